// What the kernels of norms share: parameters, gamma and beta, and who computes a row.

// What is done to rows; uniform over the launch.
struct Norm {
    const void* x;
    int dtype;
    const void* gamma;
    int gamma_dtype;
    const void* beta;  // null: none
    int beta_dtype;
    int centered;  // LayerNorm
    int around_one;  // gamma is stored as its distance from 1
    float eps;
    u64 rows;
    u64 cols;
};

// Where values go, both null where they go nowhere.
struct Sink {
    void* y;  // in x's type
    u8* codes;
};

// Eight elements that all rows share, kept in L1.
__device__ __forceinline__ void shared8(float v[8], const void* p, int dtype, u64 i) {
    widen8(v, raw8_cached(p, dtype, i), dtype);
}

__device__ __forceinline__ void gamma8(float v[8], const Norm& norm, u64 col) {
    shared8(v, norm.gamma, norm.gamma_dtype, col);
    if (norm.around_one) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += 1.0f;
    }
}

__device__ __forceinline__ float gamma1(const Norm& norm, u64 col) {
    float g = load1(norm.gamma, norm.gamma_dtype, col);
    return norm.around_one ? g + 1.0f : g;
}

__device__ __forceinline__ float normed(const Norm& norm, float x, float mean, float rsigma, float g, float b) {
    float n = (x - mean) * rsigma;
    return norm.beta ? fmaf(n, g, b) : n * g;
}

__device__ __forceinline__ float normed1(const Norm& norm, float x, float mean, float rsigma, u64 col) {
    float b = norm.beta ? load1(norm.beta, norm.beta_dtype, col) : 0.0f;
    return normed(norm, x, mean, rsigma, gamma1(norm, col), b);
}

// From x in v to the norm.
__device__ __forceinline__ void normed8(float v[8], const Norm& norm, float mean, float rsigma, u64 col) {
    float g[8], b[8];
    gamma8(g, norm, col);
    if (norm.beta) shared8(b, norm.beta, norm.beta_dtype, col);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = normed(norm, v[k], mean, rsigma, g[k], norm.beta ? b[k] : 0.0f);
}

__device__ __forceinline__ void put8(const Sink& sink, Codes& out, int dtype, u64 i, const float v[8]) {
    if (sink.y) store8(sink.y, dtype, i, v);
    if (sink.codes) {
        *(uint2*)(sink.codes + i) = code8(out, v);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) out.amax = fmaxf(out.amax, fabsf(v[k]));
    }
}

__device__ __forceinline__ void put1(const Sink& sink, Codes& out, int dtype, u64 i, float v) {
    if (sink.y) store1(sink.y, dtype, i, v);
    if (sink.codes) sink.codes[i] = (u8)code1(out, v);
    else out.amax = fmaxf(out.amax, fabsf(v));
}

// A row is the work of a warp or of a block.
enum { BY_WARP = 0, BY_BLOCK = 1 };

// The sum over the threads of one row; every one of them gets it.
template <int BY>
__device__ __forceinline__ float row_sum(float v, float* scratch) {
    return BY == BY_WARP ? warp_sum(v) : block_sum(v, scratch);
}

// Calls `body(row, lane, lanes)` for the rows of this thread's warp or block: as often for each of its threads.
template <int BY, typename Body>
__device__ __forceinline__ void each_row(u64 rows, Body body) {
    const int lanes = BY == BY_WARP ? WARP : (int)blockDim.x;
    const u64 groups = blockDim.x / lanes;
    const u64 step = groups * gridDim.x;
    for (u64 row = blockIdx.x * groups + threadIdx.x / lanes; row < rows; row += step) {
        body(row, (int)threadIdx.x % lanes, lanes);
    }
}

__device__ __forceinline__ void put_statistics(float* means, float* rsigmas, u64 row, float mean, float rsigma) {
    if (means) means[row] = mean;
    if (rsigmas) rsigmas[row] = rsigma;
}

// y and codes null, rsigmas not: statistics alone. All three null: the amax alone. `unset`, if not null, is a scale cell:
// where it is set nobody needs the amax, and x is not read.
#define ROWS(NAME, BOUNDS, BODY)                                                                                       \
    extern "C" __global__ void __launch_bounds__(BOUNDS)                                                             \
        NAME(const void* x, int dtype, const void* gamma, int gamma_dtype, const void* beta, int beta_dtype,           \
             int centered, int around_one, float eps, u64 rows, u64 cols, float* means, float* rsigmas, void* y,       \
             u8* codes, int format, const float* scale, float* scale_inv, int* amax, u64* counters,                    \
             const float* unset) {                                                                                     \
        if (unset && __float_as_int(*unset) != REST_BITS) return;                                                      \
        const Norm norm = {x, dtype, gamma, gamma_dtype, beta, beta_dtype, centered, around_one, eps, rows, cols};     \
        const Sink sink = {y, codes};                                                                                  \
        Codes out = begin_codes(scale, format, counters);                                                              \
        if (scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / out.scale;                           \
        __shared__ float scratch[WARP];                                                                                \
        BODY(norm, sink, out, means, rsigmas);                                                                         \
        finish_codes(out, amax, counters, blockIdx.x == 0 ? rows * cols : 0, scratch);                                 \
    }
