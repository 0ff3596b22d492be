// Which elements dropout keeps: src/backend/cpu/dropout.rs.

// Where a mask's random numbers begin, as the host lays it out. In device memory, so that a replayed launch draws anew.
struct DropoutKey {
    u64 seed, offset;
};

// Of one mask: the key, how many counters behind its offset the mask begins, and the smallest random number that is kept.
struct Mask {
    const DropoutKey* key;
    u64 first;
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

// Bits of whether COUNT elements from `element` on are kept, the first one's the lowest; what is above them means nothing.
template <int COUNT>
__device__ __forceinline__ u32 kept_bits(const DropoutKey& key, u64 element, const Mask& mask) {
    const u32 skipped = (u32)element & 3;
    u64 counter = key.offset + mask.first + (element >> 2), bits = 0;
    // One counter more where the elements begin inside one. Each brings four bits in from above.
#pragma unroll 1
    for (int i = skipped ? -1 : 0; i < COUNT / 4; i++, counter++) {
        u32 r[4], four = 0;
        philox4x32_10(r, counter, key.seed);
#pragma unroll
        for (int j = 0; j < 4; j++) four |= r[j] >= mask.threshold ? 1u << j : 0u;
        bits = bits >> 4 | (u64)four << COUNT;
    }
    return (u32)(bits >> (skipped ? skipped : 4));
}

// Whether one element is kept.
__device__ __forceinline__ int is_kept(const DropoutKey& key, u64 element, const Mask& mask) {
    u32 r[4];
    philox4x32_10(r, key.offset + mask.first + (element >> 2), key.seed);
    const u32 low = element & 1 ? r[1] : r[0], high = element & 1 ? r[3] : r[2];
    return (element & 2 ? high : low) >= mask.threshold;
}
