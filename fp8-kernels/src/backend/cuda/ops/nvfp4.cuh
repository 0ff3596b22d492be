// NVFP4: blocks of 16 values with codes of 4 bits (E2M1), a scale in E4M3 each, and one f32 scale for the tensor.
//
// The rules are those of fp8-format's tensor_scale.rs and arch/scalar/fp4.rs, operation by operation.

#define FP4_BLOCK 16
// The signs of the Hadamard transform: element i of 16 is negated if bit i is set. slice::HADAMARD_SIGNS.
#define HADAMARD_SIGNS 0xd7e8

#define FLT_MAX_F __int_as_float(0x7f7fffff)
#define ABS_BITS 0x7fffffffu
#define EXPONENT_BITS 0x7f800000u

// Whether the target converts to E2M1 itself: those of one architecture or one family do, from sm_100 on. NVRTC 12.8 defines only the
// later names.
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define CONVERTS_TO_E2M1 1
#else
#define CONVERTS_TO_E2M1 0
#endif

// ---- E2M1 and E4M3 without the conversions that only newer GPUs have ----

// The code of a magnitude that is at most the format's largest value, to nearest, ties to even. The sum rounds at the format's last
// bit, and its last byte is the code: codec.rs.
template <u32 MANTISSA, u32 BIAS>
__device__ __forceinline__ u32 nearest_magnitude(float c) {
    constexpr u32 DROP = 23 - MANTISSA, SMALLEST_NORMAL = (128 - BIAS) << 23;
    constexpr u32 OFFSET = (0u - ((128 - BIAS + DROP) << MANTISSA)) & 0xffu;
    const u32 bits = (u32)__float_as_int(c);
    const u32 exponent = (bits > SMALLEST_NORMAL ? bits : SMALLEST_NORMAL) & EXPONENT_BITS;
    const u32 t = (u32)__float_as_int(c + __int_as_float((int)(exponent + (DROP << 23) + OFFSET)));
    return ((t >> DROP) + t) & 0x7fu;
}

// The magnitude of a value, at most 6. NaN becomes 6, too.
__device__ __forceinline__ float limited_magnitude(u32 bits) {
    const u32 magnitude = bits & ABS_BITS;
    return __int_as_float((int)(magnitude < 0x40c00000u ? magnitude : 0x40c00000u));
}

// The sign's bit of a code. That of NaN is 0.
__device__ __forceinline__ u32 sign_of_code(u32 bits) {
    return (bits & ABS_BITS) > EXPONENT_BITS ? 0u : bits >> 28 & 8u;
}

// The nearest code, ties to even.
__device__ __forceinline__ u32 nearest_code(float v) {
    const u32 bits = (u32)__float_as_int(v);
    return (nearest_magnitude<1, 1>(limited_magnitude(bits)) & 7u) | sign_of_code(bits);
}

// The code rounded by a byte: up in magnitude if 256 times the fraction, cut off, and the byte reach 256.
__device__ __forceinline__ u32 stochastic_code(float v, u32 byte) {
    const u32 bits = (u32)__float_as_int(v);
    const float c = limited_magnitude(bits);
    // Below 2 a step is 1/2, below 4 it is 1, and from there 2: 2^binade / 2. A code is so many steps, and 2 a binade.
    const u32 exponent = (u32)__float_as_int(c) >> 23, binade = (exponent > 127u ? exponent : 127u) - 127u;
    const u32 fixed = (u32)(int)(c * __int_as_float((int)(127 + 9 - binade) << 23));
    return (((fixed + byte) >> 8) + 2 * binade) | sign_of_code(bits);
}

// The nearest codes of eight values, in memory order.
__device__ __forceinline__ u32 nearest_codes8(const float v[8]) {
    u32 codes = 0;
#if CONVERTS_TO_E2M1
    // The first operand becomes the high half of a byte.
    asm("{ .reg .b8 c<4>; "
        "cvt.rn.satfinite.e2m1x2.f32 c0, %2, %1; cvt.rn.satfinite.e2m1x2.f32 c1, %4, %3; "
        "cvt.rn.satfinite.e2m1x2.f32 c2, %6, %5; cvt.rn.satfinite.e2m1x2.f32 c3, %8, %7; "
        "mov.b32 %0, {c0, c1, c2, c3}; }"
        : "=r"(codes)
        : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
#else
#pragma unroll
    for (int k = 0; k < 8; k++) codes |= nearest_code(v[k]) << (4 * k);
#endif
    return codes;
}

// The codes of eight values times a factor, in memory order. `words` are the eight bytes that round them where `is_random`.
__device__ __forceinline__ u32 fp4_codes8(const float v[8], float factor, int is_random, const u32 words[2]) {
    float scaled[8];
#pragma unroll
    for (int k = 0; k < 8; k++) scaled[k] = v[k] * factor;
    if (!is_random) return nearest_codes8(scaled);
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        codes |= stochastic_code(scaled[k], words[k / 4] >> (8 * (k % 4)) & 0xffu) << (4 * k);
    }
    return codes;
}

// The value of a code.
__device__ __forceinline__ float fp4_value(u32 code) {
    const float magnitude = __int_as_float((int)((code & 7u) << 22)) * power_of_two(126);
    return __int_as_float(__float_as_int(magnitude) | (int)(code & 8u) << 28);
}

// The value of an E4M3 byte.
__device__ __forceinline__ float e4m3_value(u32 byte) {
    if ((byte & 0x7fu) == 0x7fu) return NAN_F;
    const float magnitude = __int_as_float((int)((byte & 0x7fu) << 20)) * power_of_two(120);
    return __int_as_float(__float_as_int(magnitude) | (int)(byte & 0x80u) << 24);
}

// ---- scales ----

// The factors that all blocks of a tensor share: fp8_format::TensorScale.
struct TensorScale {
    float encode, decode;
};

__device__ __forceinline__ TensorScale tensor_scale(float amax) {
    amax = fabsf(amax);
    float encode = fminf(2688.0f / amax, FLT_MAX_F);
    if (amax == 0.0f || encode == 0.0f || amax != amax) encode = 1.0f;
    return {encode, 1.0f / encode};
}

__device__ __forceinline__ void store_tensor_scale(float* to, const TensorScale& scale) {
    to[0] = scale.encode;
    to[1] = scale.decode;
}

// The scale of a block, and the factor of its values. The scale of a block with a NaN is NaN; its factor is that of the others.
struct Fp4Scale {
    u32 byte;
    float factor;
};

// The largest magnitude of N values as its bits, and in the bit above them whether one is NaN.
template <int N>
__device__ __forceinline__ u32 fp4_peak(const float v[N]) {
    float amax = 0.0f;
    u32 nan = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        amax = fmaxf(amax, fabsf(v[k]));
        nan |= v[k] != v[k] ? ~ABS_BITS : 0u;
    }
    return (u32)__float_as_int(amax) | nan;
}

// The peak of both.
__device__ __forceinline__ u32 join_peaks(u32 a, u32 b) {
    const u32 first = a & ABS_BITS, second = b & ABS_BITS;
    return (first > second ? first : second) | ((a | b) & ~ABS_BITS);
}

// The peak of this thread and of the one whose lane differs by these bits.
__device__ __forceinline__ u32 shuffled_peak(u32 peak, int lanes) {
    return join_peaks(peak, __shfl_xor_sync(FULL_WARP, peak, lanes));
}

__device__ __forceinline__ Fp4Scale fp4_scale(const TensorScale& tensor, u32 peak) {
    const float amax = __int_as_float((int)(peak & ABS_BITS));
    const u32 byte = nearest_magnitude<3, 7>(fminf(amax * (tensor.encode * (1.0f / 6.0f)), 448.0f));
    const float factor = fminf(1.0f / (e4m3_value(byte) * tensor.decode), FLT_MAX_F);
    return {peak & ~ABS_BITS ? 0x7fu : byte, factor};
}

// ---- the Hadamard transform ----

// x · H with H[i][j] = sign(i) · (-1)^popcount(i & j) / 4, rounded as the copy of a tensor of this type keeps it.
__device__ __forceinline__ void hadamard16(float t[FP4_BLOCK], int dtype) {
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) t[i] *= HADAMARD_SIGNS >> i & 1 ? -0.25f : 0.25f;
#pragma unroll
    for (int stride = 1; stride < FP4_BLOCK; stride *= 2) {
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++) {
            if (i & stride) continue;
            const float a = t[i], b = t[i + stride];
            t[i] = a + b;
            t[i + stride] = a - b;
        }
    }
    if (dtype != BF16) return;
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i += 2) widen2<BF16>(f32_to_bf16x2(t[i], t[i + 1]), t + i, t + i + 1);
}

// ---- tiles of 128 rows of 64 columns in shared memory, from which blocks of 16 rows are read ----

// The tile as f32. Four floats lie between each 16 rows, so that the lanes of fp4_column meet no bank twice.
#define FP4_TILE_FLOATS (TILE_ROWS * TILE_COLS + TILE_ROWS / FP4_BLOCK * 4)
// Blocks of 16 rows in a tile.
#define FP4_TILE_BLOCKS (TILE_ROWS / FP4_BLOCK * TILE_COLS)

// A thread's part of the tile at (row0, col0): four rows of eight columns, and zeros for what is not there. `values` may add up
// columns.
__device__ __forceinline__ void load_part(float v[4][8], Elements& values, u64 rows, u64 row0, u64 col0) {
    const u64 row = row0 + tile_row(), col = col0 + tile_col();
    const int n = tile_width(col, values.cols);
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        if (n > 0 && row + r < rows) values.load(v[r], row + r, col, n);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (n > 0 && row + r < rows) values.compute(v[r], row + r, col, n);
    }
}

__device__ __forceinline__ void put_part(float* tile, const float v[4][8]) {
    // The four rows are of one block.
    float* to = tile + tile_row() * TILE_COLS + tile_row() / FP4_BLOCK * 4 + tile_col();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        *(float4*)(to + r * TILE_COLS) = make_float4(v[r][0], v[r][1], v[r][2], v[r][3]);
        *(float4*)(to + r * TILE_COLS + 4) = make_float4(v[r][4], v[r][5], v[r][6], v[r][7]);
    }
}

// The column and the block of rows with number i. A warp has all blocks of four columns: whole sectors of the transpose.
__device__ __forceinline__ int fp4_column_of(int i) { return i / 32 * 4 + i % 4; }
__device__ __forceinline__ int fp4_block_of(int i) { return i / 4 % (TILE_ROWS / FP4_BLOCK); }

// The values of the block with number i, transformed if that is asked for.
__device__ __forceinline__ void fp4_column(float t[FP4_BLOCK], const float* tile, int i, int hadamard, int dtype) {
    const float* from = tile + fp4_block_of(i) * (FP4_BLOCK * TILE_COLS + 4) + fp4_column_of(i);
#pragma unroll
    for (int k = 0; k < FP4_BLOCK; k++) t[k] = from[k * TILE_COLS];
    if (hadamard) hadamard16(t, dtype);
}

// Stores the first n bytes of eight codes; `whole` where rows of bytes are a multiple of four, so that n is 4.
__device__ __forceinline__ void store_packed4(u8* to, u32 codes, int n, int whole) {
    if (whole) {
        *(u32*)to = codes;
        return;
    }
#pragma unroll 1
    for (int k = 0; k < n; k++, codes >>= 8) to[k] = (u8)codes;
}
