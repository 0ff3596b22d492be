#include "exp_near.cuh"
// Cross-entropy of logits and targets, and its backward: src/backend/cpu/cross_entropy.rs.
//
// A block reads a row once: each thread keeps the largest logit it met and the sum of exponentials relative to it.
// Losses of rows are compensated sums of two floats, added by one block. A launch may have a part of the columns, from `first`
// on, of the `total` that targets are of. Rows begin anywhere: groups of eight
// elements are counted from the tensor's start, so that whole ones can be moved in 16 bytes.

#define ROW_MAX_THREADS 512
#define FINISH_THREADS 1024
#define FAULT_TARGET 3
#define FAULT_BACKWARD_TARGET 4

__device__ __forceinline__ float origin_of(float max) { return max == -INFINITY_F ? 0.0f : max; }

__device__ __forceinline__ int counts(int target, u64 total, int has_ignore, int ignore) {
    return !(has_ignore && target == ignore) && target >= 0 && (u64)target < total;
}

// The column of a row's target in the whole row, or -1 where it counts for nothing; an id out of range is told to the host.
__device__ __forceinline__ int column_of(const int* targets, u64 row, u64 total, int has_ignore, int ignore,
                                         i64* fault, int code) {
    int target = targets[row];
    if (counts(target, total, has_ignore, ignore)) return target;
    if (threadIdx.x == 0 && !(has_ignore && target == ignore)) report_fault(fault, code, target, row, total);
    return -1;
}

// exp(v - max) summed over what was met.
struct Met {
    float max;
    float sum;
};

__device__ __forceinline__ void meet(Met& met, const float v[8]) {
    float max = met.max;
#pragma unroll
    for (int k = 0; k < 8; k++) max = fmaxf(max, v[k]);
    float origin = origin_of(max);
    if (max != met.max) met.sum *= exp_near(met.max - origin);
    met.max = max;
    float e[8];
#pragma unroll
    for (int k = 0; k < 8; k++) e[k] = exp_near(v[k] - origin);
    met.sum += tree8(e);
}

// `sums` takes the sum of each row, then the logit of each row's target, or 0 where another launch has it. Launch: a multiple
// of 32 threads, up to ROW_MAX_THREADS.
extern "C" __global__ void __launch_bounds__(ROW_MAX_THREADS)
cross_entropy_rows(const void* logits, int dtype, const int* targets, u64 rows, u64 columns, u64 first, u64 total,
                   int has_ignore, int ignore, float* row_max, float* sums, i64* fault) {
    __shared__ float scratch[64];
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        int column = column_of(targets, row, total, has_ignore, ignore, fault, FAULT_TARGET);
        float max = 0.0f, sum = 1.0f, own = 0.0f;
        if (column >= 0) {
            Met met = {-INFINITY_F, 0.0f};
            u64 start = row * columns, end = start + columns;
            for (u64 i = start / 8 * 8 + 8 * threadIdx.x; i < end; i += 8 * blockDim.x) {
                float v[8];
                if (i >= start && i + 8 <= end) {
                    load8(v, logits, dtype, i);
                } else {
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        u64 at = i + (u64)k;
                        v[k] = at >= start && at < end ? load1(logits, dtype, at) : -INFINITY_F;
                    }
                }
                meet(met, v);
            }
            max = block_max(met.max, scratch);
            // What a thread met nothing of has the sum 0: its factor is exp(-inf).
            float part = met.sum * exp_near(met.max - origin_of(max));
            sum = sum_value(block_merge({part, 0.0f}, scratch));
            u64 at = (u64)column - first;
            if (at < columns) own = load1(logits, dtype, start + at);
        }
        if (threadIdx.x == 0) {
            row_max[row] = max;
            sums[row] = sum;
            sums[rows + row] = own;
        }
    }
}

// The sums of a part, relative to the maxima of whole rows in place of the part's own. Logits of targets stay as they are.
extern "C" __global__ void __launch_bounds__(256)
cross_entropy_part_sums(const float* own_max, const float* own_sums, const float* row_max, u64 rows, float* sums) {
    for (u64 row = grid_thread(); row < rows; row += grid_threads()) {
        sums[row] = own_sums[row] * exp_near(own_max[row] - origin_of(row_max[row]));
        sums[rows + row] = own_sums[rows + row];
    }
}

// The loss of whole rows, and how many targets counted. `normalizer` 0 stands for their number. `row_sum` takes the sums as
// backward reads them: 1 for rows that do not count. Launch: one block.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
cross_entropy(const float* row_max, const float* sums, const int* targets, u64 rows, u64 total, int has_ignore, int ignore,
              float normalizer, float* row_sum, float* out, int* count) {
    __shared__ float scratch[64];
    __shared__ u64 counted[FINISH_THREADS / WARP];
    Sum sum = {0.0f, 0.0f};
    u64 own = 0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) {
        float part = 1.0f;
        if (counts(targets[row], total, has_ignore, ignore)) {
            part = sums[row];
            Sum distance = two_sum(origin_of(row_max[row]), -sums[rows + row]);
            sum = sum_merge(sum, sum_add(distance, logf(part)));
            own++;
        }
        row_sum[row] = part;
    }
    sum = block_merge(sum, scratch);
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) {
        u32 low = __shfl_xor_sync(FULL_WARP, (u32)own, step), high = __shfl_xor_sync(FULL_WARP, (u32)(own >> 32), step);
        own += (u64)high << 32 | low;
    }
    if (threadIdx.x % WARP == 0) counted[threadIdx.x / WARP] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    u64 all = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) all += counted[w];
    out[0] = all == 0 ? 0.0f : sum_value(sum) / (normalizer > 0.0f ? normalizer : (float)all);
    count[0] = all > 0x7fffffffull ? 0x7fffffff : (int)all;
}

// A row in pieces of `span` elements, a multiple of eight; a block takes pieces in turn. The number of targets comes from
// the device where `normalizer` is 0, and a factor where `device_scale` is not null.
extern "C" __global__ void __launch_bounds__(ROW_MAX_THREADS)
cross_entropy_backward(const void* logits, int dtype, const int* targets, u64 rows, u64 columns, u64 first_column, u64 total,
                       int has_ignore, int ignore, const float* row_max, const float* row_sum, const int* count,
                       float normalizer, float loss_scale, const float* device_scale, u64 span, void* dx, i64* fault) {
    float factor = (device_scale ? *device_scale : loss_scale) / (normalizer > 0.0f ? normalizer : (float)count[0]);
    // One more than whole spans need: a row may begin within a group.
    u64 pieces = (columns + 7 + span - 1) / span;
    for (u64 piece = blockIdx.x; piece < rows * pieces; piece += gridDim.x) {
        u64 row = quotient(piece, pieces), start = row * columns, end = start + columns;
        u64 first = start / 8 * 8 + (piece - row * pieces) * span;
        u64 last = first + span < end ? first + span : end;
        int column = column_of(targets, row, total, has_ignore, ignore, fault, FAULT_BACKWARD_TARGET);
        // Outside the row where another launch has the column: what is computed there is not stored.
        u64 hit = start + (u64)column - first_column;
        float origin = origin_of(row_max[row]), inverse = 1.0f / row_sum[row];
        for (u64 i = first + 8 * threadIdx.x; i < last; i += 8 * blockDim.x) {
            float v[8];
            int whole = i >= start && i + 8 <= end;
            if (column < 0) {
#pragma unroll
                for (int k = 0; k < 8; k++) v[k] = 0.0f;
            } else {
                if (whole) {
                    load8(v, logits, dtype, i);
                } else {
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        u64 at = i + (u64)k;
                        v[k] = at >= start && at < end ? load1(logits, dtype, at) : 0.0f;
                    }
                }
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    // From the probability itself: p - 1 is exact where p is near 1, factor·p - factor is not.
                    float p = exp_near(v[k] - origin) * inverse;
                    v[k] = (i + (u64)k == hit ? p - 1.0f : p) * factor;
                }
            }
            if (whole) {
                store8(dx, dtype, i, v);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    u64 at = i + (u64)k;
                    if (at >= start && at < end) store1(dx, dtype, at, v[k]);
                }
            }
        }
    }
}
