// Sums and products element by element, in f32, rounded once: src/backend/cpu/elementwise.rs.
//
// A thread takes eight elements at a time; the last ones, fewer than eight, go one by one.

extern "C" __global__ void __launch_bounds__(256)
    elementwise_add(const void* a, const void* b, void* y, u64 n, int a_type, int b_type) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            Raw8 left = raw8(a, a_type, i), right = raw8(b, b_type, i);
            float v[8], w[8];
            widen8(v, left, a_type);
            widen8(w, right, b_type);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] + w[k];
            store8(y, a_type, i, v);
        } else {
#pragma unroll 1
            do store1(y, a_type, i, load1(a, a_type, i) + load1(b, b_type, i));
            while (++i < n);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    elementwise_mul(const void* a, const void* b, void* y, u64 n, int a_type, int b_type) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            Raw8 left = raw8(a, a_type, i), right = raw8(b, b_type, i);
            float v[8], w[8];
            widen8(v, left, a_type);
            widen8(w, right, b_type);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] * w[k];
            store8(y, a_type, i, v);
        } else {
#pragma unroll 1
            do store1(y, a_type, i, load1(a, a_type, i) * load1(b, b_type, i));
            while (++i < n);
        }
    }
}

// x [rows, cols] plus bias [cols] on every row; n = rows · cols.
extern "C" __global__ void __launch_bounds__(256)
    elementwise_bias(const void* x, const void* bias, void* y, u64 n, u64 cols, int x_type, int bias_type) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        u64 col = i - quotient(i, cols) * cols;
        if (i + 8 <= n) {
            Raw8 raw = raw8(x, x_type, i);
            float v[8], w[8];
            if (cols % 8 == 0) {
                Raw8 row = raw8_cached(bias, bias_type, col);
                widen8(w, row, bias_type);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    w[k] = load1(bias, bias_type, col);
                    col = col + 1 == cols ? 0 : col + 1;
                }
            }
            widen8(v, raw, x_type);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] + w[k];
            store8(y, x_type, i, v);
        } else {
#pragma unroll 1
            do {
                store1(y, x_type, i, load1(x, x_type, i) + load1(bias, bias_type, col));
                col = col + 1 == cols ? 0 : col + 1;
            } while (++i < n);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    elementwise_scale(const void* x, void* y, u64 n, int dtype, float factor) {
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            float v[8];
            widen8(v, raw8(x, dtype, i), dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] * factor;
            store8(y, dtype, i, v);
        } else {
#pragma unroll 1
            do store1(y, dtype, i, load1(x, dtype, i) * factor);
            while (++i < n);
        }
    }
}

// Where there is a norm, the factor is the largest that it may be: x becomes that long if it is longer, and not infinite.
extern "C" __global__ void __launch_bounds__(256)
    elementwise_scale_in_place(void* x, u64 n, int dtype, float factor, const float* norm) {
    if (norm) {
        const float length = *norm;
        if (!(length > factor && length < INFINITY_F)) return;
        factor = factor / length;
    }
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        if (i + 8 <= n) {
            float v[8];
            widen8(v, raw8_cached(x, dtype, i), dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = v[k] * factor;
            store8(x, dtype, i, v);
        } else {
#pragma unroll 1
            do store1(x, dtype, i, load1(x, dtype, i) * factor);
            while (++i < n);
        }
    }
}
