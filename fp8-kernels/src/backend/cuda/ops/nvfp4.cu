#include "tile_elements.cuh"
#include "dropout.cuh"
#include "nvfp4.cuh"
// NVFP4: quantize, back to numbers, and what matrix products need of it.
//
// A thread block has a tile of 128 rows of 64 columns. Its blocks of 16 columns are quantized from registers, two threads a block,
// its blocks of 16 rows from shared memory, one thread a block. x is read once for both copies.

// Max-combines the amaxes of both copies: amax[0] is that of x, amax[1] that of its transpose, which may be transformed. NaN is
// skipped. The grid has a block for each tile, or for several.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    nvfp4_amax(const void* x, int dtype, u64 rows, u64 cols, int hadamard, int* amax) {
    __shared__ __align__(16) float tile[FP4_TILE_FLOATS];
    __shared__ float scratch[WARP];
    const u64 across = tiles_across(cols), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * across;
    Elements values = {x, dtype, cols, 0, {}};
    float largest = 0.0f, transformed = 0.0f;
    for (u64 at = blockIdx.x; at < tiles; at += gridDim.x) {
        const u64 down = quotient(at, across);
        float v[4][8];
        load_part(v, values, rows, down * TILE_ROWS, (at - down * across) * TILE_COLS);
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[r][k]));
        }
        if (!hadamard) continue;
        put_part(tile, v);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < FP4_TILE_BLOCKS; i += TILE_THREADS) {
            float t[FP4_BLOCK];
            fp4_column(t, tile, i, 1, dtype);
#pragma unroll
            for (int k = 0; k < FP4_BLOCK; k++) transformed = fmaxf(transformed, fabsf(t[k]));
        }
        __syncthreads();
    }
    largest = block_max(largest, scratch);
    transformed = hadamard ? block_max(transformed, scratch) : largest;
    if (threadIdx.x == 0) {
        record_amax(amax, largest);
        record_amax(amax + 1, transformed);
    }
}

// The bytes for a thread's eight columns of two rows of one pair of threads. Each of the two draws the sixteen bytes of one row,
// even threads those of the first, and gives the other thread its half.
__device__ __forceinline__ void pair_words(u32 words[2][2], u64 counter, u64 step, u64 seed) {
    const int is_odd = threadIdx.x & 1;
    u32 drawn[4];
    philox4x32_10(drawn, is_odd ? counter + step : counter, seed);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const u32 other = __shfl_xor_sync(FULL_WARP, is_odd ? drawn[k] : drawn[2 + k], 1);
        words[0][k] = is_odd ? other : drawn[k];
        words[1][k] = is_odd ? drawn[2 + k] : other;
    }
}

// Saturated are finite values that become 7 or more in magnitude before they are rounded, underflowed those that become 0, be it by their
// codes or by a scale of 0. Blocks with a NaN count their NaNs alone.
__device__ __forceinline__ void count_fp4(Codes& out, const float v[8], const Fp4Scale& scale, u32 codes) {
    const int is_nan = scale.byte == 0x7fu, is_zero = scale.byte == 0;
    u32 nan = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        out.saturated += !is_nan && !is_zero && fabsf(v[k]) < INFINITY_F && fabsf(v[k] * scale.factor) >= 7.0f;
        out.underflowed += v[k] != 0.0f && !is_nan && (is_zero || (codes >> (4 * k) & 7u) == 0);
        nan += v[k] != v[k];
    }
    count_nan(out, nan);
}

// Quantizes a [rows, cols] matrix and its transpose, each with its own amax; either may be left out with null codes. `tiles`: a
// scale for 16 x 16 values instead of 1 x 16. `hadamard`, without tiles: the transpose is transformed, and its rows are padded to a
// multiple of 16.
//
// `key` is a seed and an offset, or null to round to nearest. Block n of a row takes its bytes from counter offset + first + row ·
// step + n. Each copy has its own, so that with a key the codes of tiles are not those of the other copy. `counters` are of the
// rowwise copy: without it, nothing is counted. The grid has a block for each tile.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_nvfp4(const void* x, int dtype, u64 rows, u64 cols, const float* amax, int tiles, int hadamard, u8* codes,
                   u8* scales, float* tensor, u8* columnwise, u8* columnwise_scales, float* columnwise_tensor, const u64* key,
                   u64 first, u64 step, u64 columnwise_first, u64 columnwise_step, u64* counters, float* partial_sums) {
    __shared__ __align__(16) float tile[FP4_TILE_FLOATS];
    // Of tiles of 16 x 16.
    __shared__ u32 tile_peaks[TILE_ROWS / FP4_BLOCK][TILE_COLS / FP4_BLOCK];
    __shared__ float scratch[WARP];
    const u64 down = quotient(blockIdx.x, tiles_across(cols));
    const u64 row0 = down * TILE_ROWS, col0 = (blockIdx.x - down * tiles_across(cols)) * TILE_COLS;
    const int lane = threadIdx.x % WARP, is_random = key != nullptr;
    const u64 seed = key ? key[0] : 0, offset = key ? key[1] : 0;
    Elements values = {x, dtype, cols, partial_sums != nullptr, {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f}};
    float v[4][8];
    load_part(v, values, rows, row0, col0);
    if (partial_sums) tile_sums(tile, values.sums, partial_sums + down * cols + col0, col0, cols);
    if (columnwise) put_part(tile, v);

    u32 peaks[4];
#pragma unroll
    for (int r = 0; r < 4; r++) peaks[r] = shuffled_peak(fp4_peak<8>(v[r]), 1);
    if (tiles) {
        // The rows of a tile are those of a warp.
        u32 peak = join_peaks(join_peaks(peaks[0], peaks[1]), join_peaks(peaks[2], peaks[3]));
        peak = shuffled_peak(shuffled_peak(peak, 8), 16);
#pragma unroll
        for (int r = 0; r < 4; r++) peaks[r] = peak;
        if (lane < 8 && lane % 2 == 0) tile_peaks[threadIdx.x / WARP][lane / 2] = peak;
    }

    if (codes) {
        const TensorScale of = tensor_scale(amax[0]);
        if (blockIdx.x == 0 && threadIdx.x == 0) store_tensor_scale(tensor, of);
        const u64 col = col0 + tile_col(), pitch = (cols + 1) / 2, wide = (cols + FP4_BLOCK - 1) / FP4_BLOCK;
        const int bytes = (tile_width(col, cols) + 1) / 2;
        u64 row = row0 + tile_row(), counter = offset + first + row * step + col / FP4_BLOCK;
        Codes out = begin_codes(nullptr, E4M3, counters);
#pragma unroll 1
        for (int half = 0; half < 2; half++, row += 2, counter += 2 * step) {
            u32 words[2][2] = {};
            if (is_random) pair_words(words, counter, step, seed);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Fp4Scale scale = fp4_scale(of, peaks[r]);
                const u32 eight = fp4_codes8(v[r], scale.factor, is_random, words[r]);
                if (bytes > 0 && row + r < rows) {
                    if (counters) count_fp4(out, v[r], scale, eight);
                    store_packed4(codes + (row + r) * pitch + col / 2, eight, bytes, pitch % 4 == 0);
                    const u64 band = tiles ? (row + r) / FP4_BLOCK : row + r;
                    if (lane % 2 == 0 && (!tiles || (row + r) % FP4_BLOCK == 0)) {
                        scales[band * wide + col / FP4_BLOCK] = (u8)scale.byte;
                    }
                }
#pragma unroll
                for (int k = 0; k < 8; k++) v[r][k] = v[r + 2][k];
                peaks[r] = peaks[r + 2];
            }
        }
        finish_codes(out, nullptr, counters, blockIdx.x == 0 ? rows * cols : 0, scratch);
    }
    if (!columnwise) return;
    __syncthreads();

    const TensorScale of = tensor_scale(amax[1]);
    if (blockIdx.x == 0 && threadIdx.x == 0) store_tensor_scale(columnwise_tensor, of);
    const u64 wide = (rows + FP4_BLOCK - 1) / FP4_BLOCK, pitch = hadamard ? wide * (FP4_BLOCK / 2) : (rows + 1) / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < FP4_TILE_BLOCKS; i += TILE_THREADS) {
        const u64 col = col0 + fp4_column_of(i), block = row0 / FP4_BLOCK + fp4_block_of(i);
        if (col >= cols || block >= wide) continue;
        float t[FP4_BLOCK];
        fp4_column(t, tile, i, hadamard, dtype);
        const u32 peak = tiles ? tile_peaks[fp4_block_of(i)][fp4_column_of(i) / FP4_BLOCK] : fp4_peak<FP4_BLOCK>(t);
        const Fp4Scale scale = fp4_scale(of, peak);
        u32 words[4] = {};
        if (is_random) philox4x32_10(words, offset + columnwise_first + col * columnwise_step + block, seed);
        const u32 low = fp4_codes8(t, scale.factor, is_random, words);
        const u32 high = fp4_codes8(t + 8, scale.factor, is_random, words + 2);
        const u64 place = block * (FP4_BLOCK / 2);
        const int bytes = pitch - place < 8 ? (int)(pitch - place) : 8;
        u8* to = columnwise + col * pitch + place;
        if (pitch % 8 == 0) {
            *(uint2*)to = make_uint2(low, high);
        } else {
            store_packed4(to, low, bytes < 4 ? bytes : 4, 0);
            store_packed4(to + 4, high, bytes - 4, 0);
        }
        if (!tiles) columnwise_scales[col * wide + block] = (u8)scale.byte;
        else if (col % FP4_BLOCK == 0) columnwise_scales[col / FP4_BLOCK * wide + block] = (u8)scale.byte;
    }
}

// out [rows, width] is (code · scale) · factor of a [rows, cols] matrix, rounded to the dtype, with zeros behind the last column.
__device__ __forceinline__ void store_fp4_values(const u8* codes, const u8* scales, float factor, int tiles, u64 rows, u64 cols,
                                                 u64 width, void* out, int dtype) {
    const u64 chunks = (width + 7) / 8, pitch = (cols + 1) / 2, wide = (cols + FP4_BLOCK - 1) / FP4_BLOCK;
    for (u64 i = grid_thread(); i < rows * chunks; i += grid_threads()) {
        const u64 row = quotient(i, chunks), col = (i - row * chunks) * 8;
        const int n = tile_width(col, cols);
        float v[8] = {};
        if (n > 0) {
            const u8* from = codes + row * pitch + col / 2;
            u32 eight = 0;
            if (pitch % 4 == 0) {
                eight = *(const u32*)from;
            } else {
#pragma unroll 1
                for (int k = (n - 1) / 2; k >= 0; k--) eight = eight << 8 | from[k];
            }
            const float scale = e4m3_value(scales[(tiles ? row / FP4_BLOCK : row) * wide + col / FP4_BLOCK]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float value = fp4_value(eight >> (4 * k)) * scale * factor;
                // One NaN on every machine.
                if (k < n) v[k] = value != value ? __int_as_float((int)ABS_BITS) : value;
            }
        }
        store_row8(out, dtype, row * width + col, v, tile_width(col, width), width % 8 == 0);
    }
}

// `tensor` is the factor that encodes and the one that decodes.
extern "C" __global__ void __launch_bounds__(256)
    dequantize_nvfp4(const u8* codes, const u8* scales, const float* tensor, int tiles, u64 rows, u64 cols, void* out,
                     int dtype) {
    store_fp4_values(codes, scales, tensor[1], tiles, rows, cols, cols, out, dtype);
}

// out [rows, width] of bf16 is code · scale, which is exact.
extern "C" __global__ void __launch_bounds__(256)
    nvfp4_scaled_codes(const u8* codes, const u8* scales, int tiles, u64 rows, u64 cols, u64 width, void* out) {
    store_fp4_values(codes, scales, 1.0f, tiles, rows, cols, width, out, BF16);
}

// Eight rows of eight codes, transposed.
__device__ __forceinline__ void turn_codes(u32 w[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 a = w[i], b = w[i + 4];
        w[i] = __byte_perm(a, b, 0x5410);
        w[i + 4] = __byte_perm(a, b, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i & 2) continue;
        const u32 a = w[i], b = w[i + 2];
        w[i] = __byte_perm(a, b, 0x6240);
        w[i + 2] = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 a = w[i], b = w[i + 1];
        w[i] = (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
        w[i + 1] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
    }
}

// out [cols, rows] is the transpose of codes [rows, cols], both two codes a byte. The grid has a block for each 128 rows of 128
// columns; a thread has eight rows of eight columns.
extern "C" __global__ void __launch_bounds__(256) nvfp4_transpose(const u8* codes, u64 rows, u64 cols, u8* out) {
    const u64 pitch = (cols + 1) / 2, out_pitch = (rows + 1) / 2, across = (cols + 127) / 128;
    const u64 down = quotient(blockIdx.x, across);
    const u64 row = down * 128 + threadIdx.x % 16 * 8, col = (blockIdx.x - down * across) * 128 + threadIdx.x / 16 * 8;
    if (row >= rows || col >= cols) return;
    const int bytes = (tile_width(col, cols) + 1) / 2, out_bytes = (tile_width(row, rows) + 1) / 2;
    u32 w[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        w[r] = 0;
        if (row + r >= rows) continue;
        const u8* from = codes + (row + r) * pitch + col / 2;
        if (pitch % 4 == 0) {
            w[r] = *(const u32*)from;
        } else {
#pragma unroll 1
            for (int k = bytes - 1; k >= 0; k--) w[r] = w[r] << 8 | from[k];
        }
    }
    turn_codes(w);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        if (col + c < cols) store_packed4(out + (col + c) * out_pitch + row / 2, w[c], out_bytes, out_pitch % 4 == 0);
    }
}

// The factor of a product of two tensors, followed by a zero and a one. Each tensor has the factor that encodes and the one that
// decodes.
extern "C" __global__ void __launch_bounds__(32) nvfp4_alpha(const float* a, const float* b, float* out) {
    if (grid_thread() != 0) return;
    out[0] = a[1] * b[1];
    out[1] = 0.0f;
    out[2] = 1.0f;
}

// y is the scales of a [rows, depth] operand as cuBLASLt's VEC16_UE4M3 wants them: tiles of 128 rows by 4 blocks, zeros where there
// is no row or block; n bytes. A thread has the four blocks of a row.
extern "C" __global__ void __launch_bounds__(256)
    nvfp4_factors(const u8* scales, int tiles, u64 rows, u64 depth, u8* y, u64 n) {
    const u64 wide = (depth + FP4_BLOCK - 1) / FP4_BLOCK, across = (wide + 3) / 4;
    for (u64 i = grid_thread(); i < n / 4; i += grid_threads()) {
        const u64 tile = i / 128, down = quotient(tile, across), row = down * 128 + i % 4 * 32 + i % 128 / 4;
        const u64 block = (tile - down * across) * 4;
        u32 four = 0;
        if (row < rows) {
            const u8* from = scales + (tiles ? row / FP4_BLOCK : row) * wide;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (block + k < wide) four |= (u32)from[block + k] << (8 * k);
            }
        }
        ((u32*)y)[i] = four;
    }
}
