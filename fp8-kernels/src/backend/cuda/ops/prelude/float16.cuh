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

