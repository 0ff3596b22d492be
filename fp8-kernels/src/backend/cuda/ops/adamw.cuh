// The step of AdamW: src/backend/cpu/adamw.rs, operation by operation.

struct Factors {
    float grad_scale, keep, new_first, beta2, new_second, step_size, root_correction, eps;
};

__device__ __forceinline__ Factors factors_at(const float* f) {
    return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]};
}

// The new parameter; the moments become the new ones.
__device__ __forceinline__ float step(const Factors& f, float p, float grad, float& m, float& v) {
    const float g = grad * f.grad_scale;
    m += f.new_first * (g - m);
    v = f.beta2 * v + f.new_second * (g * g);
    const float root = sqrtf(v) / f.root_correction + f.eps;
    return p * f.keep - f.step_size * (m / root);
}

// Whether a step of this norm is skipped. NaN is not less than anything.
__device__ __forceinline__ int skips_step(const float* norm) { return norm && !(fabsf(*norm) < INFINITY_F); }

// The tensor that a tile belongs to: the last whose first tile is not behind it.
__device__ __forceinline__ int tensor_of(const u64* first_tiles, int tensors, u64 tile) {
    int low = 0, high = tensors;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_tiles[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}
