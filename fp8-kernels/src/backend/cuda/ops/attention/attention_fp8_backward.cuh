// What attention_fp8_backward_q.cu and attention_fp8_backward_kv.cu are made of. It follows attention_dropout.cuh,
// attention_backward_loop.cuh and attention_fp8.cuh.
//
// Both launches compute probabilities again from the codes of q and k: p = exp(score - max) / sum, ds = p · (dp - mean), in
// f32. p becomes E4M3 and ds codes of dy's format, with a scale for each row (RowScale).
// With dropout, dp is multiplied by the mask and its factor. The codes of p are those of what is kept, and its factor is that of dv.

// Whether a lane's probabilities of a part of a tile are kept: bit 4n + e for p[n][e]. `word` is that of tile_bits.
template <int OWNS_KEYS, int COLUMNS, int STEP>
__device__ __forceinline__ u32 kept_of_part(u32 word, int part) {
    static_assert(STEP == COLUMNS / 2 && STEP <= WARP, "a part is half a tile");
    const int lane = threadIdx.x % WARP;
    u32 kept = 0;
#pragma unroll
    for (int half = 0; half < (OWNS_KEYS ? 0 : 2); half++) {
        const u32 bits = __shfl_sync(FULL_WARP, word, 2 * (lane / 4 + 8 * half) + part / STEP) >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) kept |= (bits >> (8 * n) & 3) << (4 * n + 2 * half);
    }
#pragma unroll
    for (int n = 0; n < (OWNS_KEYS ? STEP / 8 : 0); n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 bits = bits_of_query(word, part + 8 * n + lane % 4 * 2 + i) >> (lane / 4);
            kept |= (bits & 1) << (4 * n + i) | (bits >> 8 & 1) << (4 * n + 2 + i);
        }
    }
    return kept;
}

// FORMAT is dy's. `scale_invs` are those of q, k, v and dy.
template <int FORMAT, int D, int OWNS_KEYS>
__device__ __forceinline__ void backward(char* memory, Block& block, const u8* q, const u8* k, const u8* v, const u8* dy,
                                         const float* scale_invs[4], const Row* row_numbers, void* d_first, void* d_second,
                                         int dtype, SEQUENCE_PARAMETERS, const Call& call, const OptionalDropout& dropout) {
    constexpr int COLUMNS = 64, STEP = 32;
    constexpr int LEFT_FORMAT = OWNS_KEYS ? E4M3 : FORMAT, RIGHT_FORMAT = OWNS_KEYS ? FORMAT : E4M3;
    constexpr u32 LEFT = ROWS * D, RIGHT = COLUMNS * D;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Span* of_warp = block.spans + warp * 16;
    const float q_scale_inv = *scale_invs[0], k_factor = *scale_invs[1] * call.scale * LOG2_E;
    const float v_scale_inv = *scale_invs[2], dy_scale_inv = *scale_invs[3];
    float first_sums[D / 8][4], second_sums[OWNS_KEYS ? D / 8 : 1][4];
    clear(first_sums);
    clear(second_sums);
    RowScale<FORMAT> first_scales[2];
    RowScale<E4M3> second_scales[2];
#pragma unroll
    for (int half = 0; half < 2; half++) first_scales[half].start(), second_scales[half].start();
    auto use = [&](const Stage& here, const Row(&of_rows)[2]) {
        // A part of the tile at a time, as registers allow.
#pragma unroll 1
        for (int part = 0; part < COLUMNS; part += STEP) {
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
#pragma unroll 1
            for (int i = 0; i < D / 32; i++) {
                u32 a[4], b[4];
                load_left_codes<D>(a, here.lefts, warp * 16, i);
                load_left_codes<D>(b, here.lefts + LEFT, warp * 16, i);
#pragma unroll
                for (int n = 0; n < STEP / 16; n++) {
                    u32 m[4];
                    load_right_codes<D>(m, here.rights, part + n * 16, i);
                    multiply_codes<E4M3, E4M3>(p[2 * n], a, m[0], m[1]);
                    multiply_codes<E4M3, E4M3>(p[2 * n + 1], a, m[2], m[3]);
                    load_right_codes<D>(m, here.rights + RIGHT, part + n * 16, i);
                    multiply_codes<LEFT_FORMAT, RIGHT_FORMAT>(ds[2 * n], b, m[0], m[1]);
                    multiply_codes<LEFT_FORMAT, RIGHT_FORMAT>(ds[2 * n + 1], b, m[2], m[3]);
                }
            }
            // Of the part's 16 · STEP probabilities, the lane's: bit 4n + e is that of p[n][e].
            u32 kept = 0xffffffffu;
            if (drops(dropout)) {
                kept = kept_of_part<OWNS_KEYS, COLUMNS, STEP>(here.kept_word, part);
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) ds[n][e] = kept >> (4 * n + e) & 1 ? ds[n][e] * dropout.mask.factor : 0.0f;
                }
            }
            // Whether some query here does not see some key here.
            const int partial = is_partial(of_warp, here.start + part, here.start + part + STEP);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const u32 columns = here.start + part + 8 * n + lane % 4 * 2;
                Row of_columns[2];
#pragma unroll
                for (int i = 0; i < 2 * OWNS_KEYS; i++) of_columns[i] = here.numbers[part + 8 * n + lane % 4 * 2 + i];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 column = columns + e % 2;
                    const Row& numbers = OWNS_KEYS ? of_columns[e % 2] : of_rows[e / 2];
                    float probability =
                        exp2_approx(fmaf(p[n][e] * q_scale_inv, k_factor, -numbers.origin_log2)) * numbers.inverse;
                    float slope = probability * (ds[n][e] * dy_scale_inv * v_scale_inv - numbers.mean);
                    if (partial) {
                        const Span span = of_warp[lane / 4 + e / 2 * 8];
                        const int visible = column >= span.begin && column < span.end;
                        probability = visible ? probability : 0.0f;
                        slope = visible ? slope : 0.0f;
                    }
                    p[n][e] = probability;
                    ds[n][e] = slope;
                }
            }
            u32 weights[4];
            rescale(first_scales, ds, first_sums);
            encode_quads<FORMAT>(weights, ds, first_scales[0].scale(), first_scales[1].scale());
            add_product_of_codes<FORMAT, E4M3, D>(first_sums, weights, here.rights, part);
            if constexpr (OWNS_KEYS) {
                if (drops(dropout)) {
#pragma unroll
                    for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) p[n][e] = kept >> (4 * n + e) & 1 ? p[n][e] : 0.0f;
                    }
                }
                rescale(second_scales, p, second_sums);
                encode_quads<E4M3>(weights, p, second_scales[0].scale(), second_scales[1].scale());
                add_product_of_codes<E4M3, FORMAT, D>(second_sums, weights, here.rights + RIGHT, part);
            }
        }
    };
    if (!backward_loop<FP8Codes<D>, D, OWNS_KEYS, COLUMNS>(memory, block, q, k, v, dy, row_numbers, SEQUENCES, call, dropout, use)) {
        return;
    }
    const u32 own = block.tile.first + warp * 16;
    const float first_factors[2] = {first_scales[0].inverse(), first_scales[1].inverse()};
    const u64 results = block.elements(OWNS_KEYS ? call.keys : call.queries, call.result_pitch, call.head_dim);
    store_sums<D>(d_first, dtype, results, call.result_pitch, own, block.tile.end, call.head_dim, first_sums, first_factors,
                  *scale_invs[OWNS_KEYS ? 0 : 1] * call.scale);
    if constexpr (OWNS_KEYS) {
        const float second_factors[2] = {second_scales[0].inverse(), second_scales[1].inverse()};
        store_sums<D>(d_second, dtype, results, call.result_pitch, own, block.tile.end, call.head_dim, second_sums,
                      second_factors, dy_scale_inv * dropout.mask.factor);
    }
}

#define BACKWARD(NAME, FORMAT, D, OWNS_KEYS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                       \
    NAME(const u8* q, const u8* k, const u8* v, const u8* dy, const float* q_scale_inv, const float* k_scale_inv,  \
         const float* v_scale_inv, const float* dy_scale_inv, const Row* row_numbers, void* d_first,               \
         void* d_second, int dtype, DROPOUT_ON_PARAMETERS CALL_PARAMETERS) {                                       \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        const float* scale_invs[4] = {q_scale_inv, k_scale_inv, v_scale_inv, dy_scale_inv};                        \
        backward<FORMAT, D, OWNS_KEYS>(memory, block, q, k, v, dy, scale_invs, row_numbers, d_first, d_second,     \
                                       dtype, SEQUENCES, call, OPTIONAL_DROPOUT);                                  \
    }
