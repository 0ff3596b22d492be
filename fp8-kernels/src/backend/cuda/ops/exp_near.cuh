// exp within 4 ulp, for results that are compared within a tolerance and never decide a code: a third of fp8_exp's
// instructions. x is at most 0, or NaN. Below 2^-126 it is 0.
__device__ __forceinline__ float exp_near(float x) {
    const float LOG2E = 1.44269504088896340736f, LOG2E_REST = 1.9259629911266175e-8f, LN2 = 0.693147180559945309f;
    const float clamped = max_or_nan(x, -104.0f);
    // x·log2(e) = power + rest: the rounding of the product alone would cost as many ulp as the product is large.
    const float power = clamped * LOG2E;
    const float rest = fmaf(clamped, LOG2E_REST, fmaf(clamped, LOG2E, -power));
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(power));
    return fmaf(value, rest * LN2, value);
}
