// Rows of a table by id, and the gradient of the table: src/backend/cpu/embedding.rs.
//
// The gradient's rows are summed in the order of the ids, without float atomics: a stable radix sort of (id, position),
// eight bits of the id a pass, puts the positions of each id next to each other in their order; then a warp adds the
// rows of one id one after the other. An id out of range is reported once and otherwise ignored.

#define BINS 256
#define SORT_THREADS 256
#define SORT_WARPS (SORT_THREADS / WARP)
// Ids of a block of the sort, and of each warp: a contiguous piece, 32 ids a round.
#define TILE 2048
#define ROUNDS (TILE / SORT_THREADS)
// Sorted entries in which a warp looks for first ones of an id; columns that it adds at a time.
#define GROUP 8
#define SLICE (8 * WARP)

template <typename T>
__device__ __forceinline__ void gather(const int* ids, const T* table, T* y, u64 n, u64 first, u64 limit,
                                       u64 total, u64 width, i64* fault) {
    // Rows of no elements have their ids checked too.
    u64 pieces = width == 0 ? 1 : width;
    for (u64 item = grid_thread(); item < n * pieces; item += grid_threads()) {
        u64 position = quotient(item, pieces), col = item - position * pieces;
        int id = ids[position];
        // That of a negative id is beyond the limit as well.
        u64 row = (u64)(i64)id - first;
        T v = T();
        if (row < limit) {
            if (width != 0) v = table[row * width + col];
        } else if ((u64)(i64)id >= total && col == 0) {
            report_fault(fault, 1, id, position, total);
        }
        if (width != 0) y[item] = v;
    }
}

// `width` counts units of a row; a unit has 16, 8, 4 or 2 bytes. The table has `limit` rows, from `first` on, of the `total` that
// ids are of; those of other rows give zeros.
extern "C" __global__ void __launch_bounds__(256)
    embedding(const int* ids, const void* table, void* y, u64 n, u64 first, u64 limit, u64 total, u64 width, int unit,
              i64* fault) {
    if (unit == 16) gather(ids, (const uint4*)table, (uint4*)y, n, first, limit, total, width, fault);
    else if (unit == 8) gather(ids, (const u64*)table, (u64*)y, n, first, limit, total, width, fault);
    else if (unit == 4) gather(ids, (const u32*)table, (u32*)y, n, first, limit, total, width, fault);
    else gather(ids, (const u16*)table, (u16*)y, n, first, limit, total, width, fault);
}

// ---- the sort: entries are row << 32 | position, where the row is the id less `first`; ids of other rows than the table's
// `limit` count as `limit` and go last ----

// Entry i: of the ids where there are some (the first pass), else of the entries.
__device__ __forceinline__ u64 entry_at(const int* ids, const u64* entries, u64 i, u32 first, u32 limit) {
    if (ids == nullptr) return entries[i];
    u32 row = (u32)ids[i] - first;
    return (u64)(row < limit ? row : limit) << 32 | (u32)i;
}

__device__ __forceinline__ u32 bin_of(u64 entry, int shift) { return (u32)(entry >> (32 + shift)) & (BINS - 1); }

// The sum over the lanes up to this one.
__device__ __forceinline__ u32 sum_up_to(u32 v) {
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        u32 before = __shfl_up_sync(FULL_WARP, v, step);
        if ((int)threadIdx.x % WARP >= step) v += before;
    }
    return v;
}

// The sum over the threads before this one, and the sum over all. `scratch` has a word for each warp and may be used
// again at once.
__device__ __forceinline__ u32 sum_before(u32 v, u32* all, u32* scratch) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    u32 sum = sum_up_to(v);
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    u32 start = 0;
    *all = 0;
    for (int w = 0; w < SORT_WARPS; w++) {
        if (w == warp) start = *all;
        *all += scratch[w];
    }
    __syncthreads();
    return start + sum - v;
}

// counts[bin, block]: how many of the block's entries go into the bin. `fault` is null after the first pass.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    embedding_backward_count(const int* ids, const u64* entries, u64 n, u32 first_row, u32 limit, u32 total, int shift,
                             u32* counts, i64* fault) {
    __shared__ u32 bins[BINS];
    bins[threadIdx.x] = 0;
    __syncthreads();
    u64 first = (u64)blockIdx.x * TILE + threadIdx.x, wrong = n;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        u64 i = first + round * SORT_THREADS;
        if (i < n) {
            u64 entry = entry_at(ids, entries, i, first_row, limit);
            atomicAdd(&bins[bin_of(entry, shift)], 1u);
        }
    }
    if (fault != nullptr) {
#pragma unroll 1
        for (u64 i = first; i < n && i < first + TILE; i += SORT_THREADS) {
            if ((u32)ids[i] >= total) wrong = i;
        }
    }
    if (wrong < n) report_fault(fault, 2, ids[wrong], wrong, total);
    __syncthreads();
    counts[(u64)threadIdx.x * gridDim.x + blockIdx.x] = bins[threadIdx.x];
}

// A warp for each bin: its counts become the number of its entries in the blocks before, totals[bin] that in all.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    embedding_backward_scan(u32* counts, u32* totals, u32 blocks) {
    u32 lane = threadIdx.x % WARP, bin = blockIdx.x * SORT_WARPS + threadIdx.x / WARP;
    u32* row = counts + (u64)bin * blocks;
    u32 total = 0;
    for (u32 first = 0; first < blocks; first += WARP) {
        u32 i = first + lane, count = i < blocks ? row[i] : 0;
        u32 sum = sum_up_to(count);
        if (i < blocks) row[i] = total + sum - count;
        total += __shfl_sync(FULL_WARP, sum, WARP - 1);
    }
    if (lane == 0) totals[bin] = total;
}

// Writes each entry to its place: behind the smaller bins, the earlier blocks, the earlier warps and the earlier
// entries of its warp.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    embedding_backward_place(const int* ids, const u64* entries, u64* sorted, u64 n, u32 first_row, u32 limit, int shift,
                             const u32* counts, const u32* totals) {
    __shared__ u32 next[SORT_WARPS][BINS];
    __shared__ u32 scratch[SORT_WARPS];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    u64 first = (u64)blockIdx.x * TILE + (u64)warp * (ROUNDS * WARP) + lane;
    for (int w = 0; w < SORT_WARPS; w++) next[w][threadIdx.x] = 0;
    __syncthreads();
    u64 mine[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        u64 i = first + round * WARP;
        mine[round] = i < n ? entry_at(ids, entries, i, first_row, limit) : 0;
        if (i < n) atomicAdd(&next[warp][bin_of(mine[round], shift)], 1u);
    }
    u32 all;
    u32 place = sum_before(totals[threadIdx.x], &all, scratch);
    place += counts[(u64)threadIdx.x * gridDim.x + blockIdx.x];
    for (int w = 0; w < SORT_WARPS; w++) {
        u32 count = next[w][threadIdx.x];
        next[w][threadIdx.x] = place;
        place += count;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        bool valid = first + round * WARP < n;
        u32 bin = bin_of(mine[round], shift);
        // Lanes of the same bin.
        u32 peers = __ballot_sync(FULL_WARP, valid);
#pragma unroll
        for (int bit = 0; bit < 8; bit++) {
            bool set = (bin >> bit & 1) != 0;
            u32 lanes = __ballot_sync(FULL_WARP, set);
            peers &= set ? lanes : ~lanes;
        }
        u32 before = __popc(peers & ((1u << lane) - 1)), start = next[warp][bin];
        __syncwarp();
        if (valid) sorted[start + before] = mine[round];
        if (valid && before == 0) next[warp][bin] = start + __popc(peers);
        __syncwarp();
    }
}

// ---- the sums ----

// Adds rows of dy, eight columns a lane from `col` on: neighbours where `wide`, else WARP apart.
__device__ __forceinline__ void add_row(float sum[8], const void* dy, int dtype, u64 row, u64 col, u64 hidden) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u64 c = col + k * WARP;
        if (c < hidden) sum[k] += load1(dy, dtype, row + c);
    }
}

// dtable[row, :] += Σ dy[position, :] for the positions of each row. Nothing where an id was out of range: an error
// changes nothing.
extern "C" __global__ void __launch_bounds__(256, 2)
    embedding_backward_add(const void* dy, const u64* sorted, float* dtable, u64 n, u64 hidden, u32 limit, int dtype,
                           const i64* fault) {
    if (fault[0] != 0) return;
    int lane = (int)threadIdx.x % WARP;
    bool wide = hidden % 8 == 0;
    u64 groups = (n + GROUP - 1) / GROUP, slices = (hidden + SLICE - 1) / SLICE;
    for (u64 item = grid_thread() / WARP; item < groups * slices; item += grid_threads() / WARP) {
        u64 group = quotient(item, slices), slice = item - group * slices;
        u64 col = slice * SLICE + (wide ? lane * 8 : lane);
        // The first entries of their ids among the group's.
        u64 i = group * GROUP + lane;
        u32 id = limit;
        bool is_first = false;
        if (lane < GROUP && i < n) {
            id = (u32)(sorted[i] >> 32);
            is_first = id < limit && (i == 0 || (u32)(sorted[i - 1] >> 32) != id);
        }
        u32 firsts = __ballot_sync(FULL_WARP, is_first);
        while (firsts != 0) {
            int at = __ffs((int)firsts) - 1;
            firsts &= firsts - 1;
            u32 row_id = __shfl_sync(FULL_WARP, id, at);
            u64 out = (u64)row_id * hidden + col;
            float sum[8];
            if (wide && col < hidden) {
                widen8(sum, raw8_cached(dtable, F32, out), F32);
            } else if (!wide) {
#pragma unroll
                for (int k = 0; k < 8; k++) sum[k] = col + k * WARP < hidden ? dtable[out + k * WARP] : 0.0f;
            }
            int count = WARP;
            for (u64 from = group * GROUP + at; count == WARP; from += WARP) {
                u64 entry = from + lane < n ? sorted[from + lane] : ~0ull;
                u32 same = __ballot_sync(FULL_WARP, (u32)(entry >> 32) == row_id);
                count = same == FULL_WARP ? WARP : __ffs((int)~same) - 1;
                int t = 0;
                for (; t + 4 <= count; t += 4) {
                    u64 rows[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) rows[k] = (u64)__shfl_sync(FULL_WARP, (u32)entry, t + k) * hidden;
                    if (wide && col < hidden) {
                        Raw8 raw[4];
#pragma unroll
                        for (int k = 0; k < 4; k++) raw[k] = raw8(dy, dtype, rows[k] + col);
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            float v[8];
                            widen8(v, raw[k], dtype);
#pragma unroll
                            for (int c = 0; c < 8; c++) sum[c] += v[c];
                        }
                    } else if (!wide) {
#pragma unroll
                        for (int k = 0; k < 4; k++) add_row(sum, dy, dtype, rows[k], col, hidden);
                    }
                }
                for (; t < count; t++) {
                    u64 row = (u64)__shfl_sync(FULL_WARP, (u32)entry, t) * hidden;
                    if (wide && col < hidden) {
                        float v[8];
                        widen8(v, raw8(dy, dtype, row + col), dtype);
#pragma unroll
                        for (int c = 0; c < 8; c++) sum[c] += v[c];
                    } else if (!wide) {
                        add_row(sum, dy, dtype, row, col, hidden);
                    }
                }
            }
            if (wide && col < hidden) {
                store8(dtable, F32, out, sum);
            } else if (!wide) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    if (col + k * WARP < hidden) dtable[out + k * WARP] = sum[k];
                }
            }
        }
    }
}
