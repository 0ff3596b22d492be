// Quantize: codes, amax and counts from one read; and codes back to numbers.
//
// code = satfinite_rne(x · scale), amax and counts before scaling; scale_inv = 1 / scale. The kernels stream 16-byte loads.
// Scales come from cells, so nothing here waits for the host. With the transpose, quantize_tiles.cu.

#define FLAT_THREADS 256
// 16-byte loads under way in each thread.
#define FLAT_LOADS 4

// Each load of a warp is 512 bytes in a row; the codes of a load are one store of 8 bytes a thread, of 4 for f32.
template <int DTYPE>
__device__ __forceinline__ void quantize_flat(const void* x, u64 n, u8* codes, int format, const float* scale,
                                              float* scale_inv, int* amax, u64* counters) {
    __shared__ float scratch[WARP];
    constexpr int SIZE = DTYPE == F32 ? 4 : 2, WIDTH = 16 / SIZE;
    Codes out = begin_codes(scale, format, counters);
    write_scale_inv(scale, scale_inv);
    const u64 stride = grid_threads() * WIDTH * FLAT_LOADS;
    u64 i = ((u64)blockIdx.x * FLAT_THREADS * FLAT_LOADS + threadIdx.x) * WIDTH;
    for (; i < n; i += stride) {
        Raw8 raw[FLAT_LOADS];
#pragma unroll
        for (int load = 0; load < FLAT_LOADS; load++) {
            const u64 at = i + load * FLAT_THREADS * WIDTH;
            raw[load].low = at + WIDTH <= n ? load16((const char*)x + at * SIZE) : make_uint4(0, 0, 0, 0);
            raw[load].high = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int load = 0; load < FLAT_LOADS; load++) {
            const u64 at = i + load * FLAT_THREADS * WIDTH;
            float v[8];
            widen8(v, raw[load], DTYPE);
            uint2 words = code8(out, v);
            if (at + WIDTH <= n) {
                if (DTYPE == F32) *(u32*)(codes + at) = words.x;
                else *(uint2*)(codes + at) = words;
            }
        }
    }
    const u64 rest = n - n % WIDTH + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) codes[rest] = (u8)code1(out, load1(x, DTYPE, rest));
    finish_codes(out, amax, counters, blockIdx.x == 0 ? n : 0, scratch);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_f32(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                 u64* counters) {
    quantize_flat<F32>(x, n, codes, format, scale, scale_inv, amax, counters);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_bf16(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                  u64* counters) {
    quantize_flat<BF16>(x, n, codes, format, scale, scale_inv, amax, counters);
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    quantize_f16(const void* x, u64 n, u8* codes, int format, const float* scale, float* scale_inv, int* amax,
                 u64* counters) {
    quantize_flat<F16>(x, n, codes, format, scale, scale_inv, amax, counters);
}

// ---- scales ----

// Writes into `scale` what to quantize with: the cell's magnitude if it is set, else the rule's for the tensor's amax,
// which rests at -1 where no element was read. `cell` is null for a scale of the tensor's own.
extern "C" __global__ void __launch_bounds__(WARP)
    quantize_scale(float* cell, int keep, const float* amax, int kind, float fp8_max, float scaled_max, int margin,
                   float epsilon, float* scale) {
    if (threadIdx.x != 0) return;
    const float largest = *amax < 0.0f ? 0.0f : *amax;
    const Rule rule = {kind, fp8_max, scaled_max, margin, epsilon};
    if (!cell) {
        *scale = scale_of(rule, largest, 1.0f);
        return;
    }
    const float stored = *cell;
    if (__float_as_int(stored) != REST_BITS) {
        *scale = fabsf(stored);
    } else if (!usable_amax(largest)) {
        // Zero and non-finite amaxes say nothing: scale 1, and the slot stays unset.
        *scale = 1.0f;
    } else {
        const float first = scale_of(rule, largest, 1.0f);
        *scale = first;
        if (keep) *cell = -first;
    }
}

// ---- back to numbers ----

// value = code · scale_inv in f32, rounded to the dtype. Two loads are under way in each thread.
template <int FORMAT, int DTYPE>
__device__ __forceinline__ void dequantize_flat(const u8* codes, u64 n, float factor, void* out) {
    const u64 whole = n / 8, stride = grid_threads();
    const uint2* from = (const uint2*)codes;
#pragma unroll 1
    for (u64 i = grid_thread(); i < whole; i += 2 * stride) {
        const int both = i + stride < whole;
        const uint2 first = from[i], second = both ? from[i + stride] : first;
        float v[8];
        decode8(v, first, FORMAT, factor);
        store8(out, DTYPE, i * 8, v);
        if (!both) break;
        decode8(v, second, FORMAT, factor);
        store8(out, DTYPE, (i + stride) * 8, v);
    }
    const u64 rest = whole * 8 + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) {
        float value, none;
        decode2(codes[rest], FORMAT, &value, &none);
        store1(out, DTYPE, rest, value * factor);
    }
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    dequantize(const u8* codes, u64 n, int format, const float* scale_inv, void* out, int dtype) {
    const float factor = *scale_inv;
    if (format == E4M3) {
        if (dtype == BF16) dequantize_flat<E4M3, BF16>(codes, n, factor, out);
        else if (dtype == F16) dequantize_flat<E4M3, F16>(codes, n, factor, out);
        else dequantize_flat<E4M3, F32>(codes, n, factor, out);
    } else {
        if (dtype == BF16) dequantize_flat<E5M2, BF16>(codes, n, factor, out);
        else if (dtype == F16) dequantize_flat<E5M2, F16>(codes, n, factor, out);
        else dequantize_flat<E5M2, F32>(codes, n, factor, out);
    }
}
