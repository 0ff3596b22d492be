// The loop of attention over keys, for elements of 16 bits and for FP8 codes. It follows attention.cuh and attention_dropout.cuh.
//
// A block owns 64 queries and goes through the keys they see in rising order. Scores, softmax and sums are f32. Shared memory
// is dynamic: two stages of keys and values. ELEMENTS says how tiles and operands are loaded and multiplied.

// The largest and the sum over the four lanes that share a row.
__device__ __forceinline__ float row_max_of(float v) {
    v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 1));
    return fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 2));
}

__device__ __forceinline__ float row_sum_of(float v) {
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}

// What a block computes of its queries: the sums of weighted values, and of each lane's two rows the largest score and the sum
// of exponentials of the lane's own keys.
template <int D>
struct Forward {
    float out[D / 8][4], max[2], sum[2];
};

// False for a tile without rows. `scaled` makes a score of a product, in base 2; exponentials are 2^SHIFT times as large;
// `add_values` adds the products of a block of probabilities and the values of a tile.
template <typename ELEMENTS, int D, int KEYS, int SHIFT, typename Drop, typename Scaled, typename AddValues>
__device__ __forceinline__ int forward_loop(char* memory, Block& block, const typename ELEMENTS::Element* q,
                                            const typename ELEMENTS::Element* k, const typename ELEMENTS::Element* v,
                                            SEQUENCE_PARAMETERS, const Call& call, const Drop& dropout, Forward<D>& result,
                                            const Scaled& scaled, const AddValues& add_values) {
    constexpr u32 TILE = KEYS * D * sizeof(*q), STAGE = 2 * TILE;
    constexpr int STEPS = D / ELEMENTS::INNER;
    const u32 stages = shared_address(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // The last queries of a causal head see most: they go first.
    const u32 index = call.tiles - 1 - blockIdx.x % call.tiles;
    if (!start_block<0, 0>(block, call, SEQUENCES, index, blockIdx.x / call.tiles, 1)) return 0;
    const u32 first = block.tile.first, group = block.owner / (call.heads / call.groups);
    const u32 q_stride = call.q_pitch, k_stride = call.k_pitch;
    const u64 q_start = block.elements(call.queries, call.q_pitch, call.head_dim);
    const u64 k_start = (u64)block.tile.batch * call.keys * k_stride + (u64)group * call.head_dim;

    // Queries pass through the second stage into registers.
    u32 rows[STEPS][4];
    ELEMENTS::template load<ROWS>(stages + STAGE, q + q_start, q_stride, first, block.tile.end, call.head_dim);
    commit_copies();
    ELEMENTS::template load<KEYS>(stages, k + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    ELEMENTS::template load<KEYS>(stages + TILE, v + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i++) ELEMENTS::left(rows[i], stages + STAGE, warp * 16, i);

    float(&out)[D / 8][4] = result.out;
    float(&max)[2] = result.max, (&sum)[2] = result.sum;
    max[0] = max[1] = -INFINITY_F, sum[0] = sum[1] = 0.0f;
    clear(out);
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
            ELEMENTS::template load<KEYS>(next, k + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            ELEMENTS::template load<KEYS>(next + TILE, v + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            commit_copies();
        }
        u32 kept_word = 0;
        if constexpr (Drop::ON) {
            if (drops(dropout)) {
                const u64 head = mask_start(dropout, call, block.tile.batch, block.owner);
                kept_word = tile_bits<0, KEYS>(dropout, head, call.keys, block.tile.first + warp * 16, start);
            }
        }
        float scores[KEYS / 8][4];
        clear(scores);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 m[4];
                ELEMENTS::right(m, tile, n * 16, i);
                ELEMENTS::multiply_scores(scores[2 * n], rows[i], m[0], m[1]);
                ELEMENTS::multiply_scores(scores[2 * n + 1], rows[i], m[2], m[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] = scaled(scores[n][e]);
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
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    // The difference first: a large origin would swallow the shift.
                    const float difference = scores[n][e] - origin;
                    scores[n][e] = exp2_approx(SHIFT == 0 ? difference : difference + (float)SHIFT);
                }
                added += scores[n][2 * half] + scores[n][2 * half + 1];
            }
            max[half] = largest;
            sum[half] = sum[half] * shrink + added;
            // Dropped after they were summed: what is normalized are the probabilities without dropout.
            if constexpr (Drop::ON) {
                if (drops(dropout)) {
                    u32 kept[2];
                    bits_of_row(kept, kept_word, lane / 4 + 8 * half);
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) {
                        const u32 pair = kept[8 * n / (KEYS / 2)] >> (8 * n % (KEYS / 2) + lane % 4 * 2);
                        if (!(pair & 1)) scores[n][2 * half] = 0.0f;
                        if (!(pair & 2)) scores[n][2 * half + 1] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }
        add_values(out, scores, tile + TILE);
    }
    return 1;
}

// Writes the largest scores and the sums of a warp's rows, and makes the factors that normalize the lane's two rows.
template <int D, int SHIFT, typename Drop>
__device__ __forceinline__ void finish_rows(const Block& block, const Call& call, const Drop& dropout, Forward<D>& result,
                                            float* row_max, float* row_sum, float (&factors)[2]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u64 row_start = ((u64)block.tile.batch * call.heads + block.owner) * call.queries;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = row_sum_of(result.sum[half]);
        factors[half] = sum != 0.0f ? 1.0f / sum : 0.0f;
        if constexpr (Drop::ON) factors[half] *= dropout.mask.factor;
        const u32 query = block.tile.first + warp * 16 + lane / 4 + 8 * half;
        if (lane % 4 == 0 && query < block.tile.end) {
            row_max[row_start + query] = result.max[half] * LN_2;
            row_sum[row_start + query] = SHIFT == 0 ? sum : sum * power_of_two(-SHIFT);
        }
    }
}
