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

