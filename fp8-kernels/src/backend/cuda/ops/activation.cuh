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
// Every sigmoid that occurs is 0 or 1 here, so those at clamped and unclamped arguments are equal.
#define TAIL 128.0f
// The largest argument of sigmoid_near: 1 + e^87.32 is below 2^126.
#define NEAR 87.32f

__device__ __forceinline__ int is_set(const float* unset) { return unset && __float_as_int(*unset) != REST_BITS; }

// ---- the sigmoid ----

// Moves eight values down by one, and adds one.
__device__ __forceinline__ void push_last(float v[8], float last) {
#pragma unroll
    for (int k = 0; k < 7; k++) v[k] = v[k + 1];
    v[7] = last;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

__device__ __forceinline__ float clamp_to(float x, float limit) { return min_or_nan(max_or_nan(x, -limit), limit); }

// 1 / d for d from 1 to 2^126. The first step rounds up: from every start within 4 ulp the second ends at the correctly
// rounded quotient (src/math.rs tries all mantissas), so the approximation decides no bit.
__device__ __forceinline__ float inverse_of(float d) {
    float y, e;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
    e = fmaf(-d, y, 1.0f);
    asm("fma.rp.f32 %0, %0, %1, %0;" : "+f"(y) : "f"(e));
    return fmaf(y, fmaf(-d, y, 1.0f), y);
}

// fp8_sigmoid of x from -NEAR to NEAR, or NaN, in half the instructions. One power of two is enough here, and it is
// multiplied and added in one operation, since the product is exact or vanishes beside the 1.
__device__ __forceinline__ float sigmoid_near(float x) {
    const float ROUND = 12582912.0f;
    const float shifted = x * -1.44269504088896340736f + ROUND;
    const float k = shifted - ROUND;
    const float p = exp_of_rest(-x, k);
    const float power = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    return inverse_of(fmaf(p, power, 1.0f));
}

// The sigmoids of eight arguments, in their place.
__device__ __forceinline__ void sigmoids_of(float z[8]) {
    float largest = fabsf(z[0]);
#pragma unroll
    for (int k = 1; k < 8; k++) largest = fmaxf(largest, fabsf(z[k]));
    if (largest <= NEAR) {
#pragma unroll
        for (int k = 0; k < 8; k++) z[k] = sigmoid_near(z[k]);
    } else {
        // One at a time, since this is rare: after eight turns each is in its place.
#pragma unroll 1
        for (int turn = 0; turn < 8; turn++) push_last(z, fp8_sigmoid(z[0]));
    }
}

// ---- the functions ----

constexpr __device__ int has_sigmoid(int kind) { return kind != RELU && kind != SRELU; }

__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// The sigmoid's argument.
template <int KIND>
__device__ __forceinline__ float argument(float x) {
    if (KIND == GELU) return x * fmaf(x * x, GELU_CUBIC, GELU_LINEAR);
    return KIND == QGELU ? QGELU_SLOPE * x : x;
}

// f(x) from its sigmoid.
template <int KIND>
__device__ __forceinline__ float value_of(float x, float s) {
    if (KIND == SIGMOID) return s;
    if (KIND == RELU) return relu(x);
    if (KIND == SRELU) return relu(x) * relu(x);
    return x * s;
}

// f'(x) from c, which is x clamped to TAIL, and its sigmoid.
template <int KIND>
__device__ __forceinline__ float slope_of(float x, float c, float s) {
    if (KIND == GELU) return s * fmaf(c * (1.0f - s), fmaf(c * c, GELU_SQUARE, GELU_LINEAR), 1.0f);
    if (KIND == SIGMOID) return s * (1.0f - s);
    if (KIND == RELU) return x <= 0.0f ? 0.0f : 1.0f;
    if (KIND == SRELU) return 2.0f * relu(x);
    return s * fmaf(argument<KIND>(c), 1.0f - s, 1.0f);
}

// ---- eight values, any kind ----

template <int KIND>
__device__ __forceinline__ void arguments(const float c[8], float z[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) z[k] = argument<KIND>(c[k]);
}

// x clamped, and its sigmoid, which the kinds share; the kinds without one get zeros.
__device__ __forceinline__ void sigmoids(int kind, const float x[8], float c[8], float s[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) c[k] = clamp_to(x[k], TAIL), s[k] = 0.0f;
    if (!has_sigmoid(kind)) return;
    if (kind == GELU) arguments<GELU>(c, s);
    else if (kind == QGELU) arguments<QGELU>(c, s);
    else arguments<SILU>(c, s);
    sigmoids_of(s);
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
        if (kind == QGELU) arguments<QGELU>(c, c);
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
