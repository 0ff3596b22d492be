// ---- exp, tanh, sigmoid: src/math.rs, operation by operation ----

__device__ __forceinline__ float power_of_two(int k) { return __int_as_float((k + 127) << 23); }

// e^(x - k ln 2) for the integer k that is nearest to x / ln 2.
__device__ __forceinline__ float exp_of_rest(float x, float k) {
    float r = fmaf(k, -0.6933594f, x);
    r = fmaf(k, 0.00021219444f, r);
    float p = 0.00019918448f;
    p = fmaf(p, r, 0.0013946119f);
    p = fmaf(p, r, 0.008333264f);
    p = fmaf(p, r, 0.04166627f);
    p = fmaf(p, r, 0.16666667f);
    p = fmaf(p, r, 0.5f);
    return fmaf(p * r, r, r) + 1.0f;
}

__device__ __forceinline__ float fp8_exp(float x) {
    const float ROUND = 12582912.0f;
    float clamped = x < -104.0f ? -104.0f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;
    float shifted = clamped * 1.44269504088896340736f + ROUND;
    float k = shifted - ROUND;
    const float p = exp_of_rest(clamped, k);
    int n = __float_as_int(shifted) - __float_as_int(ROUND);
    int half = n >> 1;
    return p * power_of_two(half) * power_of_two(n - half);
}

__device__ __forceinline__ float fp8_sigmoid(float x) { return 1.0f / (1.0f + fp8_exp(-x)); }

