// Activation functions and their slopes.
//
// The expressions are those of src/math.rs and backend/cpu/activation.rs, operation by operation. Each function is written
// once, for one value and a kind that the compiler knows; below are the forms for eight values and any kind, which is then
// one number for all threads.

// Functions as the host numbers them.
enum { GELU = 0, SILU = 1, QGELU = 2, RELU = 3, SRELU = 4, SIGMOID = 5 };

#define GELU_LINEAR 1.595769f
#define GELU_CUBIC 0.071354814f
#define GELU_SQUARE 0.21406444f
#define QGELU_SLOPE 1.702f
// Where the sigmoid is exactly 0 or 1, and the x whose argument in gelu is.
#define SIGMOID_TAIL 88.0f
#define GELU_TAIL 10.02f

__device__ __forceinline__ int is_set(const float* unset) { return unset && __float_as_int(*unset) != REST_BITS; }

// ---- the sigmoid ----

__device__ __forceinline__ float min_or_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

__device__ __forceinline__ float clamp_to(float x, float limit) { return min_or_nan(max_or_nan(x, -limit), limit); }

// 1 / d for d from 1 to 2^126, and 0 for larger ones. The first step rounds up: from every start within 4 ulp the second
// ends at the correctly rounded quotient (src/math.rs tries all mantissas), so the approximation decides no bit.
__device__ __forceinline__ float inverse_of(float d) {
    float y, e;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
    e = fmaf(-d, y, 1.0f);
    asm("fma.rp.f32 %0, %0, %1, %0;" : "+f"(y) : "f"(e));
    return fmaf(y, fmaf(-d, y, 1.0f), y);
}

// math::bounded_sigmoid: of x from -88 to 88, or NaN.
__device__ __forceinline__ float sigmoid_of(float x) {
    const float ROUND = 12582912.0f;
    const float shifted = fmaf(x, -1.44269504088896340736f, ROUND);
    const float k = shifted - ROUND;
    float r = fmaf(k, -0.6933594f, -x);
    r = fmaf(k, 0.00021219444f, r);
    float p = 0.0013814499f;
    p = fmaf(p, r, 0.008368765f);
    p = fmaf(p, r, 0.041668393f);
    p = fmaf(p, r, 0.1666652f);
    p = fmaf(p, r, 0.49999994f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    // The power of two, or 0 for k = -127.
    const float power = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    return inverse_of(fmaf(p, power, 1.0f));
}

// ---- the functions ----

constexpr __device__ int has_sigmoid(int kind) { return kind != RELU && kind != SRELU; }

__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// x within the bounds of the function's sigmoid: c of gelu, z of the others.
template <int KIND>
__device__ __forceinline__ float bounded(float x) {
    if (KIND == GELU) return clamp_to(x, GELU_TAIL);
    return clamp_to(KIND == QGELU ? QGELU_SLOPE * x : x, SIGMOID_TAIL);
}

// The sigmoid's argument from what is bounded.
template <int KIND>
__device__ __forceinline__ float argument(float c) {
    return KIND == GELU ? c * fmaf(c * c, GELU_CUBIC, GELU_LINEAR) : c;
}

// f(x) from its sigmoid.
template <int KIND>
__device__ __forceinline__ float value_of(float x, float s) {
    if (KIND == SIGMOID) return s;
    if (KIND == RELU) return relu(x);
    if (KIND == SRELU) return relu(x) * relu(x);
    return x * s;
}

// f'(x) from c, which is bounded, and its sigmoid.
template <int KIND>
__device__ __forceinline__ float slope_of(float x, float c, float s) {
    if (KIND == GELU) return s * fmaf(c * (1.0f - s), fmaf(c * c, GELU_SQUARE, GELU_LINEAR), 1.0f);
    if (KIND == SIGMOID) return s * (1.0f - s);
    if (KIND == RELU) return x <= 0.0f ? 0.0f : 1.0f;
    if (KIND == SRELU) return 2.0f * relu(x);
    return s * fmaf(c, 1.0f - s, 1.0f);
}

// ---- eight values, any kind ----

template <int KIND>
__device__ __forceinline__ void arguments(const float x[8], float c[8], float z[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) c[k] = bounded<KIND>(x[k]), z[k] = argument<KIND>(c[k]);
}

// What is bounded, and its sigmoid, which the kinds share; the kinds without one get zeros.
__device__ __forceinline__ void sigmoids(int kind, const float x[8], float c[8], float s[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) c[k] = x[k], s[k] = 0.0f;
    if (!has_sigmoid(kind)) return;
    if (kind == GELU) arguments<GELU>(x, c, s);
    else if (kind == QGELU) arguments<QGELU>(x, c, s);
    else arguments<SILU>(x, c, s);
#pragma unroll
    for (int k = 0; k < 8; k++) s[k] = sigmoid_of(s[k]);
}

// f(x) from s, its sigmoid.
__device__ __forceinline__ void function_values(int kind, const float x[8], const float s[8], float f[8]) {
    if (has_sigmoid(kind)) {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = kind == SIGMOID ? s[k] : value_of<GELU>(x[k], s[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = kind == RELU ? value_of<RELU>(x[k], 0.0f) : value_of<SRELU>(x[k], 0.0f);
    }
}

// f'(x), and s, its sigmoid.
__device__ __forceinline__ void function_slopes(int kind, const float x[8], float s[8], float slope[8]) {
    float c[8];
    sigmoids(kind, x, c, s);
    if (kind == GELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = slope_of<GELU>(x[k], c[k], s[k]);
    } else if (kind == SILU || kind == QGELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = slope_of<SILU>(x[k], c[k], s[k]);
    } else if (kind == SIGMOID) {
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = slope_of<SIGMOID>(x[k], c[k], s[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float relu_slope = slope_of<RELU>(x[k], 0.0f, 0.0f);
            slope[k] = kind == RELU ? relu_slope : slope_of<SRELU>(x[k], 0.0f, 0.0f);
        }
    }
}
