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
        w[k] = dtype == BF16 ? f32_to_bf16x2(v[2 * k], v[2 * k + 1]) : f32_to_f16x2(v[2 * k], v[2 * k + 1]);
    }
    store16((u16*)p + i, make_uint4(w[0], w[1], w[2], w[3]));
}

