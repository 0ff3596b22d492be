// A loss scale: what multiplies gradients, what notices that they overflowed, and how the scale adapts.
// src/backend/cpu/loss_scale.rs, operation by operation.
//
// The number of the optimizer's step is counted here, since a skipped step does not count: so the bias corrections are
// computed here too, in pairs of f32.

// y = x · scale, or x / scale. x and y may be the same.
extern "C" __global__ void __launch_bounds__(256)
    loss_scale_multiply(const void* x, void* y, u64 n, int dtype, const float* scale, int inverse) {
    const float factor = inverse ? 1.0f / *scale : *scale;
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            float v[8];
            widen8(v, raw8_cached(x, dtype, i), dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] * factor;
            store8(y, dtype, i, v);
        } else {
#pragma unroll 1
            do store1(y, dtype, i, load1(x, dtype, i) * factor);
            while (++i < n);
        }
    }
}

// NaN is not less than anything.
__device__ __forceinline__ int is_finite(float v) { return fabsf(v) < INFINITY_F; }

extern "C" __global__ void __launch_bounds__(32) loss_scale_check(const float* norm, float* overflow) {
    if (threadIdx.x == 0 && !is_finite(*norm)) *overflow = 1.0f;
}

// Launch: one block.
extern "C" __global__ void __launch_bounds__(256) loss_scale_check_amaxes(const float* row, u64 n, float* overflow) {
    int found = 0;
    for (u64 i = threadIdx.x; i < n; i += 256) found |= !is_finite(row[i]);
    if (__syncthreads_or(found) && threadIdx.x == 0) *overflow = 1.0f;
}

// `counts`: the growth tracker and the number of skipped steps.
extern "C" __global__ void __launch_bounds__(32)
    loss_scale_update(float* scale, float* overflow, u64* counts, float growth_factor, float backoff_factor,
                      u64 growth_interval, int is_dynamic) {
    if (threadIdx.x != 0) return;
    if (*overflow != 0.0f) {
        counts[1] += 1;
        *overflow = 0.0f;
        if (!is_dynamic) return;
        counts[0] = 0;
        *scale = fmaxf(*scale * backoff_factor, __int_as_float(1 << 23));
    } else if (is_dynamic) {
        const u64 tracker = counts[0] + 1;
        counts[0] = tracker < growth_interval ? tracker : 0;
        const float grown = *scale * growth_factor;
        if (tracker >= growth_interval && is_finite(grown)) *scale = grown;
    }
}

// A number as the sum of two f32, the second of which is at most half an ulp of the first.
struct Pair {
    float hi;
    float lo;
};

// The sum of two f32 of which the first is the larger.
__device__ __forceinline__ Pair make_pair(float hi, float lo) {
    const float sum = hi + lo;
    return {sum, lo - (sum - hi)};
}

__device__ __forceinline__ Pair product(Pair a, Pair b) {
    const float hi = a.hi * b.hi;
    const float lo = fmaf(a.hi, b.hi, -hi) + (a.hi * b.lo + a.lo * b.hi);
    return make_pair(hi, lo);
}

// beta to the n by squaring; n is at least 1.
__device__ __forceinline__ Pair power(float beta, u64 n) {
    Pair result = {1.0f, 0.0f}, base = {beta, 0.0f};
#pragma unroll 1
    do {
        if (n & 1) result = product(result, base);
        base = product(base, base);
        n >>= 1;
    } while (n > 0);
    return result;
}

// 1 - p for p from 0 to less than 1.
__device__ __forceinline__ Pair complement(Pair p) {
    const float hi = 1.0f - p.hi;
    return make_pair(hi, ((1.0f - hi) - p.hi) - p.lo);
}

// a / b, rounded once but for the rarest ties.
__device__ __forceinline__ float divided(float a, Pair b) {
    const float first = a / b.hi;
    const float rest = fmaf(-first, b.hi, a) - first * b.lo;
    const float better = first + rest / b.hi;
    return is_finite(better) ? better : first;
}

// The square root, likewise.
__device__ __forceinline__ float root(Pair a) {
    const float first = sqrtf(a.hi);
    const float rest = fmaf(-first, first, a.hi) + a.lo;
    return first + rest / (first + first);
}

// The factors of each group's step, and whether it is skipped: the verdict is a norm for adamw.cu, infinite or 0. `groups`
// has the address of each group's numbers from the host: the eight factors of adamw.cu, the rate and beta1. `scale` is null
// for gradients without one, `overflow` and `norm` are null where they decide nothing.
extern "C" __global__ void __launch_bounds__(32)
    loss_scale_factors(const float* const* groups, u64 count, const float* scale, float* overflow, const float* norm,
                       u64* updates, int counts_skipped, float* factors, float* verdict) {
    const int skips = (overflow && *overflow != 0.0f) || (norm && !is_finite(*norm));
    const u64 before = *updates, number = before + (before != ~0ull);  // saturating, as the host's
    const float inverse = scale ? 1.0f / *scale : 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        *verdict = skips ? INFINITY_F : 0.0f;
        if (skips && overflow) *overflow = 1.0f;
        if (!skips || counts_skipped) *updates = number;
    }
    for (u64 group = threadIdx.x; group < count; group += WARP) {
        const float* from = groups[group];
        float* to = factors + 8 * group;
        to[0] = from[0] * inverse;
        to[1] = from[1];
        to[2] = from[2];
        to[3] = from[3];
        to[4] = from[4];
        to[5] = divided(from[8], complement(power(from[9], number)));
        to[6] = root(complement(power(from[3], number)));
        to[7] = from[7];
    }
}
