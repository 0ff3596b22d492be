#include "attention.cuh"
#include "attention_backward.cuh"
// Backward of attention.cu for dq: a block owns 64 queries of a head.

BACKWARD(attention_backward_q_bf16_64, BF16, 64, 0)
BACKWARD(attention_backward_q_bf16_128, BF16, 128, 0)
BACKWARD(attention_backward_q_f16_64, F16, 64, 0)
BACKWARD(attention_backward_q_f16_128, F16, 128, 0)
