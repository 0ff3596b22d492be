// ---- FP8 ----

// Codes of two values, `low` in the low byte: to nearest, ties to even, saturating. PTX does not say which code of NaN it makes:
// `plain_nan` is for that.
__device__ __forceinline__ u32 encode2_numbers(float low, float high, int format) {
    u16 pair;
    if (format == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Four such codes, NaN as 0x7F whatever its sign. Saturated, no number has a code beyond the largest value's.
__device__ __forceinline__ u32 plain_nan(u32 codes, int format) {
    const u32 beyond = ((codes & 0x7f7f7f7fu) + (format == E4M3 ? 0x01010101u : 0x04040404u)) & 0x80808080u;
    return (codes & ~beyond) | (beyond - (beyond >> 7));
}

// Whether products of a number by this magnitude of a scale are numbers: not by NaN, by infinity or, of infinity, by zero.
__device__ __forceinline__ int keeps_numbers(float scale) { return scale > 0.0f && scale < INFINITY_F; }

// The codes of two values, NaN as 0x7F.
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

// The values of eight codes, times a factor.
__device__ __forceinline__ void decode8(float v[8], uint2 codes, int format, float factor) {
    decode2(codes.x & 0xffffu, format, v, v + 1);
    decode2(codes.x >> 16, format, v + 2, v + 3);
    decode2(codes.y & 0xffffu, format, v + 4, v + 5);
    decode2(codes.y >> 16, format, v + 6, v + 7);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= factor;
}

// The largest magnitude that rounds to the format's largest value; every larger one saturates. Encoding::saturation_limit.
__device__ __forceinline__ float saturation_limit(int format) {
    return format == E4M3 ? 464.0f : __int_as_float(0x476fffff);  // the float below 61440
}

