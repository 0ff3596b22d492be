// Codes as stored and transposed of whole tiles of 16-bit values: matrices with a multiple of 128 rows and of 64 columns, and
// nothing counted. The next tile's loads are under way while a tile is encoded.

// What is quantized, and to where: codes as stored and transposed.
struct WholeMatrix {
    const u16* x;
    u8* codes;
    u8* columnwise;
    u32 rows;
    u32 cols;
};

// One thread's parts of the tile at (row0, col0): four rows of eight values, as pairs.
__device__ __forceinline__ void load_part(uint4 part[4], const WholeMatrix& of, u32 row0, u32 col0) {
    const u32 cols = of.cols;
    const u16* from = of.x + (u64)(row0 + (u32)tile_row()) * cols + (col0 + (u32)tile_col());
#pragma unroll
    for (int r = 0; r < 4; r++) part[r] = load16(from + (u64)r * cols);
}

// The largest magnitude of a part in each half of a pair, where NaN wins, or loses.
template <int DTYPE>
__device__ __forceinline__ u32 part_peak_nan(const uint4 part[4]) {
    u32 peak = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        peak = max2_nan<DTYPE>(peak, abs2<DTYPE>(part[r].x));
        peak = max2_nan<DTYPE>(peak, abs2<DTYPE>(part[r].y));
        peak = max2_nan<DTYPE>(peak, abs2<DTYPE>(part[r].z));
        peak = max2_nan<DTYPE>(peak, abs2<DTYPE>(part[r].w));
    }
    return peak;
}

template <int DTYPE>
__device__ __forceinline__ u32 part_peak(const uint4 part[4]) {
    u32 peak = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        peak = max2<DTYPE>(max2<DTYPE>(peak, abs2<DTYPE>(part[r].x)), abs2<DTYPE>(part[r].y));
        peak = max2<DTYPE>(max2<DTYPE>(peak, abs2<DTYPE>(part[r].z)), abs2<DTYPE>(part[r].w));
    }
    return peak;
}

// The sums of a part's eight columns, added in order.
template <int DTYPE>
__device__ __forceinline__ void part_sums(float sums[8], const uint4 part[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float v[8];
        widen2<DTYPE>(part[r].x, v, v + 1);
        widen2<DTYPE>(part[r].y, v + 2, v + 3);
        widen2<DTYPE>(part[r].z, v + 4, v + 5);
        widen2<DTYPE>(part[r].w, v + 6, v + 7);
#pragma unroll
        for (int k = 0; k < 8; k++) sums[k] = r == 0 ? v[k] : sums[k] + v[k];
    }
}

// Where a block goes from a tile: down a strip of 64 columns, or along the rows of tiles.
enum { DOWN = 0, ALONG = 1 };

template <int WAY>
__device__ __forceinline__ void next_tile(u32& row0, u32& col0, u32 cols) {
    if (WAY == DOWN) {
        row0 += TILE_ROWS;
    } else {
        col0 += TILE_COLS;
        if (col0 == cols) col0 = 0, row0 += TILE_ROWS;
    }
}

// Quantizes `tiles` tiles from the one at (row0, col0) on and returns the thread's amax. Where SUMS is 1, the way is DOWN,
// `partial_sums` is the place of the first tile's sums in [rows of tiles, cols], and `columnwise` may be null. `of` may be in
// shared memory. All threads of a block come here.
template <int DTYPE, int FORMAT, int SUMS, int WAY>
__device__ __forceinline__ float code_whole_tiles(u32* tile, float* parts, const WholeMatrix& of, u32 row0, u32 col0, u32 tiles,
                                                  float scale, float* partial_sums) {
    // The chunks of the transpose that this thread stores are those of columns `column` and `column` + 32.
    const u32 column = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint4* turned0 = (const uint4*)(tile + column * (TILE_ROWS / 4) + ((chunk ^ (column / 8)) << 2));
    const uint4* turned1 = (const uint4*)(tile + (column + 32) * (TILE_ROWS / 4) + ((chunk ^ (column / 8 + 4)) << 2));
    u32 largest = 0;
    uint4 next[4];
    if (tiles > 0) load_part(next, of, row0, col0);
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        uint4 part[4];
#pragma unroll
        for (int r = 0; r < 4; r++) part[r] = next[r];
        if (SUMS) {
            float sums[8];
            part_sums<DTYPE>(sums, part);
            put_sums(parts, sums);
        }
        const u32 row = row0, col = col0;
        next_tile<WAY>(row0, col0, of.cols);
        if (tiles > 1) load_part(next, of, row0, col0);
        u32 low[4], high[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            low[r] = codes4<DTYPE, FORMAT>(part[r].x, part[r].y, scale);
            high[r] = codes4<DTYPE, FORMAT>(part[r].z, part[r].w, scale);
        }
        u32 peak = part_peak_nan<DTYPE>(part);
        if (has_nan<DTYPE>(peak) || !keeps_numbers(scale)) {
            peak = part_peak<DTYPE>(part);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                low[r] = plain_nan(low[r], FORMAT);
                high[r] = plain_nan(high[r], FORMAT);
            }
        }
        largest = max2<DTYPE>(largest, peak);

        const u32 cols = of.cols;
        u8* to = of.codes + (u64)(row + (u32)tile_row()) * cols + (col + (u32)tile_col());
#pragma unroll
        for (int r = 0; r < 4; r++) *(uint2*)(to + (u64)r * cols) = make_uint2(low[r], high[r]);
        if (!SUMS || of.columnwise) {
            put_four(tile, 0, low);
            put_four(tile, 4, high);
        }
        __syncthreads();
        if (!SUMS || of.columnwise) {
            const u32 rows = of.rows;
            u8* side = of.columnwise + (u64)(col + column) * rows + (row + chunk * 16);
            store16(side, *turned0);
            store16(side + (u64)32 * rows, *turned1);
        }
        if (SUMS) {
            finish_sums(parts, partial_sums, 0, TILE_COLS);
            partial_sums += of.cols;
        }
        __syncthreads();
    }
    return larger_half<DTYPE>(largest);
}

// The kernel: a block takes `run` tiles, one below the other.
template <int DTYPE, int FORMAT, int SUMS>
__device__ __forceinline__ void quantize_whole_tiles(const u16* x, u32 rows, u32 cols, u32 run, u8* codes, u8* columnwise,
                                                     const float* scale, float* scale_inv, int* amax, float* partial_sums) {
    __shared__ float scratch[WARP];
    __shared__ float parts[SUMS ? TILE_THREADS / WARP * TILE_COLS : 1];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    write_scale_inv(scale, scale_inv);
    const u32 across = cols / TILE_COLS, strip = blockIdx.x / across, col0 = (blockIdx.x - strip * across) * TILE_COLS;
    const u32 first = strip * run, left = rows / TILE_ROWS - first, tiles = left < run ? left : run;
    if (SUMS) partial_sums += (u64)first * cols + col0;
    const WholeMatrix of = {x, codes, columnwise, rows, cols};
    const float largest = code_whole_tiles<DTYPE, FORMAT, SUMS, DOWN>(tile, parts, of, first * TILE_ROWS, col0, tiles,
                                                                      fabsf(*scale), partial_sums);
    if (amax) {
        const float all = block_max(largest, scratch);
        if (threadIdx.x == 0) record_amax(amax, all);
    }
}
