#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_plain.cuh"
// Attention and its backward in f32 arithmetic: any float type and head size; and the numbers of rows that each backward
// reads.

#define DROPOUT_PARAMETERS
#define DROPOUT_VALUE \
    NoDropout {}

FORWARD_PLAIN(attention_plain)
BACKWARD_PLAIN(attention_plain_backward_q, 0, 3)
BACKWARD_PLAIN(attention_plain_backward_kv, 1, 3)

// A warp for each row: what both kinds of backward read of it.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_rows(const void* dy, const void* o, int dtype, const float* row_max, const float* row_sum, Row* rows,
                        u64 count, u32 queries, u32 heads, u32 head_dim) {
    const int lane = threadIdx.x % WARP;
    for (u64 row = grid_thread() / WARP; row < count; row += grid_threads() / WARP) {
        const u64 above = quotient(row, queries), batch = quotient(above, heads);
        const u64 token = batch * queries + (row - above * queries);
        const u64 start = (token * heads + above - batch * heads) * head_dim;
        float mean = 0.0f;
#pragma unroll 4
        for (u32 i = lane; i < head_dim; i += WARP) {
            mean = fmaf(load1(dy, dtype, start + i), load1(o, dtype, start + i), mean);
        }
        mean = warp_sum(mean);
        if (lane == 0) {
            const float largest = row_max[row], sum = row_sum[row];
            const float origin = largest == -INFINITY_F ? 0.0f : largest;
            *(float4*)(rows + row) = make_float4(origin, sum != 0.0f ? 1.0f / sum : 0.0f, mean, origin * LOG2_E);
        }
    }
}
