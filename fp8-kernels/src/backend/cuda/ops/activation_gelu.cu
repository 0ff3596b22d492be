#include "activation.cuh"
#include "activation_tiles.cuh"
// gelu and its gradient, bf16, whole tiles.

WHOLE_FORWARD(activation_codes_gelu_e4m3, GELU, 0, CODES_E4M3)
WHOLE_FORWARD_HIGH(activation_high_gelu, GELU, 0)
WHOLE_BACKWARD(activation_backward_codes_gelu_e4m3, GELU, 0, CODES_E4M3)
WHOLE_BACKWARD(activation_backward_codes_gelu_e5m2, GELU, 0, CODES_E5M2)
WHOLE_BACKWARD_HIGH(activation_backward_high_gelu, GELU, 0)
