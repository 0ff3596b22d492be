#include "activation.cuh"
#include "activation_tiles.cuh"
// swiglu and its gradient, bf16, whole tiles.

WHOLE_FORWARD(activation_codes_swiglu_e4m3, SILU, 1, CODES_E4M3)
WHOLE_FORWARD_HIGH(activation_high_swiglu, SILU, 1)
WHOLE_BACKWARD(activation_backward_codes_swiglu_e4m3, SILU, 1, CODES_E4M3)
WHOLE_BACKWARD(activation_backward_codes_swiglu_e5m2, SILU, 1, CODES_E5M2)
WHOLE_BACKWARD_HIGH(activation_backward_high_swiglu, SILU, 1)
