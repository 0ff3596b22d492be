// Activation functions and their slopes, eight values at a time.
//
// The expressions are those of src/ops/activation.rs, operation by operation. The kind is one number for all threads;
// the kinds share one sigmoid.

// Functions as the host numbers them.
enum { GELU = 0, SILU = 1, QGELU = 2, RELU = 3, SRELU = 4, SIGMOID = 5 };

#define GELU_LINEAR 1.595769f
#define GELU_CUBIC 0.071354814f
#define GELU_SQUARE 0.21406444f
#define QGELU_SLOPE 1.702f
// Every sigmoid that occurs is 0 or 1 here, so those at clamped and unclamped arguments are equal.
#define TAIL 128.0f

// ---- the functions ----

__device__ __forceinline__ int has_sigmoid(int kind) { return kind != RELU && kind != SRELU; }

__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// What the sigmoid is taken of.
__device__ __forceinline__ void arguments(int kind, const float x[8], float z[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) z[k] = x[k];
    if (kind == GELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) z[k] = x[k] * fmaf(x[k] * x[k], GELU_CUBIC, GELU_LINEAR);
    } else if (kind == QGELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) z[k] = QGELU_SLOPE * x[k];
    }
}

// f(x) from s, its sigmoid.
__device__ __forceinline__ void function_values(int kind, const float x[8], const float s[8], float f[8]) {
    if (kind == SIGMOID) {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = s[k];
    } else if (has_sigmoid(kind)) {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = x[k] * s[k];
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float r = relu(x[k]);
            f[k] = kind == RELU ? r : r * r;
        }
    }
}

__device__ __forceinline__ void sigmoids(int kind, const float z[8], float s[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) s[k] = 0.0f;
    if (has_sigmoid(kind)) {
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = fp8_sigmoid(z[k]);
    }
}

// f'(x), and s, its sigmoid at the clamped x.
__device__ __forceinline__ void function_slopes(int kind, const float x[8], float s[8], float slope[8]) {
    float c[8], z[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        c[k] = x[k] < -TAIL ? -TAIL : x[k];
        c[k] = c[k] > TAIL ? TAIL : c[k];
    }
    arguments(kind, c, z);
    sigmoids(kind, z, s);
    if (kind == GELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            slope[k] = s[k] * fmaf(c[k] * (1.0f - s[k]), fmaf(c[k] * c[k], GELU_SQUARE, GELU_LINEAR), 1.0f);
        }
    } else if (kind == SILU || kind == QGELU) {
        // z is c for silu.
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = s[k] * fmaf(z[k], 1.0f - s[k], 1.0f);
    } else if (kind == SIGMOID) {
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = s[k] * (1.0f - s[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float relu_slope = x[k] <= 0.0f ? 0.0f : 1.0f;
            slope[k] = kind == RELU ? relu_slope : 2.0f * relu(x[k]);
        }
    }
}
