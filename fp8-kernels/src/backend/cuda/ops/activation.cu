#include "blocks.cuh"
// Activation functions and their gradients, plain and gated, by tiles: codes with their transpose, or values in high
// precision, or the amax alone; column sums; never rounded in between.
//
// The expressions are those of src/ops/activation.rs, operation by operation. The kind is one number for all threads;
// the kinds share one sigmoid. A row's loads are under way while the row before it is computed.

// Functions as the host numbers them.
enum { GELU = 0, SILU = 1, QGELU = 2, RELU = 3, SRELU = 4, SIGMOID = 5 };

#define GELU_LINEAR 1.595769f
#define GELU_CUBIC 0.071354814f
#define GELU_SQUARE 0.21406444f
#define QGELU_SLOPE 1.702f
// Every sigmoid that occurs is 0 or 1 here, so those at clamped and unclamped arguments are equal.
#define TAIL 128.0f

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

// ---- the functions ----

__device__ __forceinline__ int has_sigmoid(int kind) { return kind != RELU && kind != SRELU; }

__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// What the sigmoid is taken of.
__device__ __forceinline__ void arguments(int kind, const float x[8], float z[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) z[k] = x[k];
    if (kind == GELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) z[k] = x[k] * fmaf(x[k] * x[k], GELU_CUBIC, GELU_LINEAR);
    } else if (kind == QGELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) z[k] = QGELU_SLOPE * x[k];
    }
}

// f(x) from s, its sigmoid.
__device__ __forceinline__ void function_values(int kind, const float x[8], const float s[8], float f[8]) {
    if (kind == SIGMOID) {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = s[k];
    } else if (has_sigmoid(kind)) {
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] = x[k] * s[k];
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float r = relu(x[k]);
            f[k] = kind == RELU ? r : r * r;
        }
    }
}

__device__ __forceinline__ void sigmoids(int kind, const float z[8], float s[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) s[k] = 0.0f;
    if (has_sigmoid(kind)) {
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = fp8_sigmoid(z[k]);
    }
}

// f'(x), and s, its sigmoid at the clamped x.
__device__ __forceinline__ void function_slopes(int kind, const float x[8], float s[8], float slope[8]) {
    float c[8], z[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        c[k] = x[k] < -TAIL ? -TAIL : x[k];
        c[k] = c[k] > TAIL ? TAIL : c[k];
    }
    arguments(kind, c, z);
    sigmoids(kind, z, s);
    if (kind == GELU) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            slope[k] = s[k] * fmaf(c[k] * (1.0f - s[k]), fmaf(c[k] * c[k], GELU_SQUARE, GELU_LINEAR), 1.0f);
        }
    } else if (kind == SILU || kind == QGELU) {
        // z is c for silu.
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = s[k] * fmaf(z[k], 1.0f - s[k], 1.0f);
    } else if (kind == SIGMOID) {
#pragma unroll
        for (int k = 0; k < 8; k++) slope[k] = s[k] * (1.0f - s[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float relu_slope = x[k] <= 0.0f ? 0.0f : 1.0f;
            slope[k] = kind == RELU ? relu_slope : 2.0f * relu(x[k]);
        }
    }
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

__device__ __forceinline__ int is_set(const float* unset) { return unset && __float_as_int(*unset) != REST_BITS; }

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
            float x[8], z[8], s[8], v[8];
            widen8(x, first, dtype);
            if (GATED) widen8(v, second, dtype);
            const int next = r < 3 && row + 1 < rows ? n : 0;
            first = raw8_row(h, dtype, (row + 1) * pitch + col, next, whole);
            if (GATED) second = raw8_row(h, dtype, (row + 1) * pitch + cols + col, next, whole);
            arguments(kind, x, z);
            sigmoids(kind, z, s);
            function_values(kind, x, s, z);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = GATED ? z[k] * v[k] : z[k];
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

// ---- values for blocks with scales of their own ----

// Values of a row of f(h), or of f(h[..cols]) * h[cols..] where gated.
template <int GATED>
struct Activated {
    const void* h;
    int dtype;
    int kind;
    u64 cols;

    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        const u64 at = row * (GATED ? 2 * cols : cols) + col;
        const int whole = cols % 8 == 0;
        float x[8], z[8], s[8];
        widen8(x, raw8_row(h, dtype, at, n, whole), dtype);
        if (GATED) widen8(v, raw8_row(h, dtype, at + cols, n, whole), dtype);
        arguments(kind, x, z);
        sigmoids(kind, z, s);
        function_values(kind, x, s, z);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = k < n ? (GATED ? z[k] * v[k] : z[k]) : 0.0f;
    }

    __device__ __forceinline__ void compute(float*, u64, u64, int) const {}
};

// Values of a row of the gradient of h; dy has `cols` columns, h and the gradient as many, or twice as many where gated.
template <int GATED>
struct ActivatedBackward {
    const void* dy;
    int dy_dtype;
    const void* h;
    int dtype;
    int kind;
    u64 cols;

    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        const u64 start = row * (GATED ? 2 * cols : cols);
        float x[8], d[8], gate[8], s[8], slope[8];
        // Which of the eight are gradients of the gate.
        u32 is_gate = 0;
        if (!GATED || cols % 8 == 0) {
            const u64 of = GATED && col >= cols ? col - cols : col;
            is_gate = of == col ? 0u : 0xffu;
            widen8(x, raw8_row(h, dtype, start + of, n, cols % 8 == 0), dtype);
            widen8(d, raw8_row(dy, dy_dtype, row * cols + of, n, cols % 8 == 0), dy_dtype);
            if (GATED) widen8(gate, raw8_row(h, dtype, start + cols + of, n, 1), dtype);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = d[k] = gate[k] = 0.0f;
            // From the last to the first, each moving the others up.
#pragma unroll 1
            for (int k = n - 1; k >= 0; k--) {
#pragma unroll
                for (int j = 7; j > 0; j--) x[j] = x[j - 1], d[j] = d[j - 1], gate[j] = gate[j - 1];
                const u64 of = col + k >= cols ? col + k - cols : col + k;
                is_gate = is_gate << 1 | (of != col + k);
                x[0] = load1(h, dtype, start + of);
                d[0] = load1(dy, dy_dtype, row * cols + of);
                gate[0] = load1(h, dtype, start + cols + of);
            }
        }
        function_slopes(kind, x, s, slope);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            slope[k] = slope[k] * d[k];
            if (GATED) slope[k] = slope[k] * gate[k];
        }
        if (GATED) function_values(kind, x, s, gate);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (GATED && is_gate >> k & 1u) slope[k] = gate[k] * d[k];
            v[k] = k < n ? slope[k] : 0.0f;
        }
    }

    __device__ __forceinline__ void compute(float*, u64, u64, int) const {}
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_blocks(const void* h, int dtype, int kind, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Activated<0> values = {h, dtype, kind, cols};
    block_tile<1, 0>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_blocks_gated(const void* h, int dtype, int kind, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Activated<1> values = {h, dtype, kind, cols};
    block_tile<1, 0>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_backward_blocks(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols,
                               BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    ActivatedBackward<0> values = {dy, dy_dtype, h, dtype, kind, cols};
    block_tile<1, 1>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_backward_blocks_gated(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols,
                                     BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    ActivatedBackward<1> values = {dy, dy_dtype, h, dtype, kind, cols};
    block_tile<1, 1>(shared, sink, rows, 2 * cols, values);
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
