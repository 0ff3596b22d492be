// What attention.cu and attention_dropout.cu are made of: attention with the tensor cores. It follows attention.cuh,
// attention_dropout.cuh and attention_forward_loop.cuh.

// Probabilities keep twice the digits of their type: as a value and what it drops, each with a product of its own. With one
// of them, outputs that nearly cancel would be off by more than the tolerance.
template <int DTYPE, int D, int KEYS, typename Drop>
__device__ __forceinline__ void forward(char* memory, Block& block, const u16* q, const u16* k, const u16* v, u16* o, float* row_max,
                                        float* row_sum, SEQUENCE_PARAMETERS, const Call& call, const Drop& dropout) {
    Forward<D> result;
    const float scale = call.scale * LOG2_E;
    auto scaled = [&](float product) { return product * scale; };
    auto add_values = [&](float(&out)[D / 8][4], const float(&scores)[KEYS / 8][4], u32 values) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            u32 high[4], low[4];
            narrow_pairs<DTYPE>(high, scores + 2 * i);
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const float* pair = scores[2 * i + part / 2] + part % 2 * 2;
                low[part] = remainder<DTYPE>(high[part], pair[0], pair[1]);
            }
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 m[4];
                load_right_rows<D>(m, values, i * 16, n);
                multiply<DTYPE>(out[2 * n], high, m[0], m[1]);
                multiply<DTYPE>(out[2 * n], low, m[0], m[1]);
                multiply<DTYPE>(out[2 * n + 1], high, m[2], m[3]);
                multiply<DTYPE>(out[2 * n + 1], low, m[2], m[3]);
            }
        }
    };
    if (!forward_loop<Halves<DTYPE, D>, D, KEYS, 0>(memory, block, q, k, v, SEQUENCES, call, dropout, result, scaled, add_values)) {
        return;
    }
    float factors[2];
    finish_rows<D, 0>(block, call, dropout, result, row_max, row_sum, factors);
    store_rows<DTYPE, D>(o + block.elements(call.queries, call.result_pitch, call.head_dim), call.result_pitch,
                         block.tile.first + threadIdx.x / WARP * 16, block.tile.end, call.head_dim, result.out, factors[0],
                         factors[1]);
}

#define FORWARD(NAME, DTYPE, D, KEYS)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 3 : 2)                                         \
    NAME(const u16* q, const u16* k, const u16* v, u16* o, float* row_max, float* row_sum,                       \
         DROPOUT_PARAMETERS CALL_PARAMETERS) {                                                                     \
        extern __shared__ __align__(16) char memory[];                                                            \
        __shared__ Block block;                                                                                    \
        Call call = CALL_OF_PARAMETERS;                                                                            \
        forward<DTYPE, D, KEYS>(memory, block, q, k, v, o, row_max, row_sum, SEQUENCES, call, DROPOUT_VALUE);      \
    }
