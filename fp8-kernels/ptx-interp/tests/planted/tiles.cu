// Codes of a matrix, their transpose by way of a tile in shared memory, and the amax: x is [rows, cols], rows a multiple
// of 64 and cols of 32. 256 threads; a block takes `run` tiles below each other. A cell holds -1 until it is met.
#define TILE_ROWS 64
#define TILE_COLS 32
#ifdef BUG_PITCH_66
#define PITCH 66
#else
#define PITCH 68
#endif

__device__ __forceinline__ int code(float x, float scale) {
    return (int)rintf(fminf(fmaxf(x * scale, -127.0f), 127.0f)) & 0xff;
}

extern "C" __global__ void __launch_bounds__(256)
tiles(const float* x, int rows, int cols, int run, float scale, u8* codes, u8* turned, float* largest, int* amax) {
    extern __shared__ __align__(16) u8 room[];
    // Behind the tile: the largest value of each column, by each of the eight warps.
    u8* tile = room;
#ifdef BUG_TILE_ROW_SHORT
    float* parts = (float*)(room + (TILE_COLS - 1) * PITCH);
#else
    float* parts = (float*)(room + TILE_COLS * PITCH);
#endif
    float* scratch = parts + 8 * TILE_COLS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int col0 = blockIdx.x * TILE_COLS, col = col0 + lane;
    float top = 0.0f;
    for (int t = 0; t < run; t++) {
        const int row0 = (blockIdx.y * run + t) * TILE_ROWS;
        float column = 0.0f;
#pragma unroll 1
        for (int group = warp; group < TILE_ROWS / 4; group += 8) {
            u32 packed = 0;
#pragma unroll 1
            for (int k = 0; k < 4; k++) {
                const int at = (row0 + group * 4 + k) * cols + col;
                const float v = x[at];
                const int c = code(v, scale);
#ifdef BUG_AMAX_AFTER_SCALING
                column = fmaxf(column, fabsf(v * scale));
#else
                column = fmaxf(column, fabsf(v));
#endif
                codes[at] = c;
                packed |= c << (8 * k);
            }
            *(u32*)(tile + lane * PITCH + group * 4) = packed;
        }
        parts[warp * TILE_COLS + lane] = column;
        top = fmaxf(top, column);
#ifdef BUG_NO_TILE_BARRIER
        __syncwarp();
#else
        __syncthreads();
#endif
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE_COLS * TILE_ROWS / 4; i += 256) {
            const int c = i / (TILE_ROWS / 4), chunk = i % (TILE_ROWS / 4);
#ifdef BUG_WRONG_SMEM_INDEX
            const u32 packed = *(const u32*)(tile + c * PITCH + (chunk ^ 1) * 4);
#else
            const u32 packed = *(const u32*)(tile + c * PITCH + chunk * 4);
#endif
            *(u32*)(turned + (col0 + c) * rows + row0 + chunk * 4) = packed;
        }
        if (threadIdx.x < TILE_COLS) {
            float m = 0.0f;
#pragma unroll 1
            for (int w = 0; w < 8; w++) m = fmaxf(m, parts[w * TILE_COLS + threadIdx.x]);
            largest[(blockIdx.y * run + t) * cols + col] = m;
        }
#ifndef BUG_NO_BARRIER_BEFORE_TILE_REUSE
        __syncthreads();
#endif
    }
    top = block_max(top, scratch);
    if (threadIdx.x == 0) {
#if defined(BUG_PLAIN_AMAX)
        *amax = max(*amax, __float_as_int(top));
#elif defined(BUG_UNSIGNED_ATOMIC_MAX)
        atomicMax((u32*)amax, (u32)__float_as_int(top));
#else
        atomicMax(amax, __float_as_int(top));
#endif
    }
}
