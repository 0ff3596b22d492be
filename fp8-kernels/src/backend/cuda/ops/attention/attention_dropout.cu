#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_forward_loop.cuh"
#include "attention_forward.cuh"
// attention.cu with dropout of the probabilities.

#define DROPOUT_PARAMETERS DROPOUT_ON_PARAMETERS
#define DROPOUT_VALUE DROPOUT_ON_VALUE

// With 64 keys at a time the last one would spill on sm_100.
FORWARD(attention_dropout_bf16_64, BF16, 64, 64)
FORWARD(attention_dropout_bf16_128, BF16, 128, 64)
FORWARD(attention_dropout_f16_64, F16, 64, 64)
FORWARD(attention_dropout_f16_128, F16, 128, 32)
