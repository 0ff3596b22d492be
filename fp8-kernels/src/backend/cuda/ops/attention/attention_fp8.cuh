// What the kernels of attention in FP8 share. It follows attention.cuh, whose blocks, spans and instructions they use, and
// attention_dropout.cuh.
//
// Elements are codes of one byte. Tiles have rows of D codes in chunks of 16, which stand where ldmatrix meets no bank twice.
// m16n8k32 reads bytes where m16n8k16 reads halves of 16-bit elements, so operands whose rows are tile rows are loaded as
// there. A product that goes along the tile's rows (p · v, ds · k, …) needs four rows of one column in a register, and scores
// leave their product two and two: row 8i + 2t, 8i + 2t + 1 of each eight. Both sides take the rows in that order, which
// ldmatrix.trans of byte pairs gives up to one byte permutation. Of its 16 columns one product computes the even ones and one
// the odd ones, so that a lane ends with four neighbours: 4t … 4t + 3.

// c += a · b for 16 rows of 32 codes and 8 columns.
template <int LEFT, int RIGHT>
__device__ __forceinline__ void multiply_codes(float c[4], const u32 a[4], u32 b0, u32 b1) {
#define MULTIPLY_CODES(TYPES)                                                                                      \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "     \
                 "{%0,%1,%2,%3};"                                                                                  \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (LEFT == E4M3 && RIGHT == E4M3) MULTIPLY_CODES("e4m3.e4m3");
    else if (LEFT == E4M3) MULTIPLY_CODES("e4m3.e5m2");
    else MULTIPLY_CODES("e5m2.e4m3");
#undef MULTIPLY_CODES
}

// Four results of eight columns each as the left operand of 32 codes, each row's values times its factor.
template <int FORMAT>
__device__ __forceinline__ void encode_quads(u32 w[4], const float (*c)[4], float factor0, float factor1) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const float(*pair)[4] = c + part / 2 * 2;
        const int e = part % 2 * 2;
        const float factor = part % 2 ? factor1 : factor0;
        w[part] = encode2_numbers(pair[0][e] * factor, pair[0][e + 1] * factor, FORMAT) |
                  encode2_numbers(pair[1][e] * factor, pair[1][e + 1] * factor, FORMAT) << 16;
    }
}

// ---- a scale for each row of weights ----

// Weights become codes with a power of two for each row, which falls as larger values come: what was summed before is
// multiplied by the quotient, exactly. The largest value of a row ends in the format's last binade but one, so nothing
// saturates, and what is less than 2^-13 of it (E4M3) or 2^-28 (E5M2) loses digits.
template <int FORMAT>
struct RowScale {
    // The largest value lies in [2^TOP, 2^(TOP + 1)) after scaling.
    static constexpr int TOP = FORMAT == E4M3 ? 7 : 14;
    // The biased exponent of the largest value so far; small enough values share one that gives a normal factor.
    int exponent;

    __device__ __forceinline__ void start() { exponent = TOP + 1; }
    __device__ __forceinline__ float scale() const { return __int_as_float((254 + TOP - exponent) << 23); }
    __device__ __forceinline__ float inverse() const { return __int_as_float((exponent - TOP) << 23); }

    // Takes the largest magnitude of further values. Returns the factor for sums of the values before.
    __device__ __forceinline__ float take(float amax) {
        const int before = exponent, now = __float_as_int(amax) >> 23;
        exponent = now > before ? now : before;
        const int quotient = 127 + before - exponent;
        return __int_as_float(quotient > 0 ? quotient << 23 : 0);
    }
};

// The largest magnitude of one row's values in the four lanes that share it.
template <int N>
__device__ __forceinline__ float row_amax(const float (&c)[N][4], int half) {
    float amax = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) amax = fmaxf(amax, fmaxf(fabsf(c[n][2 * half]), fabsf(c[n][2 * half + 1])));
    amax = fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, 1));
    return fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, 2));
}

// Lets a warp's two rows of a lane take further weights, and brings the sums to the new scales.
template <int FORMAT, int N, int SUMS>
__device__ __forceinline__ void rescale(RowScale<FORMAT> (&scales)[2], const float (&weights)[N][4], float (&sums)[SUMS][4]) {
    const float quotients[2] = {scales[0].take(row_amax(weights, 0)), scales[1].take(row_amax(weights, 1))};
    // Seldom, once the first tiles are through.
    if (!__any_sync(FULL_WARP, quotients[0] != 1.0f || quotients[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < SUMS; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[n][e] *= quotients[e / 2];
    }
}

// ---- tiles ----

// Where a chunk of a row stands: 128 bytes hold one row of 128 codes, or two of 64.
template <int D>
__device__ __forceinline__ u32 place_codes(u32 tile, int row, int chunk) {
    constexpr int CHUNKS = D / 16;
    return tile + row * D + ((chunk ^ row / (8 / CHUNKS) % CHUNKS) << 4);
}

// Rows `first` … of a matrix whose rows are `stride` codes apart; zeros from row `limit` and column `head_dim` on.
template <int D, int COUNT>
__device__ __forceinline__ void load_codes(u32 tile, const u8* from, u32 stride, u32 first, u32 limit, u32 head_dim) {
    constexpr int CHUNKS = D / 16, AT_ONCE = THREADS / CHUNKS;
    // A thread copies one chunk of several rows.
    const int chunk = threadIdx.x % CHUNKS, is_real = 16 * chunk < head_dim;
    const u8* column = is_real ? from + 16 * chunk : from;
    const u32 end = is_real ? limit : 0;
#pragma unroll
    for (int i = 0; i < COUNT / AT_ONCE; i++) {
        const u32 row = threadIdx.x / CHUNKS + i * AT_ONCE;
        const int there = first + row < end;
        copy16(place_codes<D>(tile, row, chunk), column + (u64)(there ? first + row : 0) * stride, there ? 16 : 0);
    }
}

// A left operand: 16 rows of 32 columns.
template <int D>
__device__ __forceinline__ void load_left_codes(u32 m[4], u32 tile, int row, int column32) {
    const int lane = threadIdx.x % WARP;
    load_matrices(m, place_codes<D>(tile, row + lane % 16, 2 * column32 + lane / 16));
}

// A right operand whose columns are 16 of the tile's rows: m[0] and m[1] for the first eight, m[2] and m[3] for the others.
template <int D>
__device__ __forceinline__ void load_right_codes(u32 m[4], u32 tile, int row, int column32) {
    const int lane = threadIdx.x % WARP;
    load_matrices(m, place_codes<D>(tile, row + lane % 8 + lane / 16 * 8, 2 * column32 + lane / 8 % 2));
}

// c += w · tile, for w of 16 rows and 32 columns in the order of encode_quads, the tile's rows from `row` on. c[2n] has the
// even columns of 16n …, c[2n + 1] the odd ones.
template <int LEFT, int RIGHT, int D>
__device__ __forceinline__ void add_product_of_codes(float (&c)[D / 8][4], const u32 w[4], u32 tile, int row) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        u32 m[4];
        load_transposed(m, place_codes<D>(tile, row + lane, n));
        multiply_codes<LEFT, RIGHT>(c[2 * n], w, __byte_perm(m[0], m[1], 0x6420), __byte_perm(m[2], m[3], 0x6420));
        multiply_codes<LEFT, RIGHT>(c[2 * n + 1], w, __byte_perm(m[0], m[1], 0x7531), __byte_perm(m[2], m[3], 0x7531));
    }
}

// A warp's 16 rows from `row` on, as far as there are, of sums in the order of add_product_of_codes; times a factor for each
// of a lane's two rows, then one for all.
template <int D>
__device__ __forceinline__ void store_sums(void* to, int dtype, u64 start, u32 stride, u32 row, u32 limit, u32 head_dim,
                                           const float (&c)[D / 8][4], const float (&factors)[2], float factor) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 own = row + lane / 4 + 8 * half;
        if (own >= limit) continue;
        const u64 line = start + (u64)own * stride + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            if (16 * n >= head_dim) break;
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = c[2 * n + e % 2][2 * half + e / 2] * factors[half] * factor;
            if (dtype == F32) {
                *(float4*)((float*)to + line + 16 * n) = make_float4(v[0], v[1], v[2], v[3]);
            } else {
                uint2 pairs = dtype == BF16 ? make_uint2(narrow<BF16>(v[0], v[1]), narrow<BF16>(v[2], v[3]))
                                            : make_uint2(narrow<F16>(v[0], v[1]), narrow<F16>(v[2], v[3]));
                *(uint2*)((u16*)to + line + 16 * n) = pairs;
            }
        }
    }
}

// How the loops of forward and backward load and multiply tiles of codes.
template <int D>
struct FP8Codes {
    typedef u8 Element;
    static constexpr int INNER = 32;

    template <int COUNT>
    static __device__ __forceinline__ void load(u32 tile, const u8* from, u32 stride, u32 first, u32 limit, u32 head_dim) {
        load_codes<D, COUNT>(tile, from, stride, first, limit, head_dim);
    }
    static __device__ __forceinline__ void left(u32 m[4], u32 tile, int row, int step) { load_left_codes<D>(m, tile, row, step); }
    static __device__ __forceinline__ void right(u32 m[4], u32 tile, int row, int step) { load_right_codes<D>(m, tile, row, step); }
    static __device__ __forceinline__ void multiply_scores(float c[4], const u32 a[4], u32 b0, u32 b1) {
        multiply_codes<E4M3, E4M3>(c, a, b0, b1);
    }
};

#define OPTIONAL_DROPOUT \
    OptionalDropout { DROPOUT_ON_VALUE }
