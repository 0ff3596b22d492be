// Sums, maxima and column sums, in orders that depend on the shape alone.
//
// sum: eight neighbours in pairs, groups of a thread compensated, blocks compensated. column_sums: tiles in
// plain f32 (see tile_sums), pieces of TILE_ROWS rows compensated.

#define REDUCE_THREADS 256
#define UNROLL 4

template <int DTYPE>
__device__ __forceinline__ Sum sum_of(const void* x, u64 n) {
    Sum sum = {0.0f, 0.0f};
    u64 groups = n / 8, step = (u64)gridDim.x * REDUCE_THREADS;
    u64 g = (u64)blockIdx.x * REDUCE_THREADS + threadIdx.x;
    for (; g + (UNROLL - 1) * step < groups; g += UNROLL * step) {
        float v[UNROLL][8];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) load8(v[k], x, DTYPE, 8 * (g + (u64)k * step));
#pragma unroll
        for (int k = 0; k < UNROLL; k++) sum = sum_add(sum, tree8(v[k]));
    }
    for (; g < groups; g += step) {
        float v[8];
        load8(v, x, DTYPE, 8 * g);
        sum = sum_add(sum, tree8(v));
    }
    // At most seven, in the thread whose turn it is.
    if (g == groups) {
#pragma unroll 1
        for (u64 i = 8 * groups; i < n; i++) sum = sum_add(sum, load1(x, DTYPE, i));
    }
    return sum;
}

// `partial` takes two floats a block; with a single block the sum itself, divided, goes to `out`.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
reduce_sum(const void* x, int dtype, u64 n, float* partial, float* out, float divisor) {
    __shared__ float scratch[64];
    Sum sum;
    if (dtype == F32) sum = sum_of<F32>(x, n);
    else if (dtype == BF16) sum = sum_of<BF16>(x, n);
    else sum = sum_of<F16>(x, n);
    sum = block_merge(sum, scratch);
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1) {
        out[0] = sum_value(sum) / divisor;
    } else {
        partial[2 * (u64)blockIdx.x] = sum.hi;
        partial[2 * (u64)blockIdx.x + 1] = sum.lo;
    }
}

// Launch: one block.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
reduce_sum_finish(const float* partial, u64 blocks, float* out, float divisor) {
    __shared__ float scratch[64];
    Sum sum = {0.0f, 0.0f};
    for (u64 b = threadIdx.x; b < blocks; b += REDUCE_THREADS) sum = sum_merge(sum, {partial[2 * b], partial[2 * b + 1]});
    sum = block_merge(sum, scratch);
    if (threadIdx.x == 0) out[0] = sum_value(sum) / divisor;
}

// NaN, once there is one.
struct Largest {
    float value;
    int nan;
};

__device__ __forceinline__ void larger(Largest& largest, float v) {
    largest.value = fmaxf(largest.value, v);
    largest.nan |= v != v;
}

template <int DTYPE>
__device__ __forceinline__ Largest largest_of(const void* x, u64 n) {
    Largest largest = {-INFINITY_F, 0};
    u64 groups = n / 8, step = (u64)gridDim.x * REDUCE_THREADS;
    u64 g = (u64)blockIdx.x * REDUCE_THREADS + threadIdx.x;
    for (; g + (UNROLL - 1) * step < groups; g += UNROLL * step) {
        float v[UNROLL][8];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) load8(v[k], x, DTYPE, 8 * (g + (u64)k * step));
#pragma unroll
        for (int k = 0; k < UNROLL * 8; k++) larger(largest, v[k / 8][k % 8]);
    }
    for (; g < groups; g += step) {
        float v[8];
        load8(v, x, DTYPE, 8 * g);
#pragma unroll
        for (int k = 0; k < 8; k++) larger(largest, v[k]);
    }
    if (g == groups) {
#pragma unroll 1
        for (u64 i = 8 * groups; i < n; i++) larger(largest, load1(x, DTYPE, i));
    }
    return largest;
}

__device__ __forceinline__ float block_largest(Largest largest, float* scratch) {
    float value = block_max(largest.value, scratch);
    // A sum of flags: above zero where one is set.
    float nan = block_max(largest.nan ? 1.0f : 0.0f, scratch);
    return nan > 0.0f ? NAN_F : value;
}

// `out` takes one float a block: the maximum itself for a single one.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS) reduce_max(const void* x, int dtype, u64 n, float* out) {
    __shared__ float scratch[32];
    Largest largest;
    if (dtype == F32) largest = largest_of<F32>(x, n);
    else if (dtype == BF16) largest = largest_of<BF16>(x, n);
    else largest = largest_of<F16>(x, n);
    float value = block_largest(largest, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = value;
}

// ---- column sums ----

// `partial` is [ceil(rows / TILE_ROWS)][cols]. Blocks take tiles in turn, those of the same rows after each other.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
reduce_columns(const void* x, int dtype, u64 rows, u64 cols, float* partial) {
    __shared__ float scratch[TILE_THREADS / WARP * TILE_COLS];
    u64 across = tiles_across(cols), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * across;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 down = quotient(tile, across), col0 = (tile - down * across) * TILE_COLS;
        u64 row = down * TILE_ROWS + tile_row(), col = col0 + tile_col();
        int width = tile_width(col, cols), whole = cols % 8 == 0;
        float v[4][8];
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        }
        if (whole && width > 0) {
            Raw8 raw[4];
#pragma unroll
            for (int r = 0; r < 4; r++) raw[r] = raw8(x, dtype, (row + r < rows ? row + r : 0) * cols + col);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                if (row + r < rows) widen8(v[r], raw[r], dtype);
            }
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    if (row + r < rows && k < width) v[r][k] = load1(x, dtype, (row + r) * cols + col + k);
                }
            }
        }
        float sums[8];
#pragma unroll
        for (int k = 0; k < 8; k++) sums[k] = ((v[0][k] + v[1][k]) + v[2][k]) + v[3][k];
        tile_sums(scratch, sums, partial + down * cols + col0, col0, cols);
    }
}

// out[c] = the compensated sum over the pieces of column c, or is added to. A block has `lanes` columns, a power of two up to 32, and
// 256 / lanes threads for each.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
reduce_columns_finish(const float* partial, u64 pieces, u64 cols, int lanes, float* out, int add) {
    __shared__ float high[REDUCE_THREADS];
    __shared__ float low[REDUCE_THREADS];
    int lane = (int)threadIdx.x % lanes, stripes = REDUCE_THREADS / lanes;
    u64 col = (u64)blockIdx.x * (u64)lanes + (u64)lane;
    Sum sum = {0.0f, 0.0f};
    if (col < cols) {
        for (u64 p = threadIdx.x / (unsigned)lanes; p < pieces; p += (u64)stripes) sum = sum_add(sum, partial[p * cols + col]);
    }
    high[threadIdx.x] = sum.hi;
    low[threadIdx.x] = sum.lo;
    __syncthreads();
    for (int half = stripes / 2; half > 0; half /= 2) {
        int other = (int)threadIdx.x + half * lanes;
        int active = (int)threadIdx.x < half * lanes;
        if (active) {
            sum = sum_merge(sum, {high[other], low[other]});
            high[threadIdx.x] = sum.hi;
            low[threadIdx.x] = sum.lo;
        }
        __syncthreads();
    }
    if ((int)threadIdx.x < lanes && col < cols) out[col] = add ? out[col] + sum_value(sum) : sum_value(sum);
}
