// Scales for rows, 1 x 128 blocks, 128 x 128 blocks and MX blocks of 32: scales, codes and the codes of the transpose, from
// one read of the values.
//
// A thread block of 512 threads holds a tile of 128 x 128 values in registers, four rows of eight columns a thread, so it has
// every block that lies in the tile, as stored and transposed. Scales of whole rows and columns need the whole matrix: a first
// launch, `measure`, finds the amaxes, and a second one computes the codes.
//
// The rules are those of fp8-format's arch/blocks.rs, operation by operation.

#define BLOCK_TILE 128
#define BLOCK_THREADS 512
#define BLOCK_WARPS (BLOCK_THREADS / WARP)

// Which elements share a scale, as the host numbers them.
enum { BLOCKS_ROW = 0, BLOCKS_1X128 = 1, BLOCKS_128X128 = 2, BLOCKS_MX32 = 3 };
// How an amax becomes a scale.
enum { SCALE_EXACT = 0, SCALE_POWER_OF_TWO = 1, SCALE_MX_CEIL = 2, SCALE_MX_FLOOR = 3 };

// What a launch computes. The factors are f32, or bytes for MX; those of the transpose have the transpose's grid.
struct BlockSink {
    int blocks;
    int rule;
    float fp8_max;
    float epsilon;
    float scale_max;  // of a quotient that overflows
    u8* codes;
    u8* columnwise;  // null: none
    int format;
    void* scale_inv;
    void* columnwise_scale_inv;
    // Only for BLOCKS_ROW: amaxes of rows and of columns, max-combined where `measure` is set and read where it is not.
    int* row_amaxes;
    int* col_amaxes;
    int one_column;  // all columns share col_amaxes[0] and one factor
    int measure;
    int* amax;
    u64* counters;
    float* partial_sums;  // column sums of the values, a row for each tile: see tile_sums; null: none
};

#define BLOCK_PARAMS                                                                                                   \
    int blocks, int rule, float fp8_max, float epsilon, float scale_max, u8 *codes, u8 *columnwise, int format,        \
        void *scale_inv, void *columnwise_scale_inv, int *row_amaxes, int *col_amaxes, int one_column, int measure,    \
        int *amax, u64 *counters, float *partial_sums
#define BLOCK_SINK                                                                                                     \
    {blocks, rule, fp8_max, epsilon, scale_max, codes, columnwise, format, scale_inv, columnwise_scale_inv,            \
     row_amaxes, col_amaxes, one_column, measure, amax, counters, partial_sums}

// A block's scale, and the factor that is stored: the f32 `inverse`, or for MX `byte`.
struct BlockScale {
    float scale;
    float inverse;
    u8 byte;
};

// 2^(bits - 127), as E8M0 has it.
__device__ __forceinline__ float e8m0_value(u32 bits) { return __int_as_float(bits == 0 ? 0x00400000 : (int)(bits << 23)); }

__device__ __forceinline__ BlockScale block_scale(const BlockSink& sink, float amax) {
    if (sink.rule >= SCALE_MX_CEIL) {
        u32 bits, exponent;
        if (sink.rule == SCALE_MX_CEIL) {
            bits = (u32)__float_as_int(amax * (1.0f / sink.fp8_max));
            // 2^-127 is subnormal.
            exponent = (bits >> 23) + ((bits & 0x007fffffu) > (bits < 0x00800000u ? 0x00400000u : 0u));
        } else {
            const u32 largest = sink.format == E4M3 ? 8u : 15u;
            bits = (u32)__float_as_int(amax);
            exponent = bits >> 23 > largest ? (bits >> 23) - largest : 0u;
        }
        if (bits >= 0x7f800000u) exponent = 254u;
        return {e8m0_value(254u - exponent), 0.0f, (u8)exponent};
    }
    const float a = amax < sink.epsilon ? sink.epsilon : amax;
    float scale = sink.fp8_max / a;
    if (scale == INFINITY_F) scale = sink.scale_max;
    if (a == 0.0f || a == INFINITY_F) scale = 1.0f;
    if (sink.rule == SCALE_POWER_OF_TWO) scale = __int_as_float(__float_as_int(scale) & (int)0xff800000);
    return {scale, 1.0f / scale, 0};
}

__device__ __forceinline__ void store_factor(const BlockSink& sink, void* factors, u64 i, const BlockScale& scale) {
    if (sink.blocks == BLOCKS_MX32) ((u8*)factors)[i] = scale.byte;
    else ((float*)factors)[i] = scale.inverse;
}

struct BlockShared {
    // Amaxes, then scales, of the tile's rows and columns: four each for MX, else one.
    float row[4 * BLOCK_TILE];
    float col[4 * BLOCK_TILE];
    // What each warp found in its eight rows: amaxes of columns, then sums.
    float4 parts[BLOCK_WARPS][BLOCK_TILE / 4];
    // Codes of the transpose, four rows a word.
    uint4 tile[BLOCK_TILE][BLOCK_TILE / 16];
    float scratch[WARP];
};

// A thread's part of the tile: four rows of eight columns from these on.
__device__ __forceinline__ int block_row() { return (int)threadIdx.x / 16 * 4; }
__device__ __forceinline__ int block_col() { return (int)threadIdx.x % 16 * 8; }

// Where the word of a column's four rows is, so that neither side meets a bank twice: chunks of 16 rows are exchanged by the
// column's group of eight, and the halves of a chunk in the tile's right half.
__device__ __forceinline__ u32* column_word(BlockShared& shared, int col) {
    const int group = (int)threadIdx.x / 16, chunk = group / 4 ^ (col / 8 % 8), word = group % 4 ^ (col / 64 * 2);
    return (u32*)&shared.tile[col][chunk] + word;
}

__device__ __forceinline__ void store_block_columns(const BlockShared& shared, u8* columnwise, u64 rows, u64 cols, u64 row0,
                                                    u64 col0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_TILE * (BLOCK_TILE / 16); i += BLOCK_THREADS) {
        const int col = i / 8, chunk = i % 8;
        uint4 codes = shared.tile[col][chunk ^ (col / 8 % 8)];
        if (col >= 64) codes = make_uint4(codes.z, codes.w, codes.x, codes.y);
        const u64 first = row0 + chunk * 16;
        if (col0 + col >= cols || first >= rows) continue;
        u8* out = columnwise + (col0 + col) * rows + first;
        if (rows % 16 == 0) {
            store16(out, codes);
            continue;
        }
        u64 low = codes.x | (u64)codes.y << 32, high = codes.z | (u64)codes.w << 32;
#pragma unroll 1
        for (int k = 0; k < 16 && first + k < rows; k++) {
            out[k] = (u8)low;
            low = (low >> 8) | (high << 56);
            high >>= 8;
        }
    }
}

// One value a column from each warp: combined over the two row groups of the warp, into `shared.parts`.
template <typename Combine>
__device__ __forceinline__ void put_parts(BlockShared& shared, const float v[8], Combine combine) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float all[8];
#pragma unroll
    for (int k = 0; k < 8; k++) all[k] = combine(v[k], __shfl_xor_sync(FULL_WARP, v[k], 16));
    if (lane < 16) {
        shared.parts[warp][2 * lane] = make_float4(all[0], all[1], all[2], all[3]);
        shared.parts[warp][2 * lane + 1] = make_float4(all[4], all[5], all[6], all[7]);
    }
}

// The next row becomes the first one: registers move, so that a loop over rows has one body.
__device__ __forceinline__ void rotate(float v[4][8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float first = v[0][k];
        v[0][k] = v[1][k], v[1][k] = v[2][k], v[2][k] = v[3][k], v[3][k] = first;
    }
}

// The tile at (row0, col0) of a [rows, cols] matrix, for all threads of a block. `values` has two members, of which the first is
// called for all of a thread's rows before the second: load(v, row, col, n) and compute(v, row, col, n), for the n values of a
// row from col on, and zeros behind them. LOADS and UNROLL are 4 where the one and the other take few instructions, else 1: one body
// for the four rows. SUMS is 0
// where no column sums are asked for; in the norm the compiler spills registers without them.
template <int LOADS, int UNROLL, int SUMS, typename Values>
__device__ __forceinline__ void block_tile(BlockShared& shared, const BlockSink& sink, u64 rows, u64 cols, Values& values) {
    const u64 across = (cols + BLOCK_TILE - 1) / BLOCK_TILE;
    const u64 row0 = blockIdx.x / across * BLOCK_TILE, col0 = blockIdx.x % across * BLOCK_TILE;
    // What there is of the tile, and a thread's place in it.
    const int tile_rows = rows - row0 < BLOCK_TILE ? (int)(rows - row0) : BLOCK_TILE;
    const int tile_cols = cols - col0 < BLOCK_TILE ? (int)(cols - col0) : BLOCK_TILE;
    const int row = block_row(), col = block_col(), thread = threadIdx.x;
    const int n = tile_cols - col < 8 ? (tile_cols - col < 0 ? 0 : tile_cols - col) : 8;
    const int subs = sink.blocks == BLOCKS_MX32 ? 4 : 1, is_tile = sink.blocks == BLOCKS_128X128;
    const int is_row = sink.blocks == BLOCKS_ROW, turns = sink.columnwise || (sink.measure && sink.col_amaxes);

    float v[4][8];
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
    }
#pragma unroll LOADS
    for (int r = 0; r < 4; r++) {
        if (n > 0 && row + r < tile_rows) values.load(v[0], row0 + (row + r), col0 + col, n);
        rotate(v);
    }
#pragma unroll UNROLL
    for (int r = 0; r < 4; r++) {
        if (n > 0 && row + r < tile_rows) values.compute(v[0], row0 + (row + r), col0 + col, n);
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[0][k]));
        // Amaxes of 32 columns are those of four threads, amaxes of 128 those of sixteen.
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        if (subs == 1) {
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 4));
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 8));
        }
        if (thread % (16 / subs) == 0) shared.row[(row + r) * subs + thread % 16 / 4 % subs] = largest;
        rotate(v);
    }
    if (turns && !is_tile) {
        float columns[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            // NaN loses, and against another NaN, 0 wins.
            const float first = fmaxf(fmaxf(0.0f, fabsf(v[0][k])), fabsf(v[1][k]));
            columns[k] = fmaxf(fmaxf(first, fabsf(v[2][k])), fabsf(v[3][k]));
        }
        put_parts(shared, columns, [](float a, float b) { return fmaxf(a, b); });
    }
    __syncthreads();

    // One thread for each scale: entry `thread` of rows, and of columns.
    const int live_row = thread / subs < tile_rows && thread % subs * 32 < tile_cols;
    const int at_col = thread % BLOCK_TILE, at_sub = thread / BLOCK_TILE;
    const int live_col = turns && at_sub < subs && at_col < tile_cols && at_sub * 32 < tile_rows;
    float column = 0.0f;
    if (live_col && !is_tile) {
        const int warps = BLOCK_WARPS / subs;
        for (int w = at_sub * warps; w < (at_sub + 1) * warps; w++) {
            column = fmaxf(column, ((const float*)shared.parts[w])[at_col]);
        }
    }
    if (sink.measure) {
        if (live_row) record_amax(sink.row_amaxes + row0 + thread, shared.row[thread]);
        if (sink.one_column) {
            column = block_max(column, shared.scratch);
            if (thread == 0 && sink.col_amaxes) record_amax(sink.col_amaxes, column);
        } else if (live_col) {
            record_amax(sink.col_amaxes + col0 + at_col, column);
        }
        return;
    }
    if (is_tile) {
        float largest = fmaxf(shared.row[thread % WARP], shared.row[thread % WARP + 32]);
        largest = fmaxf(largest, fmaxf(shared.row[thread % WARP + 64], shared.row[thread % WARP + 96]));
        column = warp_max(largest);
        __syncthreads();
        if (live_row) shared.row[thread] = column;
    }
    if (live_row) {
        const float amax = is_row ? __int_as_float(sink.row_amaxes[row0 + thread]) : shared.row[thread];
        const BlockScale scale = block_scale(sink, amax);
        shared.row[thread] = scale.scale;
        const u64 wide = is_row ? 1 : (cols + BLOCK_TILE / subs - 1) / (BLOCK_TILE / subs);
        if (is_tile) {
            if (thread == 0) store_factor(sink, sink.scale_inv, row0 / BLOCK_TILE * wide + col0 / BLOCK_TILE, scale);
        } else if (!is_row || col0 == 0) {
            const u64 block = is_row ? 0 : col0 / (BLOCK_TILE / subs) + thread % subs;
            store_factor(sink, sink.scale_inv, (row0 + thread / subs) * wide + block, scale);
        }
    }
    if (live_col) {
        if (is_row) column = __int_as_float(sink.col_amaxes[sink.one_column ? 0 : col0 + at_col]);
        const BlockScale scale = block_scale(sink, column);
        shared.col[at_col * subs + at_sub] = scale.scale;
        const u64 wide = is_row ? 1 : (rows + BLOCK_TILE / subs - 1) / (BLOCK_TILE / subs);
        if (is_tile) {
            if (thread == 0) store_factor(sink, sink.columnwise_scale_inv, col0 / BLOCK_TILE * wide + row0 / BLOCK_TILE, scale);
        } else if (!is_row || row0 == 0) {
            const u64 block = is_row ? 0 : row0 / (BLOCK_TILE / subs) + at_sub;
            const u64 place = sink.one_column ? 0 : (col0 + at_col) * wide + block;
            if (!sink.one_column || col0 + at_col == 0) store_factor(sink, sink.columnwise_scale_inv, place, scale);
        }
    }
    __syncthreads();

    Codes out = begin_codes(nullptr, sink.format, sink.counters);
#pragma unroll UNROLL
    for (int r = 0; r < 4; r++) {
        if (n > 0 && row + r < tile_rows) {
            out.scale = shared.row[(row + r) * subs + thread % 16 / 4 % subs];
            const u64 place = (row0 + (row + r)) * cols + (col0 + col);
            store_codes8(sink.codes + place, code8(out, v[0]), n, cols % 8 == 0);
        }
        rotate(v);
    }
    if (sink.columnwise) {
        const int sub = row / 32 % subs;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int live = k < n && sub * 32 < tile_rows;
            const float scale = live ? shared.col[(col + k) * subs + sub] : 0.0f;
            const u32 low = encode2(v[0][k] * scale, v[1][k] * scale, sink.format);
            const u32 high = encode2(v[2][k] * scale, v[3][k] * scale, sink.format);
            *column_word(shared, col + k) = low | high << 16;
        }
        __syncthreads();
        store_block_columns(shared, sink.columnwise, rows, cols, row0, col0);
    }
    if (SUMS && sink.partial_sums) {
        // All have read the amaxes that were here. The order is that of tile_sums.
        float sums[8];
#pragma unroll
        for (int k = 0; k < 8; k++) sums[k] = (((-0.0f + v[0][k]) + v[1][k]) + v[2][k]) + v[3][k];
        put_parts(shared, sums, [](float a, float b) { return a + b; });
        __syncthreads();
        if (thread < tile_cols) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < BLOCK_WARPS; w += 2) {
                const float pair = ((const float*)shared.parts[w])[thread] + ((const float*)shared.parts[w + 1])[thread];
                sum = w == 0 ? pair : sum + pair;
            }
            sink.partial_sums[row0 / BLOCK_TILE * cols + col0 + thread] = sum;
        }
    }
    finish_codes(out, sink.amax, sink.counters, blockIdx.x == 0 ? rows * cols : 0, shared.scratch);
}
