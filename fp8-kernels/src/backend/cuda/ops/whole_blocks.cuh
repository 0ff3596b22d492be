// Scales for rows and blocks, as in blocks.cuh, for 16-bit values in whole tiles: matrices with a multiple of 128 rows and of 128
// columns, and nothing counted. A tile stays in registers as pairs, and amaxes are those of pairs.

#define WHOLE_BLOCK_PAIRS (BLOCK_TILE / 2)
// Words from one warp's amaxes of columns to the next one's: four warps' words are in different banks.
#define WHOLE_BLOCK_PITCH (WHOLE_BLOCK_PAIRS + 8)

struct WholeShared {
    // Scales of the tile's rows and columns, behind one another those of the four blocks of MX.
    float row[4 * BLOCK_TILE];
    float col[4 * BLOCK_TILE];
    // What each warp found in its eight rows: amaxes of columns in pairs; or sums.
    __align__(16) union {
        u32 pairs[BLOCK_WARPS][WHOLE_BLOCK_PITCH];
        float sums[BLOCK_WARPS][BLOCK_TILE];
    } parts;
    // Codes of the transpose, four rows a word.
    uint4 tile[BLOCK_TILE][BLOCK_TILE / 16];
};

// A thread's four rows of eight values.
struct BlockPart {
    u32 w[4][4];
};

__device__ __forceinline__ BlockPart load_block_part(const u16* x, u32 cols) {
    BlockPart part;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint4 raw = load16(x + (u64)r * cols);
        part.w[r][0] = raw.x, part.w[r][1] = raw.y, part.w[r][2] = raw.z, part.w[r][3] = raw.w;
    }
    return part;
}

template <int DTYPE>
__device__ __forceinline__ u32 shuffled_max(u32 pair, int step) {
    return max2<DTYPE>(pair, __shfl_xor_sync(FULL_WARP, pair, step));
}

// The amaxes of the thread's four rows over `LANES` threads: rows 0 and 1 in one pair, 2 and 3 in the other.
template <int DTYPE, int LANES>
__device__ __forceinline__ void row_peaks(const BlockPart& part, u32 peaks[2]) {
    u32 row[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        row[r] = max2<DTYPE>(max2<DTYPE>(abs2<DTYPE>(part.w[r][0]), abs2<DTYPE>(part.w[r][1])),
                             max2<DTYPE>(abs2<DTYPE>(part.w[r][2]), abs2<DTYPE>(part.w[r][3])));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 first = row[2 * half], second = row[2 * half + 1];
        // A row of nothing but NaN has amax 0.
        u32 peak = max2<DTYPE>(max2<DTYPE>(permute<0x5410>(first, second), permute<0x7632>(first, second)), 0u);
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) peak = shuffled_max<DTYPE>(peak, step);
        peaks[half] = peak;
    }
}

// The largest magnitudes of the thread's eight columns, in pairs. Returns a pair that has NaN where one of the values is.
template <int DTYPE>
__device__ __forceinline__ u32 col_peaks(const BlockPart& part, u32 peaks[4]) {
    u32 any = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        peaks[k] = max2_nan<DTYPE>(max2_nan<DTYPE>(abs2<DTYPE>(part.w[0][k]), abs2<DTYPE>(part.w[1][k])),
                                   max2_nan<DTYPE>(abs2<DTYPE>(part.w[2][k]), abs2<DTYPE>(part.w[3][k])));
        any = max2_nan<DTYPE>(any, peaks[k]);
    }
    if (has_nan<DTYPE>(any)) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 first = max2<DTYPE>(max2<DTYPE>(0u, abs2<DTYPE>(part.w[0][k])), abs2<DTYPE>(part.w[1][k]));
            peaks[k] = max2<DTYPE>(max2<DTYPE>(first, abs2<DTYPE>(part.w[2][k])), abs2<DTYPE>(part.w[3][k]));
        }
    }
    return any;
}

// One word of four columns from each warp: combined over the two row groups of the warp.
template <int DTYPE>
__device__ __forceinline__ void put_peaks(WholeShared& shared, u32 peaks[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) peaks[k] = shuffled_max<DTYPE>(peaks[k], 16);
    if (threadIdx.x % WARP < 16) {
        *(uint4*)&shared.parts.pairs[threadIdx.x / WARP][threadIdx.x % 16 * 4] = make_uint4(peaks[0], peaks[1], peaks[2], peaks[3]);
    }
}

// The amax of column 2 · word + thread % 2 over all rows, for threads in fours: thread / 4 % WHOLE_BLOCK_PAIRS is the word.
template <int DTYPE>
__device__ __forceinline__ float column_peak(const WholeShared& shared, int word, int lane) {
    u32 peak = 0;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; w += 4) peak = max2<DTYPE>(peak, shared.parts.pairs[w + lane][word]);
    peak = shuffled_max<DTYPE>(peak, 1);
    peak = shuffled_max<DTYPE>(peak, 2);
    float low, high;
    widen2<DTYPE>(peak, &low, &high);
    return lane & 1 ? high : low;
}

// The amax of column `col` over the 32 rows of block `sub`.
template <int DTYPE>
__device__ __forceinline__ float column_peak_of_32(const WholeShared& shared, int col, int sub) {
    u32 peak = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) peak = max2<DTYPE>(peak, shared.parts.pairs[4 * sub + w][col / 2]);
    float low, high;
    widen2<DTYPE>(peak, &low, &high);
    return col & 1 ? high : low;
}

// Where the word of a thread's column k is: see column_word. Columns 0 … 7 of a thread are lines of one chunk.
__device__ __forceinline__ u32* turned_words(WholeShared& shared) {
    const int col = block_col(), group = (int)threadIdx.x / 16;
    const int chunk = group / 4 ^ (col / 8 % 8), word = group % 4 ^ (col / 64 * 2);
    return (u32*)&shared.tile[col][chunk] + word;
}

// A complete tile of codes to its place in [cols, rows].
__device__ __forceinline__ void store_turned(const WholeShared& shared, u8* columnwise, u32 rows, u32 row0, u32 col0) {
    const u32 col = threadIdx.x / 8, chunk = threadIdx.x % 8, swapped = chunk ^ (col / 8);
    const uint4 low = shared.tile[col][swapped], high = shared.tile[col + 64][swapped];
    u8* to = columnwise + (u64)(col0 + col) * rows + (row0 + chunk * 16);
    store16(to, low);
    store16(to + (u64)64 * rows, make_uint4(high.z, high.w, high.x, high.y));
}

// The codes of the transpose, each column by its scale.
template <int DTYPE, int FORMAT>
__device__ __forceinline__ void put_turned(WholeShared& shared, const BlockPart& part, const float* scales, int mends) {
    u32* to = turned_words(shared);
    const float4 s0 = *(const float4*)scales, s1 = *(const float4*)(scales + 4);
    const float s[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float low[4], high[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            widen2<DTYPE>(part.w[r][k], low + r, high + r);
            low[r] *= s[2 * k];
            high[r] *= s[2 * k + 1];
        }
        u32 first = encode2_numbers(low[0], low[1], FORMAT) | encode2_numbers(low[2], low[3], FORMAT) << 16;
        u32 second = encode2_numbers(high[0], high[1], FORMAT) | encode2_numbers(high[2], high[3], FORMAT) << 16;
        if (mends) {
            first = plain_nan(first, FORMAT);
            second = plain_nan(second, FORMAT);
        }
        // A column is a line of 128 bytes.
        to[2 * k * (BLOCK_TILE / 4)] = first;
        to[(2 * k + 1) * (BLOCK_TILE / 4)] = second;
    }
}

// Sums of the tile's columns, in the order of tile_sums. Barriers around it are the caller's.
template <int DTYPE>
__device__ __forceinline__ void put_block_sums(WholeShared& shared, const BlockPart& part) {
    float all[8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float low[4], high[4];
#pragma unroll
        for (int r = 0; r < 4; r++) widen2<DTYPE>(part.w[r][k], low + r, high + r);
        all[2 * k] = ((low[0] + low[1]) + low[2]) + low[3];
        all[2 * k + 1] = ((high[0] + high[1]) + high[2]) + high[3];
    }
#pragma unroll
    for (int k = 0; k < 8; k++) all[k] += __shfl_xor_sync(FULL_WARP, all[k], 16);
    if (threadIdx.x % WARP < 16) {
        float4* to = (float4*)&shared.parts.sums[threadIdx.x / WARP][block_col()];
        to[0] = make_float4(all[0], all[1], all[2], all[3]);
        to[1] = make_float4(all[4], all[5], all[6], all[7]);
    }
}

__device__ __forceinline__ void finish_block_sums(const WholeShared& shared, float* partial) {
    const int col = threadIdx.x;
    if (col >= BLOCK_TILE) return;
    float sum = shared.parts.sums[0][col] + shared.parts.sums[1][col];
#pragma unroll
    for (int w = 2; w < BLOCK_WARPS; w += 2) sum += shared.parts.sums[w][col] + shared.parts.sums[w + 1][col];
    partial[col] = sum;
}

// Quantizes the block's tile of a [rows, cols] matrix. BLOCKS and FORMAT are those of the sink; its counters are null, and it does
// not measure.
template <int DTYPE, int FORMAT, int BLOCKS>
__device__ __forceinline__ void quantize_whole_block(WholeShared& shared, const u16* x, u32 rows, u32 cols,
                                                     const BlockSink& given) {
    constexpr int SUBS = BLOCKS == BLOCKS_MX32 ? 4 : 1;
    // Known here, so that the rules' divisions by constants cost nothing.
    BlockSink sink = given;
    sink.blocks = BLOCKS, sink.format = FORMAT, sink.fp8_max = FORMAT == E4M3 ? 448.0f : 57344.0f;
    const u32 across = cols / BLOCK_TILE, down = blockIdx.x / across;
    const u32 row0 = down * BLOCK_TILE, col0 = (blockIdx.x - down * across) * BLOCK_TILE;
    const int thread = (int)threadIdx.x, row = block_row(), col = block_col();
    const u64 place = (u64)(row0 + row) * cols + (col0 + col);
    const BlockPart part = load_block_part(x + place, cols);

    u32 peaks[4], rows_of[2];
    int mends = has_nan<DTYPE>(col_peaks<DTYPE>(part, peaks));
    if (BLOCKS == BLOCKS_128X128) {
        u32 peak = max2<DTYPE>(max2<DTYPE>(peaks[0], peaks[1]), max2<DTYPE>(peaks[2], peaks[3]));
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) peak = shuffled_max<DTYPE>(peak, step);
        if (thread % WARP == 0) ((u32*)shared.row)[thread / WARP] = peak;
    } else if (BLOCKS != BLOCKS_ROW) {
        row_peaks<DTYPE, 16 / SUBS>(part, rows_of);
        if (thread % (16 / SUBS) == 0) {
            float v[4];
            widen2<DTYPE>(rows_of[0], v, v + 1);
            widen2<DTYPE>(rows_of[1], v + 2, v + 3);
            *(float4*)(shared.row + thread % 16 / (16 / SUBS) * BLOCK_TILE + row) = make_float4(v[0], v[1], v[2], v[3]);
        }
        if (sink.columnwise) put_peaks<DTYPE>(shared, peaks);
    }
    if (BLOCKS != BLOCKS_ROW) __syncthreads();

    // One thread for each scale.
    float scale_of_tile = 0.0f, amax = 0.0f;
    if (BLOCKS == BLOCKS_128X128) {
        u32 peak = ((const u32*)shared.row)[thread % BLOCK_WARPS];
#pragma unroll
        for (int step = 1; step < BLOCK_WARPS; step *= 2) peak = shuffled_max<DTYPE>(peak, step);
        amax = larger_half<DTYPE>(peak);
        const BlockScale scale = block_scale(sink, amax);
        scale_of_tile = scale.scale;
        if (thread == 0) {
            store_factor(sink, sink.scale_inv, (u64)(row0 / BLOCK_TILE) * across + col0 / BLOCK_TILE, scale);
            if (sink.columnwise) {
                store_factor(sink, sink.columnwise_scale_inv, (u64)(col0 / BLOCK_TILE) * (rows / BLOCK_TILE) + row0 / BLOCK_TILE,
                             scale);
            }
            if (sink.amax) record_amax(sink.amax, amax);
        }
    } else {
        if (thread < SUBS * BLOCK_TILE) {
            const int at = thread % BLOCK_TILE, sub = thread / BLOCK_TILE;
            amax = BLOCKS == BLOCKS_ROW ? __int_as_float(sink.row_amaxes[row0 + at]) : shared.row[thread];
            const BlockScale scale = block_scale(sink, amax);
            shared.row[thread] = scale.scale;
            if (BLOCKS != BLOCKS_ROW) {
                store_factor(sink, sink.scale_inv, (u64)(row0 + at) * (across * SUBS) + (col0 / BLOCK_TILE * SUBS + sub), scale);
            } else if (col0 == 0) {
                store_factor(sink, sink.scale_inv, row0 + at, scale);
            }
            if (sink.amax) {
                amax = warp_max(amax);
                if (thread % WARP == 0) record_amax(sink.amax, amax);
            }
        }
        if (sink.columnwise && BLOCKS == BLOCKS_MX32) {
            const int at = thread % BLOCK_TILE, sub = thread / BLOCK_TILE;
            const BlockScale scale = block_scale(sink, column_peak_of_32<DTYPE>(shared, at, sub));
            shared.col[thread] = scale.scale;
            store_factor(sink, sink.columnwise_scale_inv,
                         (u64)(col0 + at) * (rows / BLOCK_TILE * SUBS) + (row0 / BLOCK_TILE * SUBS + sub), scale);
        } else if (sink.columnwise && thread >= BLOCK_THREADS / 2) {
            const int word = thread / 4 % WHOLE_BLOCK_PAIRS, lane = thread % 4, at = 2 * word + lane % 2;
            float column = 0.0f;
            if (BLOCKS == BLOCKS_1X128) column = column_peak<DTYPE>(shared, word, lane);
            else column = __int_as_float(sink.col_amaxes[sink.one_column ? 0 : col0 + at]);
            if (lane < 2) {
                const BlockScale scale = block_scale(sink, column);
                shared.col[at] = scale.scale;
                if (BLOCKS == BLOCKS_1X128) {
                    store_factor(sink, sink.columnwise_scale_inv, (u64)(col0 + at) * (rows / BLOCK_TILE) + row0 / BLOCK_TILE,
                                 scale);
                } else if (row0 == 0 && (!sink.one_column || col0 + at == 0)) {
                    store_factor(sink, sink.columnwise_scale_inv, col0 + at, scale);
                }
            }
        }
        __syncthreads();
    }

    if (sink.columnwise && BLOCKS != BLOCKS_128X128) {
        put_turned<DTYPE, FORMAT>(shared, part, shared.col + (SUBS == 1 ? 0 : row / 32 * BLOCK_TILE) + col, mends);
    }
    // All have read the amaxes that were here.
    const int sums = sink.partial_sums != nullptr;
    if (sums) put_block_sums<DTYPE>(shared, part);
    float scales[4] = {scale_of_tile, scale_of_tile, scale_of_tile, scale_of_tile};
    if (BLOCKS != BLOCKS_128X128) {
        const float4 s = *(const float4*)(shared.row + (SUBS == 1 ? 0 : col / 32 * BLOCK_TILE) + row);
        scales[0] = s.x, scales[1] = s.y, scales[2] = s.z, scales[3] = s.w;
    }
    u32 low[4], high[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        low[r] = codes4<DTYPE, FORMAT>(part.w[r][0], part.w[r][1], scales[r]);
        high[r] = codes4<DTYPE, FORMAT>(part.w[r][2], part.w[r][3], scales[r]);
        if (mends) {
            low[r] = plain_nan(low[r], FORMAT);
            high[r] = plain_nan(high[r], FORMAT);
        }
        *(uint2*)(sink.codes + place + (u64)r * cols) = make_uint2(low[r], high[r]);
    }
    if (sink.columnwise && BLOCKS == BLOCKS_128X128) {
        u32* to = turned_words(shared);
        u32 columns[8];
        turn_four(columns, low);
        turn_four(columns + 4, high);
#pragma unroll
        for (int k = 0; k < 8; k++) to[k * (BLOCK_TILE / 4)] = columns[k];
    }
    __syncthreads();
    if (sink.columnwise) store_turned(shared, sink.columnwise, rows, row0, col0);
    if (sums) finish_block_sums(shared, sink.partial_sums + (u64)(row0 / BLOCK_TILE) * cols + col0);
}

// Max-combines the amaxes of the rows and columns of the block's tile: what BLOCKS_ROW makes scales of.
template <int DTYPE>
__device__ __forceinline__ void measure_whole_block(WholeShared& shared, const u16* x, u32 cols, int* row_amaxes,
                                                    int* col_amaxes, int one_column) {
    const u32 across = cols / BLOCK_TILE, down = blockIdx.x / across;
    const u32 row0 = down * BLOCK_TILE, col0 = (blockIdx.x - down * across) * BLOCK_TILE;
    const int thread = (int)threadIdx.x, row = block_row();
    const BlockPart part = load_block_part(x + (u64)(row0 + row) * cols + (col0 + block_col()), cols);
    u32 peaks[4], rows_of[2];
    row_peaks<DTYPE, 16>(part, rows_of);
    if (thread % 16 == 0) {
        float v[4];
        widen2<DTYPE>(rows_of[0], v, v + 1);
        widen2<DTYPE>(rows_of[1], v + 2, v + 3);
#pragma unroll
        for (int r = 0; r < 4; r++) record_amax(row_amaxes + row0 + row + r, v[r]);
    }
    if (!col_amaxes) return;
    col_peaks<DTYPE>(part, peaks);
    put_peaks<DTYPE>(shared, peaks);
    __syncthreads();
    if (thread >= BLOCK_THREADS / 2) return;
    const int word = thread / 4, lane = thread % 4;
    float amax = column_peak<DTYPE>(shared, word, lane);
    if (one_column) {
        amax = warp_max(amax);
        if (thread % WARP == 0) record_amax(col_amaxes, amax);
    } else if (lane < 2) {
        record_amax(col_amaxes + col0 + 2 * word + lane, amax);
    }
}
