// What attention_backward_q.cu, attention_backward_kv.cu and the same with dropout are made of. It follows attention.cuh,
// attention_dropout.cuh and attention_backward_loop.cuh.
//
// Both launches compute probabilities again: p = exp(score - max) / sum, ds = p · (dp - mean) · scale, in f32; p and ds are
// narrowed to the elements' type as operands of the products that follow.

template <int DTYPE, int D, int OWNS_KEYS, typename Drop>
__device__ __forceinline__ void backward(char* memory, Block& block, const u16* q, const u16* k, const u16* v, const u16* dy,
                                         const Row* row_numbers, u16* d_first, u16* d_second, SEQUENCE_PARAMETERS,
                                         const Call& call, const Drop& dropout) {
    constexpr int COLUMNS = D == 128 ? 64 : 32, STEP = OWNS_KEYS && D == 128 ? 16 : COLUMNS;
    constexpr u32 LEFT = ROWS * D * 2, RIGHT = COLUMNS * D * 2;
    const float scale_log2 = call.scale * LOG2_E;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Span* of_warp = block.spans + warp * 16;
    float first_sums[D / 8][4], second_sums[OWNS_KEYS ? D / 8 : 1][4];
    clear(first_sums);
    clear(second_sums);
    auto use = [&](const Stage& here, const Row(&of_rows)[2]) {
        // A part of the tile at a time, as registers allow.
#pragma unroll 1
        for (int part = 0; part < COLUMNS; part += STEP) {
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
#pragma unroll (D == 128 && !OWNS_KEYS ? 1 : 2)
            for (int i = 0; i < D / 16; i++) {
                u32 a[4], b[4];
                load_left<D>(a, here.lefts, warp * 16, i);
                load_left<D>(b, here.lefts + LEFT, warp * 16, i);
#pragma unroll
                for (int n = 0; n < STEP / 16; n++) {
                    u32 m[4];
                    load_right<D>(m, here.rights, part + n * 16, i);
                    multiply<DTYPE>(p[2 * n], a, m[0], m[1]);
                    multiply<DTYPE>(p[2 * n + 1], a, m[2], m[3]);
                    load_right<D>(m, here.rights + RIGHT, part + n * 16, i);
                    multiply<DTYPE>(ds[2 * n], b, m[0], m[1]);
                    multiply<DTYPE>(ds[2 * n + 1], b, m[2], m[3]);
                }
            }
            u32 kept_rows[2][2];
#pragma unroll
            for (int half = 0; half < (Drop::ON && !OWNS_KEYS ? 2 : 0); half++) {
                bits_of_row(kept_rows[half], here.kept_word, lane / 4 + 8 * half);
            }
            // Whether some query here does not see some key here.
            const int partial = is_partial(of_warp, here.start + part, here.start + part + STEP);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const u32 columns = here.start + part + 8 * n + lane % 4 * 2;
                Row of_columns[2];
#pragma unroll
                for (int i = 0; i < 2 * OWNS_KEYS; i++) of_columns[i] = here.numbers[part + 8 * n + lane % 4 * 2 + i];
                u32 kept_columns[2];
#pragma unroll
                for (int i = 0; i < (Drop::ON && OWNS_KEYS ? 2 : 0); i++) {
                    kept_columns[i] = bits_of_query(here.kept_word, part + 8 * n + lane % 4 * 2 + i) >> (lane / 4);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 column = columns + e % 2;
                    const Row& numbers = OWNS_KEYS ? of_columns[e % 2] : of_rows[e / 2];
                    float probability = exp2_approx(fmaf(p[n][e], scale_log2, -numbers.origin_log2)) * numbers.inverse;
                    float slope = ds[n][e];
                    int kept = 1;
                    if constexpr (Drop::ON) {
                        const int place = 8 * n % (COLUMNS / 2) + lane % 4 * 2 + e % 2;
                        const u32 bits = OWNS_KEYS ? kept_columns[e % 2] >> (e / 2 * 8)
                                                   : kept_rows[e / 2][8 * n / (COLUMNS / 2)] >> place;
                        kept = bits & 1;
                        slope = kept ? slope * dropout.mask.factor : 0.0f;
                    }
                    slope = probability * (slope - numbers.mean) * call.scale;
                    // The factor of what is kept comes at the end.
                    if (Drop::ON && OWNS_KEYS) probability = kept ? probability : 0.0f;
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
            u32 w[2 * (STEP / 16)][4];
#pragma unroll
            for (int i = 0; i < STEP / 16; i++) {
                narrow_pairs<DTYPE>(w[2 * i], ds + 2 * i);
                narrow_pairs<DTYPE>(w[2 * i + 1], p + 2 * i);
            }
#pragma unroll
            for (int i = 0; i < STEP / 16; i++) {
                add_product<DTYPE, D>(first_sums, w[2 * i], here.rights, part + i * 16);
                if constexpr (OWNS_KEYS) {
                    add_product<DTYPE, D>(second_sums, w[2 * i + 1], here.rights + RIGHT, part + i * 16);
                }
            }
        }
    };
    if (!backward_loop<Halves<DTYPE, D>, D, OWNS_KEYS, COLUMNS>(memory, block, q, k, v, dy, row_numbers, SEQUENCES, call, dropout,
                                                                use)) {
        return;
    }
    const u32 own = block.tile.first + warp * 16;
    const u64 results = block.elements(OWNS_KEYS ? call.keys : call.queries, call.result_pitch, call.head_dim);
    store_rows<DTYPE, D>(d_first + results, call.result_pitch, own, block.tile.end, call.head_dim, first_sums, 1.0f, 1.0f);
    if constexpr (OWNS_KEYS) {
        float factor = 1.0f;
        if constexpr (Drop::ON) factor = dropout.mask.factor;
        store_rows<DTYPE, D>(d_second + results, call.result_pitch, own, block.tile.end, call.head_dim, second_sums, factor,
                             factor);
    }
}

#define BACKWARD(NAME, DTYPE, D, OWNS_KEYS)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                       \
    NAME(const u16* q, const u16* k, const u16* v, const u16* dy, const Row* row_numbers, u16* d_first,            \
         u16* d_second, DROPOUT_PARAMETERS CALL_PARAMETERS) {                                                      \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        backward<DTYPE, D, OWNS_KEYS>(memory, block, q, k, v, dy, row_numbers, d_first, d_second, SEQUENCES, call, \
                                      DROPOUT_VALUE);                                                              \
    }
