#include "tile_elements.cuh"
// Quantize with the transpose or the sums of the columns: a row of partial sums for each row of tiles.

// A block takes `run` tiles, one below the other. `codes`, `columnwise` and `partial_sums`, [rows of tiles, cols], may be
// null, and `scale` where the first two are.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles(const void* x, int dtype, u64 rows, u64 cols, u64 run, u8* codes, u8* columnwise, int format,
                   const float* scale, float* scale_inv, int* amax, u64* counters, float* partial_sums) {
    __shared__ float scratch[WARP];
    __shared__ float parts[TILE_THREADS / WARP * TILE_COLS];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    Codes out = begin_codes(scale, format, counters);
    write_scale_inv(scale, scale_inv);
    const u64 across = tiles_across(cols), down = blockIdx.x / across * run, col0 = blockIdx.x % across * TILE_COLS;
    Elements values = {x, dtype, cols, partial_sums != nullptr, {}};
    for (u64 i = down; i < down + run && i * TILE_ROWS < rows; i++) {
        const u64 row0 = i * TILE_ROWS;
#pragma unroll
        for (int k = 0; k < 8; k++) values.sums[k] = -0.0f;
        code_tile<4>(tile, out, codes, columnwise, rows, cols, row0, col0, values);
        if (partial_sums) tile_sums(parts, values.sums, partial_sums + i * cols + col0, col0, cols);
    }
    finish_codes(out, amax, counters, blockIdx.x == 0 ? rows * cols : 0, scratch);
}
