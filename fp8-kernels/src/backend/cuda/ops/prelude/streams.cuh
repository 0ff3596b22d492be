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

