// The values of a matrix, for kernels that go by tiles.

// Elements of a matrix, and what those of one thread add up to in each column. Sums start at -0, which costs no addition.
struct Elements {
    const void* x;
    int dtype;
    u64 cols;
    int summing;
    float sums[8];

    // As bits: conversion waits until all loads are under way.
    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        Raw8 raw = raw8_row(x, dtype, row * cols + col, n, cols % 8 == 0);
        u32 w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __int_as_float((int)w[k]);
    }

    __device__ __forceinline__ void compute(float v[8], u64, u64, int) {
        u32 w[8];
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = (u32)__float_as_int(v[k]);
        Raw8 raw = {make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
        widen8(v, raw, dtype);
        if (summing) {
#pragma unroll
            for (int k = 0; k < 8; k++) sums[k] += v[k];
        }
    }
};
