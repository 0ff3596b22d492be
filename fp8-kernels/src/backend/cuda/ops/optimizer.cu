#include "adamw.cuh"
#include "philox.cuh"
// AdamW, Lion and SGD with moments in f32, bf16 or FP8, and with stochastic rounding: src/backend/cpu/optimizer.rs.
//
// A warp takes a block of 128 elements of a row, four a lane: one counter of Philox for each number that a lane rounds.
// Blocks are numbered over all tensors; a warp takes consecutive ones. The first number of each tensor, the records and the
// step's factors are on the device.

#define MOMENT_BLOCK 128
// A moment in FP8, beside the numbers of the float types.
#define FP8 3

// What the random numbers of an element are for.
enum { STREAM_FIRST = 0, STREAM_SECOND = 1, STREAM_PARAM = 2 };

// One tensor. All members are eight bytes, in the host's order (cuda/optimizer.rs).
struct OptimizerRecord {
    void* param;
    float* main;  // null: none
    const float* grad;
    void* exp_avg;
    void* exp_avg_sq;
    float* first_scale_inv;  // null where the moment is not in FP8
    float* second_scale_inv;
    u64 cols;
    u64 across;  // blocks of a row
    u64 seed;
    u64 kinds;  // the dtype, the kinds of both moments, whether the parameter is rounded stochastically, the rule: a byte each
};

// The rules by which parameters are updated. AdamW alone has a second moment.
enum { RULE_ADAMW = 0, RULE_LION = 1, RULE_SGD = 2, RULE_NESTEROV = 3 };

// The numbers of a step beside its factors, in the host's order (src/ops/adamw_step.rs).
struct Numbers {
    float lr, beta1, weight_decay;
};

// The new parameter; the moments become the new ones. src/backend/cpu/optimizer.rs, operation by operation.
__device__ __forceinline__ float update(int rule, const Factors& f, const Numbers& n, float p, float grad, float& m, float& v) {
    if (rule == RULE_ADAMW) return step(f, p, grad, m, v);
    const float g = grad * f.grad_scale;
    if (rule == RULE_LION) {
        const float c = m + f.new_first * (g - m);
        m += f.new_second * (g - m);
        return p * f.keep - n.lr * (c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c);
    }
    const float d = g + n.weight_decay * p;
    m = n.beta1 * m + d;
    return p - n.lr * (rule == RULE_NESTEROV ? d + n.beta1 * m : m);
}

// Four elements of a lane: where they are, how many there are, and whether they can be loaded at once.
struct Lane {
    u64 at;
    int live;
    int whole;
};

__device__ __forceinline__ void load_four(float v[4], const void* p, int dtype, const Lane& lane) {
    if (!lane.whole) {
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = k < lane.live ? load1(p, dtype, lane.at + k) : 0.0f;
    } else if (dtype == F32) {
        const float4 four = *(const float4*)((const float*)p + lane.at);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
        const uint2 two = *(const uint2*)((const u16*)p + lane.at);
        const u32 bits[4] = {two.x & 0xffffu, two.x >> 16, two.y & 0xffffu, two.y >> 16};
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = dtype == BF16 ? bf16_to_f32(bits[k]) : f16_to_f32(bits[k]);
    }
}

__device__ __forceinline__ void store_floats(float* p, const Lane& lane, const float v[4]) {
    if (lane.whole) {
        *(float4*)(p + lane.at) = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < lane.live) p[lane.at + k] = v[k];
    }
}

__device__ __forceinline__ void store_halves(u16* p, const Lane& lane, const u32 bits[4]) {
    if (lane.whole) {
        *(uint2*)(p + lane.at) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < lane.live) p[lane.at + k] = (u16)bits[k];
    }
}

__device__ __forceinline__ u32 load_codes(const u8* p, const Lane& lane) {
    if (lane.whole) return *(const u32*)(p + lane.at);
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) codes |= k < lane.live ? (u32)p[lane.at + k] << (8 * k) : 0;
    return codes;
}

__device__ __forceinline__ void store_codes(u8* p, const Lane& lane, u32 codes) {
    if (lane.whole) {
        *(u32*)(p + lane.at) = codes;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < lane.live) p[lane.at + k] = (u8)(codes >> (8 * k));
    }
}

// bf16 with stochastic rounding: up in magnitude where the bits that are dropped and 16 random bits carry. Finite values stay
// finite.
__device__ __forceinline__ u32 stochastic_bf16(float v, u32 r) {
    const u32 bits = (u32)__float_as_int(v), magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return f32_to_bf16(v);
    const u32 rounded = (magnitude + (r >> 16)) >> 16;
    return (rounded < 0x7f7fu ? rounded : 0x7f7fu) | (bits >> 16 & 0x8000u);
}

// E4M3 with stochastic rounding, saturating: fp8_format's from_f32_stochastic.
__device__ __forceinline__ u32 stochastic_e4m3(float v, u32 r) {
    const u32 bits = (u32)__float_as_int(v), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    const u32 limited = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
    const u32 field = limited >> 23, mantissa = (limited & 0x7fffffu) | (field ? 1u << 23 : 0u);
    const u32 e = field ? field : 1, binade = e > 121 ? e : 121, shift = 20 + (binade - e);
    const u64 fixed = ((u64)mantissa << 32) >> (shift < 63 ? shift : 63);
    const u32 code = ((binade - 121) << 3) + (u32)((fixed + r) >> 32);
    return code | (bits >> 24 & 0x80u);
}

// The value of a code from 0 to 0x7e.
__device__ __forceinline__ float value_of(u32 code) {
    float value, other;
    decode2(code, E4M3, &value, &other);
    return value;
}

// The exponent field of the smallest power of two that a block of this amax can be divided by: the quotients are at most 448.
__device__ __forceinline__ u32 scale_exponent(float amax) {
    const u32 rounded = ((u32)__float_as_int(amax) + 0x1fffffu) >> 23;
    return rounded < 9 ? 1 : rounded > 254 ? 246 : rounded - 8;
}

__device__ __forceinline__ float power_of_field(u32 field) { return __int_as_float((int)(field << 23)); }

__device__ __forceinline__ void random4(u32 r[4], const OptimizerRecord& record, u64 quad, int stream, u64 number) {
    philox_block(r, quad | (u64)stream << 62, number, record.seed);
}

// The scale of this warp's block, which lane 0 alone reads and writes.
__device__ __forceinline__ float read_scale(const float* scales, u64 block, int lane) {
    float scale = 0.0f;
    if (lane == 0) scale = scales[block];
    return __shfl_sync(FULL_WARP, scale, 0);
}

__device__ __forceinline__ void load_moment(float v[4], const void* p, const float* scale_inv, int kind, u64 block,
                                            const Lane& lane, int index) {
    if (kind != FP8) {
        load_four(v, p, kind, lane);
        return;
    }
    const float scale = read_scale(scale_inv, block, index);
    const u32 codes = load_codes((const u8*)p, lane);
    decode2(codes & 0xffffu, E4M3, v, v + 1);
    decode2(codes >> 16, E4M3, v + 2, v + 3);
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = v[k] * scale;
}

// `r` is unused where the moment is in f32.
__device__ __forceinline__ void store_float_moment(void* p, int kind, const Lane& lane, const float v[4], const u32 r[4]) {
    if (kind == F32) {
        store_floats((float*)p, lane, v);
        return;
    }
    u32 bits[4];
#pragma unroll
    for (int k = 0; k < 4; k++) bits[k] = stochastic_bf16(v[k], r[k]);
    store_halves((u16*)p, lane, bits);
}

// The field of a block's scale, which lane 0 stores.
__device__ __forceinline__ u32 new_scale(float* scales, u64 block, float largest, int index) {
    const u32 field = scale_exponent(warp_max(largest));
    if (index == 0) scales[block] = power_of_field(field);
    return field;
}

__device__ __forceinline__ float largest_of(const float v[4]) {
    return fmaxf(fmaxf(fmaxf(0.0f, fabsf(v[0])), fmaxf(fabsf(v[1]), fabsf(v[2]))), fabsf(v[3]));
}

__device__ __forceinline__ void store_first(const OptimizerRecord& record, u64 block, const Lane& lane, int index,
                                            const float m[4], const u32 r[4]) {
    const float scale = power_of_field(254 - new_scale(record.first_scale_inv, block, largest_of(m), index));
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) codes |= stochastic_e4m3(m[k] * scale, r[k]) << (8 * k);
    store_codes((u8*)record.exp_avg, lane, codes);
}

// The code of the root of v: of the two around it, so that the square of what is stored is v in the mean.
__device__ __forceinline__ u32 second_code(float v, float root, float scale, u32 r) {
    const u32 low = stochastic_e4m3(root * scale, 0);
    if (low >= 0x7eu) return low;
    const float a = value_of(low), b = value_of(low + 1), x = v * scale * scale;
    const float part = (x - a * a) / (b * b - a * a);
    const u32 code = low + ((float)(r >> 8) < part * 16777216.0f);
    return code == 0 && v > 0.0f ? 1 : code;
}

__device__ __forceinline__ void store_second(const OptimizerRecord& record, u64 block, const Lane& lane, int index,
                                             const float v[4], const u32 r[4]) {
    float root[4];
#pragma unroll
    for (int k = 0; k < 4; k++) root[k] = sqrtf(v[k]);
    const float scale = power_of_field(254 - new_scale(record.second_scale_inv, block, largest_of(root), index));
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) codes |= second_code(v[k], root[k], scale, r[k]) << (8 * k);
    store_codes((u8*)record.exp_avg_sq, lane, codes);
}

// `numbers` has the rate, beta1 and the weight decay at 8, and the step's number, which counts from 1, at 12. `norm` may be null; so may `skipped`, which counts steps that are skipped.
extern "C" __global__ void __launch_bounds__(256)
    optimizer(const OptimizerRecord* records, const u64* first_blocks, int tensors, const float* factors,
              const float* numbers, const float* norm, u64* skipped) {
    if (skips_step(norm)) {
        if (skipped && blockIdx.x == 0 && threadIdx.x == 0) *skipped += 1;
        return;
    }
    const Factors f = factors_at(factors);
    const Numbers n = {numbers[8], numbers[9], numbers[10]};
    const u64 step_number = *(const u64*)(numbers + 12);
    const u64 blocks = first_blocks[tensors], warps = (u64)gridDim.x * (blockDim.x / WARP);
    const u64 warp = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const u64 last = blocks * (warp + 1) / warps;
    const int index = (int)(threadIdx.x % WARP);
    u64 next = blocks * warp / warps;
    while (next < last) {
        const int tensor = tensor_of(first_blocks, tensors, next);
        const OptimizerRecord& record = records[tensor];
        const u64 first = first_blocks[tensor], end = first_blocks[tensor + 1] < last ? first_blocks[tensor + 1] : last;
        const u64 cols = record.cols, across = record.across;
        const int dtype = (int)(record.kinds & 0xff), first_kind = (int)(record.kinds >> 8 & 0xff);
        const int second_kind = (int)(record.kinds >> 16 & 0xff), is_stochastic = (int)(record.kinds >> 24 & 0xff);
        const int rule = (int)(record.kinds >> 32 & 0xff);
#pragma unroll 1
        for (; next < end; next++) {
            const u64 block = next - first, row = quotient(block, across);
            const u64 col = (block - row * across) * MOMENT_BLOCK + index * 4;
            const int live = col >= cols ? 0 : cols - col < 4 ? (int)(cols - col) : 4;
            const Lane lane = {row * cols + col, live, cols % 4 == 0 && live == 4};
            float p[4], g[4], m[4], v[4];
            load_moment(m, record.exp_avg, record.first_scale_inv, first_kind, block, lane, index);
            if (rule == RULE_ADAMW) {
                load_moment(v, record.exp_avg_sq, record.second_scale_inv, second_kind, block, lane, index);
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) v[k] = 0.0f;
            }
            load_four(g, record.grad, F32, lane);
            load_four(p, record.main ? record.main : record.param, record.main ? F32 : dtype, lane);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (second_kind == FP8) v[k] = v[k] * v[k];
                p[k] = update(rule, f, n, p[k], g[k], m[k], v[k]);
                // Elements behind the row's last have a weight in no block.
                if (k >= lane.live) m[k] = 0.0f, v[k] = 0.0f;
            }
            // Lanes have read their block's scales before lane 0 replaces them.
            __syncwarp();
            const u64 quad = block * (MOMENT_BLOCK / 4) + index;
            u32 r[4] = {0, 0, 0, 0};
            if (first_kind != F32) random4(r, record, quad, STREAM_FIRST, step_number);
            if (first_kind == FP8) store_first(record, block, lane, index, m, r);
            else store_float_moment(record.exp_avg, first_kind, lane, m, r);
            if (rule == RULE_ADAMW) {
                if (second_kind != F32) random4(r, record, quad, STREAM_SECOND, step_number);
                if (second_kind == FP8) store_second(record, block, lane, index, v, r);
                else store_float_moment(record.exp_avg_sq, second_kind, lane, v, r);
            }
            if (record.main) store_floats(record.main, lane, p);
            if (dtype == F32) {
                store_floats((float*)record.param, lane, p);
                continue;
            }
            u32 bits[4];
            if (is_stochastic) random4(r, record, quad, STREAM_PARAM, step_number);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                bits[k] = is_stochastic ? stochastic_bf16(p[k], r[k]) : dtype == BF16 ? f32_to_bf16(p[k]) : f32_to_f16(p[k]);
            }
            store_halves((u16*)record.param, lane, bits);
        }
    }
}
