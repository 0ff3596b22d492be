// What attention_backward_q.cu, attention_backward_kv.cu and the same with dropout are made of. It follows attention.cuh and
// attention_dropout.cuh.
//
// One program, two launches: for dq a block owns 64 queries and goes through the keys they
// see, for dk and dv it owns 64 keys and goes through the queries that see them, head after head of the group, in rising
// order. Both compute probabilities again: p = exp(score - max) / sum, ds = p · (dp - mean) · scale, in f32; p and ds are
// narrowed to the elements' type as operands of the products that follow. No atomics: each sum has one order. While one
// tile of the other side is used, the next is copied to shared memory, which is dynamic.

// Of a row of scores, by attention_backward_rows.
struct __align__(16) Row {
    float origin, inverse, mean, origin_log2;
};

// Where there is no query, probabilities are 0.
__device__ __forceinline__ Row load_row(const Row* rows, u32 query, u32 queries) {
    float4 row = query < queries ? *(const float4*)(rows + query) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return {row.x, row.y, row.z, row.w};
}

// What the block owns is `left`, what it goes through `right`: (q, dy) and (k, v), or (k, v) and (q, dy).
template <int DTYPE, int D, int OWNS_KEYS, typename Drop>
__device__ __forceinline__ void backward(char* memory, Block& block, const u16* q, const u16* k, const u16* v, const u16* dy,
                                         const Row* row_numbers, u16* d_first, u16* d_second, SEQUENCE_PARAMETERS,
                                         const Call& call, const Drop& dropout) {
    constexpr int COLUMNS = D == 128 ? 64 : 32, STEP = OWNS_KEYS && D == 128 ? 16 : COLUMNS;
    // The owned rows, then two stages of the other side's, then the numbers of those rows where they are queries.
    constexpr u32 LEFT = ROWS * D * 2, RIGHT = COLUMNS * D * 2, NUMBERS = 2 * LEFT + 4 * RIGHT;
    const u32 lefts = shared_address(memory);
    const float scale_log2 = call.scale * LOG2_E;
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
    const u16 *left1 = OWNS_KEYS ? k : q, *left2 = OWNS_KEYS ? v : dy;
    const u16 *right1 = OWNS_KEYS ? q : k, *right2 = OWNS_KEYS ? dy : v;

    // Of padding nothing is read.
    const u32 left_limit = OWNS_KEYS ? block.tile.key_end : block.tile.query_end;
    load_tile<D, ROWS>(lefts, left1 + left_start, left_stride, first, left_limit, call.head_dim);
    load_tile<D, ROWS>(lefts + LEFT, left2 + left_start, left_stride, first, left_limit, call.head_dim);
    commit_copies();

    const u32 own = first + warp * 16, row0 = own + lane / 4;
    Row of_rows[2];
#pragma unroll
    for (int half = 0; half < (OWNS_KEYS ? 0 : 2); half++) {
        of_rows[half] = load_row(row_numbers + ((u64)batch * call.heads + owner) * call.queries, row0 + 8 * half, block.tile.query_end);
    }
    float first_sums[D / 8][4], second_sums[OWNS_KEYS ? D / 8 : 1][4];
    clear(first_sums);
    clear(second_sums);

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
        load_tile<D, COLUMNS>(rights, right1 + right_start, right_stride, start, right_limit, call.head_dim);
        load_tile<D, COLUMNS>(rights + RIGHT, right2 + right_start, right_stride, start, right_limit, call.head_dim);
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
        if constexpr (Drop::ON) {
            const u64 head = mask_start(dropout, call, batch, OWNS_KEYS ? owner * per_group + member : owner);
            kept_word = tile_bits<OWNS_KEYS, COLUMNS>(dropout, head, call.keys, own, start);
        }
        // A part of the tile at a time, as registers allow.
#pragma unroll 1
        for (int part = 0; part < COLUMNS; part += STEP) {
            float p[STEP / 8][4], ds[STEP / 8][4];
            clear(p);
            clear(ds);
#pragma unroll (D == 128 && !OWNS_KEYS ? 1 : 2)
            for (int i = 0; i < D / 16; i++) {
                u32 a[4], b[4];
                load_left<D>(a, lefts, warp * 16, i);
                load_left<D>(b, lefts + LEFT, warp * 16, i);
#pragma unroll
                for (int n = 0; n < STEP / 16; n++) {
                    u32 m[4];
                    load_right<D>(m, rights, part + n * 16, i);
                    multiply<DTYPE>(p[2 * n], a, m[0], m[1]);
                    multiply<DTYPE>(p[2 * n + 1], a, m[2], m[3]);
                    load_right<D>(m, rights + RIGHT, part + n * 16, i);
                    multiply<DTYPE>(ds[2 * n], b, m[0], m[1]);
                    multiply<DTYPE>(ds[2 * n + 1], b, m[2], m[3]);
                }
            }
            u32 kept_rows[2][2];
#pragma unroll
            for (int half = 0; half < (Drop::ON && !OWNS_KEYS ? 2 : 0); half++) {
                bits_of_row(kept_rows[half], kept_word, lane / 4 + 8 * half);
            }
            // Whether some query here does not see some key here.
            const int partial = is_partial(of_warp, start + part, start + part + STEP);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const u32 columns = start + part + 8 * n + lane % 4 * 2;
                Row of_columns[2];
#pragma unroll
                for (int i = 0; i < 2 * OWNS_KEYS; i++) of_columns[i] = numbers_here[part + 8 * n + lane % 4 * 2 + i];
                u32 kept_columns[2];
#pragma unroll
                for (int i = 0; i < (Drop::ON && OWNS_KEYS ? 2 : 0); i++) {
                    kept_columns[i] = bits_of_query(kept_word, part + 8 * n + lane % 4 * 2 + i) >> (lane / 4);
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
                add_product<DTYPE, D>(first_sums, w[2 * i], rights, part + i * 16);
                if constexpr (OWNS_KEYS) {
                    add_product<DTYPE, D>(second_sums, w[2 * i + 1], rights + RIGHT, part + i * 16);
                }
            }
        }
        // The stage is free for the tile after the next.
        __syncthreads();
        member = next_member, start = next;
    }
    store_rows<DTYPE, D>(d_first + left_start, left_stride, own, block.tile.end, call.head_dim, first_sums, 1.0f, 1.0f);
    if constexpr (OWNS_KEYS) {
        float factor = 1.0f;
        if constexpr (Drop::ON) factor = dropout.mask.factor;
        store_rows<DTYPE, D>(d_second + left_start, left_stride, own, block.tile.end, call.head_dim, second_sums, factor, factor);
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
