// y = 2 · x, four values at a time, then one by one.
extern "C" __global__ void __launch_bounds__(64) flat(const float* x, float* y, int n) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x, vectors = n / 4;
#ifdef BUG_VECTOR_TOO_MANY
    for (int i = first; i <= vectors; i += step) {
#else
    for (int i = first; i < vectors; i += step) {
#endif
        const float4 v = ((const float4*)x)[i];
        ((float4*)y)[i] = make_float4(2.0f * v.x, 2.0f * v.y, 2.0f * v.z, 2.0f * v.w);
    }
#ifdef BUG_TAIL_TOO_LONG
    for (int i = vectors * 4 + first; i <= n; i += step) y[i] = 2.0f * x[i];
#else
    for (int i = vectors * 4 + first; i < n; i += step) y[i] = 2.0f * x[i];
#endif
}
