#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_plain.cuh"
// attention_plain.cu with dropout of the probabilities.

#define DROPOUT_PARAMETERS DROPOUT_ON_PARAMETERS
#define DROPOUT_VALUE DROPOUT_ON_VALUE

FORWARD_PLAIN(attention_dropout_plain)
BACKWARD_PLAIN(attention_dropout_plain_backward_q, 0, 3)
// With three blocks at a time this one would spill.
BACKWARD_PLAIN(attention_dropout_plain_backward_kv, 1, 2)
