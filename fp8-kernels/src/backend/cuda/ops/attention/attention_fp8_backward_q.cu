#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_backward_loop.cuh"
#include "attention_fp8.cuh"
#include "attention_fp8_backward.cuh"
// Backward of attention_fp8.cu for dq: a block owns 64 queries of a head.

BACKWARD(attention_fp8_backward_q_e5m2_64, E5M2, 64, 0)
BACKWARD(attention_fp8_backward_q_e5m2_128, E5M2, 128, 0)
BACKWARD(attention_fp8_backward_q_e4m3_64, E4M3, 64, 0)
BACKWARD(attention_fp8_backward_q_e4m3_128, E4M3, 128, 0)
