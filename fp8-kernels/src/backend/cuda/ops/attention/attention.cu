#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_forward_loop.cuh"
#include "attention_forward.cuh"
// Attention with the tensor cores, for 16-bit elements and head sizes up to 128 that are multiples of eight; anything else
// is attention_plain.cu's.

#define DROPOUT_PARAMETERS
#define DROPOUT_VALUE \
    NoDropout {}

// With 64 keys at a time the last one would spill on sm_100.
FORWARD(attention_bf16_64, BF16, 64, 64)
FORWARD(attention_bf16_128, BF16, 128, 64)
FORWARD(attention_f16_64, F16, 64, 64)
FORWARD(attention_f16_128, F16, 128, 32)
