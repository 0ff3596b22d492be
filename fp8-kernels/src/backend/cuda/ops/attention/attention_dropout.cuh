// Dropout of probabilities. It follows dropout.cuh and attention.cuh.
//
// The elements of the mask are the probabilities [batch, heads, queries, keys] in row-major order, of all `heads` of a layer, of
// which a call has those from `first_head` on. A warp owns 16 rows, of
// queries or of keys, and goes through the other side in tiles. Its lanes compute the bits of such a tile together and read
// each other's by shuffles: no shared memory, no barrier, and one register between.

struct NoDropout {
    static constexpr int ON = 0;
};

__device__ __forceinline__ int drops(const NoDropout&) { return 0; }

struct Dropout {
    static constexpr int ON = 1;
    Mask mask;
    u32 first_head, heads;
};

__device__ __forceinline__ int drops(const Dropout&) { return 1; }

// For kernels that serve calls with and without dropout: the latter have no key.
struct OptionalDropout : Dropout {};

__device__ __forceinline__ int drops(const OptionalDropout& dropout) { return dropout.mask.key != 0; }

#define DROPOUT_ON_PARAMETERS                                                                              \
    const DropoutKey *dropout_key, u64 dropout_first, u32 dropout_threshold, float dropout_factor,         \
        u32 dropout_first_head, u32 dropout_heads,
#define DROPOUT_ON_VALUE                                                                                   \
    Dropout {                                                                                              \
        {dropout_key, dropout_first, dropout_threshold, dropout_factor}, dropout_first_head, dropout_heads \
    }

// The mask's first element of a head.
__device__ __forceinline__ u64 mask_start(const Dropout& dropout, const Call& call, u32 batch, u32 head) {
    return ((u64)batch * dropout.heads + (dropout.first_head + head)) * call.queries * call.keys;
}

// A lane's part of the bits of a tile of 16 owned rows, from `own` on, and COLUMNS rows of the other side, from `start` on.
// Queries owned: half of the keys of query lane / 2. Keys owned: the 16 keys of query `lane`, above them those of query
// lane + 32.
template <int OWNS_KEYS, int COLUMNS>
__device__ __forceinline__ u32 tile_bits(const Dropout& dropout, u64 head, u32 keys, u32 own, u32 start) {
    const u32 lane = threadIdx.x % WARP;
    const DropoutKey key = *dropout.mask.key;
    if constexpr (!OWNS_KEYS) {
        const u64 element = head + (u64)(own + lane / 2) * keys + (start + lane % 2 * (COLUMNS / 2));
        return kept_bits<COLUMNS / 2>(key, element, dropout.mask);
    } else {
        u32 word = 0;
#pragma unroll 1
        for (int query = COLUMNS - WARP; query >= 0; query -= WARP) {
            const u64 element = head + (u64)(start + query + lane) * keys + own;
            word = word << 16 | (kept_bits<16>(key, element, dropout.mask) & 0xffffu);
        }
        return word;
    }
}

// Of the tile's lanes: the bits of row `row`, those of keys from 0 and those of keys from COLUMNS / 2 on.
__device__ __forceinline__ void bits_of_row(u32 (&bits)[2], u32 word, int row) {
    bits[0] = __shfl_sync(FULL_WARP, word, 2 * row);
    bits[1] = __shfl_sync(FULL_WARP, word, 2 * row + 1);
}

// Where keys are owned: the bits of the owned rows with query `query` of the tile.
__device__ __forceinline__ u32 bits_of_query(u32 word, int query) {
    return __shfl_sync(FULL_WARP, word, query % WARP) >> (query / WARP * 16);
}
