// Philox4x32-10 with a counter of 128 bits: fp8_format::philox::block. dropout.cuh has it for counters of 64 bits.

__device__ __forceinline__ void philox_block(u32 r[4], u64 low, u64 high, u64 seed) {
    u32 c0 = (u32)low, c1 = (u32)(low >> 32), c2 = (u32)high, c3 = (u32)(high >> 32);
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 low0 = 0xd2511f53u * c0, high0 = __umulhi(0xd2511f53u, c0);
        u32 low1 = 0xcd9e8d57u * c2, high1 = __umulhi(0xcd9e8d57u, c2);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    r[0] = c0;
    r[1] = c1;
    r[2] = c2;
    r[3] = c3;
}
