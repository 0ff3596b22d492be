// ---- compensated sums: about twice the digits of an f32 ----

// hi + lo. Once hi is infinite or NaN, hi alone is the sum, as of plain additions.
struct Sum {
    float hi;
    float lo;
};

// The exact sum of two floats, as long as nothing overflows (Knuth).
__device__ __forceinline__ Sum two_sum(float a, float b) {
    float s = a + b;
    float t = s - a;
    return {s, (a - (s - t)) + (b - t)};
}

__device__ __forceinline__ Sum sum_add(Sum sum, float v) {
    Sum exact = two_sum(sum.hi, v);
    return {exact.hi, sum.lo + exact.lo};
}

// The same bits for both orders of the arguments.
__device__ __forceinline__ Sum sum_merge(Sum a, Sum b) {
    Sum exact = two_sum(a.hi, b.hi);
    return {exact.hi, (a.lo + b.lo) + exact.lo};
}

__device__ __forceinline__ float sum_value(Sum sum) {
    return fabsf(sum.hi) < INFINITY_F ? sum.hi + sum.lo : sum.hi;
}

__device__ __forceinline__ Sum warp_merge(Sum sum) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) {
        Sum other = {__shfl_xor_sync(FULL_WARP, sum.hi, step), __shfl_xor_sync(FULL_WARP, sum.lo, step)};
        sum = sum_merge(sum, other);
    }
    return sum;
}

// Every thread gets the block's sum. `scratch` holds 64 floats and may be used again at once.
__device__ __forceinline__ Sum block_merge(Sum sum, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    sum = warp_merge(sum);
    if (threadIdx.x % WARP == 0) {
        scratch[2 * (threadIdx.x / WARP)] = sum.hi;
        scratch[2 * (threadIdx.x / WARP) + 1] = sum.lo;
    }
    __syncthreads();
    sum = {scratch[0], scratch[1]};
    for (int w = 1; w < warps; w++) sum = sum_merge(sum, {scratch[2 * w], scratch[2 * w + 1]});
    __syncthreads();
    return sum;
}

// Eight values in pairs.
__device__ __forceinline__ float tree8(const float v[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

