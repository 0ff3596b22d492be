#include "blocks.cuh"
#include "norm.cuh"
// LayerNorm and RMSNorm of rows, into high precision or FP8, and their gradients.
//
// Statistics are taken twice over the row, mean and then squares around it, in an order that the number of columns alone
// decides: neither the element type nor what becomes of the values changes them. RMSNorm is the same with a mean of 0,
// bit for bit, since x - 0 is x.
//
// Rows of a multiple of eight columns lie in registers, 32 columns a thread: a warp holds up to 1024 columns, a block of
// 512 threads up to 16384. All others are read again for each pass, from L1 and L2.

// ---- statistics and values, row by row ----

// A row is the work of a warp or of a block.
enum { BY_WARP = 0, BY_BLOCK = 1 };

// The sum over the threads of one row; every one of them gets it.
template <int BY>
__device__ __forceinline__ float row_sum(float v, float* scratch) {
    return BY == BY_WARP ? warp_sum(v) : block_sum(v, scratch);
}

// Calls `body(row, lane, lanes)` for the rows of this thread's warp or block: as often for each of its threads.
template <int BY, typename Body>
__device__ __forceinline__ void each_row(u64 rows, Body body) {
    const int lanes = BY == BY_WARP ? WARP : (int)blockDim.x;
    const u64 groups = blockDim.x / lanes;
    const u64 step = groups * gridDim.x;
    for (u64 row = blockIdx.x * groups + threadIdx.x / lanes; row < rows; row += step) {
        body(row, (int)threadIdx.x % lanes, lanes);
    }
}

// A row in registers: four times eight columns for each thread. Columns are a multiple of eight.
template <int BY>
__device__ __forceinline__ void rows_held(const Norm& norm, const Sink& sink, Codes& out, float* means, float* rsigmas) {
    __shared__ float scratch[WARP];
    const int cols = (int)norm.cols;
    const int values = sink.y || sink.codes || !rsigmas;
    each_row<BY>(norm.rows, [&](u64 row, int lane, int lanes) {
        const u64 start = row * norm.cols;
        float v[4][8];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int col = (c * lanes + lane) * 8;
#pragma unroll
            for (int k = 0; k < 8; k++) v[c][k] = 0.0f;
            if (col < cols) load8(v[c], norm.x, norm.dtype, start + col);
        }
        float mean = 0.0f;
        if (norm.centered) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; c++) {
#pragma unroll
                for (int k = 0; k < 8; k++) sum += v[c][k];
            }
            mean = row_sum<BY>(sum, scratch) / (float)cols;
        }
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if ((c * lanes + lane) * 8 < cols) {
#pragma unroll
                for (int k = 0; k < 8; k++) squares += (v[c][k] - mean) * (v[c][k] - mean);
            }
        }
        const float variance = row_sum<BY>(squares, scratch) / (float)cols;
        const float rsigma = 1.0f / sqrtf(variance + norm.eps);
        if (lane == 0) put_statistics(means, rsigmas, row, mean, rsigma);
        if (!values) return;
        // One body for all four, a quarter of the code: the registers move up.
#pragma unroll 1
        for (int col = lane * 8; col < cols; col += lanes * 8) {
            normed8(v[0], norm, mean, rsigma, col);
            put8(sink, out, norm.dtype, start + col, v[0]);
#pragma unroll
            for (int c = 1; c < 4; c++) {
#pragma unroll
                for (int k = 0; k < 8; k++) v[c - 1][k] = v[c][k];
            }
        }
    });
}

// A row of any length, read anew for each pass, element by element.
template <int BY>
__device__ __forceinline__ void rows_read(const Norm& norm, const Sink& sink, Codes& out, float* means, float* rsigmas) {
    __shared__ float scratch[WARP];
    const u64 cols = norm.cols;
    const int values = sink.y || sink.codes || !rsigmas;
    each_row<BY>(norm.rows, [&](u64 row, int lane, int lanes) {
        const u64 start = row * cols;
        float mean = 0.0f;
        if (norm.centered) {
            float sum = 0.0f;
            for (u64 col = lane; col < cols; col += lanes) sum += load1(norm.x, norm.dtype, start + col);
            mean = row_sum<BY>(sum, scratch) / (float)cols;
        }
        float squares = 0.0f;
        for (u64 col = lane; col < cols; col += lanes) {
            const float d = load1(norm.x, norm.dtype, start + col) - mean;
            squares += d * d;
        }
        const float variance = row_sum<BY>(squares, scratch) / (float)cols;
        const float rsigma = 1.0f / sqrtf(variance + norm.eps);
        if (lane == 0) put_statistics(means, rsigmas, row, mean, rsigma);
        if (values) {
            for (u64 col = lane; col < cols; col += lanes) {
                const float x = load1(norm.x, norm.dtype, start + col);
                put1(sink, out, norm.dtype, start + col, normed1(norm, x, mean, rsigma, col));
            }
        }
    });
}

ROWS(norm_held_warp, 256, rows_held<BY_WARP>)
ROWS(norm_held_block, 512, rows_held<BY_BLOCK>)
ROWS(norm_read_warp, 256, rows_read<BY_WARP>)
ROWS(norm_read_block, 256, rows_read<BY_BLOCK>)

// ---- scales of rows and blocks, from statistics ----

// Values of one thread's columns.
struct Normed {
    const Norm& norm;
    const float* means;
    const float* rsigmas;
    float g[8];
    float b[8];

    // As bits: conversion waits until all loads are under way.
    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        const Raw8 raw = raw8_row(norm.x, norm.dtype, row * norm.cols + col, n, norm.cols % 8 == 0);
        const u32 w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __int_as_float((int)w[k]);
    }

    __device__ __forceinline__ void compute(float v[8], u64 row, u64, int n) const {
        const float mean = means ? means[row] : 0.0f, rsigma = rsigmas[row];
        u32 w[8];
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = (u32)__float_as_int(v[k]);
        const Raw8 raw = {make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
        widen8(v, raw, norm.dtype);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = k < n ? normed(norm, v[k], mean, rsigma, g[k], b[k]) : 0.0f;
    }
};

// Eight of a parameter's values, zeros behind its end; kept in L1.
__device__ __forceinline__ void parameter8(float v[8], const void* p, int dtype, u64 col, u64 cols) {
    if (cols % 8 == 0) {
        if (col < cols) shared8(v, p, dtype, col);
    } else {
        // From the last to the first, each moving the others up.
#pragma unroll 1
        for (int k = tile_width(col, cols) - 1; k >= 0; k--) {
#pragma unroll
            for (int j = 7; j > 0; j--) v[j] = v[j - 1];
            v[0] = load1(p, dtype, col + k);
        }
    }
}

// Codes with a scale for each row or block.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_blocks(const void* x, int dtype, const void* gamma, int gamma_dtype, const void* beta, int beta_dtype,
                int around_one, u64 rows, u64 cols, const float* means, const float* rsigmas, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    const Norm norm = {x, dtype, gamma, gamma_dtype, beta, beta_dtype, means != nullptr, around_one, 0.0f, rows, cols};
    const u64 across = (cols + BLOCK_TILE - 1) / BLOCK_TILE, col = blockIdx.x % across * BLOCK_TILE + block_col();
    Normed values = {norm, means, rsigmas, {}, {}};
    parameter8(values.g, gamma, gamma_dtype, col, cols);
    if (beta) parameter8(values.b, beta, beta_dtype, col, cols);
    if (around_one) {
#pragma unroll
        for (int k = 0; k < 8; k++) values.g[k] += 1.0f;
    }
    block_tile<4, 1, 1>(shared, sink, rows, cols, values);
}

// ---- gradients ----
//
// Of a row: n = (x - mean) * rsigma, s = dy * gamma, along = mean of s * n, level = mean of s (LayerNorm), and
// dx = fma(n, -along, s - level) * rsigma, to which the residual's gradient is added before rounding. Sums over rows go
// from each block or part into its own row of partial sums, and those are added in order by a second kernel.

struct Backward {
    const void* dy;
    int dy_dtype;
    Norm norm;
    const float* means;
    const float* rsigmas;
    const void* residual;  // null: none
    int residual_dtype;
    void* dx;
    float per_column;
};

#define BACKWARD_PARAMS                                                                                                \
    const void *dy, int dy_dtype, const void *x, int dtype, const void *gamma, int gamma_dtype, int around_one,        \
        const float *means, const float *rsigmas, const void *residual, int residual_dtype, void *dx, u64 rows, u64 cols
#define BACKWARD                                                                                                       \
    {dy, dy_dtype, {x, dtype, gamma, gamma_dtype, nullptr, 0, means != nullptr, around_one, 0.0f, rows, cols},         \
     means, rsigmas, residual, residual_dtype, dx, 1.0f / (float)cols}

__device__ __forceinline__ float dx_of(float n, float s, float along, float level, float rsigma) {
    return fmaf(n, -along, s - level) * rsigma;
}

// Both sums over the block. The caller takes the two halves of `scratch`, 32 each, in turn: one barrier a row.
__device__ __forceinline__ float2 block_sums(float a, float b, float2* scratch) {
    const int warps = (int)blockDim.x / WARP, lane = threadIdx.x % WARP;
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) scratch[threadIdx.x / WARP] = make_float2(a, b);
    __syncthreads();
    float2 part = lane < warps ? scratch[lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(part.x), warp_sum(part.y));
}

// Eight columns a thread, sums over rows in registers, a row of partial sums for each block. At most 8192 columns, a
// multiple of eight.
extern "C" __global__ void __launch_bounds__(1024)
    norm_backward_held(BACKWARD_PARAMS, float* partial_gamma, float* partial_beta) {
    __shared__ float2 scratch[2][WARP];
    const Backward b = BACKWARD;
    const u64 col = threadIdx.x * 8ull;
    const int live = col < cols;
    float dgamma[8], dbeta[8];
#pragma unroll
    for (int k = 0; k < 8; k++) dgamma[k] = dbeta[k] = 0.0f;
    int half = 0;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x, half ^= 1) {
        const float mean = means ? means[row] : 0.0f, rsigma = rsigmas[row];
        const u64 i = row * cols + col;
        float n[8], s[8];
        float along = 0.0f, level = 0.0f;
        if (live) {
            load8(n, x, dtype, i);
            load8(s, dy, dy_dtype, i);
            float g[8];
            gamma8(g, b.norm, col);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                n[k] = (n[k] - mean) * rsigma;
                dgamma[k] = fmaf(s[k], n[k], dgamma[k]);
                dbeta[k] += s[k];
                s[k] *= g[k];
                along += s[k] * n[k];
                level += s[k];
            }
        }
        const float2 sums = block_sums(along, level, scratch[half]);
        if (live) {
            along = sums.x * b.per_column;
            level = means ? sums.y * b.per_column : 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) s[k] = dx_of(n[k], s[k], along, level, rsigma);
            if (residual) {
                load8(n, residual, residual_dtype, i);
#pragma unroll
                for (int k = 0; k < 8; k++) s[k] += n[k];
            }
            store8(dx, dtype, i, s);
        }
    }
    if (live) {
        store8(partial_gamma, F32, blockIdx.x * cols + col, dgamma);
        if (partial_beta) store8(partial_beta, F32, blockIdx.x * cols + col, dbeta);
    }
}

// dx alone, rows of any length read twice.
template <int BY>
__device__ __forceinline__ void backward_read(const Backward& b) {
    __shared__ float scratch[WARP];
    const Norm& norm = b.norm;
    each_row<BY>(norm.rows, [&](u64 row, int lane, int lanes) {
        const float mean = b.means ? b.means[row] : 0.0f, rsigma = b.rsigmas[row];
        const u64 start = row * norm.cols;
        float along = 0.0f, level = 0.0f;
        for (u64 col = lane; col < norm.cols; col += lanes) {
            const float n = (load1(norm.x, norm.dtype, start + col) - mean) * rsigma;
            const float s = load1(b.dy, b.dy_dtype, start + col) * gamma1(norm, col);
            along += s * n;
            level += s;
        }
        along = row_sum<BY>(along, scratch) * b.per_column;
        level = row_sum<BY>(level, scratch) * b.per_column;
        if (!b.means) level = 0.0f;
        for (u64 col = lane; col < norm.cols; col += lanes) {
            const float n = (load1(norm.x, norm.dtype, start + col) - mean) * rsigma;
            const float s = load1(b.dy, b.dy_dtype, start + col) * gamma1(norm, col);
            float v = dx_of(n, s, along, level, rsigma);
            if (b.residual) v += load1(b.residual, b.residual_dtype, start + col);
            store1(b.dx, norm.dtype, start + col, v);
        }
    });
}

extern "C" __global__ void __launch_bounds__(256) norm_backward_warp(BACKWARD_PARAMS) {
    const Backward b = BACKWARD;
    backward_read<BY_WARP>(b);
}

extern "C" __global__ void __launch_bounds__(256) norm_backward_block(BACKWARD_PARAMS) {
    const Backward b = BACKWARD;
    backward_read<BY_BLOCK>(b);
}

#define PART_WARPS 8

// The sums over `part_rows` rows of 32 columns, for each block: parts of one strip of columns, then the next strip.
extern "C" __global__ void __launch_bounds__(WARP* PART_WARPS)
    norm_backward_columns(const void* dy, int dy_dtype, const void* x, int dtype, const float* means,
                          const float* rsigmas, u64 rows, u64 cols, u64 parts, u64 part_rows, float* partial_gamma,
                          float* partial_beta) {
    __shared__ float2 sums[PART_WARPS][WARP];
    const u64 part = blockIdx.x % parts, col = blockIdx.x / parts * WARP + threadIdx.x % WARP;
    const u64 first = part * part_rows, last = first + part_rows < rows ? first + part_rows : rows;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float dgamma = 0.0f, dbeta = 0.0f;
    if (col < cols) {
        for (u64 row = first + warp; row < last; row += PART_WARPS) {
            const float mean = means ? means[row] : 0.0f;
            const float n = (load1(x, dtype, row * cols + col) - mean) * rsigmas[row];
            const float d = load1(dy, dy_dtype, row * cols + col);
            dgamma = fmaf(d, n, dgamma);
            dbeta += d;
        }
    }
    sums[warp][lane] = make_float2(dgamma, dbeta);
    __syncthreads();
    if (warp == 0 && col < cols) {
        for (int w = 1; w < PART_WARPS; w++) {
            dgamma += sums[w][lane].x;
            dbeta += sums[w][lane].y;
        }
        partial_gamma[part * cols + col] = dgamma;
        if (partial_beta) partial_beta[part * cols + col] = dbeta;
    }
}

// The sum of `parts` rows of partial sums, 32 columns a block: dgamma's strips first, then dbeta's.
extern "C" __global__ void __launch_bounds__(1024)
    norm_backward_sums(const float* partial_gamma, const float* partial_beta, u64 parts, u64 cols, float* dgamma,
                       float* dbeta) {
    __shared__ float sums[WARP][WARP + 1];
    const u64 strips = (cols + WARP - 1) / WARP;
    const int second = blockIdx.x >= strips;
    const float* partial = second ? partial_beta : partial_gamma;
    float* out = second ? dbeta : dgamma;
    const u64 col0 = blockIdx.x % strips * WARP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sum = 0.0f;
    if (col0 + lane < cols) {
        for (u64 part = warp; part < parts; part += WARP) sum += partial[part * cols + col0 + lane];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane][warp]);
    if (lane == 0 && col0 + warp < cols) out[col0 + warp] = sum;
}
