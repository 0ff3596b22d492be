#include "whole_tiles.cuh"
// quantize_tiles for bf16 in whole tiles, a kernel for each format, with the column sums and without.

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles_bf16_e4m3(const u16* x, u32 rows, u32 cols, u32 run, u8* codes, u8* columnwise, const float* scale,
                             float* scale_inv, int* amax, float* partial_sums) {
    quantize_whole_tiles<BF16, E4M3, 0>(x, rows, cols, run, codes, columnwise, scale, scale_inv, amax, partial_sums);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles_bf16_e5m2(const u16* x, u32 rows, u32 cols, u32 run, u8* codes, u8* columnwise, const float* scale,
                             float* scale_inv, int* amax, float* partial_sums) {
    quantize_whole_tiles<BF16, E5M2, 0>(x, rows, cols, run, codes, columnwise, scale, scale_inv, amax, partial_sums);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles_bf16_e4m3_sums(const u16* x, u32 rows, u32 cols, u32 run, u8* codes, u8* columnwise, const float* scale,
                                  float* scale_inv, int* amax, float* partial_sums) {
    quantize_whole_tiles<BF16, E4M3, 1>(x, rows, cols, run, codes, columnwise, scale, scale_inv, amax, partial_sums);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_tiles_bf16_e5m2_sums(const u16* x, u32 rows, u32 cols, u32 run, u8* codes, u8* columnwise, const float* scale,
                                  float* scale_inv, int* amax, float* partial_sums) {
    quantize_whole_tiles<BF16, E5M2, 1>(x, rows, cols, run, codes, columnwise, scale, scale_inv, amax, partial_sums);
}
