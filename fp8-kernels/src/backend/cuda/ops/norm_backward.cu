#include "norm.cuh"
// The gradients of LayerNorm and RMSNorm.
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

// The first sum alone, in the same order.
__device__ __forceinline__ float2 block_sum_alone(float a, float2* scratch) {
    const int warps = (int)blockDim.x / WARP, lane = threadIdx.x % WARP;
    a = warp_sum(a);
    if (lane == 0) scratch[threadIdx.x / WARP].x = a;
    __syncthreads();
    return make_float2(warp_sum(lane < warps ? scratch[lane].x : 0.0f), 0.0f);
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

// The same for bf16 in and out, with the next row's loads under way: what differs between launches is a template's parameter.
// The order of all sums is that of norm_backward_held, bit for bit.
template <int CENTERED, int RESIDUAL>
__device__ __forceinline__ void backward_ahead(const Backward& b, float* partial_gamma, float* partial_beta) {
    __shared__ float2 scratch[2][WARP];
    const u32 rows = (u32)b.norm.rows, cols = (u32)b.norm.cols, col = threadIdx.x * 8;
    const int live = col < cols;
    float g[8], dgamma[8], dbeta[8];
#pragma unroll
    for (int k = 0; k < 8; k++) g[k] = dgamma[k] = dbeta[k] = 0.0f;
    if (live) gamma8(g, b.norm, col);
    uint4 next_x = make_uint4(0, 0, 0, 0), next_dy = next_x;
    float next_mean = 0.0f, next_rsigma = 0.0f;
    u32 row = blockIdx.x;
    const auto load = [&](u32 row) {
        const u64 i = (u64)row * cols + col;
        if (CENTERED) next_mean = b.means[row];
        next_rsigma = b.rsigmas[row];
        if (live) {
            next_x = load16((const u16*)b.norm.x + i);
            next_dy = load16((const u16*)b.dy + i);
        }
    };
    if (row < rows) load(row);
    int half = 0;
#pragma unroll 1
    for (; row < rows; row += gridDim.x, half ^= 1) {
        const u64 i = (u64)row * cols + col;
        const float mean = next_mean, rsigma = next_rsigma;
        float n[8], s[8];
        widen8(n, {next_x, next_x}, BF16);
        widen8(s, {next_dy, next_dy}, BF16);
        if (row + gridDim.x < rows) load(row + gridDim.x);
        uint4 residual = make_uint4(0, 0, 0, 0);
        float along = 0.0f, level = 0.0f;
        if (live) {
            if (RESIDUAL) residual = load16((const u16*)b.residual + i);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                n[k] = CENTERED ? (n[k] - mean) * rsigma : n[k] * rsigma;
                dgamma[k] = fmaf(s[k], n[k], dgamma[k]);
                if (CENTERED) dbeta[k] += s[k];
                s[k] *= g[k];
                along += s[k] * n[k];
                if (CENTERED) level += s[k];
            }
        }
        const float2 sums = CENTERED ? block_sums(along, level, scratch[half]) : block_sum_alone(along, scratch[half]);
        if (live) {
            along = sums.x * b.per_column;
            level = sums.y * b.per_column;
#pragma unroll
            for (int k = 0; k < 8; k++) s[k] = dx_of(n[k], s[k], along, CENTERED ? level : 0.0f, rsigma);
            if (RESIDUAL) {
                widen8(n, {residual, residual}, BF16);
#pragma unroll
                for (int k = 0; k < 8; k++) s[k] += n[k];
            }
            store8(b.dx, BF16, i, s);
        }
    }
    if (live) {
        store8(partial_gamma, F32, (u64)blockIdx.x * cols + col, dgamma);
        if (CENTERED) store8(partial_beta, F32, (u64)blockIdx.x * cols + col, dbeta);
    }
}

#define BACKWARD_AHEAD(NAME, CENTERED, RESIDUAL)                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        NAME(BACKWARD_PARAMS, float* partial_gamma, float* partial_beta) {                                             \
        const Backward b = BACKWARD;                                                                                   \
        backward_ahead<CENTERED, RESIDUAL>(b, partial_gamma, partial_beta);                                            \
    }

BACKWARD_AHEAD(norm_backward_held_layer, 1, 0)
BACKWARD_AHEAD(norm_backward_held_layer_add, 1, 1)
BACKWARD_AHEAD(norm_backward_held_rms, 0, 0)
BACKWARD_AHEAD(norm_backward_held_rms_add, 0, 1)

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

// The sum of `parts` rows of partial sums, 32 columns a block: dgamma's strips first, then dbeta's. Each is written, or added to
// what is there.
extern "C" __global__ void __launch_bounds__(1024)
    norm_backward_sums(const float* partial_gamma, const float* partial_beta, u64 parts, u64 cols, float* dgamma,
                       float* dbeta, int add_gamma, int add_beta) {
    __shared__ float sums[WARP][WARP + 1];
    const u64 strips = (cols + WARP - 1) / WARP;
    const int second = blockIdx.x >= strips;
    const float* partial = second ? partial_beta : partial_gamma;
    float* out = second ? dbeta : dgamma;
    const int add = second ? add_beta : add_gamma;
    const u64 col0 = blockIdx.x % strips * WARP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float sum = 0.0f;
    if (col0 + lane < cols) {
        for (u64 part = warp; part < parts; part += WARP) sum += partial[part * cols + col0 + lane];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane][warp]);
    if (lane == 0 && col0 + warp < cols) out[col0 + warp] = add ? out[col0 + warp] + sum : sum;
}
