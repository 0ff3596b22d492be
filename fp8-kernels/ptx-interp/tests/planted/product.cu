// c = a · bᵀ for a [32, k], b [16, k] of bf16 and k a multiple of 16: two warps, two stages of tiles.
typedef unsigned short u16;

__device__ __forceinline__ u32 place(u32 tile, int row, int chunk) { return tile + row * 32 + ((chunk ^ (row / 4 % 2)) << 4); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 m[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void fetch(u32 stage, const u16* a, const u16* b, u32 k, u32 from) {
    const int row = threadIdx.x / 2, chunk = threadIdx.x % 2;
    copy16(place(stage, row, chunk), a + row * k + from + 8 * chunk);
    if (row < 16) copy16(place(stage + 1024, row, chunk), b + row * k + from + 8 * chunk);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(64) product(const u16* a, const u16* b, u32 k, float* c) {
    __shared__ __align__(16) char memory[2 * 1536];
    u32 tiles;
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(tiles) : "l"(memory));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[2][4] = {};
    fetch(tiles, a, b, k, 0);
#pragma unroll 1
    for (u32 from = 0; from < k; from += 16) {
        const u32 stage = tiles + from / 16 % 2 * 1536, next = tiles + (from / 16 + 1) % 2 * 1536;
#ifndef BUG_NO_WAIT
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
#ifdef BUG_NO_BARRIER_AFTER_WAIT
        __syncwarp();
#else
        __syncthreads();
#endif
        if (from + 16 < k) fetch(next, a, b, k, from + 16);
        u32 left[4], right[4];
        load_matrices(left, place(stage, warp * 16 + lane % 16, lane / 16));
#ifdef BUG_WRONG_FRAGMENT
        load_matrices(right, place(stage + 1024, lane % 16, lane / 16));
#else
        load_matrices(right, place(stage + 1024, lane % 8 + lane / 16 * 8, lane / 8 % 2));
#endif
#ifdef BUG_DIVERGENT_PRODUCT
        if (lane < 28)
#endif
        multiply(sums[0], left, right[0], right[1]);
        multiply(sums[1], left, right[2], right[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
#ifdef BUG_WRONG_RESULT_ROW
            const int row = warp * 16 + lane / 4 + e % 2 * 8, column = 8 * n + lane % 4 * 2 + e / 2;
#else
            const int row = warp * 16 + lane / 4 + e / 2 * 8, column = 8 * n + lane % 4 * 2 + e % 2;
#endif
            c[row * 16 + column] = sums[n][e];
        }
    }
}
