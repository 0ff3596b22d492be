#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_backward_loop.cuh"
#include "attention_fp8.cuh"
#include "attention_fp8_backward.cuh"
// Backward of attention_fp8.cu for dk and dv: a block owns 64 keys of a group.

BACKWARD(attention_fp8_backward_kv_e5m2_64, E5M2, 64, 1)
BACKWARD(attention_fp8_backward_kv_e5m2_128, E5M2, 128, 1)
BACKWARD(attention_fp8_backward_kv_e4m3_64, E4M3, 64, 1)
BACKWARD(attention_fp8_backward_kv_e4m3_128, E4M3, 128, 1)
