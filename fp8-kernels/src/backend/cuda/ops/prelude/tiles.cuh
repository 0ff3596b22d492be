// ---- tiles of codes, as stored and transposed: 128 rows of 64 columns for 256 threads ----

#define TILE_ROWS 128
#define TILE_COLS 64
#define TILE_THREADS 256
// The transposed codes of one tile in shared memory, four rows a word.
#define TILE_WORDS (TILE_COLS * TILE_ROWS / 4)

__device__ __forceinline__ u64 tiles_across(u64 cols) { return (cols + TILE_COLS - 1) / TILE_COLS; }

// A thread's part: four rows of eight columns from these on.
__device__ __forceinline__ u64 tile_row() { return (threadIdx.x / 8) * 4; }
__device__ __forceinline__ u64 tile_col() { return (threadIdx.x % 8) * 8; }

// How many of a thread's eight columns from `col` on there are.
__device__ __forceinline__ int tile_width(u64 col, u64 cols) {
    return col < cols ? (cols - col < 8 ? (int)(cols - col) : 8) : 0;
}

// The codes of a row's n values; `whole` where rows are a multiple of eight, so that n is 8.
__device__ __forceinline__ void store_codes8(u8* to, uint2 codes, int n, int whole) {
    if (whole) {
        *(uint2*)to = codes;
        return;
    }
    u64 left = codes.x | (u64)codes.y << 32;
#pragma unroll 1
    for (int k = 0; k < n; k++, left >>= 8) to[k] = (u8)left;
}

// The four rows' codes of a thread's column j into the tile. Chunks of 16 rows stand at (chunk xor column / 8): neither
// side meets a bank twice.
__device__ __forceinline__ void put_column(u32* tile, int j, u32 codes) {
    const int lane_row = (threadIdx.x / 8) % 4, lane_col = threadIdx.x % 8, warp = threadIdx.x / WARP;
    tile[(tile_col() + j) * (TILE_ROWS / 4) + ((warp ^ lane_col) << 2) + lane_row] = codes;
}

// Four rows of four bytes, transposed.
__device__ __forceinline__ void turn_four(u32 columns[4], const u32 rows[4]) {
    u32 first = __byte_perm(rows[0], rows[1], 0x5140), second = __byte_perm(rows[2], rows[3], 0x5140);
    u32 third = __byte_perm(rows[0], rows[1], 0x7362), fourth = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(first, second, 0x5410);
    columns[1] = __byte_perm(first, second, 0x7632);
    columns[2] = __byte_perm(third, fourth, 0x5410);
    columns[3] = __byte_perm(third, fourth, 0x7632);
}

// The same for columns j … j + 3, from a word of each row.
__device__ __forceinline__ void put_four(u32* tile, int j, const u32 rows[4]) {
    u32 columns[4];
    turn_four(columns, rows);
#pragma unroll
    for (int k = 0; k < 4; k++) put_column(tile, j + k, columns[k]);
}

// A complete tile to its place in [cols, rows]. Barriers before and after are the caller's.
__device__ __forceinline__ void store_columns(const u32* tile, u8* columnwise, u64 rows, u64 cols, u64 row0, u64 col0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_COLS * 8; i += TILE_THREADS) {
        const int column = i / 8, chunk = i % 8;
        uint4 codes = *(const uint4*)(tile + column * (TILE_ROWS / 4) + ((chunk ^ (column / 8)) << 2));
        const u64 first = row0 + chunk * 16;
        if (col0 + column < cols && first < rows) {
            u8* out = columnwise + (col0 + column) * rows + first;
            if (rows % 16 == 0) {
                store16(out, codes);
            } else {
                u64 low = codes.x | (u64)codes.y << 32, high = codes.z | (u64)codes.w << 32;
#pragma unroll 1
                for (int k = 0; k < 16 && first + k < rows; k++) {
                    out[k] = (u8)low;
                    low = (low >> 8) | (high << 56);
                    high >>= 8;
                }
            }
        }
    }
}

// Quantizes the tile at (row0, col0) of a [rows, cols] matrix. `values` has two members, of which the first is called for
// all of a thread's rows before the second: load(v, row, col, n) and compute(v, row, col, n), for the n values of a row
// from col on. n is 8 wherever cols is a multiple of eight. `rowwise` and `columnwise` may be null. The next tile may
// follow at once. UNROLL is 4 where a row takes few instructions, else 1: one body for the four rows.
template <int UNROLL = 1, typename Values>
__device__ __forceinline__ void code_tile(u32* tile, Codes& out, u8* rowwise, u8* columnwise, u64 rows, u64 cols,
                                          u64 row0, u64 col0, Values& values) {
    const u64 row = row0 + tile_row(), col = col0 + tile_col();
    const int n = tile_width(col, cols);
    float v[4][8];
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        if (n > 0 && row + r < rows) values.load(v[r], row + r, col, n);
    }
    // Registers move up, values and words of codes alike.
    u32 low[4], high[4];
#pragma unroll UNROLL
    for (int r = 0; r < 4; r++) {
        const int live = n > 0 && row + r < rows;
        if (live) values.compute(v[0], row + r, col, n);
        uint2 codes = code8(out, v[0]);
        if (rowwise && live) store_codes8(rowwise + (row + r) * cols + col, codes, n, cols % 8 == 0);
#pragma unroll
        for (int k = 0; k < 3; k++) {
            low[k] = low[k + 1], high[k] = high[k + 1];
#pragma unroll
            for (int j = 0; j < 8; j++) v[k][j] = v[k + 1][j];
        }
        low[3] = codes.x, high[3] = codes.y;
    }
    if (!columnwise) return;
    put_four(tile, 0, low);
    put_four(tile, 4, high);
    __syncthreads();
    store_columns(tile, columnwise, rows, cols, row0, col0);
    __syncthreads();
}

