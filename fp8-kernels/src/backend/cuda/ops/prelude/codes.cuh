// ---- from values to codes ----

// How one thread quantizes, and what it saw: put into the slot's cells by finish_codes.
struct Codes {
    float scale;
    int format;
    u64* counters;  // null: nothing is counted
    float amax;
    u32 saturated;
    u32 underflowed;
    int is_careful;  // something is counted, or the scale makes NaN of numbers
};

// `scale` is a scale cell: its magnitude counts. Null: values are only looked at for their amax.
__device__ __forceinline__ Codes begin_codes(const float* scale, int format, u64* counters) {
    const float magnitude = scale ? fabsf(*scale) : 1.0f;
    return {magnitude, format, counters, 0.0f, 0, 0, counters || !keeps_numbers(magnitude)};
}

__device__ __forceinline__ void count_code(Codes& out, float v, u32 code) {
    out.saturated += fabsf(v) < INFINITY_F && fabsf(v * out.scale) > saturation_limit(out.format);
    out.underflowed += v != 0.0f && (code & 0x7fu) == 0;
}

// NaN is rare, so it is counted at once: a register less in every kernel.
__device__ __forceinline__ void count_nan(const Codes& out, u32 n) {
    if (n > 0 && out.counters) atomicAdd(out.counters + 3, (u64)n);
}

// The code of one value; amax and counts are kept.
__device__ __forceinline__ u32 code1(Codes& out, float v) {
    u32 code = encode1(v * out.scale, out.format);
    out.amax = fmaxf(out.amax, fabsf(v));
    if (out.counters) count_code(out, v, code);
    count_nan(out, v != v);
    return code;
}

// The larger; NaN wins.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// The codes of eight values, in memory order. A zero changes neither amax nor counts.
//
// Values of which none is NaN and none is lost to the format, as they nearly always are, take few instructions: the largest
// and the smallest of the eight tell. `least` rounds to zero, as does every smaller magnitude.
__device__ __forceinline__ uint2 code8(Codes& out, const float v[8]) {
    const float least = out.format == E4M3 ? 0.0009765625f : 7.62939453125e-06f;
    float scaled[8], largest = fabsf(v[0]), smallest = INFINITY_F;
#pragma unroll
    for (int k = 0; k < 8; k++) scaled[k] = v[k] * out.scale;
#pragma unroll
    for (int k = 1; k < 8; k++) largest = max_or_nan(largest, fabsf(v[k]));
#pragma unroll
    for (int k = 0; k < 8; k++) smallest = fminf(smallest, fabsf(scaled[k]));
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const float* four = scaled + 4 * w;
        words[w] = encode2_numbers(four[0], four[1], out.format) | encode2_numbers(four[2], four[3], out.format) << 16;
    }
    const int is_usual = largest * out.scale <= saturation_limit(out.format) && smallest > least;
    if (!is_usual && (out.is_careful || largest != largest)) {
        u32 nan = 0;
        largest = 0.0f;
        words[0] = plain_nan(words[0], out.format), words[1] = plain_nan(words[1], out.format);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int at = 8 * (k % 4);
            nan += v[k] != v[k];
            largest = fmaxf(largest, fabsf(v[k]));
            count_code(out, v[k], words[k / 4] >> at & 0xffu);
        }
        count_nan(out, nan);
    }
    out.amax = fmaxf(out.amax, largest);
    return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ u32 warp_count(u32 n) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step >>= 1) n += __shfl_xor_sync(FULL_WARP, n, step);
    return n;
}

// The block's amax and counts into their cells, where these are not null; all its threads come here together, once per
// tensor. Values quantized are for one of them to add: `elements`, 0 for the others.
__device__ __forceinline__ void finish_codes(const Codes& out, int* amax, u64* counters, u64 elements, float* scratch) {
    if (amax) {
        float largest = block_max(out.amax, scratch);
        if (threadIdx.x == 0) record_amax(amax, largest);
    }
    if (counters) {
        u32 saturated = warp_count(out.saturated), underflowed = warp_count(out.underflowed);
        if (threadIdx.x % WARP == 0) {
            if (saturated) atomicAdd(counters, (u64)saturated);
            if (underflowed) atomicAdd(counters + 1, (u64)underflowed);
        }
        if (elements && threadIdx.x == 0) atomicAdd(counters + 2, elements);
    }
}

