#include "dropout.cuh"
#include "attention.cuh"
#include "attention_dropout.cuh"
#include "attention_forward_loop.cuh"
#include "attention_fp8.cuh"
#include "attention_rows.cuh"
// Attention whose products read FP8 codes, for head sizes up to 128 that are multiples of 16.
//
// Probabilities relative to the largest score so far are at most 1: times 256 they become E4M3 codes, and nothing saturates.
// With dropout, codes are those of the probabilities that are kept; their factor is that of a row's result.

// Probabilities are multiplied by 2^8.
#define LOG2_SCALE 8

template <int D, int KEYS>
__device__ __forceinline__ void forward(char* memory, Block& block, const u8* q, const u8* k, const u8* v,
                                        const float* scale_invs[3], void* o, int dtype, float* row_max, float* row_sum,
                                        SEQUENCE_PARAMETERS, const Call& call, const OptionalDropout& dropout) {
    Forward<D> result;
    // One after the other: the product of both factors might underflow.
    const float q_scale_inv = *scale_invs[0], k_factor = *scale_invs[1] * call.scale * LOG2_E;
    auto scaled = [&](float product) { return product * q_scale_inv * k_factor; };
    auto add_values = [&](float(&out)[D / 8][4], const float(&scores)[KEYS / 8][4], u32 values) {
#pragma unroll
        for (int i = 0; i < KEYS / 32; i++) {
            u32 weights[4];
            encode_quads<E4M3>(weights, scores + 4 * i, 1.0f, 1.0f);
            add_product_of_codes<E4M3, E4M3, D>(out, weights, values, 32 * i);
        }
    };
    if (!forward_loop<FP8Codes<D>, D, KEYS, LOG2_SCALE>(memory, block, q, k, v, SEQUENCES, call, dropout, result, scaled,
                                                        add_values)) {
        return;
    }
    float factors[2];
    finish_rows<D, LOG2_SCALE>(block, call, dropout, result, row_max, row_sum, factors);
    store_sums<D>(o, dtype, block.elements(call.queries, call.result_pitch, call.head_dim), call.result_pitch,
                  block.tile.first + threadIdx.x / WARP * 16, block.tile.end, call.head_dim, result.out, factors, *scale_invs[2]);
}

#define FORWARD(NAME, D, KEYS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 3 : 2)                                         \
    NAME(const u8* q, const u8* k, const u8* v, const float* q_scale_inv, const float* k_scale_inv,                \
         const float* v_scale_inv, void* o, int dtype, float* row_max, float* row_sum,                           \
         DROPOUT_ON_PARAMETERS CALL_PARAMETERS) {                                                                  \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        const float* scale_invs[3] = {q_scale_inv, k_scale_inv, v_scale_inv};                                      \
        forward<D, KEYS>(memory, block, q, k, v, scale_invs, o, dtype, row_max, row_sum, SEQUENCES, call,          \
                         OPTIONAL_DROPOUT);                                                                        \
    }

// With 64 keys at a time the last one would spill on sm_100.
FORWARD(attention_fp8_64, 64, 64)
FORWARD(attention_fp8_128, 128, 32)

// Eight products of dy's codes and o, without dy's factor.
struct DotOfCodes {
    const u8* dy;
    int format;
    const void* o;
    int dtype;

    __device__ __forceinline__ float operator()(u64 i, float sum) const {
        const uint2 codes = *(const uint2*)(dy + i);
        const u32 pairs[4] = {codes.x & 0xffffu, codes.x >> 16, codes.y & 0xffffu, codes.y >> 16};
        float right[8];
        load8(right, o, dtype, i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float low, high;
            decode2(pairs[k], format, &low, &high);
            sum = fmaf(low, right[2 * k], sum);
            sum = fmaf(high, right[2 * k + 1], sum);
        }
        return sum;
    }
};

// The numbers of rows that backward reads; `mean` is that of dp, with the values of dy's codes. A head has at most 128 of them.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_fp8_rows(const u8* dy, int format, const float* dy_scale_inv, const void* o, int dtype, const float* row_max,
                   const float* row_sum, Row* rows, u64 count, u32 queries, u32 heads, u32 head_dim) {
    const DotOfCodes dot = {dy, format, o, dtype};
    for (u64 base = grid_thread() / WARP * WARP; base < count; base += grid_threads()) {
        const OwnRow own = own_row(base, count, queries, heads, head_dim);
        const float mean = head_dim <= 64 ? mean_of_eights<4>(own, head_dim, dot) : mean_of_eights<8>(own, head_dim, dot);
        write_row(rows, own, row_max, row_sum, mean * *dy_scale_inv);
    }
}
