// What attention_fp8_backward_q.cu and attention_fp8_backward_kv.cu are made of. It follows attention_dropout.cuh and
// attention_fp8.cuh.
//
// One program, two launches, as in attention_backward.cuh: for dq a block owns 64 queries and goes through the keys they
// see, for dk and dv it owns 64 keys and goes through the queries that see them, head after head of the group, in rising
// order. Both compute probabilities again from the codes of q and k: p = exp(score - max) / sum, ds = p · (dp - mean), in
// f32. p becomes E4M3 and ds codes of dy's format, with a scale for each row (RowScale). No atomics: each sum has one order.
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

// What the block owns is `left`, what it goes through `right`: (q, dy) and (k, v), or (k, v) and (q, dy). FORMAT is dy's.
// `scale_invs` are those of q, k, v and dy.
template <int FORMAT, int D, int OWNS_KEYS>
__device__ __forceinline__ void backward(char* memory, Block& block, const u8* q, const u8* k, const u8* v, const u8* dy,
                                         const float* scale_invs[4], const Row* row_numbers, void* d_first, void* d_second,
                                         int dtype, SEQUENCE_PARAMETERS, const Call& call, const Dropout& dropout) {
    constexpr int COLUMNS = 64, STEP = 32;
    constexpr int LEFT_FORMAT = OWNS_KEYS ? E4M3 : FORMAT, RIGHT_FORMAT = OWNS_KEYS ? FORMAT : E4M3;
    // The owned rows, then two stages of the other side's, then the numbers of those rows where they are queries.
    constexpr u32 LEFT = ROWS * D, RIGHT = COLUMNS * D, NUMBERS = 2 * LEFT + 4 * RIGHT;
    const u32 lefts = shared_address(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u32 per_group = call.heads / call.groups;
    // Who has most to do goes first: the first keys, the last queries.
    const u32 place = blockIdx.x % call.tiles, index = OWNS_KEYS ? place : call.tiles - 1 - place;
    if (!start_block<OWNS_KEYS, 1>(block, call, SEQUENCES, index, blockIdx.x / call.tiles, 1)) return;
    const u32 batch = block.tile.batch, first = block.tile.first, owner = block.owner;
    const u32 group = OWNS_KEYS ? owner : owner / per_group;
    const u64 q_stride = (u64)call.heads * call.head_dim, k_stride = (u64)call.groups * call.head_dim;
    const u64 q_start = (u64)batch * call.queries * q_stride;
    const u64 k_start = (u64)batch * call.keys * k_stride + (u64)group * call.head_dim;
    const u64 left_start = OWNS_KEYS ? k_start : q_start + (u64)owner * call.head_dim;
    const u64 left_stride = OWNS_KEYS ? k_stride : q_stride, right_stride = OWNS_KEYS ? q_stride : k_stride;
    const u8 *left1 = OWNS_KEYS ? k : q, *left2 = OWNS_KEYS ? v : dy;
    const u8 *right1 = OWNS_KEYS ? q : k, *right2 = OWNS_KEYS ? dy : v;

    // Of padding nothing is read.
    const u32 left_limit = OWNS_KEYS ? block.tile.key_end : block.tile.query_end;
    load_codes<D, ROWS>(lefts, left1 + left_start, left_stride, first, left_limit, call.head_dim);
    load_codes<D, ROWS>(lefts + LEFT, left2 + left_start, left_stride, first, left_limit, call.head_dim);
    commit_copies();

    const float q_scale_inv = *scale_invs[0], k_factor = *scale_invs[1] * call.scale * LOG2_E;
    const float v_scale_inv = *scale_invs[2], dy_scale_inv = *scale_invs[3];
    const u32 own = first + warp * 16, row0 = own + lane / 4;
    Row of_rows[2];
#pragma unroll
    for (int half = 0; half < (OWNS_KEYS ? 0 : 2); half++) {
        of_rows[half] = load_row(row_numbers + ((u64)batch * call.heads + owner) * call.queries, row0 + 8 * half, block.tile.query_end);
    }
    float first_sums[D / 8][4], second_sums[OWNS_KEYS ? D / 8 : 1][4];
    clear(first_sums);
    clear(second_sums);
    RowScale<FORMAT> first_scales[2];
    RowScale<E4M3> second_scales[2];
#pragma unroll
    for (int half = 0; half < 2; half++) first_scales[half].start(), second_scales[half].start();

    // The other side's rows that meet any of the block's.
    const u32 begin = block.begin(), end = block.end();
    const Span* of_warp = block.spans + warp * 16;
    // The other side's tiles, those of each head of the group in turn.
    const u32 per_head = begin < end ? (end - begin + COLUMNS - 1) / COLUMNS : 0;
    const u32 turns = per_head * (OWNS_KEYS ? per_group : 1);
    const u32 right_limit = OWNS_KEYS ? block.tile.query_end : block.tile.key_end;
    auto fetch = [&](u32 member, u32 start, u32 stage) {
        const u32 head = OWNS_KEYS ? owner * per_group + member : owner;
        const u64 right_start = OWNS_KEYS ? q_start + (u64)head * call.head_dim : k_start;
        const u32 rights = lefts + 2 * LEFT + stage * 2 * RIGHT;
        load_codes<D, COLUMNS>(rights, right1 + right_start, right_stride, start, right_limit, call.head_dim);
        load_codes<D, COLUMNS>(rights + RIGHT, right2 + right_start, right_stride, start, right_limit, call.head_dim);
        if (OWNS_KEYS && threadIdx.x < COLUMNS) {
            const Row* of_head = row_numbers + ((u64)batch * call.heads + head) * call.queries;
            const u32 query = start + threadIdx.x;
            const int there = query < block.tile.query_end;
            // Where there is no query, zeros make probabilities 0.
            copy16(lefts + NUMBERS + (stage * COLUMNS + threadIdx.x) * sizeof(Row), of_head + (there ? query : 0),
                   there ? sizeof(Row) : 0);
        }
    };
    u32 member = 0, start = begin;
    if (turns > 0) fetch(member, start, 0);
    commit_copies();
#pragma unroll 1
    for (u32 turn = 0; turn < turns; turn++) {
        u32 next_member = member, next = start + COLUMNS;
        if (OWNS_KEYS && next >= end) next = begin, next_member++;
        if (turn + 1 < turns) fetch(next_member, next, (turn + 1) % 2);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        const u32 rights = lefts + 2 * LEFT + turn % 2 * 2 * RIGHT;
        const Row* numbers_here = (const Row*)(memory + NUMBERS) + turn % 2 * COLUMNS;
        u32 kept_word = 0;
        if (drops(dropout)) {
            const u64 head = mask_start(dropout, call, batch, OWNS_KEYS ? owner * per_group + member : owner);
            kept_word = tile_bits<OWNS_KEYS, COLUMNS>(dropout, head, call.keys, own, start);
        }
        // A part of the tile at a time, as registers allow.
#pragma unroll 1
        for (int part = 0; part < COLUMNS; part += STEP) {
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
#pragma unroll 1
            for (int i = 0; i < D / 32; i++) {
                u32 a[4], b[4];
                load_left_codes<D>(a, lefts, warp * 16, i);
                load_left_codes<D>(b, lefts + LEFT, warp * 16, i);
#pragma unroll
                for (int n = 0; n < STEP / 16; n++) {
                    u32 m[4];
                    load_right_codes<D>(m, rights, part + n * 16, i);
                    multiply_codes<E4M3, E4M3>(p[2 * n], a, m[0], m[1]);
                    multiply_codes<E4M3, E4M3>(p[2 * n + 1], a, m[2], m[3]);
                    load_right_codes<D>(m, rights + RIGHT, part + n * 16, i);
                    multiply_codes<LEFT_FORMAT, RIGHT_FORMAT>(ds[2 * n], b, m[0], m[1]);
                    multiply_codes<LEFT_FORMAT, RIGHT_FORMAT>(ds[2 * n + 1], b, m[2], m[3]);
                }
            }
            // Of the part's 16 · STEP probabilities, the lane's: bit 4n + e is that of p[n][e].
            u32 kept = 0xffffffffu;
            if (drops(dropout)) {
                kept = kept_of_part<OWNS_KEYS, COLUMNS, STEP>(kept_word, part);
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) ds[n][e] = kept >> (4 * n + e) & 1 ? ds[n][e] * dropout.mask.factor : 0.0f;
                }
            }
            // Whether some query here does not see some key here.
            const int partial = is_partial(of_warp, start + part, start + part + STEP);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const u32 columns = start + part + 8 * n + lane % 4 * 2;
                Row of_columns[2];
#pragma unroll
                for (int i = 0; i < 2 * OWNS_KEYS; i++) of_columns[i] = numbers_here[part + 8 * n + lane % 4 * 2 + i];
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
            add_product_of_codes<FORMAT, E4M3, D>(first_sums, weights, rights, part);
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
                add_product_of_codes<E4M3, FORMAT, D>(second_sums, weights, rights + RIGHT, part);
            }
        }
        // The stage is free for the tile after the next.
        __syncthreads();
        member = next_member, start = next;
    }
    const float first_factors[2] = {first_scales[0].inverse(), first_scales[1].inverse()};
    store_sums<D>(d_first, dtype, left_start, left_stride, own, block.tile.end, call.head_dim, first_sums, first_factors,
                  *scale_invs[OWNS_KEYS ? 0 : 1] * call.scale);
    if constexpr (OWNS_KEYS) {
        const float second_factors[2] = {second_scales[0].inverse(), second_scales[1].inverse()};
        store_sums<D>(d_second, dtype, left_start, left_stride, own, block.tile.end, call.head_dim, second_sums,
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
                                       dtype, SEQUENCES, call, DROPOUT_ON_VALUE);                                  \
    }
