// What surrounds a matrix product of cuBLASLt's: zeros around codes whose extents no FP8 kernel takes, and what a library's
// epilogue cannot do: a bias that it would round, the type of the caller, the sum with a matrix that has no padding.

// y [padded_rows, padded_cols] is x [rows, cols] with zeros around it; padded_cols is a multiple of 16.
extern "C" __global__ void __launch_bounds__(256)
    gemm_pad(const u8* x, u64 rows, u64 cols, u8* y, u64 padded_rows, u64 padded_cols) {
    u64 chunks = padded_cols / 16;
    for (u64 chunk = grid_thread(); chunk < padded_rows * chunks; chunk += grid_threads()) {
        u64 row = quotient(chunk, chunks), col = (chunk - row * chunks) * 16;
        u32 words[4] = {0, 0, 0, 0};
        if (row < rows) {
#pragma unroll
            for (int k = 0; k < 16; k++) {
                u32 code = col + k < cols ? x[row * cols + col + k] : 0u;
                words[k / 4] |= code << (8 * (k % 4));
            }
        }
        store16(y + chunk * 16, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// y [rows, cols] of y_type is x [more rows, ld] without its padding, plus bias [cols] on every row, rounded once; or, where
// y is to be added to, plus y, which is f32 then. n = rows · cols.
extern "C" __global__ void __launch_bounds__(256)
    gemm_finish(const float* x, u64 ld, const void* bias, void* y, u64 n, u64 cols, int bias_type, int y_type, int add) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        u64 row = quotient(i, cols), col = i - row * cols;
        int count = n - i < 8 ? (int)(n - i) : 8;
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k < count) {
                v[k] = x[row * ld + col];
                if (bias) v[k] = v[k] + load1(bias, bias_type, col);
                if (add) v[k] = v[k] + ((const float*)y)[i + k];
                if (++col == cols) { col = 0; row++; }
            }
        }
        if (count == 8) store8(y, y_type, i, v);
        else {
#pragma unroll
            for (int k = 0; k < 7; k++)
                if (k < count) store1(y, y_type, i + k, v[k]);
        }
    }
}
