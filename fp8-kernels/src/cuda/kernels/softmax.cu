// Softmax of scaled, masked scores and its backward: src/cpu/softmax.rs. Sums run over the lanes of a warp, then warps.
//
// Up to WARP_KEYS keys a warp holds a row in registers: one read. Longer rows have a block each and are read three times,
// twice from the caches. Rows of a multiple of eight keys move in 16 bytes, others element by element, neighbours in
// neighbouring lanes.

#define ROW_GROUPS 4
#define WARP_KEYS (ROW_GROUPS * 8 * WARP)
#define WARP_THREADS 128
#define BLOCK_THREADS 512

// Where a row of scores begins in a mask that repeats along some dimensions: extents and strides, innermost first.
struct Mask {
    const u8* bytes;
    u64 extent[5];
    u64 stride[5];
};

// `step` is 0 where one byte stands for a whole row.
#define MASK_PARAMETERS                                                                                             \
    const u8 *__restrict__ mask, u64 extent0, u64 extent1, u64 extent2, u64 extent3, u64 extent4, u64 stride0,       \
        u64 stride1, u64 stride2, u64 stride3, u64 stride4, u64 step
#define MASK_OF_PARAMETERS                                                                                          \
    {mask, {extent0, extent1, extent2, extent3, extent4}, {stride0, stride1, stride2, stride3, stride4}}

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

// How many keys of a row count.
__device__ __forceinline__ u32 visible(u64 row, u32 keys, u64 queries, int causal) {
    if (!causal) return keys;
    u64 reach = row - quotient(row, queries) * queries + 1;
    return reach < keys ? (u32)reach : keys;
}

// The key of a thread's element j of group k: eight neighbours where rows are whole, else one per lane.
template <int WHOLE>
__device__ __forceinline__ u32 key_of(u32 k, u32 j, unsigned thread, unsigned threads) {
    return WHOLE ? 8 * (k * threads + thread) + j : (8 * k + j) * threads + thread;
}

// A thread's eight elements of group k of the row from `at` on; zeros from `limit` on.
template <int WHOLE>
__device__ __forceinline__ void load_group(float v[8], const void* x, int dtype, u64 at, u32 k, u32 limit,
                                           unsigned thread, unsigned threads) {
    if constexpr (WHOLE) {
        u32 key = key_of<WHOLE>(k, 0, thread, threads);
        if (key < limit) {
            load8(v, x, dtype, at + key);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = 0.0f;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 key = key_of<WHOLE>(k, j, thread, threads);
            v[j] = key < limit ? load1(x, dtype, at + key) : 0.0f;
        }
    }
}

template <int WHOLE>
__device__ __forceinline__ void store_group(const float v[8], void* y, int dtype, u64 at, u32 k, u32 keys,
                                            unsigned thread, unsigned threads) {
    if constexpr (WHOLE) {
        u32 key = key_of<WHOLE>(k, 0, thread, threads);
        if (key < keys) store8(y, dtype, at + key, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 key = key_of<WHOLE>(k, j, thread, threads);
            if (key < keys) store1(y, dtype, at + key, v[j]);
        }
    }
}

// Scaled scores of a group; what is masked or out of sight is -inf.
template <int WHOLE>
__device__ __forceinline__ void scores(float v[8], const void* x, int dtype, u64 at, u32 k, u32 limit, float scale,
                                       const u8* hidden, u64 step, unsigned thread, unsigned threads) {
    load_group<WHOLE>(v, x, dtype, at, k, limit, thread, threads);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 key = key_of<WHOLE>(k, j, thread, threads);
        int seen = key < limit && !(hidden && hidden[key * step]);
        v[j] = seen ? v[j] * scale : -INFINITY_F;
    }
}

// exp(v - origin) / sum; a row of masked scores only has the sum 0 and stays 0, as does what is out of sight.
__device__ __forceinline__ float probability(float e, float sum, int seen) {
    return !seen ? 0.0f : sum != 0.0f ? e / sum : e;
}

template <int WHOLE>
__device__ __forceinline__ void softmax_row(const void* x, void* y, const u8* hidden, u64 step, int dtype, u64 row,
                                            u32 keys, u32 limit, float scale, unsigned lane) {
    float v[ROW_GROUPS][8];
    float max = -INFINITY_F;
#pragma unroll
    for (int k = 0; k < ROW_GROUPS; k++) {
        scores<WHOLE>(v[k], x, dtype, row * keys, k, limit, scale, hidden, step, lane, WARP);
#pragma unroll
        for (int j = 0; j < 8; j++) max = fmaxf(max, v[k][j]);
    }
    float origin = origin_of(warp_max(max)), sum = 0.0f;
#pragma unroll
    for (int k = 0; k < ROW_GROUPS; k++) {
        if (key_of<WHOLE>(k, 0, 0, WARP) >= limit) break;
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = fp8_exp(v[k][j] - origin);
        sum += tree8(v[k]);
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int k = 0; k < ROW_GROUPS; k++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = probability(v[k][j], sum, key_of<WHOLE>(k, j, lane, WARP) < limit);
        store_group<WHOLE>(v[k], y, dtype, row * keys, k, keys, lane, WARP);
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
        u32 limit = visible(row, keys, queries, causal);
        const u8* hidden = mask ? mask_row(all, row) : nullptr;
        if (keys % 8 == 0) softmax_row<1>(x, y, hidden, step, dtype, row, keys, limit, scale, lane);
        else softmax_row<0>(x, y, hidden, step, dtype, row, keys, limit, scale, lane);
    }
}

template <int WHOLE>
__device__ __forceinline__ void softmax_long_row(const void* x, void* y, const u8* hidden, u64 step, int dtype,
                                                 u64 row, u32 keys, u32 limit, float scale, float* scratch) {
    const unsigned thread = threadIdx.x;
    u64 at = row * keys;
    float v[8];
    float max = -INFINITY_F;
    for (u32 k = 0; k < groups_of(limit); k++) {
        scores<WHOLE>(v, x, dtype, at, k, limit, scale, hidden, step, thread, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) max = fmaxf(max, v[j]);
    }
    float origin = origin_of(block_max(max, scratch));
    Sum exact = {0.0f, 0.0f};
    for (u32 k = 0; k < groups_of(limit); k++) {
        scores<WHOLE>(v, x, dtype, at, k, limit, scale, hidden, step, thread, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = fp8_exp(v[j] - origin);
        exact = sum_add(exact, tree8(v));
    }
    float sum = sum_value(block_merge(exact, scratch));
    for (u32 k = 0; k < groups_of(keys); k++) {
        scores<WHOLE>(v, x, dtype, at, k, limit, scale, hidden, step, thread, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int seen = key_of<WHOLE>(k, j, thread, BLOCK_THREADS) < limit;
            v[j] = probability(fp8_exp(v[j] - origin), sum, seen);
        }
        store_group<WHOLE>(v, y, dtype, at, k, keys, thread, BLOCK_THREADS);
    }
}

// Longer rows, a block each: a multiple of eight keys, or any number in the one below.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
softmax_block(const void* x, void* y, int dtype, u64 rows, u32 keys, u64 queries, float scale, int causal, MASK_PARAMETERS) {
    __shared__ float scratch[64];
    Mask all = MASK_OF_PARAMETERS;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        u32 limit = visible(row, keys, queries, causal);
        const u8* hidden = mask ? mask_row(all, row) : nullptr;
        softmax_long_row<1>(x, y, hidden, step, dtype, row, keys, limit, scale, scratch);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
softmax_block_ragged(const void* x, void* y, int dtype, u64 rows, u32 keys, u64 queries, float scale, int causal,
                     MASK_PARAMETERS) {
    __shared__ float scratch[64];
    Mask all = MASK_OF_PARAMETERS;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        u32 limit = visible(row, keys, queries, causal);
        const u8* hidden = mask ? mask_row(all, row) : nullptr;
        softmax_long_row<0>(x, y, hidden, step, dtype, row, keys, limit, scale, scratch);
    }
}

// ---- backward ----

template <int WHOLE>
__device__ __forceinline__ void softmax_backward_row(const void* dy, const void* y, void* dx, int dy_dtype, int dtype,
                                                     u64 row, u32 keys, float scale, unsigned lane) {
    float v[ROW_GROUPS][8], g[ROW_GROUPS][8];
    float mean = 0.0f;
#pragma unroll
    for (int k = 0; k < ROW_GROUPS; k++) {
        load_group<WHOLE>(v[k], y, dtype, row * keys, k, keys, lane, WARP);
        load_group<WHOLE>(g[k], dy, dy_dtype, row * keys, k, keys, lane, WARP);
        float products[8];
#pragma unroll
        for (int j = 0; j < 8; j++) products[j] = v[k][j] * g[k][j];
        mean += tree8(products);
    }
    mean = warp_sum(mean);
#pragma unroll
    for (int k = 0; k < ROW_GROUPS; k++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = scale * (v[k][j] * (g[k][j] - mean));
        store_group<WHOLE>(v[k], dx, dtype, row * keys, k, keys, lane, WARP);
    }
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS)
softmax_backward_warp(const void* dy, const void* y, void* dx, int dy_dtype, int dtype, u64 rows, u32 keys, float scale) {
    u64 warps = (u64)gridDim.x * (WARP_THREADS / WARP);
    unsigned lane = threadIdx.x % WARP;
    for (u64 row = grid_thread() / WARP; row < rows; row += warps) {
        if (keys % 8 == 0) softmax_backward_row<1>(dy, y, dx, dy_dtype, dtype, row, keys, scale, lane);
        else softmax_backward_row<0>(dy, y, dx, dy_dtype, dtype, row, keys, scale, lane);
    }
}

template <int WHOLE>
__device__ __forceinline__ void softmax_backward_long_row(const void* dy, const void* y, void* dx, int dy_dtype, int dtype,
                                                          u64 row, u32 keys, float scale, float* scratch) {
    const unsigned thread = threadIdx.x;
    u64 at = row * keys;
    float v[8], g[8];
    Sum sum = {0.0f, 0.0f};
    for (u32 k = 0; k < groups_of(keys); k++) {
        load_group<WHOLE>(v, y, dtype, at, k, keys, thread, BLOCK_THREADS);
        load_group<WHOLE>(g, dy, dy_dtype, at, k, keys, thread, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= g[j];
        sum = sum_add(sum, tree8(v));
    }
    float mean = sum_value(block_merge(sum, scratch));
    for (u32 k = 0; k < groups_of(keys); k++) {
        load_group<WHOLE>(v, y, dtype, at, k, keys, thread, BLOCK_THREADS);
        load_group<WHOLE>(g, dy, dy_dtype, at, k, keys, thread, BLOCK_THREADS);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = scale * (v[j] * (g[j] - mean));
        store_group<WHOLE>(v, dx, dtype, at, k, keys, thread, BLOCK_THREADS);
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
