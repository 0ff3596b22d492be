#include "blocks.cuh"
// What surrounds a matrix product of cuBLASLt's: zeros around codes whose extents no FP8 kernel takes, and what a library's
// epilogue cannot do: terms that it would round, the type of the caller, the sum with a matrix that has no padding.

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

// y [rows, cols] of y_type is x [more rows, ld] without its padding, plus addend [rows, cols], plus bias [cols] on every row,
// rounded once; or, where y is to be added to, plus y, which is f32 then. n = rows · cols.
extern "C" __global__ void __launch_bounds__(256)
    gemm_finish(const float* x, u64 ld, const void* addend, const void* bias, void* y, u64 n, u64 cols, int addend_type,
                int bias_type, int y_type, int add) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        u64 row = quotient(i, cols), col = i - row * cols;
        int count = n - i < 8 ? (int)(n - i) : 8;
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k < count) {
                v[k] = x[row * ld + col];
                if (addend) v[k] = v[k] + load1(addend, addend_type, i + k);
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

// ---- factors of rows and blocks ----

// Layouts of factors, by cuBLASLt's numbers: E8M0 in tiles of 128 rows by 4 blocks of 32; one f32 a row; [blocks of k, rows];
// [tiles, blocks of k, a multiple of four].
enum { FACTORS_VEC32 = 2, FACTORS_OUTER = 3, FACTORS_VEC128 = 4, FACTORS_TILE128 = 5 };

// y is the factors of a [rows, depth] operand with `blocks`, or with one factor where that is negative, in a layout for
// `padded_rows` rows: n elements, zeros where there is no row or block. Powers of two become E8M0 in VEC32.
extern "C" __global__ void __launch_bounds__(256)
    gemm_factors(const void* scale_inv, int blocks, u64 rows, u64 depth, u64 padded_rows, int layout, void* y, u64 n) {
    const u64 width = blocks == BLOCKS_MX32 ? 32 : BLOCK_TILE, wide = (depth + width - 1) / width;
    const float* factors = (const float*)scale_inv;
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        if (layout == FACTORS_VEC32) {
            const u64 across = ((depth + 31) / 32 + 3) / 4, tile = quotient(i, 512), in = i - tile * 512;
            const u64 down = quotient(tile, across), row = down * 128 + in % 16 / 4 * 32 + in / 16;
            const u64 block = (tile - down * across) * 4 + in % 4;
            u8 byte = 0;
            if (row < rows && block * 32 < depth) {
                if (blocks == BLOCKS_MX32) byte = ((const u8*)scale_inv)[row * wide + block];
                else {
                    const u64 place = (blocks == BLOCKS_128X128 ? row / BLOCK_TILE : row) * wide + block / 4;
                    byte = (u8)(__float_as_int(factors[place]) >> 23 & 0xff);
                }
            }
            ((u8*)y)[i] = byte;
            continue;
        }
        float factor = 0.0f;
        if (layout == FACTORS_OUTER) {
            if (i < rows) factor = factors[blocks < 0 ? 0 : i];
        } else if (layout == FACTORS_VEC128) {
            const u64 block = quotient(i, padded_rows), row = i - block * padded_rows;
            if (row < rows) factor = factors[row * wide + block];
        } else {
            const u64 pitch = (wide + 3) / 4 * 4, down = quotient(i, pitch), block = i - down * pitch;
            if (block < wide) factor = factors[down * wide + block];
        }
        ((float*)y)[i] = factor;
    }
}

// As gemm_finish, of sums that have no factors yet: (((x * a) * b) + addend) + bias. `a` has a factor for each row, or one if `one_a`; `b`
// has one for each column.
extern "C" __global__ void __launch_bounds__(256)
    gemm_finish_rows(const float* x, u64 ld, const float* a, int one_a, const float* b, int one_b, const void* addend,
                     const void* bias, void* y, u64 n, u64 cols, int addend_type, int bias_type, int y_type, int add) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        const u64 row = quotient(i, cols), col = i - row * cols;
        float v = x[row * ld + col] * a[one_a ? 0 : row] * b[one_b ? 0 : col];
        if (addend) v = v + load1(addend, addend_type, i);
        if (bias) v = v + load1(bias, bias_type, col);
        if (add) v = v + ((const float*)y)[i];
        store1(y, y_type, i, v);
    }
}
