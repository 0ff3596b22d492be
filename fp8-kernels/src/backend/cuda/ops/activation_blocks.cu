#include "blocks.cuh"
#include "activation.cuh"
// Activations and their gradients with a scale for each row or block.

// Values of a row of f(h), or of f(h[..cols]) * h[cols..] where gated.
template <int GATED>
struct Activated {
    const void* h;
    int dtype;
    int kind;
    u64 cols;

    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        const u64 at = row * (GATED ? 2 * cols : cols) + col;
        const int whole = cols % 8 == 0;
        float x[8], c[8], s[8];
        widen8(x, raw8_row(h, dtype, at, n, whole), dtype);
        if (GATED) widen8(v, raw8_row(h, dtype, at + cols, n, whole), dtype);
        sigmoids(kind, x, c, s);
        function_values(kind, x, s, c);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = k < n ? (GATED ? c[k] * v[k] : c[k]) : 0.0f;
    }

    __device__ __forceinline__ void compute(float*, u64, u64, int) const {}
};

// Values of a row of the gradient of h; dy has `cols` columns, h and the gradient as many, or twice as many where gated.
template <int GATED>
struct ActivatedBackward {
    const void* dy;
    int dy_dtype;
    const void* h;
    int dtype;
    int kind;
    u64 cols;

    __device__ __forceinline__ void load(float v[8], u64 row, u64 col, int n) const {
        const u64 start = row * (GATED ? 2 * cols : cols);
        float x[8], d[8], gate[8], s[8], slope[8];
        // Which of the eight are gradients of the gate.
        u32 is_gate = 0;
        if (!GATED || cols % 8 == 0) {
            const u64 of = GATED && col >= cols ? col - cols : col;
            is_gate = of == col ? 0u : 0xffu;
            widen8(x, raw8_row(h, dtype, start + of, n, cols % 8 == 0), dtype);
            widen8(d, raw8_row(dy, dy_dtype, row * cols + of, n, cols % 8 == 0), dy_dtype);
            if (GATED) widen8(gate, raw8_row(h, dtype, start + cols + of, n, 1), dtype);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = d[k] = gate[k] = 0.0f;
            // From the last to the first, each moving the others up.
#pragma unroll 1
            for (int k = n - 1; k >= 0; k--) {
#pragma unroll
                for (int j = 7; j > 0; j--) x[j] = x[j - 1], d[j] = d[j - 1], gate[j] = gate[j - 1];
                const u64 of = col + k >= cols ? col + k - cols : col + k;
                is_gate = is_gate << 1 | (of != col + k);
                x[0] = load1(h, dtype, start + of);
                d[0] = load1(dy, dy_dtype, row * cols + of);
                gate[0] = load1(h, dtype, start + cols + of);
            }
        }
        function_slopes(kind, x, s, slope);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            slope[k] = slope[k] * d[k];
            if (GATED) slope[k] = slope[k] * gate[k];
        }
        if (GATED) function_values(kind, x, s, gate);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (GATED && is_gate >> k & 1u) slope[k] = gate[k] * d[k];
            v[k] = k < n ? slope[k] : 0.0f;
        }
    }

    __device__ __forceinline__ void compute(float*, u64, u64, int) const {}
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_blocks(const void* h, int dtype, int kind, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Activated<0> values = {h, dtype, kind, cols};
    block_tile<1, 1, 0>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    activation_blocks_gated(const void* h, int dtype, int kind, u64 rows, u64 cols, BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    Activated<1> values = {h, dtype, kind, cols};
    block_tile<1, 1, 0>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_backward_blocks(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols,
                               BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    ActivatedBackward<0> values = {dy, dy_dtype, h, dtype, kind, cols};
    block_tile<1, 1, 1>(shared, sink, rows, cols, values);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    activation_backward_blocks_gated(const void* dy, int dy_dtype, const void* h, int dtype, int kind, u64 rows, u64 cols,
                                     BLOCK_PARAMS) {
    __shared__ BlockShared shared;
    const BlockSink sink = BLOCK_SINK;
    ActivatedBackward<1> values = {dy, dy_dtype, h, dtype, kind, cols};
    block_tile<1, 1, 1>(shared, sink, rows, 2 * cols, values);
}
