#include "blocks.cuh"
// Quantize: codes, their transpose, column sums, amax and counts from one read; and codes back to numbers.
//
// code = satfinite_rne(x · scale), amax and counts before scaling; scale_inv = 1 / scale. The flat kernels stream
// 16-byte loads; those by tiles also write the transpose and the sums of the columns, as a row of partial sums for each row of
// tiles. Scales come from cells, so nothing here waits for the host.

#define FLAT_THREADS 256
// 16-byte loads under way in each thread.
#define FLAT_LOADS 4

// ---- without the transpose ----

// Each load of a warp is 512 bytes in a row; the codes of a load are one store of 8 bytes a thread, of 4 for f32.
template <int DTYPE>
__device__ __forceinline__ void quantize_flat(const void* x, u64 n, u8* codes, int format, const float* scale,
                                              float* scale_inv, int* amax, u64* counters) {
    __shared__ float scratch[WARP];
    constexpr int SIZE = DTYPE == F32 ? 4 : 2, WIDTH = 16 / SIZE;
    Codes out = begin_codes(scale, format, counters);
    write_scale_inv(scale, scale_inv);
    const u64 stride = grid_threads() * WIDTH * FLAT_LOADS;
    u64 i = ((u64)blockIdx.x * FLAT_THREADS * FLAT_LOADS + threadIdx.x) * WIDTH;
    for (; i < n; i += stride) {
        Raw8 raw[FLAT_LOADS];
#pragma unroll
        for (int load = 0; load < FLAT_LOADS; load++) {
            const u64 at = i + load * FLAT_THREADS * WIDTH;
            raw[load].low = at + WIDTH <= n ? load16((const char*)x + at * SIZE) : make_uint4(0, 0, 0, 0);
            raw[load].high = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int load = 0; load < FLAT_LOADS; load++) {
            const u64 at = i + load * FLAT_THREADS * WIDTH;
            float v[8];
            widen8(v, raw[load], DTYPE);
            uint2 words = code8(out, v);
            if (at + WIDTH <= n) {
                if (DTYPE == F32) *(u32*)(codes + at) = words.x;
                else *(uint2*)(codes + at) = words;
            }
        }
    }
    const u64 rest = n - n % WIDTH + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) codes[rest] = (u8)code1(out, load1(x, DTYPE, rest));
    finish_codes(out, amax, counters, blockIdx.x == 0 ? n : 0, scratch);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_f32(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                 u64* counters) {
    quantize_flat<F32>(x, n, codes, format, scale, scale_inv, amax, counters);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_bf16(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                  u64* counters) {
    quantize_flat<BF16>(x, n, codes, format, scale, scale_inv, amax, counters);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_f16(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                 u64* counters) {
    quantize_flat<F16>(x, n, codes, format, scale, scale_inv, amax, counters);
}

// ---- by tiles ----

// Elements of a matrix, and what those of one thread add up to in each column. Sums start at -0, which costs no addition.
struct Elements {
    const void* x;
    int dtype;
    u64 cols;
    int summing;
    float sums[8];

    // As bits: conversion waits until all loads are under way.
    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        Raw8 raw = raw8_row(x, dtype, row * cols + col, n, cols % 8 == 0);
        u32 w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __int_as_float((int)w[k]);
    }

    __device__ __forceinline__ void compute(float v[8], u64, u64, int) {
        u32 w[8];
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = (u32)__float_as_int(v[k]);
        Raw8 raw = {make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
        widen8(v, raw, dtype);
        if (summing) {
#pragma unroll
            for (int k = 0; k < 8; k++) sums[k] += v[k];
        }
    }
};

// A block takes `run` tiles, one below the other. `codes`, `columnwise` and `partial_sums`, [rows of tiles, cols], may be
// null, and `scale` where the first two are.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles(const void* x, int dtype, u64 rows, u64 cols, u64 run, u8* codes, u8* columnwise, int format,
                   const float* scale, float* scale_inv, int* amax, u64* counters, float* partial_sums) {
    __shared__ float scratch[WARP];
    __shared__ float parts[TILE_THREADS / WARP * TILE_COLS];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    Codes out = begin_codes(scale, format, counters);
    write_scale_inv(scale, scale_inv);
    const u64 across = tiles_across(cols), down = blockIdx.x / across * run, col0 = blockIdx.x % across * TILE_COLS;
    Elements values = {x, dtype, cols, partial_sums != nullptr, {}};
    for (u64 i = down; i < down + run && i * TILE_ROWS < rows; i++) {
        const u64 row0 = i * TILE_ROWS;
#pragma unroll
        for (int k = 0; k < 8; k++) values.sums[k] = -0.0f;
        code_tile<4>(tile, out, codes, columnwise, rows, cols, row0, col0, values);
        if (partial_sums) tile_sums(parts, values.sums, partial_sums + i * cols + col0, col0, cols);
    }
    finish_codes(out, amax, counters, blockIdx.x == 0 ? rows * cols : 0, scratch);
}

// ---- a scale for each row or block ----

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks(const void* x, int dtype, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Elements values = {x, dtype, cols, 0, {}};
    block_tile<4, 4, 1>(shared, sink, rows, cols, values);
}

// ---- many tensors in one launch ----

// As the host writes it; addresses are 0 for none.
struct Entry {
    const void* x;
    u8* codes;
    u8* columnwise;
    const float* scale;
    float* scale_inv;
    int* amax;
    u64* counters;
    u64 rows;
    u64 cols;
    // dtype, and format << 8.
    u64 types;
    u64 first_tile;
};

// A block takes `run` tiles in a row, of one tensor or of several; a tensor's first tile is its entry's.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    quantize_many(const u64* table, int entries, u64 tiles, u64 run) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    const Entry* list = (const Entry*)table;
    u64 next = blockIdx.x * run;
    const u64 end = next + run < tiles ? next + run : tiles;
    // The last entry whose first tile is not beyond ours.
    int low = 0, high = entries;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (list[middle].first_tile <= next) low = middle;
        else high = middle;
    }
    for (int e = low; e < entries && next < end; e++) {
        const Entry entry = list[e];
        const u64 across = tiles_across(entry.cols), first = entry.first_tile;
        const u64 own = first + (entry.rows + TILE_ROWS - 1) / TILE_ROWS * across, last = own < end ? own : end;
        const int begins = next == first;
        Codes out = begin_codes(entry.scale, (int)(entry.types >> 8), entry.counters);
        if (begins && threadIdx.x == 0) *entry.scale_inv = 1.0f / fabsf(*entry.scale);
        Elements values = {entry.x, (int)(entry.types & 0xff), entry.cols, 0, {}};
        for (; next < last; next++) {
            const u64 row0 = (next - first) / across * TILE_ROWS, col0 = (next - first) % across * TILE_COLS;
            code_tile<1>(tile, out, entry.codes, entry.columnwise, entry.rows, entry.cols, row0, col0, values);
        }
        finish_codes(out, entry.amax, entry.counters, begins ? entry.rows * entry.cols : 0, scratch);
    }
}

// ---- scales ----

// Writes into `scale` what to quantize with: the cell's magnitude if it is set, else the rule's for the tensor's amax,
// which rests at -1 where no element was read. `cell` is null for a scale of the tensor's own.
extern "C" __global__ void __launch_bounds__(WARP)
    quantize_scale(float* cell, int keep, const float* amax, int kind, float fp8_max, float scaled_max, int margin,
                   float epsilon, float* scale) {
    if (threadIdx.x != 0) return;
    const float largest = *amax < 0.0f ? 0.0f : *amax;
    const Rule rule = {kind, fp8_max, scaled_max, margin, epsilon};
    if (!cell) {
        *scale = scale_of(rule, largest, 1.0f);
        return;
    }
    const float stored = *cell;
    if (__float_as_int(stored) != REST_BITS) {
        *scale = fabsf(stored);
    } else if (!usable_amax(largest)) {
        // Zero and non-finite amaxes say nothing: scale 1, and the slot stays unset.
        *scale = 1.0f;
    } else {
        const float first = scale_of(rule, largest, 1.0f);
        *scale = first;
        if (keep) *cell = -first;
    }
}

// ---- back to numbers ----

// value = code · scale_inv in f32, rounded to the dtype.
extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    dequantize(const u8* codes, u64 n, int format, const float* scale_inv, void* out, int dtype) {
    const float factor = *scale_inv;
    const u64 whole = n / 8, stride = grid_threads();
#pragma unroll 1
    for (u64 i = grid_thread(); i < whole; i += stride) {
        const uint2 words = ((const uint2*)codes)[i];
        float v[8];
        decode2(words.x & 0xffffu, format, v, v + 1);
        decode2(words.x >> 16, format, v + 2, v + 3);
        decode2(words.y & 0xffffu, format, v + 4, v + 5);
        decode2(words.y >> 16, format, v + 6, v + 7);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] *= factor;
        store8(out, dtype, i * 8, v);
    }
    const u64 rest = whole * 8 + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) {
        float value, none;
        decode2(codes[rest], format, &value, &none);
        store1(out, dtype, rest, value * factor);
    }
}

// Where the factor of an element is among those of a [rows, cols] matrix; `wide` is how many a row of them has.
__device__ __forceinline__ u64 factor_place(int blocks, u64 row, u64 col, u64 wide) {
    if (blocks == BLOCKS_ROW) return row;
    if (blocks == BLOCKS_128X128) return row / BLOCK_TILE * wide + col / BLOCK_TILE;
    return row * wide + col / (blocks == BLOCKS_MX32 ? 32 : BLOCK_TILE);
}

// The same with a factor for each row or block: f32, or E8M0 for MX.
extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    dequantize_blocks(const u8* codes, u64 n, u64 cols, int format, int blocks, const void* scale_inv, void* out, int dtype) {
    const u64 width = blocks == BLOCKS_MX32 ? 32 : BLOCK_TILE, wide = (cols + width - 1) / width;
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        const u64 row = quotient(i, cols), place = factor_place(blocks, row, i - row * cols, wide);
        const float factor = blocks == BLOCKS_MX32 ? e8m0_value(((const u8*)scale_inv)[place])
                                                   : ((const float*)scale_inv)[place];
        float value, none;
        decode2(codes[i], format, &value, &none);
        store1(out, dtype, i, value * factor);
    }
}
