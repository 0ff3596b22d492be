// Amax: max |x| of a tensor, NaN skipped, max-combined into a cell.

#define AMAX_THREADS 256
// Eights of elements under way in each thread.
#define AMAX_LOADS 4

// `unset`, if not null, is a scale cell: where it is set nobody needs the amax, and x is not read.
extern "C" __global__ void __launch_bounds__(AMAX_THREADS)
    amax(const void* x, int dtype, u64 n, const float* unset, int* cell) {
    __shared__ float scratch[WARP];
    if (unset && __float_as_int(*unset) != REST_BITS) return;
    const u64 whole = n / 8, stride = grid_threads();
    float largest = 0.0f;
    for (u64 i = grid_thread(); i < whole; i += stride * AMAX_LOADS) {
        Raw8 raw[AMAX_LOADS];
#pragma unroll
        for (int load = 0; load < AMAX_LOADS; load++) {
            const u64 at = i + load * stride;
            raw[load] = raw8_row(x, dtype, at * 8, at < whole ? 8 : 0, 1);
        }
#pragma unroll
        for (int load = 0; load < AMAX_LOADS; load++) {
            float v[8];
            widen8(v, raw[load], dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[k]));
        }
    }
    const u64 rest = whole * 8 + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) largest = fmaxf(largest, fabsf(load1(x, dtype, rest)));
    largest = block_max(largest, scratch);
    if (threadIdx.x == 0) record_amax(cell, largest);
}
