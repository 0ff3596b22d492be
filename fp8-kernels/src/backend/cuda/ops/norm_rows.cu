#include "norm.cuh"
// LayerNorm with a bias and RMSNorm of bf16 rows, as norm_held_warp and norm_held_block compute them, bit for bit, in half the
// instructions: the next row is loaded while this one is computed, a sum over a block takes one barrier, and what differs
// between launches is a template's parameter.
//
// Rows are a multiple of eight columns, up to 8192 of them: 32 columns a thread, as four times eight. A warp holds a row of up
// to 1024 columns, else a block does. gamma is not around one, and nothing is counted.

// At most as many warps as rows of 8192 columns need.
#define ROW_WARPS 8

// What becomes of the values: codes; or values in bf16, nothing but their amax, or nothing.
enum { TO_E4M3 = 0, TO_BF16 = 1 };

__device__ __forceinline__ float4 shared4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// The sum over a row's threads, in the order of block_sum. `parts` is the address in shared memory of ROW_WARPS floats, a zero
// for each warp that does not exist, which changes no sum: none is -0. The caller takes two of them in turn.
__device__ __forceinline__ float total(float v, int by_warp, u32 parts) {
    v = warp_sum(v);
    if (by_warp) return v;
    if (threadIdx.x % WARP == 0) {
        asm volatile("st.shared.f32 [%0], %1;" : : "r"(parts + threadIdx.x / WARP * 4), "f"(v) : "memory");
    }
    __syncthreads();
    const float4 low = shared4(parts);
    v = ((low.x + low.y) + low.z) + low.w;
    if (blockDim.x > 4 * WARP) {
        const float4 high = shared4(parts + 16);
        v = (((v + high.x) + high.y) + high.z) + high.w;
    }
    return v;
}

// The codes of four values that are not NaN: in one piece, so that no instruction puts the pairs together.
__device__ __forceinline__ u32 encode4(const float v[4]) {
    u32 codes;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high}; }"
        : "=r"(codes) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
    return codes;
}

// Four of a parameter's values, which all rows share, kept in L1.
template <int DTYPE>
__device__ __forceinline__ void four_of(float v[4], const void* p, u32 col) {
    if (DTYPE == F32) {
        const float4 four = *(const float4*)((const float*)p + col);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
        const uint2 four = *(const uint2*)((const u16*)p + col);
        v[0] = __int_as_float((int)(four.x << 16)), v[1] = __int_as_float((int)(four.x & 0xffff0000u));
        v[2] = __int_as_float((int)(four.y << 16)), v[3] = __int_as_float((int)(four.y & 0xffff0000u));
    }
}

// As many of four times eight columns as there are.
__device__ __forceinline__ void load_row(uint4 row[4], const u16* from, int chunks, u32 apart) {
#pragma unroll
    for (int c = 0; c < 4; c++, from += apart) {
        if (c < chunks) row[c] = load16(from);
    }
}

template <int CENTERED, int PARAMETERS, int TO>
__device__ __forceinline__ void rows_ahead(const Norm& norm, const Sink& sink, Codes& out, float* means, float* rsigmas) {
    __shared__ __align__(64) float parts[2][ROW_WARPS];
    const u32 cols = (u32)norm.cols;
    const int by_warp = cols <= 32 * WARP, lanes = by_warp ? WARP : (int)blockDim.x;
    const int lane = (int)threadIdx.x % lanes, groups = (int)blockDim.x / lanes;
    if (threadIdx.x < 2 * ROW_WARPS && threadIdx.x % ROW_WARPS >= blockDim.x / WARP) {
        parts[threadIdx.x / ROW_WARPS][threadIdx.x % ROW_WARPS] = 0.0f;
    }
    const int is_wanted = TO == TO_E4M3 || sink.y || !rsigmas;
    const u32 rows = (u32)norm.rows, step = gridDim.x * groups;
    u32 row = blockIdx.x * groups + threadIdx.x / lanes;
    // A thread's first column, and how far the others are.
    const u32 first = lane * 8, apart = lanes * 8;
    // Of four, how many times eight columns there are.
    const int chunks = first < cols ? (cols - first + apart - 1) / apart : 0;
    u32 half = (u32)__cvta_generic_to_shared(parts);
    uint4 next[4];
#pragma unroll
    for (int c = 0; c < 4; c++) next[c] = make_uint4(0, 0, 0, 0);
    if (row < rows) load_row(next, (const u16*)norm.x + ((u64)row * cols + first), chunks, apart);
#pragma unroll 1
    for (; row < rows; row += step) {
        const u64 to = (u64)row * cols + first;
        float v[4][8];
#pragma unroll
        for (int c = 0; c < 4; c++) widen8(v[c], {next[c], next[c]}, BF16);
        if (row + step < rows) load_row(next, (const u16*)norm.x + ((u64)(row + step) * cols + first), chunks, apart);
        float mean = 0.0f;
        if (CENTERED) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; c++) {
#pragma unroll
                for (int k = 0; k < 8; k++) sum += v[c][k];
            }
            mean = total(sum, by_warp, half ^ 4 * ROW_WARPS) / (float)cols;
        }
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            // Zeros where there are no columns, which no sum feels.
            const float level = c < chunks ? mean : 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (CENTERED) v[c][k] -= level;
                squares += v[c][k] * v[c][k];
            }
        }
        const float variance = total(squares, by_warp, half) / (float)cols;
        if (!CENTERED) half ^= 4 * ROW_WARPS;
        const float rsigma = 1.0f / sqrtf(variance + norm.eps);
        if (first == 0) put_statistics(means, rsigmas, row, mean, rsigma);
        if (!is_wanted) continue;
        float largest = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (c >= chunks) break;
            u32 words[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float* four = v[c] + 4 * h;
                float g[4], b[4];
                four_of<PARAMETERS>(g, norm.gamma, first + c * apart + 4 * h);
                if (CENTERED) four_of<PARAMETERS>(b, norm.beta, first + c * apart + 4 * h);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float n = four[k] * rsigma;
                    four[k] = CENTERED ? fmaf(n, g[k], b[k]) : n * g[k];
                    largest = TO == TO_E4M3 ? max_or_nan(largest, fabsf(four[k])) : fmaxf(largest, fabsf(four[k]));
                    if (TO == TO_E4M3) four[k] *= out.scale;
                }
                if (TO == TO_E4M3) words[h] = encode4(four);
            }
            if (TO == TO_E4M3) *(uint2*)(sink.codes + to + c * apart) = make_uint2(words[0], words[1]);
            if (TO == TO_BF16 && sink.y) store8(sink.y, BF16, to + c * apart, v[c]);
        }
        if (TO != TO_E4M3 || largest * out.scale < INFINITY_F) {
            out.amax = fmaxf(out.amax, largest);
        } else {
            // Once more: the code of a product that is NaN is 0x7F, and a value that is NaN is no amax.
#pragma unroll 1
            for (u32 col = first; col < cols; col += apart) {
                load8(v[0], norm.x, BF16, to - first + col);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float g[4], b[4];
                    four_of<PARAMETERS>(g, norm.gamma, col + 4 * h);
                    if (CENTERED) four_of<PARAMETERS>(b, norm.beta, col + 4 * h);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const float n = (v[0][4 * h + k] - mean) * rsigma;
                        v[0][4 * h + k] = CENTERED ? fmaf(n, g[k], b[k]) : n * g[k];
                    }
                }
#pragma unroll
                for (int k = 0; k < 8; k++) out.amax = fmaxf(out.amax, fabsf(v[0][k]));
                u32 words[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float* four = v[0] + 4 * h;
                    words[h] = encode2(four[0] * out.scale, four[1] * out.scale, E4M3) |
                               encode2(four[2] * out.scale, four[3] * out.scale, E4M3) << 16;
                }
                *(uint2*)(sink.codes + to - first + col) = make_uint2(words[0], words[1]);
            }
        }
    }
}

// LayerNorm's rows take more registers: for 20 warps a multiprocessor instead of 24 or, in smaller blocks, 28.
#define LAYER_BOUNDS 256, 2
#define RMS_BOUNDS 256, 3

ROWS(norm_rows_layer_f32_codes, LAYER_BOUNDS, (rows_ahead<1, F32, TO_E4M3>))
ROWS(norm_rows_layer_f32_values, LAYER_BOUNDS, (rows_ahead<1, F32, TO_BF16>))
ROWS(norm_rows_layer_bf16_codes, LAYER_BOUNDS, (rows_ahead<1, BF16, TO_E4M3>))
ROWS(norm_rows_layer_bf16_values, LAYER_BOUNDS, (rows_ahead<1, BF16, TO_BF16>))
ROWS(norm_rows_rms_f32_codes, RMS_BOUNDS, (rows_ahead<0, F32, TO_E4M3>))
ROWS(norm_rows_rms_f32_values, RMS_BOUNDS, (rows_ahead<0, F32, TO_BF16>))
ROWS(norm_rows_rms_bf16_codes, RMS_BOUNDS, (rows_ahead<0, BF16, TO_E4M3>))
ROWS(norm_rows_rms_bf16_values, RMS_BOUNDS, (rows_ahead<0, BF16, TO_BF16>))
