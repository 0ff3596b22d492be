// Dropout: src/backend/cpu/dropout.rs. Eight elements of a thread take two counters of Philox4x32-10.

// What decides the mask, as the host lays it out. In device memory, so that a captured launch can be replayed with
// another key.
struct DropoutKey {
    u64 seed, offset;
    u32 threshold;
    float factor;
};

__device__ __forceinline__ void philox4x32_10(u32 r[4], u64 counter, u64 seed) {
    u32 c0 = (u32)counter, c1 = (u32)(counter >> 32), c2 = 0, c3 = 0;
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

extern "C" __global__ void __launch_bounds__(256)
    dropout(const void* x, void* y, u64 n, int dtype, const void* key) {
    DropoutKey k = *(const DropoutKey*)key;
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        u32 r[8];
        if (i + 8 <= n) {
            Raw8 raw = raw8(x, dtype, i);
            philox4x32_10(r, k.offset + chunk * 2, k.seed);
            philox4x32_10(r + 4, k.offset + chunk * 2 + 1, k.seed);
            float v[8];
            widen8(v, raw, dtype);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = r[j] >= k.threshold ? v[j] * k.factor : 0.0f;
            store8(y, dtype, i, v);
        } else {
            for (u64 part = chunk * 2; i < n; part++) {
                philox4x32_10(r, k.offset + part, k.seed);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (i < n) store1(y, dtype, i, r[j] >= k.threshold ? load1(x, dtype, i) * k.factor : 0.0f);
                    i++;
                }
            }
        }
    }
}
