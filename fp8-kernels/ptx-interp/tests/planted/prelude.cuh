// What the planted kernels share. Each file is compiled once as it is and once with each of its BUG_… names defined; see
// tests/planted.rs. Blocks have a multiple of 32 threads, at most 1024.
typedef unsigned char u8;
typedef unsigned int u32;

__device__ __forceinline__ float warp_max(float v) {
#ifdef BUG_SHORT_SHUFFLE_TREE
    for (int step = 8; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, step));
#else
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, step));
#endif
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffff, v, step);
    return v;
}

// The largest of the block's values, in all threads. `scratch` holds a float for each warp, and is free again after the
// next barrier.
__device__ __forceinline__ float block_max(float v, float* scratch) {
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
#ifdef BUG_NO_BARRIER_IN_BLOCK_MAX
    __syncwarp();
#else
    __syncthreads();
#endif
    float m = scratch[0];
#pragma unroll 1
    for (u32 w = 1; w < blockDim.x / 32; w++) m = fmaxf(m, scratch[w]);
    return m;
}

__device__ __forceinline__ float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float s = 0.0f;
#pragma unroll 1
    for (u32 w = 0; w < blockDim.x / 32; w++) s += scratch[w];
    return s;
}
