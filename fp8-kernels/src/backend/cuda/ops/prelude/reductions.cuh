// ---- reductions; a block has a whole number of warps ----

// The larger; NaN loses.
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

// Every thread gets the block's result. `scratch` holds 32 floats and may be used again at once.
__device__ __forceinline__ float block_max(float v, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    v = warp_max(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < warps; w++) v = fmaxf(v, scratch[w]);
    __syncthreads();
    return v;
}

__device__ __forceinline__ float block_sum(float v, float* scratch) {
    int warps = (int)blockDim.x / WARP;
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < warps; w++) v += scratch[w];
    __syncthreads();
    return v;
}

// Max-combines an amax into its cell. A signed maximum: cells rest at -1, whose bits are the smallest of all.
__device__ __forceinline__ void record_amax(int* cell, float amax) { atomicMax(cell, __float_as_int(amax)); }

