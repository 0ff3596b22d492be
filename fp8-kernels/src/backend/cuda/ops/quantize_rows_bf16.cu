#include "blocks.cuh"
#include "whole_blocks.cuh"
// quantize_blocks for bf16 in whole tiles: rows, their amaxes first.

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_rows_measure(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    measure_whole_block<BF16>(shared, x, cols, row_amaxes, col_amaxes, one_column);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_rows_e4m3(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E4M3, BLOCKS_ROW>(shared, x, rows, cols, sink);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)
    quantize_blocks_bf16_rows_e5m2(const u16* x, u32 rows, u32 cols, BLOCK_PARAMS) {
    __shared__ WholeShared shared;
    const BlockSink sink = BLOCK_SINK;
    quantize_whole_block<BF16, E5M2, BLOCKS_ROW>(shared, x, rows, cols, sink);
}
