// out += x, in f32, or out = x, where out is not read: src/backend/cpu/accumulate.rs. A thread takes eight elements at a time.

extern "C" __global__ void __launch_bounds__(256)
    accumulate(float* out, const void* x, u64 n, int dtype, int add) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            Raw8 raw = raw8(x, dtype, i);
            float v[8], w[8];
            widen8(w, raw, dtype);
            if (add) {
                Raw8 sum = raw8_cached(out, F32, i);
                widen8(v, sum, F32);
#pragma unroll
                for (int k = 0; k < 8; k++) w[k] = v[k] + w[k];
            }
            store8(out, F32, i, w);
        } else {
#pragma unroll 1
            do out[i] = add ? out[i] + load1(x, dtype, i) : load1(x, dtype, i);
            while (++i < n);
        }
    }
}
