// ---- 16-bit floats, kept as their bits ----

__device__ __forceinline__ float bf16_to_f32(u32 bits) { return __int_as_float((int)(bits << 16)); }

__device__ __forceinline__ float f16_to_f32(u32 bits) {
    float v;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "r"(bits));
    return v;
}

// Two values to nearest, ties to even, `low` in the lower half. Every NaN is 0x7fff.
__device__ __forceinline__ u32 f32_to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 f32_to_f16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// One value the same way.
__device__ __forceinline__ u32 f32_to_bf16(float v) {
    u32 bits;
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(v));
    return bits;
}

__device__ __forceinline__ u32 f32_to_f16(float v) {
    u32 bits;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(v));
    return bits;
}
