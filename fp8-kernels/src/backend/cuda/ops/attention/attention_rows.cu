#include "attention.cuh"
#include "attention_rows.cuh"
// The numbers of rows that both kinds of backward read, and the log-sum-exp of rows.

// Eight products of dy and o, added one after the other.
template <int DTYPE>
struct DotOf16Bits {
    const u16 *dy, *o;

    __device__ __forceinline__ float operator()(u64 i, float sum) const {
        const uint4 left = load16(dy + i), right = load16(o + i);
        const u32 a[4] = {left.x, left.y, left.z, left.w}, b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (DTYPE == BF16) {
                sum = fmaf(__int_as_float(a[k] << 16), __int_as_float(b[k] << 16), sum);
                sum = fmaf(__int_as_float(a[k] & 0xffff0000u), __int_as_float(b[k] & 0xffff0000u), sum);
            } else {
                sum = fmaf(f16_to_f32(a[k] & 0xffffu), f16_to_f32(b[k] & 0xffffu), sum);
                sum = fmaf(f16_to_f32(a[k] >> 16), f16_to_f32(b[k] >> 16), sum);
            }
        }
        return sum;
    }
};

// The same for any type and head size, a row at a time: element i is added by lane i % 32.
__device__ __forceinline__ float mean_of_elements(const OwnRow& own, const void* dy, const void* o, int dtype, u32 head_dim) {
    const u32 lane = threadIdx.x % WARP;
    float result = 0.0f;
#pragma unroll 1
    for (u32 row = 0; row < own.count; row++) {
        const u64 start = __shfl_sync(FULL_WARP, own.start, row);
        float mean = 0.0f;
#pragma unroll 4
        for (u32 i = lane; i < head_dim; i += WARP) {
            mean = fmaf(load1(dy, dtype, start + i), load1(o, dtype, start + i), mean);
        }
        mean = warp_sum(mean);
        if (lane == row) result = mean;
    }
    return result;
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_rows(const void* dy, const void* o, int dtype, const float* row_max, const float* row_sum, Row* rows,
                        u64 count, u32 queries, u32 heads, u32 head_dim) {
    for (u64 base = grid_thread() / WARP * WARP; base < count; base += grid_threads()) {
        const OwnRow own = own_row(base, count, queries, heads, head_dim);
        float mean;
        if (dtype == F32 || head_dim % 8 != 0) {
            mean = mean_of_elements(own, dy, o, dtype, head_dim);
        } else if (dtype == BF16) {
            mean = mean_of_row(own, head_dim, DotOf16Bits<BF16>{(const u16*)dy, (const u16*)o});
        } else {
            mean = mean_of_row(own, head_dim, DotOf16Bits<F16>{(const u16*)dy, (const u16*)o});
        }
        write_row(rows, own, row_max, row_sum, mean);
    }
}

// log Σ exp(score) of each row: -inf for one that sees nothing.
extern "C" __global__ void __launch_bounds__(256)
attention_log_sum_exp(const float* row_max, const float* row_sum, float* out, u64 count) {
    for (u64 row = grid_thread(); row < count; row += grid_threads()) {
        float log2;
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(row_sum[row]));
        // A NaN stays one.
        out[row] = row_sum[row] == 0.0f ? -INFINITY_F : row_max[row] + log2 * LN_2;
    }
}
