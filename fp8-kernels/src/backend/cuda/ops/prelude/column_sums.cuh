// ---- column sums of tiles: what column_sums and every fused bias gradient add up, in one order ----

// `sums` are a thread's: its four rows of a tile, added in order, rows that are not there as zeros. `scratch` holds
// 8 · TILE_COLS floats and may be used again at once; `partial` is the tile's first column in its row of partial sums,
// of which there is one for each TILE_ROWS rows. Called by all threads. The rows of partial sums are added by
// reduce_columns_finish.
__device__ __forceinline__ void tile_sums(float* scratch, const float sums[8], float* partial, u64 col0, u64 cols) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float sum = sums[k];
        sum += __shfl_xor_sync(FULL_WARP, sum, 8);
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        if (lane < 8) scratch[threadIdx.x / WARP * TILE_COLS + 8 * lane + k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TILE_COLS && col0 + threadIdx.x < cols) {
        float sum = scratch[threadIdx.x];
#pragma unroll
        for (int w = 1; w < TILE_THREADS / WARP; w++) sum += scratch[w * TILE_COLS + threadIdx.x];
        partial[threadIdx.x] = sum;
    }
    __syncthreads();
}
