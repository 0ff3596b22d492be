// ---- column sums of tiles: what column_sums and every fused bias gradient add up, in one order ----

// `sums` are a thread's: its four rows of a tile, added in order, rows that are not there as zeros. `scratch` holds
// 8 · TILE_COLS floats. finish_sums follows after a barrier.
__device__ __forceinline__ void put_sums(float* scratch, const float sums[8]) {
    const int lane = threadIdx.x % WARP;
    float* to = scratch + threadIdx.x / WARP * TILE_COLS + 8 * lane;
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
        float all[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            all[k] = sums[half + k];
            all[k] += __shfl_xor_sync(FULL_WARP, all[k], 8);
            all[k] += __shfl_xor_sync(FULL_WARP, all[k], 16);
        }
        if (lane < 8) {
#pragma unroll
            for (int k = 0; k < 4; k++) to[half + k] = all[k];
        }
    }
}

// `partial` is the tile's first column in its row of partial sums, of which there is one for each TILE_ROWS rows. They are
// added by reduce_columns_finish. `scratch` may be used again after a barrier.
__device__ __forceinline__ void finish_sums(const float* scratch, float* partial, u64 col0, u64 cols) {
    if (threadIdx.x < TILE_COLS && col0 + threadIdx.x < cols) {
        float sum = scratch[threadIdx.x];
#pragma unroll
        for (int w = 1; w < TILE_THREADS / WARP; w++) sum += scratch[w * TILE_COLS + threadIdx.x];
        partial[threadIdx.x] = sum;
    }
}

// Both. Called by all threads; `scratch` may be used again at once.
__device__ __forceinline__ void tile_sums(float* scratch, const float sums[8], float* partial, u64 col0, u64 cols) {
    put_sums(scratch, sums);
    __syncthreads();
    finish_sums(scratch, partial, col0, cols);
    __syncthreads();
}
