#include "blocks.cuh"
#include "whole_blocks.cuh"
// quantize_blocks for bf16 in whole tiles: MX blocks.

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_mx_e4m3(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E4M3, BLOCKS_MX32>(shared, x, rows, cols, sink);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_mx_e5m2(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E5M2, BLOCKS_MX32>(shared, x, rows, cols, sink);
}
