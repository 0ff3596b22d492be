#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_fp8.cuh"
// Attention whose products read FP8 codes, for head sizes up to 128 that are multiples of 16.
//
// A block owns 64 queries and goes through the keys they see in rising order. Scores, softmax and sums are f32.
// Probabilities relative to the largest score so far are at most 1: times 256 they become E4M3 codes, and nothing saturates.
// With dropout, codes are those of the probabilities that are kept; their factor is that of a row's result.
// Shared memory is dynamic: two stages of keys and values.

// Probabilities are multiplied by 2^8.
#define LOG2_SCALE 8.0f

// The largest and the sum over the four lanes that share a row.
__device__ __forceinline__ float row_max_of(float v) {
    v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 1));
    return fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 2));
}

__device__ __forceinline__ float row_sum_of(float v) {
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}

template <int D, int KEYS>
__device__ __forceinline__ void forward(char* memory, Block& block, const u8* q, const u8* k, const u8* v,
                                        const float* scale_invs[3], void* o, int dtype, float* row_max, float* row_sum,
                                        SEQUENCE_PARAMETERS, const Call& call, const Dropout& dropout) {
    constexpr u32 TILE = KEYS * D, STAGE = 2 * TILE;
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
    u32 rows[D / 32][4];
    load_codes<D, ROWS>(stages + STAGE, q + q_start, q_stride, first, block.tile.end, call.head_dim);
    commit_copies();
    load_codes<D, KEYS>(stages, k + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    load_codes<D, KEYS>(stages + TILE, v + k_start, k_stride, block.begin(), block.tile.key_end, call.head_dim);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D / 32; i++) load_left_codes<D>(rows[i], stages + STAGE, warp * 16, i);

    float out[D / 8][4], max[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.0f, 0.0f};
    clear(out);
    // One after the other: the product of both factors might underflow.
    const float q_scale_inv = *scale_invs[0], k_factor = *scale_invs[1] * call.scale * LOG2_E;
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
            load_codes<D, KEYS>(next, k + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            load_codes<D, KEYS>(next + TILE, v + k_start, k_stride, start + KEYS, block.tile.key_end, call.head_dim);
            commit_copies();
        }
        float scores[KEYS / 8][4];
        clear(scores);
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 m[4];
                load_right_codes<D>(m, tile, n * 16, i);
                multiply_codes<E4M3, E4M3>(scores[2 * n], rows[i], m[0], m[1]);
                multiply_codes<E4M3, E4M3>(scores[2 * n + 1], rows[i], m[2], m[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[n][e] = scores[n][e] * q_scale_inv * k_factor;
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
                    // The difference first: a large origin would swallow the scale.
                    scores[n][e] = exp2_approx(scores[n][e] - origin + LOG2_SCALE);
                    added += scores[n][e];
                }
            }
            max[half] = largest;
            sum[half] = sum[half] * shrink + added;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }
        // Dropped after they were summed: what is normalized are the probabilities without dropout.
        if (drops(dropout)) {
            const u64 head = mask_start(dropout, call, block.tile.batch, block.owner);
            const u32 kept_word = tile_bits<0, KEYS>(dropout, head, call.keys, block.tile.first + warp * 16, start);
#pragma unroll
            for (int half = 0; half < 2; half++) {
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
        for (int i = 0; i < KEYS / 32; i++) {
            u32 weights[4];
            encode_quads<E4M3>(weights, scores + 4 * i, 1.0f, 1.0f);
            add_product_of_codes<E4M3, E4M3, D>(out, weights, tile + TILE, 32 * i);
        }
    }
    float factors[2];
    const u32 own = block.tile.first + warp * 16;
    const u64 row_start = ((u64)block.tile.batch * call.heads + block.owner) * call.queries;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = row_sum_of(sum[half]);
        factors[half] = sum[half] != 0.0f ? dropout.mask.factor / sum[half] : 0.0f;
        const u32 query = own + lane / 4 + 8 * half;
        if (lane % 4 == 0 && query < block.tile.end) {
            row_max[row_start + query] = max[half] * LN_2;
            row_sum[row_start + query] = sum[half] * power_of_two(-(int)LOG2_SCALE);
        }
    }
    store_sums<D>(o, dtype, q_start, q_stride, own, block.tile.end, call.head_dim, out, factors, *scale_invs[2]);
}

#define FORWARD(NAME, D, KEYS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 3 : 2)                                         \
    NAME(const u8* q, const u8* k, const u8* v, const float* q_scale_inv, const float* k_scale_inv,                \
         const float* v_scale_inv, void* o, int dtype, float* row_max, float* row_sum,                           \
         DROPOUT_ON_PARAMETERS CALL_PARAMETERS) {                                                                  \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        const float* scale_invs[3] = {q_scale_inv, k_scale_inv, v_scale_inv};                                      \
        forward<D, KEYS>(memory, block, q, k, v, scale_invs, o, dtype, row_max, row_sum, SEQUENCES, call,          \
                         DROPOUT_ON_VALUE);                                                                        \
    }

// With 64 keys at a time the last one would spill on sm_100.
FORWARD(attention_fp8_64, 64, 64)
FORWARD(attention_fp8_128, 128, 32)

// A warp for each row: what backward reads of it. `mean` is that of dp, with the values of dy's codes.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_fp8_rows(const u8* dy, int format, const float* dy_scale_inv, const void* o, int dtype, const float* row_max,
                   const float* row_sum, Row* rows, u64 count, u32 queries, u32 heads, u32 head_dim) {
    const int lane = threadIdx.x % WARP;
    const float factor = *dy_scale_inv;
    for (u64 row = grid_thread() / WARP; row < count; row += grid_threads() / WARP) {
        const u64 above = quotient(row, queries), batch = quotient(above, heads);
        const u64 token = batch * queries + (row - above * queries);
        const u64 start = (token * heads + above - batch * heads) * head_dim;
        float mean = 0.0f;
#pragma unroll 2
        for (u32 i = 2 * lane; i < head_dim; i += 2 * WARP) {
            float low, high;
            decode2(*(const u16*)(dy + start + i), format, &low, &high);
            mean = fmaf(low, load1(o, dtype, start + i), mean);
            mean = fmaf(high, load1(o, dtype, start + i + 1), mean);
        }
        mean = warp_sum(mean) * factor;
        if (lane == 0) {
            const float largest = row_max[row], sum = row_sum[row];
            const float origin = largest == -INFINITY_F ? 0.0f : largest;
            *(float4*)(rows + row) = make_float4(origin, sum != 0.0f ? 1.0f / sum : 0.0f, mean, origin * LOG2_E);
        }
    }
}
