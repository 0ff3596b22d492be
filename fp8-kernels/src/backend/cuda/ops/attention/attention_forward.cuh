// What attention.cu and attention_dropout.cu are made of: attention with the tensor cores. It follows attention.cuh and
// attention_dropout.cuh.
//
// A block owns 64 queries and goes through the keys they see in rising order. Scores, softmax and sums are f32. Shared memory
// is dynamic: two stages of keys and values.

// The largest and the sum over the four lanes that share a row.
__device__ __forceinline__ float row_max_of(float v) {
    v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 1));
    return fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 2));
}

__device__ __forceinline__ float row_sum_of(float v) {
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}

// Probabilities keep twice the digits of their type: as a value and what it drops, each with a product of its own. With one
// of them, outputs that nearly cancel would be off by more than the tolerance.
template <int DTYPE, int D, int KEYS, typename Drop>
__device__ __forceinline__ void forward(char* memory, Block& block, const u16* q, const u16* k, const u16* v, u16* o, float* row_max,
                                        float* row_sum, SEQUENCE_PARAMETERS, const Call& call, const Drop& dropout) {
    constexpr u32 TILE = KEYS * D * 2, STAGE = 2 * TILE;
    const u32 stages = shared_address(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // The last queries of a causal head see most: they go first.
    const u32 index = call.tiles - 1 - blockIdx.x % call.tiles;
    if (!start_block<0, 0>(block, call, SEQUENCES, index, blockIdx.x / call.tiles, 1)) return;
    const u32 first = block.tile.first, group = block.owner / (call.heads / call.groups);
    const u64 q_stride = (u64)call.heads * call.head_dim, k_stride = (u64)call.groups * call.head_dim;
    const u64 q_start = block.elements(call.queries, call.heads, call.head_dim);
    const u64 k_start = (u64)block.tile.batch * call.keys * k_stride + (u64)group * call.head_dim;

    // Queries pass through the second stage into registers.
    u32 rows[D / 16][4];
    load_tile<D, ROWS>(stages + STAGE, q + q_start, q_stride, first, block.tile.end, call.head_dim);
    commit_copies();
    load_tile<D, KEYS>(stages, k + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    load_tile<D, KEYS>(stages + TILE, v + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D / 16; i++) load_left<D>(rows[i], stages + STAGE, warp * 16, i);

    float out[D / 8][4], max[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.0f, 0.0f};
    clear(out);
    const float scale = call.scale * LOG2_E;
    u32 stage = 0;
    const Span* of_warp = block.spans + warp * 16;
#pragma unroll 1
    for (u32 start = block.begin(); start < block.end(); start += KEYS) {
        wait_copies<0>();
        __syncthreads();
        const u32 tile = stages + stage * STAGE;
        stage ^= 1;
        if (start + KEYS < block.end()) {
            const u32 next = stages + stage * STAGE;
            load_tile<D, KEYS>(next, k + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            load_tile<D, KEYS>(next + TILE, v + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            commit_copies();
        }
        u32 kept_word = 0;
        if constexpr (Drop::ON) {
            const u64 head = mask_start(dropout, call, block.tile.batch, block.owner);
            kept_word = tile_bits<0, KEYS>(dropout, head, call.keys, block.tile.first + warp * 16, start);
        }
        float scores[KEYS / 8][4];
        clear(scores);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 m[4];
                load_right<D>(m, tile, n * 16, i);
                multiply<DTYPE>(scores[2 * n], rows[i], m[0], m[1]);
                multiply<DTYPE>(scores[2 * n + 1], rows[i], m[2], m[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] *= scale;
        }
        if (is_partial(of_warp, start, start + KEYS)) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Relative to the lane's first key.
                const Span span = of_warp[lane / 4 + 8 * half];
                const u32 own_key = start + lane % 4 * 2;
                const int begin = (int)(span.begin - own_key), end = (int)(span.end - own_key);
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    if (8 * n < begin || 8 * n >= end) scores[n][2 * half] = -INFINITY_F;
                    if (8 * n + 1 < begin || 8 * n + 1 >= end) scores[n][2 * half + 1] = -INFINITY_F;
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -INFINITY_F;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            largest = fmaxf(max[half], row_max_of(largest));
            // Where nothing was seen, -inf - -inf would be NaN.
            const float origin = largest == -INFINITY_F ? 0.0f : largest;
            const float shrink = exp2_approx(max[half] - origin);
            float added = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                scores[n][2 * half] = exp2_approx(scores[n][2 * half] - origin);
                scores[n][2 * half + 1] = exp2_approx(scores[n][2 * half + 1] - origin);
                added += scores[n][2 * half] + scores[n][2 * half + 1];
            }
            max[half] = largest;
            sum[half] = sum[half] * shrink + added;
            // Dropped after they were summed: what is normalized are the probabilities without dropout.
            if constexpr (Drop::ON) {
                u32 kept[2];
                bits_of_row(kept, kept_word, lane / 4 + 8 * half);
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    const u32 pair = kept[8 * n / (KEYS / 2)] >> (8 * n % (KEYS / 2) + lane % 4 * 2);
                    if (!(pair & 1)) scores[n][2 * half] = 0.0f;
                    if (!(pair & 2)) scores[n][2 * half + 1] = 0.0f;
                }
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            u32 high[4], low[4];
            narrow_pairs<DTYPE>(high, scores + 2 * i);
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const float* pair = scores[2 * i + part / 2] + part % 2 * 2;
                low[part] = remainder<DTYPE>(high[part], pair[0], pair[1]);
            }
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 m[4];
                load_right_rows<D>(m, tile + TILE, i * 16, n);
                multiply<DTYPE>(out[2 * n], high, m[0], m[1]);
                multiply<DTYPE>(out[2 * n], low, m[0], m[1]);
                multiply<DTYPE>(out[2 * n + 1], high, m[2], m[3]);
                multiply<DTYPE>(out[2 * n + 1], low, m[2], m[3]);
            }
        }
    }
    float factors[2];
    const u32 own = block.tile.first + warp * 16;
    const u64 row_start = ((u64)block.tile.batch * call.heads + block.owner) * call.queries;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = row_sum_of(sum[half]);
        factors[half] = sum[half] != 0.0f ? 1.0f / sum[half] : 0.0f;
        if constexpr (Drop::ON) factors[half] *= dropout.mask.factor;
        const u32 query = own + lane / 4 + 8 * half;
        if (lane % 4 == 0 && query < block.tile.end) {
            row_max[row_start + query] = max[half] * LN_2;
            row_sum[row_start + query] = sum[half];
        }
    }
    store_rows<DTYPE, D>(o + block.elements(call.queries, call.heads, call.head_dim), (u64)call.heads * call.head_dim, own,
                         block.tile.end, call.head_dim, out, factors[0], factors[1]);
}

#define FORWARD(NAME, DTYPE, D, KEYS)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 3 : 2)                                         \
    NAME(const u16* q, const u16* k, const u16* v, u16* o, float* row_max, float* row_sum,                       \
         DROPOUT_PARAMETERS CALL_PARAMETERS) {                                                                     \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        forward<DTYPE, D, KEYS>(memory, block, q, k, v, o, row_max, row_sum, SEQUENCES, call, DROPOUT_VALUE);      \
    }
