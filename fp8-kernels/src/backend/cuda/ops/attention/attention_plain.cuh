// What attention_plain.cu and attention_dropout_plain.cu are made of: attention and its backward in f32 arithmetic. It
// follows attention.cuh and attention_dropout.cuh. Sums run over keys, or over queries head by head, in rising order.
//
// A block owns 64 rows and PART columns of the result; it goes through the other side in tiles of 32. A thread has four of
// the rows, and of the tile every eighth column. Scores need whole rows, of which it keeps SLICE columns at a time: larger
// heads than PART have their scores computed once for each part.

#define COLUMNS 32
#define SLICE 32
#define PART 64
#define PITCH 33

// Rows of elements, `stride` apart; there are none from `limit` on.
struct Matrix {
    const void* elements;
    u64 start;
    u32 stride, limit;
};

struct Tiles {
    Block block;
    // Of backward: q, dy, k and v. In shared memory, since registers are scarce.
    Matrix sides[4];
    float left[ROWS][PITCH];
    float right[COLUMNS][PITCH];
    float weights[ROWS][PITCH];
    float values[COLUMNS][PART];
};

__device__ __forceinline__ float element(const Matrix& m, int dtype, u32 row, u32 column, u32 columns) {
    return row < m.limit && column < columns ? load1(m.elements, dtype, m.start + (u64)row * m.stride + column) : 0.0f;
}

// How many of `count` steps a warp takes: none where it has no row that is there.
__device__ __forceinline__ int steps(u32 count, u32 most, u32 row, u32 limit) {
    return row + threadIdx.x / WARP * 16 < limit ? (int)(count < most ? count : most) : 0;
}

// sums = left · rightᵀ, of rows `row` … and `column` …. All threads come here together.
__device__ __forceinline__ void products(float (&sums)[4][4], Tiles& tiles, const Matrix& left, u32 row,
                                         const Matrix& right, u32 column, int dtype, u32 head_dim) {
    const int y = threadIdx.x / 8, x = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
#pragma unroll 1
    for (u32 slice = 0; slice < head_dim; slice += SLICE) {
        const u32 inner = threadIdx.x % SLICE;
        __syncthreads();
#pragma unroll 4
        for (u32 n = 0; n < ROWS; n += THREADS / SLICE) {
            const u32 i = n + threadIdx.x / SLICE;
            tiles.left[i][inner] = element(left, dtype, row + i, slice + inner, head_dim);
        }
#pragma unroll 4
        for (u32 n = 0; n < COLUMNS; n += THREADS / SLICE) {
            const u32 i = n + threadIdx.x / SLICE;
            tiles.right[i][inner] = element(right, dtype, column + i, slice + inner, head_dim);
        }
        __syncthreads();
        const int count = steps(head_dim - slice, SLICE, row, left.limit);
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = tiles.left[4 * y + i][k];
#pragma unroll
            for (int j = 0; j < 4; j++) b[j] = tiles.right[x + 8 * j][k];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
            }
        }
    }
}

// sums += weights · values, of rows `own` … and PART columns from `column` on, for the rows of `values` from `row` on.
__device__ __forceinline__ void add_weighted(float (&sums)[4][8], const float (&weights)[4][4], Tiles& tiles, u32 own,
                                             u32 limit, const Matrix& values, u32 row, u32 column, int dtype,
                                             u32 head_dim) {
    const int y = threadIdx.x / 8, x = threadIdx.x % 8;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) tiles.weights[4 * y + i][x + 8 * j] = weights[i][j];
    }
#pragma unroll 4
    for (u32 n = 0; n < COLUMNS; n += THREADS / PART) {
        const u32 i = n + threadIdx.x / PART;
        tiles.values[i][threadIdx.x % PART] = element(values, dtype, row + i, column + threadIdx.x % PART, head_dim);
    }
    __syncthreads();
    const int count = steps(values.limit - row, COLUMNS, own, limit);
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        float w[4], v[8];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = tiles.weights[4 * y + i][k];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = tiles.values[k][x + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[i][j] = fmaf(w[i], v[j], sums[i][j]);
        }
    }
}

__device__ __forceinline__ void clear_sums(float (&sums)[4][8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[i][j] = 0.0f;
    }
}

// A block's results to their rows, through shared memory. All threads come here together.
__device__ __forceinline__ void store_sums(Tiles& tiles, void* to, int dtype, u64 start, u64 stride, u32 row, u32 limit,
                                           u32 column, u32 head_dim, const float (&sums)[4][8]) {
    const u32 y = threadIdx.x / 8, x = threadIdx.x % 8;
    float* staged = (float*)tiles.left;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) staged[(4 * y + i) * (PART + 1) + x + 8 * j] = sums[i][j];
    }
    __syncthreads();
    const u32 place = column + threadIdx.x % PART, count = limit - row < ROWS ? limit - row : ROWS;
#pragma unroll 1
    for (u32 i = threadIdx.x / PART; i < (place < head_dim ? count : 0); i += THREADS / PART) {
        store1(to, dtype, start + (row + i) * stride + place, staged[i * (PART + 1) + threadIdx.x % PART]);
    }
}

// Over the eight threads that share rows.
__device__ __forceinline__ float eight_max(float v) {
#pragma unroll
    for (int step = 4; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
    return v;
}

__device__ __forceinline__ float eight_sum(float v) {
#pragma unroll
    for (int step = 4; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

template <typename Drop>
__device__ __forceinline__ void forward_plain(Tiles& shared, const void* q, const void* k, const void* v, void* o, int dtype,
                                              float* row_max, float* row_sum, SEQUENCE_PARAMETERS, const Call& call,
                                              const Drop& dropout) {
    const u32 queries = call.queries, keys = call.keys, heads = call.heads, groups = call.groups, head_dim = call.head_dim;
    const u32 tiles = call.tiles;
    const u32 y = threadIdx.x / 8, x = threadIdx.x % 8;
    const u32 parts = (head_dim + PART - 1) / PART, column = blockIdx.x % parts * PART, rest = blockIdx.x / parts;
    if (!start_block<0, 0>(shared.block, call, SEQUENCES, tiles - 1 - rest % tiles, rest / tiles, column == 0)) return;
    const Tile& own = shared.block.tile;
    const u32 batch = own.batch, first = own.first, head = shared.block.owner, group = head / (heads / groups);
    const u32 q_stride = call.q_pitch, k_stride = call.k_pitch;
    const u64 q_start = shared.block.elements(queries, call.q_pitch, head_dim);
    const u64 k_start = (u64)batch * keys * k_stride + (u64)group * head_dim;
    const Matrix q_rows = {q, q_start, q_stride, own.end}, k_rows = {k, k_start, k_stride, own.key_end};
    const Matrix v_rows = {v, k_start, k_stride, own.key_end};

    float out[4][8], max[4], sum[4];
    clear_sums(out);
#pragma unroll
    for (int i = 0; i < 4; i++) max[i] = -INFINITY_F, sum[i] = 0.0f;
#pragma unroll 1
    for (u32 start = shared.block.begin(); start < shared.block.end(); start += COLUMNS) {
        u32 kept_word = 0;
        if constexpr (Drop::ON) {
            const u32 own_row = first + threadIdx.x / WARP * 16;
            kept_word = tile_bits<0, COLUMNS>(dropout, mask_start(dropout, call, batch, head), keys, own_row, start);
        }
        float scores[4][4];
        products(scores, shared, q_rows, first, k_rows, start, dtype, head_dim);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Span span = shared.block.spans[4 * y + i];
            float largest = -INFINITY_F, added = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 key = start + x + 8 * j;
                scores[i][j] = key >= span.begin && key < span.end ? scores[i][j] * call.scale : -INFINITY_F;
                largest = fmaxf(largest, scores[i][j]);
            }
            largest = fmaxf(max[i], eight_max(largest));
            // Where nothing was seen, -inf - -inf would be NaN.
            const float origin = largest == -INFINITY_F ? 0.0f : largest;
            const float shrink = fp8_exp(max[i] - origin);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][j] = fp8_exp(scores[i][j] - origin);
                added += scores[i][j];
            }
            max[i] = largest;
            sum[i] = sum[i] * shrink + added;
            // Dropped after they were summed: what is normalized are the probabilities without dropout.
            if constexpr (Drop::ON) {
                u32 kept[2];
                bits_of_row(kept, kept_word, threadIdx.x % WARP / 8 * 4 + i);
#pragma unroll
                for (int j = 0; j < 4; j++) scores[i][j] = kept[j / 2] >> (x + j % 2 * 8) & 1 ? scores[i][j] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) out[i][j] *= shrink;
        }
        add_weighted(out, scores, shared, first, own.end, v_rows, start, column, dtype, head_dim);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = eight_sum(sum[i]);
        const float divisor = sum[i] != 0.0f ? sum[i] : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) out[i][j] /= divisor;
        if constexpr (Drop::ON) {
#pragma unroll
            for (int j = 0; j < 8; j++) out[i][j] *= dropout.mask.factor;
        }
        const u32 query = first + 4 * y + i;
        if (x == 0 && column == 0 && query < own.end) {
            row_max[((u64)batch * heads + head) * queries + query] = max[i];
            row_sum[((u64)batch * heads + head) * queries + query] = sum[i];
        }
    }
    store_sums(shared, o, dtype, shared.block.elements(queries, call.result_pitch, head_dim), call.result_pitch, first,
               own.end, column, head_dim, out);
}

// What the block owns is `left`, what it goes through `right`: (q, dy) and (k, v), or (k, v) and (q, dy).
template <int OWNS_KEYS, typename Drop>
__device__ __forceinline__ void backward_plain(Tiles& tiles, const void* q, const void* k, const void* v, const void* dy,
                                               int dtype, const Row* row_numbers, void* d_first, void* d_second,
                                               SEQUENCE_PARAMETERS, const Call& call, const Drop& dropout) {
    const u32 y = threadIdx.x / 8, x = threadIdx.x % 8;
    const u32 per_group = call.heads / call.groups, head_dim = call.head_dim;
    const u32 parts = (head_dim + PART - 1) / PART, part = blockIdx.x % parts * PART, rest = blockIdx.x / parts;
    const u32 place = rest % call.tiles, index = OWNS_KEYS ? place : call.tiles - 1 - place;
    if (!start_block<OWNS_KEYS, 1>(tiles.block, call, SEQUENCES, index, rest / call.tiles, part == 0)) return;
    const Tile& own = tiles.block.tile;
    const u32 batch = own.batch, first = own.first, owner = tiles.block.owner;
    float first_sums[4][8], second_sums[4][8];
    clear_sums(first_sums);
    clear_sums(second_sums);
#pragma unroll 1
    for (u32 member = 0; member < (OWNS_KEYS ? per_group : 1); member++) {
        const u32 head = OWNS_KEYS ? owner * per_group + member : owner;
        __syncthreads();
        if (threadIdx.x == 0) {
            // dy has no other heads between its own.
            const u32 in_token = head * head_dim, dy_pitch = call.heads * head_dim;
            const u64 token = (u64)batch * call.queries;
            const u64 k_start = (u64)batch * call.keys * call.k_pitch + (OWNS_KEYS ? owner : owner / per_group) * head_dim;
            tiles.sides[0] = {q, token * call.q_pitch + in_token, call.q_pitch, own.query_end};
            tiles.sides[1] = {dy, token * dy_pitch + in_token, dy_pitch, own.query_end};
            tiles.sides[2] = {k, k_start, call.k_pitch, own.key_end};
            tiles.sides[3] = {v, k_start, call.k_pitch, own.key_end};
        }
        // The first product waits for them.
        const Matrix* left = tiles.sides + (OWNS_KEYS ? 2 : 0);
        const Matrix* right = tiles.sides + (OWNS_KEYS ? 0 : 2);
        const Row* of_head = row_numbers + ((u64)batch * call.heads + head) * call.queries;
#pragma unroll 1
        for (u32 from = tiles.block.begin(); from < tiles.block.end(); from += COLUMNS) {
            u32 kept_word = 0;
            if constexpr (Drop::ON) {
                const u32 own_row = first + threadIdx.x / WARP * 16;
                const u64 mask = mask_start(dropout, call, batch, head);
                kept_word = tile_bits<OWNS_KEYS, COLUMNS>(dropout, mask, call.keys, own_row, from);
            }
            float p[4][4], ds[4][4];
            products(p, tiles, left[0], first, right[0], from, dtype, head_dim);
            products(ds, tiles, left[1], first, right[1], from, dtype, head_dim);
            u32 kept_queries[4];
#pragma unroll
            for (int j = 0; j < (Drop::ON && OWNS_KEYS ? 4 : 0); j++) kept_queries[j] = bits_of_query(kept_word, x + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = threadIdx.x % WARP / 8 * 4 + i;
                u32 kept_keys[2];
                if constexpr (Drop::ON && !OWNS_KEYS) bits_of_row(kept_keys, kept_word, row);
                // Relative to the thread's first column. Rows behind the last one have no numbers.
                const Span span = tiles.block.spans[4 * y + i];
                const int begin = (int)(span.begin - from - x);
                const int end = first + 4 * y + i < own.end ? (int)(span.end - from - x) : begin;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int visible = 8 * j >= begin && 8 * j < end;
                    float4 numbers = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (visible) numbers = *(const float4*)(of_head + (OWNS_KEYS ? from + x + 8 * j : first + 4 * y + i));
                    float probability = fp8_exp(p[i][j] * call.scale - numbers.x) * numbers.y;
                    float slope = ds[i][j];
                    float weight = 1.0f;
                    if constexpr (Drop::ON) {
                        const u32 bits = OWNS_KEYS ? kept_queries[j] >> row : kept_keys[j / 2] >> (x + j % 2 * 8);
                        weight = bits & 1 ? dropout.mask.factor : 0.0f;
                        slope = bits & 1 ? slope * dropout.mask.factor : 0.0f;
                    }
                    slope = probability * (slope - numbers.z) * call.scale;
                    if (Drop::ON) probability *= weight;
                    p[i][j] = visible ? probability : 0.0f;
                    ds[i][j] = visible ? slope : 0.0f;
                }
            }
            add_weighted(first_sums, ds, tiles, first, left[0].limit, right[0], from, part, dtype, head_dim);
            if (OWNS_KEYS) {
                add_weighted(second_sums, p, tiles, first, left[0].limit, right[1], from, part, dtype, head_dim);
            }
        }
    }
    const u64 start = tiles.block.elements(OWNS_KEYS ? call.keys : call.queries, call.result_pitch, head_dim);
    const u64 stride = call.result_pitch;
    store_sums(tiles, d_first, dtype, start, stride, first, own.end, part, head_dim, first_sums);
    if (OWNS_KEYS) store_sums(tiles, d_second, dtype, start, stride, first, own.end, part, head_dim, second_sums);
}

#define BACKWARD_PLAIN(NAME, OWNS_KEYS, BLOCKS)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                  \
    NAME(const void* q, const void* k, const void* v, const void* dy, int dtype, const Row* row_numbers,           \
         void* d_first, void* d_second, DROPOUT_PARAMETERS CALL_PARAMETERS) {                                      \
        __shared__ Tiles shared;                                                                                   \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        backward_plain<OWNS_KEYS>(shared, q, k, v, dy, dtype, row_numbers, d_first, d_second, SEQUENCES, call,     \
                                  DROPOUT_VALUE);                                                                  \
    }

#define FORWARD_PLAIN(NAME)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                       \
    NAME(const void* q, const void* k, const void* v, void* o, int dtype, float* row_max, float* row_sum,          \
         DROPOUT_PARAMETERS CALL_PARAMETERS) {                                                                     \
        __shared__ Tiles shared;                                                                                   \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        forward_plain(shared, q, k, v, o, dtype, row_max, row_sum, SEQUENCES, call, DROPOUT_VALUE);                \
    }
