// What the kernels of attention share: sizes of a call, and the tensor cores' products of 16-bit elements.
//
// A block of four warps owns 64 rows of one head, 16 a warp, and goes through the other side in tiles. Head sizes are
// padded with zeros to D elements in shared memory. Tiles have rows of D elements in chunks of eight, which stand at
// (chunk xor row): ldmatrix meets no bank twice. The result of one product has the layout in which the next one reads its
// left operand: scores stay in registers.

#define ROWS 64
#define THREADS 128

// Scores are multiplied by log2(e) besides the call's scale, so that one instruction gives their exponential, within 2 ulp.
// Attention is compared within a tolerance; no code depends on it.
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

__device__ __forceinline__ float exp2_approx(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

// Sizes of one call. A query sees keys up to `left` before and `right` behind the one that it stands at; UNLIMITED: all.
// Pitches are the elements from one token to the next: of queries, of keys and values, and of the results. They are more
// than a token's heads have where the heads of others lie between, as in the output of one projection of all three.
struct Call {
    u32 tiles, queries, keys, heads, groups, head_dim, q_pitch, k_pitch, result_pitch, left, right;
    int bottom_right;
    float scale;
};

#define UNLIMITED 0xffffffffu

#define CALL_PARAMETERS                                                                                            \
    const int *__restrict__ query_lengths, const int *__restrict__ key_lengths, const int *__restrict__ tile_table, \
        i64 *fault, u32 tiles, u32 queries, u32 keys, u32 heads, u32 groups, u32 head_dim, u32 q_pitch,            \
        u32 k_pitch, u32 result_pitch, u32 left, u32 right, int bottom_right, float scale
#define CALL_OF_PARAMETERS \
    {tiles, queries, keys, heads, groups, head_dim, q_pitch, k_pitch, result_pitch, left, right, bottom_right, scale}
#define SEQUENCES query_lengths, key_lengths, tile_table, fault
#define SEQUENCE_PARAMETERS const int *query_lengths, const int *key_lengths, const int *tile_table, i64 *fault
enum { FAULT_FORWARD_KEYS = 5, FAULT_BACKWARD_KEYS = 6, FAULT_FORWARD_QUERIES = 9, FAULT_BACKWARD_QUERIES = 10 };

__device__ __forceinline__ u32 length_of(const int* lengths, u32 most, i64* fault, u32 batch, int reports, i64 code) {
    if (!lengths) return most;
    int length = lengths[batch];
    if ((u32)length <= most) return (u32)length;
    if (reports && threadIdx.x == 0) report_fault(fault, code, length, batch, (u64)most + 1);
    return length < 0 ? 0 : most;
}

// Of a row of scores: what turns them into probabilities again, p = exp(score - origin) · inverse, and the mean of dp. By
// attention_backward_rows or attention_fp8_rows.
struct __align__(16) Row {
    float origin, inverse, mean, origin_log2;
};

// Where there is no query, probabilities are 0.
__device__ __forceinline__ Row load_row(const Row* rows, u32 query, u32 queries) {
    float4 row = query < queries ? *(const float4*)(rows + query) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return {row.x, row.y, row.z, row.w};
}

// What a block owns: rows from `first` to `end`, and the sequence that they belong to. Rows of the sequence beyond `end` are
// padding, which is written, too.
struct Tile {
    u32 batch, first, end, query_begin, query_end, key_begin, key_end;
};

// The block's tile: number `index` of the batch entry's, or of a packing's table.
template <int OWNS_KEYS, int BACKWARD>
__device__ __forceinline__ Tile tile_of(const Call& call, SEQUENCE_PARAMETERS, u32 index, u32 batch, int reports) {
    if (tile_table) {
        const int* row = tile_table + 5 * index;
        const u32 first = row[0], end = row[OWNS_KEYS ? 4 : 2];
        return {0, first, end, (u32)row[1], (u32)row[2], (u32)row[3], (u32)row[4]};
    }
    const u32 query_length = length_of(query_lengths, call.queries, fault, batch, reports,
                                       BACKWARD ? FAULT_BACKWARD_QUERIES : FAULT_FORWARD_QUERIES);
    const u32 key_length = length_of(key_lengths, call.keys, fault, batch, reports,
                                     BACKWARD ? FAULT_BACKWARD_KEYS : FAULT_FORWARD_KEYS);
    return {batch, index * ROWS, OWNS_KEYS ? call.keys : call.queries, 0, query_length, 0, key_length};
}

// A range of rows of the other side.
struct Span {
    u32 begin, end;
};

__device__ __forceinline__ u32 clamped(i64 v, u32 least, u32 most) {
    return v < least ? least : v > most ? most : (u32)v;
}

// What a row meets of the other side: the keys that a query sees, or the queries that see a key. Both ends grow with the row.
template <int OWNS_KEYS>
__device__ __forceinline__ Span span_of(const Call& call, const Tile& tile, u32 row) {
    const u32 begin = OWNS_KEYS ? tile.query_begin : tile.key_begin, end = OWNS_KEYS ? tile.query_end : tile.key_end;
    const u32 own_begin = OWNS_KEYS ? tile.key_begin : tile.query_begin, own_end = OWNS_KEYS ? tile.key_end : tile.query_end;
    if (row >= own_end) return {end, end};
    i64 own = (i64)begin + (row - own_begin);
    if (call.bottom_right) own += (i64)(end - begin) - (own_end - own_begin);
    const u32 before = OWNS_KEYS ? call.right : call.left, behind = OWNS_KEYS ? call.left : call.right;
    return {before == UNLIMITED ? begin : clamped(own - before, begin, end),
            behind == UNLIMITED ? end : clamped(own + behind + 1, begin, end)};
}

// A block's tile, its head or group, and what each of its rows meets. In shared memory: registers are scarce, and what is read
// again at the end need not be kept in them.
struct Block {
    Tile tile;
    u32 owner;
    // Rows behind the last one have its span.
    Span spans[ROWS];

    // What any row meets.
    __device__ __forceinline__ u32 begin() const { return spans[0].begin; }
    __device__ __forceinline__ u32 end() const { return spans[ROWS - 1].end; }

    // Where the owner's elements begin, in a tensor of `rows` tokens a batch entry that are `pitch` elements apart.
    __device__ __forceinline__ u64 elements(u32 rows, u32 pitch, u32 head_dim) const {
        return (u64)tile.batch * rows * pitch + owner * head_dim;
    }
};

// All threads come here together. False for a tile without rows, of a packing's table.
template <int OWNS_KEYS, int BACKWARD>
__device__ __forceinline__ int start_block(Block& block, const Call& call, SEQUENCE_PARAMETERS, u32 index, u32 above,
                                           int reports) {
    if (threadIdx.x == 0) {
        const u32 owners = OWNS_KEYS ? call.groups : call.heads;
        block.owner = above % owners;
        reports = reports && index == 0 && block.owner == 0;
        block.tile = tile_of<OWNS_KEYS, BACKWARD>(call, SEQUENCES, index, above / owners, reports);
    }
    __syncthreads();
    const u32 first = block.tile.first, end = block.tile.end;
    if (first >= end) return 0;
    if (threadIdx.x < ROWS) {
        const u32 row = first + threadIdx.x < end ? first + threadIdx.x : end - 1;
        block.spans[threadIdx.x] = span_of<OWNS_KEYS>(call, block.tile, row);
    }
    __syncthreads();
    return 1;
}

// Whether some of a warp's rows do not meet some of the columns from `begin` to `end`.
__device__ __forceinline__ int is_partial(const Span* of_warp, u32 begin, u32 end) {
    return begin < of_warp[15].begin || end > of_warp[0].end;
}

// ---- the instructions ----

__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 address;
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(address) : "l"(p));
    return address;
}

// 16 bytes to shared memory; zeros where `size` is 0.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 size) {
    asm volatile("{ .reg .u64 p; cvta.to.global.u64 p, %1; cp.async.cg.shared.global [%0], [p], 16, %2; }" ::"r"(to),
                 "l"(from), "r"(size)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int MOST>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 m[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 m[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// c += a · b for 16 rows of 16 elements and 8 columns.
template <int DTYPE>
__device__ __forceinline__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    if (DTYPE == BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Two values in one register, `low` in its low half.
template <int DTYPE>
__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 pair;
    if (DTYPE == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// What `narrow` has dropped of both values, narrowed in turn.
template <int DTYPE>
__device__ __forceinline__ u32 remainder(u32 pair, float low, float high) {
    if (DTYPE == BF16) return narrow<BF16>(low - bf16_to_f32(pair & 0xffffu), high - bf16_to_f32(pair >> 16));
    return narrow<F16>(low - f16_to_f32(pair & 0xffffu), high - f16_to_f32(pair >> 16));
}

// Two results of eight columns each as the left operand of 16.
template <int DTYPE>
__device__ __forceinline__ void narrow_pairs(u32 w[4], const float (*c)[4]) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const float* pair = c[part / 2] + part % 2 * 2;
        w[part] = narrow<DTYPE>(pair[0], pair[1]);
    }
}

// ---- tiles ----

// Where a chunk of a row stands.
template <int D>
__device__ __forceinline__ u32 place(u32 tile, int row, int chunk) {
    return tile + row * (2 * D) + ((chunk ^ row % 8) << 4);
}

// Rows `first` … of a matrix whose rows are `stride` elements apart; zeros from row `limit` and column `head_dim` on.
template <int D, int COUNT>
__device__ __forceinline__ void load_tile(u32 tile, const u16* from, u32 stride, u32 first, u32 limit, u32 head_dim) {
    constexpr int CHUNKS = D / 8, AT_ONCE = THREADS / CHUNKS;
    // A thread copies one chunk of several rows.
    const int chunk = threadIdx.x % CHUNKS, is_real = 8 * chunk < head_dim;
    const u16* column = is_real ? from + 8 * chunk : from;
    const u32 end = is_real ? limit : 0;
#pragma unroll
    for (int i = 0; i < COUNT / AT_ONCE; i++) {
        const u32 row = threadIdx.x / CHUNKS + i * AT_ONCE;
        const int there = first + row < end;
        copy16(place<D>(tile, row, chunk), column + (u64)(there ? first + row : 0) * stride, there ? 16 : 0);
    }
}

// A left operand: 16 rows of 16 columns.
template <int D>
__device__ __forceinline__ void load_left(u32 m[4], u32 tile, int row, int column16) {
    const int lane = threadIdx.x % WARP;
    load_matrices(m, place<D>(tile, row + lane % 16, 2 * column16 + lane / 16));
}

// A right operand whose columns are 16 of the tile's rows: m[0] and m[1] for the first eight, m[2] and m[3] for the others.
template <int D>
__device__ __forceinline__ void load_right(u32 m[4], u32 tile, int row, int column16) {
    const int lane = threadIdx.x % WARP;
    load_matrices(m, place<D>(tile, row + lane % 8 + lane / 16 * 8, 2 * column16 + lane / 8 % 2));
}

// A right operand whose rows are 16 of the tile's rows, and columns 16 of its columns, in the same order.
template <int D>
__device__ __forceinline__ void load_right_rows(u32 m[4], u32 tile, int row, int column16) {
    const int lane = threadIdx.x % WARP;
    load_transposed(m, place<D>(tile, row + lane % 16, 2 * column16 + lane / 16));
}

template <int N>
__device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] = 0.0f;
    }
}

// c += w · tile, for w of 16 rows and 16 columns, the tile's rows from `row` on.
template <int DTYPE, int D>
__device__ __forceinline__ void add_product(float (&c)[D / 8][4], const u32 w[4], u32 tile, int row) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        u32 m[4];
        load_right_rows<D>(m, tile, row, n);
        multiply<DTYPE>(c[2 * n], w, m[0], m[1]);
        multiply<DTYPE>(c[2 * n + 1], w, m[2], m[3]);
    }
}

// A warp's 16 rows from `row` on, as far as there are; times a factor for each of a lane's two rows.
template <int DTYPE, int D>
__device__ __forceinline__ void store_rows(u16* to, u32 stride, u32 row, u32 limit, u32 head_dim,
                                           const float (&c)[D / 8][4], float factor0, float factor1) {
    const int lane = threadIdx.x % WARP;
    const u32 rows[2] = {row + lane / 4, row + lane / 4 + 8};
    const float factors[2] = {factor0, factor1};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (rows[half] >= limit) continue;
        u16* line = to + (u64)rows[half] * stride + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            u32 pair = narrow<DTYPE>(c[n][2 * half] * factors[half], c[n][2 * half + 1] * factors[half]);
            if (8 * n < head_dim) *(u32*)(line + 8 * n) = pair;
        }
    }
}

// How the loops of forward and backward load and multiply tiles of 16-bit elements.
template <int DTYPE, int D>
struct Halves {
    typedef u16 Element;
    // Columns of a tile that one product of scores goes along.
    static constexpr int INNER = 16;

    template <int COUNT>
    static __device__ __forceinline__ void load(u32 tile, const u16* from, u32 stride, u32 first, u32 limit, u32 head_dim) {
        load_tile<D, COUNT>(tile, from, stride, first, limit, head_dim);
    }
    static __device__ __forceinline__ void left(u32 m[4], u32 tile, int row, int step) { load_left<D>(m, tile, row, step); }
    static __device__ __forceinline__ void right(u32 m[4], u32 tile, int row, int step) { load_right<D>(m, tile, row, step); }
    static __device__ __forceinline__ void multiply_scores(float c[4], const u32 a[4], u32 b0, u32 b1) {
        multiply<DTYPE>(c, a, b0, b1);
    }
};
