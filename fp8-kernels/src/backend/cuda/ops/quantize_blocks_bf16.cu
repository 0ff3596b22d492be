#include "blocks.cuh"
#include "whole_blocks.cuh"
// quantize_blocks for bf16 in whole tiles: 1 x 128 and 128 x 128 blocks, which go together.

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_1x128_e4m3(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E4M3, BLOCKS_1X128>(shared, x, rows, cols, sink);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_1x128_e5m2(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E5M2, BLOCKS_1X128>(shared, x, rows, cols, sink);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_128x128_e4m3(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E4M3, BLOCKS_128X128>(shared, x, rows, cols, sink);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_128x128_e5m2(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E5M2, BLOCKS_128X128>(shared, x, rows, cols, sink);
}
