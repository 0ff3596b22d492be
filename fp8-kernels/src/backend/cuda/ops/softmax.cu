#include "exp_near.cuh"
// Softmax of scaled, masked scores and its backward: src/backend/cpu/softmax.rs. Sums run over the lanes of a warp, then warps.
//
// Up to WARP_KEYS keys a warp holds a row in registers: one read. Longer rows have a block each and are read three times,
// twice from the caches. Rows of a multiple of eight keys move in 16 bytes, others element by element, neighbours in
// neighbouring lanes: the rarer case, which has one body for all groups of a row, registers moving up.

#define ROW_GROUPS 4
#define WARP_KEYS (ROW_GROUPS * 8 * WARP)
#define WARP_THREADS 128
#define BLOCK_THREADS 512

// Where a row of scores begins in a mask that repeats along some dimensions: extents and strides, innermost first.
// `step` is 0 where one byte stands for a whole row, else 1.
struct Mask {
    const u8* bytes;
    u64 extent[5];
    u64 stride[5];
    u64 step;
};

#define MASK_PARAMETERS                                                                                             \
    const u8 *__restrict__ mask, u64 extent0, u64 extent1, u64 extent2, u64 extent3, u64 extent4, u64 stride0,       \
        u64 stride1, u64 stride2, u64 stride3, u64 stride4, u64 step
#define MASK_OF_PARAMETERS                                                                                          \
    {mask, {extent0, extent1, extent2, extent3, extent4}, {stride0, stride1, stride2, stride3, stride4}, step}

__device__ __forceinline__ const u8* mask_row(const Mask& mask, u64 row) {
    u64 start = 0;
#pragma unroll
    for (int d = 0; d < 5; d++) {
        u64 above = quotient(row, mask.extent[d]);
        start += (row - above * mask.extent[d]) * mask.stride[d];
        row = above;
    }
    return mask.bytes + start;
}

// Subtracted before exp: the maximum, or 0 where everything is masked, since -inf - -inf is NaN.
__device__ __forceinline__ float origin_of(float max) { return max == -INFINITY_F ? 0.0f : max; }

// What a row may look at: its first `limit` keys but those that are not zero in `hidden`, which may be null.
struct Sight {
    u32 limit;
    const u8* hidden;
};

__device__ __forceinline__ Sight sight_of(const Mask& mask, u64 row, u32 keys, u64 queries, int causal) {
    Sight sight = {keys, nullptr};
    if (causal) {
        u64 reach = row - quotient(row, queries) * queries + 1;
        if (reach < keys) sight.limit = (u32)reach;
    }
    if (mask.bytes) {
        sight.hidden = mask_row(mask, row);
        if (mask.step == 0) {
            if (*sight.hidden) sight.limit = 0;
            sight.hidden = nullptr;
        }
    }
    return sight;
}

// A thread's first key of group k. The seven others follow at once where rows are whole, else `threads` apart.
template <int WHOLE>
__device__ __forceinline__ u32 first_key(u32 k, unsigned thread, unsigned threads) {
    return WHOLE ? 8 * (k * threads + thread) : 8 * k * threads + thread;
}

// A thread's eight elements of group k of the row from `at` on; zeros from `limit` on.
template <int WHOLE>
__device__ __forceinline__ void load_group(float v[8], const void* x, int dtype, u64 at, u32 k, u32 limit,
                                           unsigned thread, unsigned threads) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0.0f;
    const u32 first = first_key<WHOLE>(k, thread, threads);
    const int apart = WHOLE ? 1 : (int)threads, left = (int)(limit - first);
    if (WHOLE) {
        if (left > 0) load8(v, x, dtype, at + first);
    } else if (dtype == F32) {
        const float* from = (const float*)x + at + first;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (left > j * apart) v[j] = from[j * apart];
        }
    } else {
        const u16* from = (const u16*)x + at + first;
        u32 bits[8];
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = left > j * apart ? from[j * apart] : 0;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = dtype == BF16 ? bf16_to_f32(bits[j]) : f16_to_f32(bits[j]);
    }
}

template <int WHOLE>
__device__ __forceinline__ void store_group(const float v[8], void* y, int dtype, u64 at, u32 k, u32 keys,
                                            unsigned thread, unsigned threads) {
    const u32 first = first_key<WHOLE>(k, thread, threads);
    const int apart = WHOLE ? 1 : (int)threads, left = (int)(keys - first);
    if (WHOLE) {
        if (left > 0) store8(y, dtype, at + first, v);
    } else if (dtype == F32) {
        float* to = (float*)y + at + first;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (left > j * apart) to[j * apart] = v[j];
        }
    } else {
        u16* to = (u16*)y + at + first;
        u32 bits[8];
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = dtype == BF16 ? f32_to_bf16(v[j]) : f32_to_f16(v[j]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (left > j * apart) to[j * apart] = (u16)bits[j];
        }
    }
}

// Scaled scores of a group; what is masked or out of sight is -inf.
template <int WHOLE>
__device__ __forceinline__ void scores(float v[8], const void* x, int dtype, u64 at, u32 k, const Sight& sight,
                                       float scale, unsigned thread, unsigned threads) {
    load_group<WHOLE>(v, x, dtype, at, k, sight.limit, thread, threads);
    const u32 first = first_key<WHOLE>(k, thread, threads);
    const int apart = WHOLE ? 1 : (int)threads, left = (int)(sight.limit - first);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = left > j * apart ? v[j] * scale : -INFINITY_F;
    if (!sight.hidden || left <= 0) return;
    const u8* bytes = sight.hidden + first;
    u64 hidden = WHOLE ? *(const u64*)bytes : 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int is_hidden = WHOLE ? hidden >> (8 * j) & 0xffu : left > j * apart && bytes[j * apart];
        if (is_hidden) v[j] = -INFINITY_F;
    }
}

// exp / divisor; zeros for what is out of sight.
template <int WHOLE>
__device__ __forceinline__ void divide_group(float v[8], float divisor, u32 k, u32 limit, unsigned thread,
                                             unsigned threads) {
    const int apart = WHOLE ? 1 : (int)threads, left = (int)(limit - first_key<WHOLE>(k, thread, threads));
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = left > j * apart ? v[j] / divisor : 0.0f;
}

// The groups of a row in registers: the first goes behind the others.
__device__ __forceinline__ void turn(float v[ROW_GROUPS][8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float first = v[0][j];
#pragma unroll
        for (int k = 0; k < ROW_GROUPS - 1; k++) v[k][j] = v[k + 1][j];
        v[ROW_GROUPS - 1][j] = first;
    }
}

// What exponentials are divided by: a row of masked scores only has the sum 0 and stays 0.
__device__ __forceinline__ float divisor_of(float sum) { return sum != 0.0f ? sum : 1.0f; }

template <int WHOLE>
__device__ __forceinline__ void softmax_row(const void* x, void* y, int dtype, u64 at, u32 keys, const Sight& sight,
                                            float scale, unsigned lane) {
    float v[ROW_GROUPS][8];
    float max = -INFINITY_F;
#pragma unroll (WHOLE ? ROW_GROUPS : 1)
    for (int k = 0; k < ROW_GROUPS; k++) {
        scores<WHOLE>(v[0], x, dtype, at, k, sight, scale, lane, WARP);
#pragma unroll
        for (int j = 0; j < 8; j++) max = fmaxf(max, v[0][j]);
        turn(v);
    }
    float origin = origin_of(warp_max(max)), sum = 0.0f;
#pragma unroll (WHOLE ? 2 : 1)
    for (int k = 0; k < ROW_GROUPS; k++) {
        if (first_key<WHOLE>(k, 0, WARP) < sight.limit) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[0][j] = exp_near(v[0][j] - origin);
            sum += tree8(v[0]);
        }
        turn(v);
    }
    float divisor = divisor_of(warp_sum(sum));
#pragma unroll (WHOLE ? 2 : 1)
    for (int k = 0; k < ROW_GROUPS; k++) {
        divide_group<WHOLE>(v[0], divisor, k, sight.limit, lane, WARP);
        store_group<WHOLE>(v[0], y, dtype, at, k, keys, lane, WARP);
        turn(v);
    }
}

// Groups that a block moves at a time.
__device__ __forceinline__ u32 groups_of(u32 keys) {
    return keys / (8 * BLOCK_THREADS) + (keys % (8 * BLOCK_THREADS) != 0);
}

// Rows of up to WARP_KEYS keys, a warp each.
extern "C" __global__ void __launch_bounds__(WARP_THREADS, 4)
softmax_warp(const void* x, void* y, int dtype, u64 rows, u32 keys, u64 queries, float scale, int causal, MASK_PARAMETERS) {
    Mask all = MASK_OF_PARAMETERS;
    u64 warps = (u64)gridDim.x * (WARP_THREADS / WARP);
    unsigned lane = threadIdx.x % WARP;
    for (u64 row = grid_thread() / WARP; row < rows; row += warps) {
        Sight sight = sight_of(all, row, keys, queries, causal);
        if (keys % 8 == 0) softmax_row<1>(x, y, dtype, row * keys, keys, sight, scale, lane);
        else softmax_row<0>(x, y, dtype, row * keys, keys, sight, scale, lane);
    }
}

template <int WHOLE>
__device__ __forceinline__ void softmax_long_row(const void* x, void* y, int dtype, u64 at, u32 keys,
                                                 const Sight& sight, float scale, float* scratch) {
    const unsigned thread = threadIdx.x;
    float max = -INFINITY_F, origin = 0.0f, divisor = 1.0f;
    Sum sum = {0.0f, 0.0f};
    // For the maximum, the sum and the results, in turn: one body for all three.
#pragma unroll 1
    for (int pass = 0; pass < 3; pass++) {
        const u32 groups = groups_of(pass < 2 ? sight.limit : keys);
#pragma unroll 1
        for (u32 k = 0; k < groups; k++) {
            float v[8];
            scores<WHOLE>(v, x, dtype, at, k, sight, scale, thread, BLOCK_THREADS);
            if (pass == 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) max = fmaxf(max, v[j]);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = exp_near(v[j] - origin);
            if (pass == 1) {
                sum = sum_add(sum, tree8(v));
                continue;
            }
            divide_group<WHOLE>(v, divisor, k, sight.limit, thread, BLOCK_THREADS);
            store_group<WHOLE>(v, y, dtype, at, k, keys, thread, BLOCK_THREADS);
        }
        if (pass == 0) origin = origin_of(block_max(max, scratch));
        if (pass == 1) divisor = divisor_of(sum_value(block_merge(sum, scratch)));
    }
}

// Longer rows, a block each: a multiple of eight keys, or any number in the one below.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
softmax_block(const void* x, void* y, int dtype, u64 rows, u32 keys, u64 queries, float scale, int causal, MASK_PARAMETERS) {
    __shared__ float scratch[64];
    Mask all = MASK_OF_PARAMETERS;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Sight sight = sight_of(all, row, keys, queries, causal);
        softmax_long_row<1>(x, y, dtype, row * keys, keys, sight, scale, scratch);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
softmax_block_ragged(const void* x, void* y, int dtype, u64 rows, u32 keys, u64 queries, float scale, int causal,
                     MASK_PARAMETERS) {
    __shared__ float scratch[64];
    Mask all = MASK_OF_PARAMETERS;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Sight sight = sight_of(all, row, keys, queries, causal);
        softmax_long_row<0>(x, y, dtype, row * keys, keys, sight, scale, scratch);
    }
}

// ---- backward ----

template <int WHOLE>
__device__ __forceinline__ void softmax_backward_row(const void* dy, const void* y, void* dx, int dy_dtype, int dtype,
                                                     u64 at, u32 keys, float scale, unsigned lane) {
    float v[ROW_GROUPS][8], g[ROW_GROUPS][8];
    float mean = 0.0f;
#pragma unroll (WHOLE ? ROW_GROUPS : 1)
    for (int k = 0; k < ROW_GROUPS; k++) {
        load_group<WHOLE>(v[0], y, dtype, at, k, keys, lane, WARP);
        load_group<WHOLE>(g[0], dy, dy_dtype, at, k, keys, lane, WARP);
        float products[8];
#pragma unroll
        for (int j = 0; j < 8; j++) products[j] = v[0][j] * g[0][j];
        mean += tree8(products);
        turn(v);
        turn(g);
    }
    mean = warp_sum(mean);
#pragma unroll (WHOLE ? ROW_GROUPS : 1)
    for (int k = 0; k < ROW_GROUPS; k++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[0][j] = scale * (v[0][j] * (g[0][j] - mean));
        store_group<WHOLE>(v[0], dx, dtype, at, k, keys, lane, WARP);
        turn(v);
        turn(g);
    }
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS)
softmax_backward_warp(const void* dy, const void* y, void* dx, int dy_dtype, int dtype, u64 rows, u32 keys, float scale) {
    u64 warps = (u64)gridDim.x * (WARP_THREADS / WARP);
    unsigned lane = threadIdx.x % WARP;
    for (u64 row = grid_thread() / WARP; row < rows; row += warps) {
        if (keys % 8 == 0) softmax_backward_row<1>(dy, y, dx, dy_dtype, dtype, row * keys, keys, scale, lane);
        else softmax_backward_row<0>(dy, y, dx, dy_dtype, dtype, row * keys, keys, scale, lane);
    }
}

template <int WHOLE>
__device__ __forceinline__ void softmax_backward_long_row(const void* dy, const void* y, void* dx, int dy_dtype, int dtype,
                                                          u64 row, u32 keys, float scale, float* scratch) {
    const unsigned thread = threadIdx.x;
    u64 at = row * keys;
    float mean = 0.0f;
    Sum sum = {0.0f, 0.0f};
    // For the sum and the results: one body for both.
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (u32 k = 0; k < groups_of(keys); k++) {
            float v[8], g[8];
            load_group<WHOLE>(v, y, dtype, at, k, keys, thread, BLOCK_THREADS);
            load_group<WHOLE>(g, dy, dy_dtype, at, k, keys, thread, BLOCK_THREADS);
            if (pass == 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] *= g[j];
                sum = sum_add(sum, tree8(v));
                continue;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = scale * (v[j] * (g[j] - mean));
            store_group<WHOLE>(v, dx, dtype, at, k, keys, thread, BLOCK_THREADS);
        }
        if (pass == 0) mean = sum_value(block_merge(sum, scratch));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
softmax_backward_block(const void* dy, const void* y, void* dx, int dy_dtype, int dtype, u64 rows, u32 keys, float scale) {
    __shared__ float scratch[64];
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (keys % 8 == 0) softmax_backward_long_row<1>(dy, y, dx, dy_dtype, dtype, row, keys, scale, scratch);
        else softmax_backward_long_row<0>(dy, y, dx, dy_dtype, dtype, row, keys, scale, scratch);
    }
}
