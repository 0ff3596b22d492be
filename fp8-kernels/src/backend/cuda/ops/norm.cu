#include "blocks.cuh"
#include "norm.cuh"
// LayerNorm and RMSNorm of rows, into high precision or FP8.
//
// Statistics are taken twice over the row, mean and then squares around it, in an order that the number of columns alone
// decides: neither the element type nor what becomes of the values changes them. RMSNorm is the same with a mean of 0,
// bit for bit, since x - 0 is x.
//
// Rows of a multiple of eight columns lie in registers, 32 columns a thread: a warp holds up to 1024 columns, a block of
// 512 threads up to 16384. All others are read again for each pass, from L1 and L2.

// ---- statistics and values, row by row ----

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
