#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_backward_loop.cuh"
#include "attention_backward.cuh"
// Backward of attention.cu for dk and dv: a block owns 64 keys of a group.

#define DROPOUT_PARAMETERS
#define DROPOUT_VALUE \
    NoDropout {}

BACKWARD(attention_backward_kv_bf16_64, BF16, 64, 1)
BACKWARD(attention_backward_kv_bf16_128, BF16, 128, 1)
BACKWARD(attention_backward_kv_f16_64, F16, 64, 1)
BACKWARD(attention_backward_kv_f16_128, F16, 128, 1)
