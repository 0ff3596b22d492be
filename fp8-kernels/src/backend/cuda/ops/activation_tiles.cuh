// Activations and their gradients of bf16 in whole tiles, for one function and one form of output that the compiler knows:
// what trains takes these. No counts are kept; activation.cu has everything else, with the same bits.
//
// A block takes `run` tiles, one below the other, and a thread four rows of eight columns of each. Codes of the four rows
// wait in shared memory, not in registers, so that 32 warps fit on a multiprocessor: these kernels are bound by instructions.

// How results leave: as codes of a format, or in bf16.
enum { CODES_E4M3 = E4M3, CODES_E5M2 = E5M2, HIGH = 2 };

// `staged` has a thread's rows of codes until their tile is transposed, for each half of a gated gradient.
template <int HALVES>
struct TileShared {
    __align__(16) u32 tile[TILE_WORDS];
    uint2 staged[HALVES][4][TILE_THREADS];
    float parts[TILE_THREADS / WARP * TILE_COLS];
    float scratch[WARP];
};

// The codes of eight values, as code8 makes them.
template <int FORMAT>
__device__ __forceinline__ uint2 codes_of(const float v[8], float scale, float& amax) {
    u32 words[2];
    float largest = fabsf(v[0]);
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const float* four = v + 4 * w;
        const u32 low = encode2_numbers(four[0] * scale, four[1] * scale, FORMAT);
        words[w] = low | encode2_numbers(four[2] * scale, four[3] * scale, FORMAT) << 16;
    }
#pragma unroll
    for (int k = 1; k < 8; k++) largest = max_or_nan(largest, fabsf(v[k]));
    if (!(largest * scale < INFINITY_F)) {
        words[0] = plain_nan(words[0], FORMAT), words[1] = plain_nan(words[1], FORMAT);
        largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[k]));
    }
    amax = fmaxf(amax, largest);
    return make_uint2(words[0], words[1]);
}

// What a launch does with its values; `columnwise`, `scale`, `scale_inv` and `amax` may be null, and so may `out` where the
// amax alone is asked for.
struct WholeSink {
    void* out;
    u8* columnwise;
    const float* scale;
    float* scale_inv;
    int* amax;
};

// A block's rows and its first column.
struct WholeStrip {
    u32 first, end;
    u32 col0;
};

__device__ __forceinline__ WholeStrip whole_strip_of(u32 rows, u32 cols, u32 run) {
    const u32 across = cols / TILE_COLS, down = blockIdx.x / across;
    const u32 first = down * run * TILE_ROWS, end = first + run * TILE_ROWS;
    return {first, end < rows ? end : rows, (blockIdx.x - down * across) * TILE_COLS};
}

// Eight values of a row to where they belong; `amax` takes part where codes are made.
template <int OUT>
__device__ __forceinline__ void put_row(const WholeSink& sink, uint2* staged, u64 at, const float v[8], float scale,
                                        float& amax) {
    if (OUT == HIGH) {
        store8(sink.out, BF16, at, v);
        return;
    }
    const uint2 codes = codes_of<OUT>(v, scale, amax);
    if (sink.out) *(uint2*)((u8*)sink.out + at) = codes;
    if (sink.columnwise) *staged = codes;
}

// The staged codes of one half to their place in the transpose; `side` is this thread's first chunk there.
template <int HALVES>
__device__ __forceinline__ void put_columns(TileShared<HALVES>& shared, int half, u8* side, u32 rows) {
    u32 low[4], high[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint2 codes = shared.staged[half][r][threadIdx.x];
        low[r] = codes.x, high[r] = codes.y;
    }
    put_four(shared.tile, 0, low);
    put_four(shared.tile, 4, high);
    __syncthreads();
    const int column = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const u32* from = shared.tile + column * (TILE_ROWS / 4);
    store16(side, *(const uint4*)(from + ((chunk ^ (column / 8)) << 2)));
    from += TILE_COLS / 2 * (TILE_ROWS / 4);
    store16(side + (u64)(TILE_COLS / 2) * rows, *(const uint4*)(from + ((chunk ^ (column / 8 + 4)) << 2)));
    __syncthreads();
}

// This thread's first chunk in the transpose of a tile whose first row and column these are.
__device__ __forceinline__ u8* side_of(u8* columnwise, u32 rows, u32 row0, u32 col0) {
    return columnwise + (u64)(col0 + threadIdx.x / 8) * rows + row0 + threadIdx.x % 8 * 16;
}

__device__ __forceinline__ void widen_bf16(float v[8], uint4 raw) {
    const u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v[2 * k] = __int_as_float((int)(w[k] << 16));
        v[2 * k + 1] = __int_as_float((int)(w[k] & 0xffff0000u));
    }
}

// Whether sigmoid_near may be taken of the arguments of these eight: of gelu or silu.
template <int KIND>
__device__ __forceinline__ int are_near(uint4 raw) {
    // 10, where gelu's argument is 87.313, or 87. What is added carries into the top bit of larger values.
    const u32 limit = KIND == GELU ? 0x4120u : 0x42aeu, margin = (0x7fffu - limit) * 0x10001u;
    const u32 first = max2<BF16>(abs2<BF16>(raw.x), abs2<BF16>(raw.y));
    const u32 second = max2<BF16>(abs2<BF16>(raw.z), abs2<BF16>(raw.w));
    return ((max2<BF16>(first, second) + margin) & 0x80008000u) == 0;
}

// Takes the first of eight values, and moves the others down.
__device__ __forceinline__ float take_bf16(uint4& raw) {
    const float first = __int_as_float((int)(raw.x << 16));
    raw.x = raw.x >> 16 | raw.y << 16;
    raw.y = raw.y >> 16 | raw.z << 16;
    raw.z = raw.z >> 16 | raw.w << 16;
    raw.w >>= 16;
    return first;
}

// h is [rows, cols], or [rows, 2·cols] where gated.
template <int KIND, int GATED, int OUT>
__device__ __forceinline__ void forward_whole(const u16* h, u32 rows, u32 cols, u32 run, const WholeSink& sink,
                                              TileShared<1>& shared) {
    const WholeStrip strip = whole_strip_of(rows, cols, run);
    const float scale = sink.scale ? fabsf(*sink.scale) : 1.0f;
    write_scale_inv(sink.scale, sink.scale_inv);
    const u32 pitch = GATED ? 2 * cols : cols, col = strip.col0 + (u32)tile_col();
    const u32 row = strip.first + (u32)tile_row();
    const u16* from = h + (u64)row * pitch + col;
    u64 at = (u64)row * cols + col;
    float amax = 0.0f;
    uint4 a = load16(from), b = a;
    if (GATED) b = load16(from + cols);
#pragma unroll 1
    for (u32 row0 = strip.first; row0 < strip.end; row0 += TILE_ROWS) {
#pragma unroll 1
        for (int r = 0; r < 4; r++) {
            float x[8], gate[8];
            const int near = are_near<KIND>(a);
            widen_bf16(x, a);
            if (GATED) widen_bf16(gate, b);
            // The next row of this tile, or the first of the next.
            const u32 step = r < 3 ? 1 : TILE_ROWS - 3;
            from += (u64)step * pitch;
            if (r < 3 || row0 + TILE_ROWS < strip.end) {
                a = load16(from);
                if (GATED) b = load16(from + cols);
            }
            if (near) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float f = value_of<KIND>(x[k], sigmoid_near(argument<KIND>(x[k])));
                    x[k] = GATED ? f * gate[k] : f;
                }
            } else {
                // One at a time, since this is rare.
#pragma unroll 1
                for (int turn = 0; turn < 8; turn++) {
                    const float f = value_of<KIND>(x[0], fp8_sigmoid(argument<KIND>(x[0])));
                    push_last(x, GATED ? f * gate[0] : f);
                    if (GATED) push_last(gate, 0.0f);
                }
            }
            put_row<OUT>(sink, &shared.staged[0][r][threadIdx.x], at, x, scale, amax);
            at += (u64)step * cols;
        }
        if (OUT != HIGH && sink.columnwise) {
            put_columns(shared, 0, side_of(sink.columnwise, rows, row0, strip.col0), rows);
        }
    }
    if (OUT != HIGH && sink.amax) {
        amax = block_max(amax, shared.scratch);
        if (threadIdx.x == 0) record_amax(sink.amax, amax);
    }
}

// The gradient of x, in its place, from c, which is x clamped, and its sigmoid; and that of the gate, if there is one.
template <int KIND, int GATED>
__device__ __forceinline__ void differentiate(float& x, float& gate, float d, float c, float s) {
    const float f = value_of<KIND>(x, s);
    x = slope_of<KIND>(x, c, s) * d;
    if (GATED) x = x * gate, gate = f * d;
}

// dy is [rows, cols], h and the gradient as well, or [rows, 2·cols] where gated. `partial_sums` may be null.
template <int KIND, int GATED, int OUT>
__device__ __forceinline__ void backward_whole(const u16* dy, const u16* h, u32 rows, u32 cols, u32 run,
                                               const WholeSink& sink, float* partial_sums,
                                               TileShared<GATED ? 2 : 1>& shared) {
    constexpr int HALVES = GATED ? 2 : 1;
    const WholeStrip strip = whole_strip_of(rows, cols, run);
    const float scale = sink.scale ? fabsf(*sink.scale) : 1.0f;
    write_scale_inv(sink.scale, sink.scale_inv);
    const u32 pitch = HALVES * cols, col = strip.col0 + (u32)tile_col();
    const u32 row = strip.first + (u32)tile_row();
    u64 at = (u64)row * pitch + col;
    const u16 *from = h + at, *grad = dy + (u64)row * cols + col;
    float amax = 0.0f;
    // Rows are loaded ahead unless gated: the sums of two gradients leave no registers for it.
    uint4 a, g;
    if (!GATED) a = load16(from), g = load16(grad);
#pragma unroll 1
    for (u32 row0 = strip.first; row0 < strip.end; row0 += TILE_ROWS) {
        // Sums start at -0, which changes no bit of the first row.
        float sums[HALVES][8];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
            for (int k = 0; k < 8; k++) sums[half][k] = -0.0f;
        }
#pragma unroll 1
        for (int r = 0; r < 4; r++) {
            float x[8], gate[8];
            if (GATED) {
                a = load16(from), g = load16(grad);
                widen_bf16(gate, load16(from + cols));
            }
            const int near = are_near<KIND>(a);
            widen_bf16(x, a);
            uint4 d = g;
            // The next row of this tile, or the first of the next.
            const u32 step = r < 3 ? 1 : TILE_ROWS - 3;
            from += (u64)step * pitch;
            grad += (u64)step * cols;
            if (!GATED && (r < 3 || row0 + TILE_ROWS < strip.end)) a = load16(from), g = load16(grad);
            if (near) {
                float all_d[8];
                widen_bf16(all_d, d);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float c = x[k];
                    differentiate<KIND, GATED>(x[k], gate[k], all_d[k], c, sigmoid_near(argument<KIND>(c)));
                }
            } else {
#pragma unroll 1
                for (int turn = 0; turn < 8; turn++) {
                    const float c = clamp_to(x[0], TAIL);
                    float first = x[0], of_gate = gate[0];
                    differentiate<KIND, GATED>(first, of_gate, take_bf16(d), c, fp8_sigmoid(argument<KIND>(c)));
                    push_last(x, first);
                    if (GATED) push_last(gate, of_gate);
                }
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sums[0][k] += x[k];
                if (GATED) sums[HALVES - 1][k] += gate[k];
            }
            put_row<OUT>(sink, &shared.staged[0][r][threadIdx.x], at, x, scale, amax);
            if (GATED) put_row<OUT>(sink, &shared.staged[HALVES - 1][r][threadIdx.x], at + cols, gate, scale, amax);
            at += (u64)step * pitch;
        }
        if (OUT != HIGH && sink.columnwise) {
            u8* side = side_of(sink.columnwise, rows, row0, strip.col0);
            put_columns(shared, 0, side, rows);
            if (GATED) put_columns(shared, 1, side + (u64)cols * rows, rows);
        }
        if (partial_sums) {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* to = partial_sums + (u64)(row0 / TILE_ROWS) * pitch + half * cols + strip.col0;
                tile_sums(shared.parts, sums[half], to, strip.col0, cols);
            }
        }
    }
    if (OUT != HIGH && sink.amax) {
        amax = block_max(amax, shared.scratch);
        if (threadIdx.x == 0) record_amax(sink.amax, amax);
    }
}

// ---- entries. `unset`, if not null, is a scale cell: where it is set, nothing is done ----

#define WHOLE_CODES_PARAMS \
    u8 *codes, u8 *columnwise, const float *scale, float *scale_inv, const float *unset, int *amax

#define WHOLE_FORWARD(NAME, KIND, GATED, FORMAT)                                                       \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)                                      \
        NAME(const u16* h, u32 rows, u32 cols, u32 run, WHOLE_CODES_PARAMS) {                          \
        __shared__ TileShared<1> shared;                                                               \
        if (is_set(unset)) return;                                                                     \
        const WholeSink sink = {codes, columnwise, scale, scale_inv, amax};                            \
        forward_whole<KIND, GATED, FORMAT>(h, rows, cols, run, sink, shared);                          \
    }

#define WHOLE_FORWARD_HIGH(NAME, KIND, GATED)                                                          \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)                                      \
        NAME(const u16* h, u32 rows, u32 cols, u32 run, u16* high) {                                   \
        __shared__ TileShared<1> shared;                                                               \
        const WholeSink sink = {high, nullptr, nullptr, nullptr, nullptr};                             \
        forward_whole<KIND, GATED, HIGH>(h, rows, cols, run, sink, shared);                            \
    }

#define WHOLE_BACKWARD(NAME, KIND, GATED, FORMAT)                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)                                      \
        NAME(const u16* dy, const u16* h, u32 rows, u32 cols, u32 run, WHOLE_CODES_PARAMS,             \
             float* partial_sums) {                                                                    \
        __shared__ TileShared<1 + GATED> shared;                                                       \
        if (is_set(unset)) return;                                                                     \
        const WholeSink sink = {codes, columnwise, scale, scale_inv, amax};                            \
        backward_whole<KIND, GATED, FORMAT>(dy, h, rows, cols, run, sink, partial_sums, shared);       \
    }

#define WHOLE_BACKWARD_HIGH(NAME, KIND, GATED)                                                         \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)                                      \
        NAME(const u16* dy, const u16* h, u32 rows, u32 cols, u32 run, u16* high, float* partial_sums) { \
        __shared__ TileShared<1 + GATED> shared;                                                       \
        const WholeSink sink = {high, nullptr, nullptr, nullptr, nullptr};                             \
        backward_whole<KIND, GATED, HIGH>(dy, h, rows, cols, run, sink, partial_sums, shared);         \
    }
