// The loop of backward over tiles, for elements of 16 bits and for FP8 codes. It follows attention.cuh and attention_dropout.cuh.
//
// One program, two launches: for dq a block owns 64 queries and goes through the keys they
// see, for dk and dv it owns 64 keys and goes through the queries that see them, head after head of the group, in rising
// order. No atomics: each sum has one order. While one tile of the other side is used, the next is copied to shared memory,
// which is dynamic. What the block owns is `left`, what it goes through `right`: (q, dy) and (k, v), or (k, v) and (q, dy).

// A tile of the other side that has come: its two parts in shared memory, its first row, and the numbers of its rows where they
// are queries.
struct Stage {
    u32 lefts, rights, start;
    const Row* numbers;
    // The bits of tile_bits, with dropout.
    u32 kept_word;
};

// Calls `use` with each tile, and the numbers of the lane's two rows where queries are owned. False for a tile without rows.
template <typename ELEMENTS, int D, int OWNS_KEYS, int COLUMNS, typename Drop, typename Use>
__device__ __forceinline__ int backward_loop(char* memory, Block& block, const typename ELEMENTS::Element* q,
                                             const typename ELEMENTS::Element* k, const typename ELEMENTS::Element* v,
                                             const typename ELEMENTS::Element* dy, const Row* row_numbers, SEQUENCE_PARAMETERS,
                                             const Call& call, const Drop& dropout, const Use& use) {
    typedef typename ELEMENTS::Element Element;
    // The owned rows, then two stages of the other side's, then the numbers of those rows where they are queries.
    constexpr u32 LEFT = ROWS * D * sizeof(Element), RIGHT = COLUMNS * D * sizeof(Element), NUMBERS = 2 * LEFT + 4 * RIGHT;
    const u32 lefts = shared_address(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u32 per_group = call.heads / call.groups;
    // Who has most to do goes first: the first keys, the last queries.
    const u32 place = blockIdx.x % call.tiles, index = OWNS_KEYS ? place : call.tiles - 1 - place;
    if (!start_block<OWNS_KEYS, 1>(block, call, SEQUENCES, index, blockIdx.x / call.tiles, 1)) return 0;
    const u32 batch = block.tile.batch, first = block.tile.first, owner = block.owner;
    const u32 group = OWNS_KEYS ? owner : owner / per_group;
    // dy has no other heads between its own.
    const u32 q_stride = call.q_pitch, k_stride = call.k_pitch, dy_stride = call.heads * call.head_dim;
    q += (u64)batch * call.queries * q_stride;
    dy += (u64)batch * call.queries * dy_stride;
    k += (u64)batch * call.keys * k_stride + group * call.head_dim;
    v += (u64)batch * call.keys * k_stride + group * call.head_dim;
    const u32 own_start = OWNS_KEYS ? 0 : owner * call.head_dim;
    const Element *left1 = OWNS_KEYS ? k : q + own_start, *left2 = OWNS_KEYS ? v : dy + own_start;
    const u32 left1_stride = OWNS_KEYS ? k_stride : q_stride, left2_stride = OWNS_KEYS ? k_stride : dy_stride;
    const u32 right1_stride = OWNS_KEYS ? q_stride : k_stride, right2_stride = OWNS_KEYS ? dy_stride : k_stride;

    // Of padding nothing is read.
    const u32 left_limit = OWNS_KEYS ? block.tile.key_end : block.tile.query_end;
    ELEMENTS::template load<ROWS>(lefts, left1, left1_stride, first, left_limit, call.head_dim);
    ELEMENTS::template load<ROWS>(lefts + LEFT, left2, left2_stride, first, left_limit, call.head_dim);
    commit_copies();

    const u32 own = first + warp * 16, row0 = own + lane / 4;
    Row of_rows[2];
#pragma unroll
    for (int half = 0; half < (OWNS_KEYS ? 0 : 2); half++) {
        of_rows[half] = load_row(row_numbers + ((u64)batch * call.heads + owner) * call.queries, row0 + 8 * half, block.tile.query_end);
    }

    // The other side's rows that meet any of the block's.
    const u32 begin = block.begin(), end = block.end();
    // The other side's tiles, those of each head of the group in turn.
    const u32 per_head = begin < end ? (end - begin + COLUMNS - 1) / COLUMNS : 0;
    const u32 turns = per_head * (OWNS_KEYS ? per_group : 1);
    const u32 right_limit = OWNS_KEYS ? block.tile.query_end : block.tile.key_end;
    auto fetch = [&](u32 member, u32 start, u32 stage) {
        const u32 head = OWNS_KEYS ? owner * per_group + member : owner;
        const u32 right_start = OWNS_KEYS ? head * call.head_dim : 0;
        const Element *right1 = (OWNS_KEYS ? q : k) + right_start, *right2 = (OWNS_KEYS ? dy : v) + right_start;
        const u32 rights = lefts + 2 * LEFT + stage * 2 * RIGHT;
        ELEMENTS::template load<COLUMNS>(rights, right1, right1_stride, start, right_limit, call.head_dim);
        ELEMENTS::template load<COLUMNS>(rights + RIGHT, right2, right2_stride, start, right_limit, call.head_dim);
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
        u32 kept_word = 0;
        if constexpr (Drop::ON) {
            if (drops(dropout)) {
                const u64 head = mask_start(dropout, call, batch, OWNS_KEYS ? owner * per_group + member : owner);
                kept_word = tile_bits<OWNS_KEYS, COLUMNS>(dropout, head, call.keys, own, start);
            }
        }
        const Row* numbers = (const Row*)(memory + NUMBERS) + turn % 2 * COLUMNS;
        use(Stage{lefts, lefts + 2 * LEFT + turn % 2 * 2 * RIGHT, start, numbers, kept_word}, of_rows);
        // The stage is free for the tile after the next.
        __syncthreads();
        member = next_member, start = next;
    }
    return 1;
}
