#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_plain.cuh"
// Attention and its backward in f32 arithmetic: any float type and head size.

#define DROPOUT_PARAMETERS
#define DROPOUT_VALUE \
    NoDropout {}

FORWARD_PLAIN(attention_plain)
BACKWARD_PLAIN(attention_plain_backward_q, 0, 3)
BACKWARD_PLAIN(attention_plain_backward_kv, 1, 3)
