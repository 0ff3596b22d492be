// Put before every kernel file: element types, conversions, the project's exp and tanh, reductions.
//
// Self-contained, since NVRTC brings no headers. Compiled with -fmad=false: each `a * b + c` here rounds twice, each
// fmaf once, as the same expressions do in Rust. Expressions that decide codes are spelled as in src/math.rs and
// src/backend/cpu, operation by operation.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Element types as the host numbers them.
enum { F32 = 0, BF16 = 1, F16 = 2 };
// FP8 formats as the host numbers them.
enum { E4M3 = 0, E5M2 = 1 };

#define FULL_WARP 0xffffffffu
#define WARP 32
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
// A staging cell at rest and a scale cell before its slot's first amax: -1, below the bits of every amax.
#define REST_BITS ((int)0xbf800000)

// ---- 16-bit floats, kept as their bits ----

__device__ __forceinline__ float bf16_to_f32(u32 bits) { return __int_as_float((int)(bits << 16)); }

__device__ __forceinline__ u32 f32_to_bf16(float v) {
    u32 bits = (u32)__float_as_int(v);
    u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return v != v ? ((bits >> 16) | 0x40u) : rounded;
}

__device__ __forceinline__ float f16_to_f32(u32 bits) {
    float v;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "r"(bits));
    return v;
}

__device__ __forceinline__ u32 f32_to_f16(float v) {
    u32 bits;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(v));
    u32 source = (u32)__float_as_int(v);
    u32 quiet = ((source >> 16) & 0x8000u) | 0x7e00u | ((source >> 13) & 0x3ffu);
    return v != v ? quiet : bits;
}

// ---- reading and writing elements of any float type as f32 ----

__device__ __forceinline__ uint4 load16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ void store16(void* p, uint4 v) { *(uint4*)p = v; }

__device__ __forceinline__ float load1(const void* p, int dtype, u64 i) {
    if (dtype == F32) return ((const float*)p)[i];
    u32 bits = ((const u16*)p)[i];
    return dtype == BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

__device__ __forceinline__ void store1(void* p, int dtype, u64 i, float v) {
    if (dtype == F32) ((float*)p)[i] = v;
    else ((u16*)p)[i] = (u16)(dtype == BF16 ? f32_to_bf16(v) : f32_to_f16(v));
}

// Eight elements from i on; i is a multiple of eight and so the address of 16 bytes.
__device__ __forceinline__ void load8(float v[8], const void* p, int dtype, u64 i) {
    if (dtype == F32) {
        uint4 a = load16((const float*)p + i), b = load16((const float*)p + i + 4);
        u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __int_as_float((int)w[k]);
        return;
    }
    uint4 a = load16((const u16*)p + i);
    u32 w[4] = {a.x, a.y, a.z, a.w};
    if (dtype == BF16) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = __int_as_float((int)(w[k] << 16));
            v[2 * k + 1] = __int_as_float((int)(w[k] & 0xffff0000u));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = f16_to_f32(w[k] & 0xffffu);
            v[2 * k + 1] = f16_to_f32(w[k] >> 16);
        }
    }
}

__device__ __forceinline__ void store8(void* p, int dtype, u64 i, const float v[8]) {
    u32 w[8];
    if (dtype == F32) {
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = (u32)__float_as_int(v[k]);
        store16((float*)p + i, make_uint4(w[0], w[1], w[2], w[3]));
        store16((float*)p + i + 4, make_uint4(w[4], w[5], w[6], w[7]));
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        w[k] = dtype == BF16 ? f32_to_bf16(v[2 * k]) | (f32_to_bf16(v[2 * k + 1]) << 16)
                             : f32_to_f16(v[2 * k]) | (f32_to_f16(v[2 * k + 1]) << 16);
    }
    store16((u16*)p + i, make_uint4(w[0], w[1], w[2], w[3]));
}

// ---- FP8 ----

// Codes of two values that are not NaN, `low` in the low byte: to nearest, ties to even, saturating.
__device__ __forceinline__ u32 encode2_numbers(float low, float high, int format) {
    u16 pair;
    if (format == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// The same of any two values: NaN is 0x7F whatever its sign.
__device__ __forceinline__ u32 encode2(float low, float high, int format) {
    u32 codes = encode2_numbers(low, high, format);
    if (low != low) codes = (codes & 0xff00u) | 0x7fu;
    if (high != high) codes = (codes & 0x00ffu) | 0x7f00u;
    return codes;
}

__device__ __forceinline__ u32 encode1(float v, int format) { return encode2(v, 0.0f, format) & 0xffu; }

// The values of two codes, exactly.
__device__ __forceinline__ void decode2(u32 codes, int format, float* low, float* high) {
    u32 halves;
    u16 pair = (u16)codes;
    if (format == E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    *low = f16_to_f32(halves & 0xffffu);
    *high = f16_to_f32(halves >> 16);
}

// The largest magnitude that rounds to the format's largest value; every larger one saturates. Encoding::saturation_limit.
__device__ __forceinline__ float saturation_limit(int format) {
    return format == E4M3 ? 464.0f : __int_as_float(0x476fffff);  // the float below 61440
}

// ---- exp, tanh, sigmoid: src/math.rs, operation by operation ----

__device__ __forceinline__ float power_of_two(int k) { return __int_as_float((k + 127) << 23); }

__device__ __forceinline__ float fp8_exp(float x) {
    const float ROUND = 12582912.0f;
    float clamped = x < -104.0f ? -104.0f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;
    float shifted = clamped * 1.44269504088896340736f + ROUND;
    float k = shifted - ROUND;
    float r = fmaf(k, -0.6933594f, clamped);
    r = fmaf(k, 0.00021219444f, r);
    float p = 0.00019918448f;
    p = fmaf(p, r, 0.0013946119f);
    p = fmaf(p, r, 0.008333264f);
    p = fmaf(p, r, 0.04166627f);
    p = fmaf(p, r, 0.16666667f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p * r, r, r) + 1.0f;
    int n = __float_as_int(shifted) - __float_as_int(ROUND);
    int half = n >> 1;
    return p * power_of_two(half) * power_of_two(n - half);
}

__device__ __forceinline__ float fp8_sigmoid(float x) { return 1.0f / (1.0f + fp8_exp(-x)); }

// ---- reductions; a block has a whole number of warps ----

// The larger; NaN loses.
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

// Every thread gets the block's result. `scratch` holds 32 floats and may be used again at once.
__device__ __forceinline__ float block_max(float v, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    v = warp_max(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < warps; w++) v = fmaxf(v, scratch[w]);
    __syncthreads();
    return v;
}

__device__ __forceinline__ float block_sum(float v, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < warps; w++) v += scratch[w];
    __syncthreads();
    return v;
}

// Max-combines an amax into its cell. A signed maximum: cells rest at -1, whose bits are the smallest of all.
__device__ __forceinline__ void record_amax(int* cell, float amax) { atomicMax(cell, __float_as_int(amax)); }

// ---- from an amax to a scale: src/scale_rule.rs ----

enum { RULE_EXACT = 0, RULE_POWER_OF_TWO = 1, RULE_CURRENT = 2, RULE_CURRENT_POWER_OF_TWO = 3 };

// `scaled_max` is fp8_max · 2^-margin, rounded by the host.
struct Rule {
    int kind;
    float fp8_max;
    float scaled_max;
    int margin;
    float epsilon;
};

__device__ __forceinline__ float finite_scale(float scale) {
    const float smallest = __int_as_float(0x00800000), largest = __int_as_float(0x7f7fffff);
    scale = scale < smallest ? smallest : scale;
    return scale > largest ? largest : scale;
}

__device__ __forceinline__ int usable_amax(float amax) { return amax > 0.0f && amax < INFINITY_F; }

// floor(log2(v)) for finite v > 0, subnormals included.
__device__ __forceinline__ int floor_log2(float v) {
    int bits = __float_as_int(v);
    if (bits >= 0x00800000) return (bits >> 23) - 127;
    return -118 - __clz(bits);
}

__device__ __forceinline__ float scale_of(const Rule& rule, float amax, float old) {
    if (rule.kind >= RULE_CURRENT) {
        amax = amax < rule.epsilon ? rule.epsilon : amax;
        if (!usable_amax(amax)) return 1.0f;
        float scale = finite_scale(rule.fp8_max / amax);
        return rule.kind == RULE_CURRENT ? scale : __int_as_float(__float_as_int(scale) & 0x7f800000);
    }
    if (!usable_amax(amax)) return old;
    if (rule.kind == RULE_EXACT) return finite_scale(rule.scaled_max / amax);
    float quotient = rule.fp8_max / amax;
    int e = quotient < INFINITY_F ? floor_log2(quotient) : 128;
    // Saturating, as the host's: margins reach beyond what an int holds.
    i64 wide = (i64)e - (i64)rule.margin;
    int exponent = wide < -126 ? -126 : wide > 127 ? 127 : (int)wide;
    return power_of_two(exponent);
}

// ---- from values to codes ----

// How one thread quantizes, and what it saw: put into the slot's cells by finish_codes.
struct Codes {
    float scale;
    int format;
    u64* counters;  // null: nothing is counted
    float amax;
    u32 saturated;
    u32 underflowed;
};

// `scale` is a scale cell: its magnitude counts. Null: values are only looked at for their amax.
__device__ __forceinline__ Codes begin_codes(const float* scale, int format, u64* counters) {
    return {scale ? fabsf(*scale) : 1.0f, format, counters, 0.0f, 0, 0};
}

__device__ __forceinline__ void count_code(Codes& out, float v, u32 code) {
    out.saturated += fabsf(v) < INFINITY_F && fabsf(v * out.scale) > saturation_limit(out.format);
    out.underflowed += v != 0.0f && (code & 0x7fu) == 0;
}

// NaN is rare, so it is counted at once: a register less in every kernel.
__device__ __forceinline__ void count_nan(const Codes& out, u32 n) {
    if (n > 0 && out.counters) atomicAdd(out.counters + 3, (u64)n);
}

// The code of one value; amax and counts are kept.
__device__ __forceinline__ u32 code1(Codes& out, float v) {
    u32 code = encode1(v * out.scale, out.format);
    out.amax = fmaxf(out.amax, fabsf(v));
    if (out.counters) count_code(out, v, code);
    count_nan(out, v != v);
    return code;
}

// The larger; NaN wins.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// The codes of eight values, in memory order. A zero changes neither amax nor counts.
//
// Values of which none is NaN and none is lost to the format, as they nearly always are, take few instructions: the largest
// and the smallest of the eight tell. `least` rounds to zero, as does every smaller magnitude.
__device__ __forceinline__ uint2 code8(Codes& out, const float v[8]) {
    const float least = out.format == E4M3 ? 0.0009765625f : 7.62939453125e-06f;
    float scaled[8], largest = fabsf(v[0]), smallest = INFINITY_F;
#pragma unroll
    for (int k = 0; k < 8; k++) scaled[k] = v[k] * out.scale;
#pragma unroll
    for (int k = 1; k < 8; k++) largest = max_or_nan(largest, fabsf(v[k]));
#pragma unroll
    for (int k = 0; k < 8; k++) smallest = fminf(smallest, fabsf(scaled[k]));
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const float* four = scaled + 4 * w;
        words[w] = encode2_numbers(four[0], four[1], out.format) | encode2_numbers(four[2], four[3], out.format) << 16;
    }
    const int is_usual = largest * out.scale <= saturation_limit(out.format) && smallest > least;
    if (!is_usual && (out.counters || largest != largest)) {
        u32 nan = 0;
        largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int at = 8 * (k % 4);
            if (v[k] != v[k]) words[k / 4] = (words[k / 4] & ~(0xffu << at)) | (0x7fu << at), nan++;
            largest = fmaxf(largest, fabsf(v[k]));
            count_code(out, v[k], words[k / 4] >> at & 0xffu);
        }
        count_nan(out, nan);
    }
    out.amax = fmaxf(out.amax, largest);
    return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ u32 warp_count(u32 n) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) n += __shfl_xor_sync(FULL_WARP, n, step);
    return n;
}

// The block's amax and counts into their cells, where these are not null; all its threads come here together, once per
// tensor. Values quantized are for one of them to add: `elements`, 0 for the others.
__device__ __forceinline__ void finish_codes(const Codes& out, int* amax, u64* counters, u64 elements, float* scratch) {
    if (amax) {
        float largest = block_max(out.amax, scratch);
        if (threadIdx.x == 0) record_amax(amax, largest);
    }
    if (counters) {
        u32 saturated = warp_count(out.saturated), underflowed = warp_count(out.underflowed);
        if (threadIdx.x % WARP == 0) {
            if (saturated) atomicAdd(counters, (u64)saturated);
            if (underflowed) atomicAdd(counters + 1, (u64)underflowed);
        }
        if (elements && threadIdx.x == 0) atomicAdd(counters + 2, elements);
    }
}

// ---- tiles of codes, as stored and transposed: 128 rows of 64 columns for 256 threads ----

#define TILE_ROWS 128
#define TILE_COLS 64
#define TILE_THREADS 256
// The transposed codes of one tile in shared memory, four rows a word.
#define TILE_WORDS (TILE_COLS * TILE_ROWS / 4)

__device__ __forceinline__ u64 tiles_across(u64 cols) { return (cols + TILE_COLS - 1) / TILE_COLS; }

// A thread's part: four rows of eight columns from these on.
__device__ __forceinline__ u64 tile_row() { return (threadIdx.x / 8) * 4; }
__device__ __forceinline__ u64 tile_col() { return (threadIdx.x % 8) * 8; }

// How many of a thread's eight columns from `col` on there are.
__device__ __forceinline__ int tile_width(u64 col, u64 cols) {
    return col < cols ? (cols - col < 8 ? (int)(cols - col) : 8) : 0;
}

// The codes of a row's n values; `whole` where rows are a multiple of eight, so that n is 8.
__device__ __forceinline__ void store_codes8(u8* to, uint2 codes, int n, int whole) {
    if (whole) {
        *(uint2*)to = codes;
        return;
    }
    u64 left = codes.x | (u64)codes.y << 32;
#pragma unroll 1
    for (int k = 0; k < n; k++, left >>= 8) to[k] = (u8)left;
}

// The four rows' codes of a thread's column j into the tile. Chunks of 16 rows stand at (chunk xor column / 8): neither
// side meets a bank twice.
__device__ __forceinline__ void put_column(u32* tile, int j, u32 codes) {
    const int lane_row = (threadIdx.x / 8) % 4, lane_col = threadIdx.x % 8, warp = threadIdx.x / WARP;
    tile[(tile_col() + j) * (TILE_ROWS / 4) + ((warp ^ lane_col) << 2) + lane_row] = codes;
}

// The same for columns j … j + 3, from a word of each row.
__device__ __forceinline__ void put_four(u32* tile, int j, const u32 rows[4]) {
    u32 first = __byte_perm(rows[0], rows[1], 0x5140), second = __byte_perm(rows[2], rows[3], 0x5140);
    u32 third = __byte_perm(rows[0], rows[1], 0x7362), fourth = __byte_perm(rows[2], rows[3], 0x7362);
    put_column(tile, j + 0, __byte_perm(first, second, 0x5410));
    put_column(tile, j + 1, __byte_perm(first, second, 0x7632));
    put_column(tile, j + 2, __byte_perm(third, fourth, 0x5410));
    put_column(tile, j + 3, __byte_perm(third, fourth, 0x7632));
}

// A complete tile to its place in [cols, rows]. Barriers before and after are the caller's.
__device__ __forceinline__ void store_columns(const u32* tile, u8* columnwise, u64 rows, u64 cols, u64 row0, u64 col0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_COLS * 8; i += TILE_THREADS) {
        const int column = i / 8, chunk = i % 8;
        uint4 codes = *(const uint4*)(tile + column * (TILE_ROWS / 4) + ((chunk ^ (column / 8)) << 2));
        const u64 first = row0 + chunk * 16;
        if (col0 + column < cols && first < rows) {
            u8* out = columnwise + (col0 + column) * rows + first;
            if (rows % 16 == 0) {
                store16(out, codes);
            } else {
                u64 low = codes.x | (u64)codes.y << 32, high = codes.z | (u64)codes.w << 32;
#pragma unroll 1
                for (int k = 0; k < 16 && first + k < rows; k++) {
                    out[k] = (u8)low;
                    low = (low >> 8) | (high << 56);
                    high >>= 8;
                }
            }
        }
    }
}

// Quantizes the tile at (row0, col0) of a [rows, cols] matrix. `values` has two members, of which the first is called for
// all of a thread's rows before the second: load(v, row, col, n) and compute(v, row, col, n), for the n values of a row
// from col on. n is 8 wherever cols is a multiple of eight. `rowwise` and `columnwise` may be null. The next tile may
// follow at once. UNROLL is 4 where a row takes few instructions, else 1: one body for the four rows.
template <int UNROLL = 1, typename Values>
__device__ __forceinline__ void code_tile(u32* tile, Codes& out, u8* rowwise, u8* columnwise, u64 rows, u64 cols,
                                          u64 row0, u64 col0, Values& values) {
    const u64 row = row0 + tile_row(), col = col0 + tile_col();
    const int n = tile_width(col, cols);
    float v[4][8];
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        if (n > 0 && row + r < rows) values.load(v[r], row + r, col, n);
    }
    // Registers move up, values and words of codes alike.
    u32 low[4], high[4];
#pragma unroll UNROLL
    for (int r = 0; r < 4; r++) {
        const int live = n > 0 && row + r < rows;
        if (live) values.compute(v[0], row + r, col, n);
        uint2 codes = code8(out, v[0]);
        if (rowwise && live) store_codes8(rowwise + (row + r) * cols + col, codes, n, cols % 8 == 0);
#pragma unroll
        for (int k = 0; k < 3; k++) {
            low[k] = low[k + 1], high[k] = high[k + 1];
#pragma unroll
            for (int j = 0; j < 8; j++) v[k][j] = v[k + 1][j];
        }
        low[3] = codes.x, high[3] = codes.y;
    }
    if (!columnwise) return;
    put_four(tile, 0, low);
    put_four(tile, 4, high);
    __syncthreads();
    store_columns(tile, columnwise, rows, cols, row0, col0);
    __syncthreads();
}

// ---- streams of elements: loads first, conversion after, so that several loads are under way ----

// Eight elements as they lie in memory: `high` is used by f32 alone.
struct Raw8 {
    uint4 low, high;
};

// i is a multiple of eight. For what the launch does not write, and reads once.
__device__ __forceinline__ Raw8 raw8(const void* p, int dtype, u64 i) {
    Raw8 raw;
    raw.low = load16((const char*)p + i * (dtype == F32 ? 4 : 2));
    raw.high = dtype == F32 ? load16((const float*)p + i + 4) : raw.low;
    return raw;
}

// For what the launch also writes, or reads again.
__device__ __forceinline__ Raw8 raw8_cached(const void* p, int dtype, u64 i) {
    Raw8 raw;
    raw.low = *(const uint4*)((const char*)p + i * (dtype == F32 ? 4 : 2));
    raw.high = dtype == F32 ? *(const uint4*)((const float*)p + i + 4) : raw.low;
    return raw;
}

__device__ __forceinline__ void widen8(float v[8], const Raw8& raw, int dtype) {
    u32 w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
    if (dtype == F32) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __int_as_float((int)w[k]);
    } else if (dtype == BF16) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = __int_as_float((int)(w[k] << 16));
            v[2 * k + 1] = __int_as_float((int)(w[k] & 0xffff0000u));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = f16_to_f32(w[k] & 0xffffu);
            v[2 * k + 1] = f16_to_f32(w[k] >> 16);
        }
    }
}

// This thread's place in the grid, and how many threads it has.
__device__ __forceinline__ u64 grid_thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 grid_threads() { return (u64)gridDim.x * blockDim.x; }

// a / b, by the short division where both are short.
__device__ __forceinline__ u64 quotient(u64 a, u64 b) {
    return ((a | b) >> 32) == 0 ? (u64)((u32)a / (u32)b) : a / b;
}

// ---- an id out of range: told to the host at its next synchronising call ----

// `fault` holds state (0: none), value, position and limit. The first to report wins.
__device__ __forceinline__ void report_fault(i64* fault, i64 code, i64 value, u64 position, u64 limit) {
    u64 old;
    asm volatile("{ .reg .u64 p; cvta.to.global.u64 p, %1; atom.global.cas.b64 %0, [p], 0, %2; }"
                 : "=l"(old) : "l"(fault), "l"(code) : "memory");
    if (old != 0ull) return;
    fault[1] = value;
    fault[2] = (i64)position;
    fault[3] = (i64)limit;
}

// ---- compensated sums: about twice the digits of an f32 ----

// hi + lo. Once hi is infinite or NaN, hi alone is the sum, as of plain additions.
struct Sum {
    float hi;
    float lo;
};

// The exact sum of two floats, as long as nothing overflows (Knuth).
__device__ __forceinline__ Sum two_sum(float a, float b) {
    float s = a + b;
    float t = s - a;
    return {s, (a - (s - t)) + (b - t)};
}

__device__ __forceinline__ Sum sum_add(Sum sum, float v) {
    Sum exact = two_sum(sum.hi, v);
    return {exact.hi, sum.lo + exact.lo};
}

// The same bits for both orders of the arguments.
__device__ __forceinline__ Sum sum_merge(Sum a, Sum b) {
    Sum exact = two_sum(a.hi, b.hi);
    return {exact.hi, (a.lo + b.lo) + exact.lo};
}

__device__ __forceinline__ float sum_value(Sum sum) {
    return fabsf(sum.hi) < INFINITY_F ? sum.hi + sum.lo : sum.hi;
}

__device__ __forceinline__ Sum warp_merge(Sum sum) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) {
        Sum other = {__shfl_xor_sync(FULL_WARP, sum.hi, step), __shfl_xor_sync(FULL_WARP, sum.lo, step)};
        sum = sum_merge(sum, other);
    }
    return sum;
}

// Every thread gets the block's sum. `scratch` holds 64 floats and may be used again at once.
__device__ __forceinline__ Sum block_merge(Sum sum, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    sum = warp_merge(sum);
    if (threadIdx.x % WARP == 0) {
        scratch[2 * (threadIdx.x / WARP)] = sum.hi;
        scratch[2 * (threadIdx.x / WARP) + 1] = sum.lo;
    }
    __syncthreads();
    sum = {scratch[0], scratch[1]};
    for (int w = 1; w < warps; w++) sum = sum_merge(sum, {scratch[2 * w], scratch[2 * w + 1]});
    __syncthreads();
    return sum;
}

// Eight values in pairs.
__device__ __forceinline__ float tree8(const float v[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// ---- tiles by rows: loads early, few registers ----

// n of eight elements from i on, zeros for the rest; `whole` where rows are a multiple of eight: n is 8, or 0 for none.
__device__ __forceinline__ Raw8 raw8_row(const void* p, int dtype, u64 i, int n, int whole) {
    Raw8 raw = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (n == 0) return raw;
    if (whole) return raw8(p, dtype, i);
    u32 w[8];
#pragma unroll
    for (int k = 0; k < 8; k++) w[k] = 0;
    if (dtype == F32) {
        // From the last to the first, each moving the others up.
#pragma unroll 1
        for (int k = n - 1; k >= 0; k--) {
#pragma unroll
            for (int j = 7; j > 0; j--) w[j] = w[j - 1];
            w[0] = ((const u32*)p)[i + k];
        }
    } else {
#pragma unroll 1
        for (int k = n - 1; k >= 0; k--) {
#pragma unroll
            for (int j = 3; j > 0; j--) w[j] = (w[j] << 16) | (w[j - 1] >> 16);
            w[0] = (w[0] << 16) | ((const u16*)p)[i + k];
        }
    }
    raw.low = make_uint4(w[0], w[1], w[2], w[3]);
    raw.high = make_uint4(w[4], w[5], w[6], w[7]);
    return raw;
}

// n of a row's eight values, in any float type.
__device__ __forceinline__ void store_row8(void* p, int dtype, u64 i, const float v[8], int n, int whole) {
    if (whole) {
        if (n > 0) store8(p, dtype, i, v);
        return;
    }
    float left[8];
#pragma unroll
    for (int k = 0; k < 8; k++) left[k] = v[k];
    // One element's instructions, the others moving up.
#pragma unroll 1
    for (int k = 0; k < n; k++) {
        store1(p, dtype, i + k, left[0]);
#pragma unroll
        for (int j = 0; j < 7; j++) left[j] = left[j + 1];
    }
}

// The next row's codes below those of three: after four rows each word holds one column.
__device__ __forceinline__ void push_row(u32 columns[8], uint2 codes) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        columns[j] = __byte_perm(columns[j], j < 4 ? codes.x : codes.y, 0x0321u + ((4u + j % 4) << 12));
    }
}

// Of the cell that a tensor is quantized with, for one thread of the grid to write. Either may be null.
__device__ __forceinline__ void write_scale_inv(const float* scale, float* scale_inv) {
    if (scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / fabsf(*scale);
}

// ---- column sums of tiles: what column_sums and every fused bias gradient add up, in one order ----

// `sums` are a thread's: its four rows of a tile, added in order, rows that are not there as zeros. `scratch` holds
// 8 · TILE_COLS floats and may be used again at once; `partial` is the tile's first column in its row of partial sums,
// of which there is one for each TILE_ROWS rows. Called by all threads. The rows of partial sums are added by
// reduce_columns_finish.
__device__ __forceinline__ void tile_sums(float* scratch, const float sums[8], float* partial, u64 col0, u64 cols) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float sum = sums[k];
        sum += __shfl_xor_sync(FULL_WARP, sum, 8);
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        if (lane < 8) scratch[threadIdx.x / WARP * TILE_COLS + 8 * lane + k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TILE_COLS && col0 + threadIdx.x < cols) {
        float sum = scratch[threadIdx.x];
#pragma unroll
        for (int w = 1; w < TILE_THREADS / WARP; w++) sum += scratch[w * TILE_COLS + threadIdx.x];
        partial[threadIdx.x] = sum;
    }
    __syncthreads();
}
