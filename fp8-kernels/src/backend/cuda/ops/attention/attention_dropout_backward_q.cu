#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_backward_loop.cuh"
#include "attention_backward.cuh"
// attention_backward_q.cu with dropout of the probabilities.

#define DROPOUT_PARAMETERS DROPOUT_ON_PARAMETERS
#define DROPOUT_VALUE DROPOUT_ON_VALUE

BACKWARD(attention_dropout_backward_q_bf16_64, BF16, 64, 0)
BACKWARD(attention_dropout_backward_q_bf16_128, BF16, 128, 0)
BACKWARD(attention_dropout_backward_q_f16_64, F16, 64, 0)
BACKWARD(attention_dropout_backward_q_f16_128, F16, 128, 0)
