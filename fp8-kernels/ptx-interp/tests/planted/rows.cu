// y = (x - largest of the row) + sum of the row: a block for a row, at most a value for each thread.
extern "C" __global__ void __launch_bounds__(128) rows(const float* x, float* y, int cols) {
    __shared__ float scratch[32];
    const int col = threadIdx.x, at = blockIdx.x * cols + col;
#ifdef BUG_EARLY_RETURN
    if (col >= cols) return;
#endif
    const float v = col < cols ? x[at] : 0.0f;
#ifdef BUG_SHUFFLE_IN_DIVERGENT_CODE
    float m = v;
    if (col < cols) m = warp_max(v);
    m = block_max(m, scratch);
#else
    const float m = block_max(v, scratch);
#endif
#ifndef BUG_NO_BARRIER_BEFORE_SCRATCH_REUSE
    __syncthreads();
#endif
    const float s = block_sum(v, scratch);
    if (col < cols) y[at] = (v - m) + s;
}
