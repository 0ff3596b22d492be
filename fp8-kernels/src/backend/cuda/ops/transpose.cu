// Transpose: [rows, cols] to [cols, rows], elements of 1, 2 or 4 bytes, through tiles in shared memory.
//
// 16-byte accesses, of 8 bytes for loads of bytes, wherever rows of x and of the output are multiples of them; ragged
// shapes go element by element in the same kernels.

// ---- bytes: tiles as in quantize ----

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    transpose_u8(const u8* x, u64 rows, u64 cols, u8* out) {
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    const u64 across = tiles_across(cols), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * across;
    const int whole = cols % 8 == 0;
    for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
        const u64 row0 = i / across * TILE_ROWS, col0 = i % across * TILE_COLS;
        const u64 row = row0 + tile_row(), col = col0 + tile_col();
        const int n = tile_width(col, cols);
        u32 low[4], high[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            uint2 words = make_uint2(0, 0);
            if (n > 0 && row + r < rows) {
                const u8* from = x + (row + r) * cols + col;
                if (whole) {
                    words = __ldg((const uint2*)from);
                } else {
                    u64 bits = 0;
#pragma unroll 1
                    for (int k = n - 1; k >= 0; k--) bits = (bits << 8) | from[k];
                    words = make_uint2((u32)bits, (u32)(bits >> 32));
                }
            }
            low[r] = words.x, high[r] = words.y;
        }
        put_four(tile, 0, low);
        put_four(tile, 4, high);
        __syncthreads();
        store_columns(tile, out, rows, cols, row0, col0);
        __syncthreads();
    }
}

// ---- elements of 2 and 4 bytes ----

#define SIDE 64
#define TRANSPOSE_THREADS 256

template <typename T>
__device__ __forceinline__ void transpose_elements(const T* x, u64 rows, u64 cols, T* out) {
    // A word more a row, so that neither side of the tile meets a bank more than twice.
    __shared__ T tile[SIDE][SIDE + 4 / sizeof(T)];
    constexpr int WIDTH = 16 / sizeof(T), ACROSS = SIDE / WIDTH, PASS = TRANSPOSE_THREADS / ACROSS;
    const int line = threadIdx.x / ACROSS, at = threadIdx.x % ACROSS * WIDTH;
    const u64 across = (cols + SIDE - 1) / SIDE, tiles = (rows + SIDE - 1) / SIDE * across;
    for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
        const u64 row0 = i / across * SIDE, col0 = i % across * SIDE;
#pragma unroll
        for (int pass = 0; pass < SIDE; pass += PASS) {
            const int r = pass + line;
            const u64 row = row0 + r, col = col0 + at;
            if (row >= rows || col >= cols) continue;
            const T* from = x + row * cols + col;
            if (cols % WIDTH == 0) {
                uint4 raw = load16(from);
                u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    tile[r][at + k] = sizeof(T) == 4 ? (T)w[k % 4] : (T)(w[k / 2] >> (16 * (k % 2)));
                }
            } else {
#pragma unroll 1
                for (int k = 0; k < WIDTH && col + k < cols; k++) tile[r][at + k] = from[k];
            }
        }
        __syncthreads();
#pragma unroll
        for (int pass = 0; pass < SIDE; pass += PASS) {
            const int c = pass + line;
            const u64 col = col0 + c, row = row0 + at;
            if (row >= rows || col >= cols) continue;
            T* to = out + col * rows + row;
            if (rows % WIDTH == 0) {
                u32 w[4] = {0, 0, 0, 0};
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    if (sizeof(T) == 4) w[k % 4] = (u32)tile[at + k][c];
                    else w[k / 2] |= (u32)tile[at + k][c] << (16 * (k % 2));
                }
                store16(to, make_uint4(w[0], w[1], w[2], w[3]));
            } else {
#pragma unroll 1
                for (int k = 0; k < WIDTH && row + k < rows; k++) to[k] = tile[at + k][c];
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(TRANSPOSE_THREADS)
    transpose_u16(const u16* x, u64 rows, u64 cols, u16* out) {
    transpose_elements(x, rows, cols, out);
}

extern "C" __global__ void __launch_bounds__(TRANSPOSE_THREADS)
    transpose_u32(const u32* x, u64 rows, u64 cols, u32* out) {
    transpose_elements(x, rows, cols, out);
}
