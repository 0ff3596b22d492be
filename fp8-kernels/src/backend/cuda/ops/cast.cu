// Conversion between f32, bf16 and f16, bits of NaN included: src/backend/cpu/cast.rs.
//
// A thread takes eight elements at a time. Every NaN is 0x7fff in 16 bits. Widening f16 keeps a NaN's sign and payload and makes
// it quiet, which the machine's own conversion need not do.

__device__ __forceinline__ float widen_f16(u32 bits, float v) {
    u32 nan = ((bits & 0x8000u) << 16) | 0x7fc00000u | ((bits & 0x3ffu) << 13);
    return (bits & 0x7fffu) > 0x7c00u ? __int_as_float((int)nan) : v;
}

extern "C" __global__ void __launch_bounds__(256)
    cast(const void* x, void* y, u64 n, int from, int to) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            Raw8 raw = raw8(x, from, i);
            float v[8];
            widen8(v, raw, from);
            if (from == F16) {
                u32 w[4] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    v[2 * k] = widen_f16(w[k] & 0xffffu, v[2 * k]);
                    v[2 * k + 1] = widen_f16(w[k] >> 16, v[2 * k + 1]);
                }
            }
            store8(y, to, i, v);
        } else {
#pragma unroll 1
            do {
                float v = load1(x, from, i);
                if (from == F16) v = widen_f16(((const u16*)x)[i], v);
                store1(y, to, i, v);
            } while (++i < n);
        }
    }
}
