#include "whole_tiles.cuh"
#include "quantize_many.cuh"
// quantize_many for tensors of bf16 in whole tiles, with their transposes and without counters.

template <int FORMAT>
__device__ __forceinline__ float whole_run(u32* tile, const WholeMatrix& of, u32 index, u32 tiles, float scale) {
    const u32 across = of.cols / TILE_COLS, down = index / across;
    return code_whole_tiles<BF16, FORMAT, 0, ALONG>(tile, nullptr, of, down * TILE_ROWS, (index - down * across) * TILE_COLS, tiles,
                                                    scale, nullptr);
}

// As quantize_many. There are fewer than 2^32 tiles.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 3)
    quantize_many_bf16(const u64* table, int entries, u32 tiles, u32 run) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    // Uniform, and registers are dear.
    __shared__ WholeMatrix of;
    const Entry* list = (const Entry*)table;
    u32 next = blockIdx.x * run;
    const u32 end = tiles - next < run ? tiles : next + run;
    for (int e = entry_of(list, entries, next); e < entries && next < end; e++) {
        const Entry& entry = list[e];
        if (threadIdx.x == 0) of = {(const u16*)entry.x, entry.codes, entry.columnwise, (u32)entry.rows, (u32)entry.cols};
        __syncthreads();
        const u32 index = next - (u32)entry.first_tile;
        const u32 left = (u32)(entry.rows / TILE_ROWS) * (u32)(entry.cols / TILE_COLS) - index;
        const u32 count = left < end - next ? left : end - next;
        if (index == 0 && threadIdx.x == 0) *entry.scale_inv = 1.0f / fabsf(*entry.scale);
        const float scale = fabsf(*entry.scale);
        const float largest = entry.types >> 8 == E4M3 ? whole_run<E4M3>(tile, of, index, count, scale)
                                                       : whole_run<E5M2>(tile, of, index, count, scale);
        if (entry.amax) {
            const float all = block_max(largest, scratch);
            if (threadIdx.x == 0) record_amax(entry.amax, all);
        }
        next += count;
    }
}
