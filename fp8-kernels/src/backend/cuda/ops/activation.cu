#include "activation.cuh"
// Activation functions and their gradients, plain and gated, of any kind, element type and shape, by tiles: codes with their transpose, or values in high
// precision, or the amax alone; column sums; never rounded in between. A row's loads are under way while the row before it
// is computed.

// What a launch does with the values that it computes; any address may be null. `scale` is where codes are made.
struct Sink {
    u8* codes;
    u8* columnwise;
    int format;
    const float* scale;
    float* scale_inv;
    void* high;
    int dtype;
    int* amax;
    u64* counters;
    float* partial_sums;
};

// Eight values of one row: to their codes, or as they are. Returns the codes.
__device__ __forceinline__ uint2 sink_row(const Sink& sink, Codes& out, const float v[8], u64 at, int n, int whole) {
    uint2 codes = code8(out, v);
    if (n > 0 && sink.codes) store_codes8(sink.codes + at, codes, n, whole);
    if (n > 0 && sink.high) store_row8(sink.high, sink.dtype, at, v, n, whole);
    return codes;
}

// ---- tiles ----

// A block takes `run` tiles of the output, one below the other; where gated, of both halves of a gradient at once.
struct Strip {
    u64 first;
    u64 col0;
};

__device__ __forceinline__ Strip strip_of(u64 cols, u64 run) {
    const u64 across = tiles_across(cols);
    return {blockIdx.x / across * run, blockIdx.x % across * TILE_COLS};
}

// h is [rows, cols], or [rows, 2·cols] where gated.
template <int GATED>
__device__ __forceinline__ void forward(const void* h, int dtype, int kind, u64 rows, u64 cols, u64 run,
                                        const Sink& sink, u32* tile, float* scratch) {
    const Strip strip = strip_of(cols, run);
    const u64 col = strip.col0 + tile_col(), pitch = GATED ? 2 * cols : cols;
    const int n = tile_width(col, cols), whole = cols % 8 == 0;
    Codes out = begin_codes(sink.scale, sink.format, sink.counters);
    write_scale_inv(sink.scale, sink.scale_inv);
    const u64 below = (strip.first + run) * TILE_ROWS, end = below < rows ? below : rows;
    for (u64 row0 = strip.first * TILE_ROWS; row0 < end; row0 += TILE_ROWS) {
        u64 row = row0 + tile_row();
        u32 columns[8];
#pragma unroll
        for (int k = 0; k < 8; k++) columns[k] = 0;
        Raw8 first = raw8_row(h, dtype, row * pitch + col, row < rows ? n : 0, whole), second = first;
        if (GATED) second = raw8_row(h, dtype, row * pitch + cols + col, row < rows ? n : 0, whole);
#pragma unroll 1
        for (int r = 0; r < 4; r++, row++) {
            float x[8], c[8], s[8], v[8];
            widen8(x, first, dtype);
            if (GATED) widen8(v, second, dtype);
            const int next = r < 3 && row + 1 < rows ? n : 0;
            first = raw8_row(h, dtype, (row + 1) * pitch + col, next, whole);
            if (GATED) second = raw8_row(h, dtype, (row + 1) * pitch + cols + col, next, whole);
            sigmoids(kind, x, c, s);
            function_values(kind, x, s, c);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = GATED ? c[k] * v[k] : c[k];
            push_row(columns, sink_row(sink, out, v, row * cols + col, row < rows ? n : 0, whole));
        }
        if (sink.columnwise) {
#pragma unroll
            for (int k = 0; k < 8; k++) put_column(tile, k, columns[k]);
            __syncthreads();
            store_columns(tile, sink.columnwise, rows, cols, row0, strip.col0);
            __syncthreads();
        }
    }
    finish_codes(out, sink.amax, sink.counters, blockIdx.x == 0 ? rows * cols : 0, scratch);
}

// dy is [rows, cols], h and the gradient as well, or [rows, 2·cols] where gated.
template <int GATED>
__device__ __forceinline__ void backward(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows,
                                         u64 cols, u64 run, const Sink& sink, u32* tiles, float* parts, float* scratch) {
    constexpr int HALVES = GATED ? 2 : 1;
    const Strip strip = strip_of(cols, run);
    const u64 col = strip.col0 + tile_col(), pitch = HALVES * cols;
    const int n = tile_width(col, cols), whole = cols % 8 == 0;
    Codes out = begin_codes(sink.scale, sink.format, sink.counters);
    write_scale_inv(sink.scale, sink.scale_inv);
    for (u64 i = strip.first; i < strip.first + run && i * TILE_ROWS < rows; i++) {
        const u64 row0 = i * TILE_ROWS;
        u64 row = row0 + tile_row();
        u32 columns[HALVES][8];
        // Sums start at -0, which changes no bit of the first row.
        float sums[HALVES][8];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
            for (int k = 0; k < 8; k++) columns[half][k] = 0, sums[half][k] = -0.0f;
        }
        int live = row < rows ? n : 0;
        Raw8 g = raw8_row(dy, dy_dtype, row * cols + col, live, whole);
        Raw8 a = raw8_row(h, dtype, row * pitch + col, live, whole), b = a;
        if (GATED) b = raw8_row(h, dtype, row * pitch + cols + col, live, whole);
#pragma unroll 1
        for (int r = 0; r < 4; r++, row++) {
            float x[8], d[8], gate[8], s[8], slope[8], v[8];
            widen8(x, a, dtype);
            widen8(d, g, dy_dtype);
            if (GATED) widen8(gate, b, dtype);
            const int next = r < 3 && row + 1 < rows ? n : 0;
            g = raw8_row(dy, dy_dtype, (row + 1) * cols + col, next, whole);
            a = raw8_row(h, dtype, (row + 1) * pitch + col, next, whole);
            if (GATED) b = raw8_row(h, dtype, (row + 1) * pitch + cols + col, next, whole);
            function_slopes(kind, x, s, slope);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                v[k] = slope[k] * d[k];
                if (GATED) v[k] = v[k] * gate[k];
                sums[0][k] += v[k];
            }
            push_row(columns[0], sink_row(sink, out, v, row * pitch + col, live, whole));
            if (GATED) {
                function_values(kind, x, s, v);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    v[k] = v[k] * d[k];
                    sums[HALVES - 1][k] += v[k];
                }
                push_row(columns[HALVES - 1], sink_row(sink, out, v, row * pitch + cols + col, live, whole));
            }
            live = next;
        }
        if (sink.columnwise) {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
#pragma unroll
                for (int k = 0; k < 8; k++) put_column(tiles + half * TILE_WORDS, k, columns[half][k]);
            }
            __syncthreads();
            for (int half = 0; half < HALVES; half++) {
                u8* columnwise = sink.columnwise + half * cols * rows;
                store_columns(tiles + half * TILE_WORDS, columnwise, rows, cols, row0, strip.col0);
            }
            __syncthreads();
        }
        if (sink.partial_sums) {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* to = sink.partial_sums + i * pitch + half * cols + strip.col0;
                tile_sums(parts, sums[half], to, strip.col0, cols);
            }
        }
    }
    finish_codes(out, sink.amax, sink.counters, blockIdx.x == 0 ? rows * pitch : 0, scratch);
}

// ---- entries. `unset`, if not null, is a scale cell: where it is set, nothing is done ----

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    activation(const void* h, int dtype, int kind, u64 rows, u64 cols, u64 run, u8* codes, u8* columnwise, int format,
               const float* scale, float* scale_inv, void* high, const float* unset, int* amax, u64* counters) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    if (is_set(unset)) return;
    const Sink sink = {codes, columnwise, format, scale, scale_inv, high, dtype, amax, counters, nullptr};
    forward<0>(h, dtype, kind, rows, cols, run, sink, tile, scratch);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    activation_gated(const void* h, int dtype, int kind, u64 rows, u64 cols, u64 run, u8* codes, u8* columnwise,
                     int format, const float* scale, float* scale_inv, void* high, const float* unset, int* amax,
                     u64* counters) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    if (is_set(unset)) return;
    const Sink sink = {codes, columnwise, format, scale, scale_inv, high, dtype, amax, counters, nullptr};
    forward<1>(h, dtype, kind, rows, cols, run, sink, tile, scratch);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    activation_backward(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols, u64 run,
                        u8* codes, u8* columnwise, int format, const float* scale, float* scale_inv, void* high,
                        const float* unset, int* amax, u64* counters, float* partial_sums) {
    __shared__ float scratch[WARP];
    __shared__ float parts[TILE_THREADS / WARP * TILE_COLS];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    if (is_set(unset)) return;
    const Sink sink = {codes, columnwise, format, scale, scale_inv, high, dtype, amax, counters, partial_sums};
    backward<0>(dy, dy_dtype, h, dtype, kind, rows, cols, run, sink, tile, parts, scratch);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    activation_backward_gated(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols,
                              u64 run, u8* codes, u8* columnwise, int format, const float* scale, float* scale_inv,
                              void* high, const float* unset, int* amax, u64* counters, float* partial_sums) {
    __shared__ float scratch[WARP];
    __shared__ float parts[TILE_THREADS / WARP * TILE_COLS];
    __shared__ __align__(16) u32 tiles[2 * TILE_WORDS];
    if (is_set(unset)) return;
    const Sink sink = {codes, columnwise, format, scale, scale_inv, high, dtype, amax, counters, partial_sums};
    backward<1>(dy, dy_dtype, h, dtype, kind, rows, cols, run, sink, tiles, parts, scratch);
}
