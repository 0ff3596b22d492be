#include "dropout.cuh"
// Tokens drawn from logits: src/backend/cpu/sample.rs. A block takes a row. Integers are added, so every order gives the same
// sums. Thresholds are found by their bits, two a pass over the row, which stays in the caches.

#define THREADS 512
#define MOST_WARPS (THREADS / WARP)
// The result of a row without a logit greater than -infinity.
#define NO_TOKEN (-1)

// A logit's place in the order of floats. NaN counts as -infinity, -0 as 0.
__device__ __forceinline__ u32 order_of(float v) {
    if (v != v) v = -INFINITY_F;
    u32 bits = v == 0.0f ? 0u : (u32)__float_as_int(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 order) {
    return __int_as_float((int)(order >> 31 ? order & 0x7fffffffu : ~order));
}

struct Row {
    const void* logits;
    int dtype;
    u64 first;
    u32 vocabulary;
    float largest;
    float factor;
};

__device__ __forceinline__ u32 order_at(const Row& row, u32 i) {
    return order_of(load1(row.logits, row.dtype, row.first + i));
}

__device__ __forceinline__ u32 weight_of(const Row& row, u32 order) {
    float v = value_of(order);
    if (v == row.largest) return 0x80000000u;
    return (u32)(fp8_exp((v - row.largest) * row.factor) * 2147483648.0f);
}

__device__ __forceinline__ u64 shuffle_xor(u64 v, int step) {
    u32 low = __shfl_xor_sync(FULL_WARP, (u32)v, step), high = __shfl_xor_sync(FULL_WARP, (u32)(v >> 32), step);
    return (u64)high << 32 | low;
}

// The row's largest logit, and behind it its place, counted backwards so that of equal ones the first is the largest. Every
// thread gets it. `scratch` holds MOST_WARPS words and may be used again at once.
__device__ __forceinline__ u64 largest_of(const Row& row, u64* scratch) {
    u64 best = 0;
    for (u32 i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
        u64 here = (u64)order_at(row, i) << 32 | ~i;
        best = here > best ? here : best;
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) {
        u64 other = shuffle_xor(best, step);
        best = other > best ? other : best;
    }
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = best;
    __syncthreads();
#pragma unroll 1
    for (u32 w = 0; w < blockDim.x / WARP; w++) best = scratch[w] > best ? scratch[w] : best;
    __syncthreads();
    return best;
}

// Adds each of three numbers over the block. `scratch` holds 3 · MOST_WARPS words and may be used again at once.
__device__ __forceinline__ void block_sums(u64 sums[3], u64* scratch) {
#pragma unroll
    for (int k = 0; k < 3; k++) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step >>= 1) sums[k] += shuffle_xor(sums[k], step);
        if (threadIdx.x % WARP == 0) scratch[k * MOST_WARPS + threadIdx.x / WARP] = sums[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 3; k++) {
        sums[k] = 0;
    #pragma unroll 1
    for (u32 w = 0; w < blockDim.x / WARP; w++) sums[k] += scratch[k * MOST_WARPS + w];
    }
    __syncthreads();
}

// The largest t such that the logits from t on number at least `needed`, or, where `is_weighed`, weigh so much. A second one
// needs no more than what the first one keeps, and so is not below it.
__device__ __forceinline__ u32 threshold(const Row& row, int is_weighed, u64 needed, u64* scratch) {
    u32 found = 0;
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 2) {
        const u32 one = found | 1u << shift, two = found | 2u << shift, three = found | 3u << shift;
        u64 sums[3] = {0, 0, 0};
        for (u32 i = threadIdx.x; i < row.vocabulary; i += blockDim.x) {
            u32 order = order_at(row, i);
            if (order < one) continue;
            u64 weight = is_weighed ? weight_of(row, order) : 1;
            sums[0] += weight;
            if (order >= two) sums[1] += weight;
            if (order >= three) sums[2] += weight;
        }
        block_sums(sums, scratch);
        const u32 digit = (sums[0] >= needed) + (sums[1] >= needed) + (sums[2] >= needed);
        found |= digit << shift;
    }
    return found;
}

// What a logit weighs, 0 unless it is kept.
__device__ __forceinline__ u64 kept_weight(const Row& row, u32 i, u32 least) {
    u32 order = order_at(row, i);
    return order >= least ? weight_of(row, order) : 0;
}

// The sum over the threads before this one, and the sum over all. `scratch` as above.
__device__ __forceinline__ u64 sum_before(u64 v, u64* all, u64* scratch) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 sum = v;
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        u32 low = __shfl_up_sync(FULL_WARP, (u32)sum, step), high = __shfl_up_sync(FULL_WARP, (u32)(sum >> 32), step);
        if (lane >= step) sum += (u64)high << 32 | low;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    u64 before = sum - v;
    *all = 0;
#pragma unroll 1
    for (u32 w = 0; w < blockDim.x / WARP; w++) {
        if (w < warp) before += scratch[w];
        *all += scratch[w];
    }
    __syncthreads();
    return before;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_largest(const void* logits, int dtype, u64 rows, u64 vocabulary, int* out) {
    __shared__ u64 scratch[MOST_WARPS];
    for (u64 r = blockIdx.x; r < rows; r += gridDim.x) {
        const Row row = {logits, dtype, r * vocabulary, (u32)vocabulary, 0.0f, 0.0f};
        u64 best = largest_of(row, scratch);
        if (threadIdx.x == 0) out[r] = value_of((u32)(best >> 32)) == -INFINITY_F ? NO_TOKEN : (int)~(u32)best;
    }
}

// `top_k` of 0 keeps all.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const void* logits, int dtype, u64 rows, u64 vocabulary, float factor, u64 top_k, int has_top_p, u64 top_p,
           const DropoutKey* key, u64 first, int* out) {
    __shared__ u64 scratch[3 * MOST_WARPS];
    for (u64 r = blockIdx.x; r < rows; r += gridDim.x) {
        Row row = {logits, dtype, r * vocabulary, (u32)vocabulary, 0.0f, factor};
        row.largest = value_of((u32)(largest_of(row, scratch) >> 32));
        if (row.largest == -INFINITY_F) {
            if (threadIdx.x == 0) out[r] = NO_TOKEN;
            continue;
        }
        // A piece of the row for each thread.
        const u32 piece = (row.vocabulary + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * piece;
        const u32 end = min(begin + piece, row.vocabulary);
        u32 least = 0;
        u64 mine = 0, before = 0, all = 0;
        // What top_k keeps and weighs, then, of that, top_p.
#pragma unroll 1
        for (int stage = 0; stage < 2; stage++) {
            u64 needed = top_k;
            if (stage == 1) {
                if (!has_top_p) break;
                needed = __umul64hi(all, top_p);
                needed = needed > 1 ? needed : 1;
            }
            if (needed != 0) least = threshold(row, stage, needed, scratch);
            mine = 0;
            for (u32 i = begin; i < end; i++) mine += kept_weight(row, i, least);
            before = sum_before(mine, &all, scratch);
        }
        u32 random[4];
        philox4x32_10(random, key->offset + first + r, key->seed);
        const u64 target = __umul64hi((u64)random[1] << 32 | random[0], all);
        if (target >= before && target - before < mine) {
            u32 i = begin;
#pragma unroll 1
            while (true) {
                before += kept_weight(row, i, least);
                if (before > target) break;
                i++;
            }
            out[r] = (int)i;
        }
    }
}
