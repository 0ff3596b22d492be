#include "blocks.cuh"
#include "tile_elements.cuh"
// Quantize with a scale for each row or block, and back to numbers.

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks(const void* x, int dtype, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Elements values = {x, dtype, cols, 0, {}};
    block_tile<4, 4, 1>(shared, sink, rows, cols, values);
}

// Where the factor of an element is among those of a [rows, cols] matrix; `wide` is how many a row of them has.
__device__ __forceinline__ u64 factor_place(int blocks, u64 row, u64 col, u64 wide) {
    if (blocks == BLOCKS_ROW) return row;
    if (blocks == BLOCKS_128X128) return row / BLOCK_TILE * wide + col / BLOCK_TILE;
    return row * wide + col / (blocks == BLOCKS_MX32 ? 32 : BLOCK_TILE);
}

// value = code · factor in f32, rounded to the dtype, with a factor for each row or block: f32, or E8M0 for MX. Eight values of a
// row share their factor where rows are a multiple of eight.
extern "C" __global__ void __launch_bounds__(256)
    dequantize_blocks(const u8* codes, u64 n, u64 cols, int format, int blocks, const void* scale_inv, void* out, int dtype) {
    const u64 width = blocks == BLOCKS_MX32 ? 32 : BLOCK_TILE, wide = (cols + width - 1) / width;
    const u64 step = cols % 8 == 0 ? 8 : 1;
    for (u64 i = grid_thread() * step; i < n; i += grid_threads() * step) {
        const u64 row = quotient(i, cols), place = factor_place(blocks, row, i - row * cols, wide);
        const float factor = blocks == BLOCKS_MX32 ? e8m0_value(((const u8*)scale_inv)[place])
                                                   : ((const float*)scale_inv)[place];
        if (step == 8) {
            float v[8];
            decode8(v, *(const uint2*)(codes + i), format, factor);
            store8(out, dtype, i, v);
        } else {
            float value, none;
            decode2(codes[i], format, &value, &none);
            store1(out, dtype, i, value * factor);
        }
    }
}
