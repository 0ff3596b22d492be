// The numbers that backward reads of each row of scores, for attention_rows.cu and attention_fp8.cu. It follows attention.cuh.

// A warp takes as many rows as it has lanes. In the end each lane has one of them, and writes what belongs to it: the divisions
// that find a row's place are made once a row and not once an element.
struct OwnRow {
    u64 row, start;
    u32 count;
};

// The lane's row among those from `base` on, and where its elements begin in dy and o. Behind the last row: the last one.
__device__ __forceinline__ OwnRow own_row(u64 base, u64 count, u32 queries, u32 heads, u32 head_dim) {
    const u32 lane = threadIdx.x % WARP;
    const u32 rows = count - base < WARP ? (u32)(count - base) : WARP;
    const u64 row = base + (lane < rows ? lane : rows - 1);
    const u64 above = quotient(row, queries), batch = quotient(above, heads);
    const u64 token = batch * queries + (row - above * queries);
    return {row, (token * heads + (above - batch * heads)) * head_dim, rows};
}

// The mean of dp for the lane's row: the products of its dy and o, of which dot(i) adds those of eight elements from i on.
// LANES lanes read a row together. All lanes come here together.
template <int LANES, typename Dot>
__device__ __forceinline__ float mean_of_eights(const OwnRow& own, u32 head_dim, const Dot& dot) {
    constexpr int AT_ONCE = WARP / LANES;
    const u32 lane = threadIdx.x % WARP;
    float result = 0.0f;
#pragma unroll 2
    for (u32 step = 0; step < LANES; step++) {
        const u64 start = __shfl_sync(FULL_WARP, own.start, step * AT_ONCE + lane / LANES);
        float mean = 0.0f;
        // Two at most, but in large heads.
#pragma unroll 2
        for (u32 i = lane % LANES * 8; i < (LANES < WARP ? LANES * 16 : head_dim); i += LANES * 8) {
            if (LANES == WARP || i < head_dim) mean = dot(start + i, mean);
        }
#pragma unroll
        for (int half = LANES / 2; half > 0; half >>= 1) mean += __shfl_xor_sync(FULL_WARP, mean, half);
        mean = __shfl_sync(FULL_WARP, mean, lane % AT_ONCE * LANES);
        if (lane / AT_ONCE == step) result = mean;
    }
    return result;
}

template <typename Dot>
__device__ __forceinline__ float mean_of_row(const OwnRow& own, u32 head_dim, const Dot& dot) {
    if (head_dim <= 64) return mean_of_eights<4>(own, head_dim, dot);
    if (head_dim <= 128) return mean_of_eights<8>(own, head_dim, dot);
    return mean_of_eights<32>(own, head_dim, dot);
}

// Without sums, `row_max` is a row's log-sum-exp. A row that sees nothing has no origin, and weighs nothing.
__device__ __forceinline__ void write_row(Row* rows, const OwnRow& own, const float* row_max, const float* row_sum, float mean) {
    if (threadIdx.x % WARP >= own.count) return;
    const float largest = row_max[own.row], sum = row_sum ? row_sum[own.row] : 1.0f;
    const float origin = largest == -INFINITY_F ? 0.0f : largest;
    *(float4*)(rows + own.row) = make_float4(origin, sum != 0.0f ? 1.0f / sum : 0.0f, mean, origin * LOG2_E);
}
