// ---- pairs of bf16 or f16 in one register: amaxes and codes without widening every element first ----

// The absolute values.
template <int DTYPE>
__device__ __forceinline__ u32 abs2(u32 pair) {
    u32 r;
    if (DTYPE == BF16) asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(pair));
    else asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}

// The larger of each half; NaN loses, and only two NaN give one.
template <int DTYPE>
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
    u32 r;
    if (DTYPE == BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// The same, but NaN wins.
template <int DTYPE>
__device__ __forceinline__ u32 max2_nan(u32 a, u32 b) {
    u32 r;
    if (DTYPE == BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Bits 15 and 31 tell which half is NaN. Other bits are anything.
template <int DTYPE>
__device__ __forceinline__ u32 nan2(u32 pair) {
    return (pair & 0x7fff7fffu) + (DTYPE == BF16 ? 0x007f007fu : 0x03ff03ffu);
}

template <int DTYPE>
__device__ __forceinline__ int has_nan(u32 pair) {
    return (nan2<DTYPE>(pair) & 0x80008000u) != 0;
}

template <int DTYPE>
__device__ __forceinline__ void widen2(u32 pair, float* low, float* high) {
    if (DTYPE == BF16) {
        *low = __int_as_float((int)(pair << 16));
        *high = __int_as_float((int)(pair & 0xffff0000u));
    } else {
        *low = f16_to_f32(pair & 0xffffu);
        *high = f16_to_f32(pair >> 16);
    }
}

// The larger half of a pair of absolute values without NaN.
template <int DTYPE>
__device__ __forceinline__ float larger_half(u32 pair) {
    float low, high;
    widen2<DTYPE>(pair, &low, &high);
    return fmaxf(low, high);
}

// The codes of two pairs, in memory order; `plain_nan` is for those of NaN.
template <int DTYPE, int FORMAT>
__device__ __forceinline__ u32 codes4(u32 first, u32 second, float scale) {
    float v[4];
    widen2<DTYPE>(first, v, v + 1);
    widen2<DTYPE>(second, v + 2, v + 3);
    return encode2_numbers(v[0] * scale, v[1] * scale, FORMAT) | encode2_numbers(v[2] * scale, v[3] * scale, FORMAT) << 16;
}

// Bytes chosen by the nibbles of SELECTOR; a nibble's top bit asks for eight copies of the byte's top bit.
template <u32 SELECTOR>
__device__ __forceinline__ u32 permute(u32 a, u32 b) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(SELECTOR));
    return r;
}
