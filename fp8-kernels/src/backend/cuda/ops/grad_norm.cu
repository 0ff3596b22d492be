// The L2 norm over many tensors: one launch over all their elements, one that finishes.
//
// No f32 gradient overflows or vanishes (Blue): eight neighbours are squared together, scaled by what their largest
// needs, and each of the three classes has its own compensated sum. Partial sums per block, in the order of the tiles.

#define NORM_THREADS 256
#define TILE_GROUPS 8
// Groups in flight at a time.
#define LOADS 4
#define TILE_ELEMENTS (NORM_THREADS * TILE_GROUPS * 8)

// Above 2^40 scaled by 2^-90, below 2^-45 by 2^90: squares of what is kept stay within 2^-118 ... 2^90.
#define BIG __int_as_float((40 + 127) << 23)
#define SMALL __int_as_float((-45 + 127) << 23)
#define DOWN __int_as_float((-90 + 127) << 23)
#define UP __int_as_float((90 + 127) << 23)

// Of one tensor in the host's table.
struct Entry {
    u64 address;
    u64 len;
    u64 dtype;
    // Of all tensors' tiles, in order.
    u64 first_tile;
};

struct Squares {
    Sum big;
    Sum medium;
    Sum small;
};

__device__ __forceinline__ void add_group(Squares& squares, const float v[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[k]));
    float factor = largest > BIG ? DOWN : largest < SMALL ? UP : 1.0f;
    float s[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float scaled = v[k] * factor;
        s[k] = scaled * scaled;
    }
    float sum = tree8(s);
    if (largest > BIG) squares.big = sum_add(squares.big, sum);
    else if (largest < SMALL) squares.small = sum_add(squares.small, sum);
    else squares.medium = sum_add(squares.medium, sum);
}

template <int DTYPE>
__device__ __forceinline__ void add_tile(Squares& squares, const Entry& entry, u64 start) {
    const void* data = (const void*)entry.address;
    if (start + TILE_ELEMENTS <= entry.len) {
#pragma unroll 1
        for (int k = 0; k < TILE_GROUPS; k += LOADS) {
            float v[LOADS][8];
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                load8(v[j], data, DTYPE, start + 8 * (u64)((k + j) * NORM_THREADS + (int)threadIdx.x));
            }
#pragma unroll
            for (int j = 0; j < LOADS; j++) add_group(squares, v[j]);
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < TILE_GROUPS; k++) {
        u64 i = start + 8 * (u64)(k * NORM_THREADS + (int)threadIdx.x);
        if (i >= entry.len) break;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = i + (u64)j < entry.len ? load1(data, DTYPE, i + (u64)j) : 0.0f;
        add_group(squares, v);
    }
}

// Most gradients have one class: the sums of the others are zeros, which need no adding.
__device__ __forceinline__ Sum block_merge_if_any(Sum sum, float* scratch) {
    return __syncthreads_or(sum.hi != 0.0f) ? block_merge(sum, scratch) : sum;
}

__device__ __forceinline__ Squares block_squares(Squares squares, float* scratch) {
    squares.big = block_merge_if_any(squares.big, scratch);
    squares.medium = block_merge_if_any(squares.medium, scratch);
    squares.small = block_merge_if_any(squares.small, scratch);
    return squares;
}

// `partial` takes six floats a block.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
grad_norm_squares(const Entry* __restrict__ table, u64 tensors, u64 tiles, float* partial) {
    __shared__ float scratch[64];
    Squares squares = {{0.0f, 0.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // The last tensor that begins at or before the tile.
        u64 low = 0, high = tensors;
        while (high - low > 1) {
            u64 middle = (low + high) / 2;
            if (table[middle].first_tile <= tile) low = middle;
            else high = middle;
        }
        Entry entry = table[low];
        u64 start = (tile - entry.first_tile) * TILE_ELEMENTS;
        if (entry.dtype == F32) add_tile<F32>(squares, entry, start);
        else if (entry.dtype == BF16) add_tile<BF16>(squares, entry, start);
        else add_tile<F16>(squares, entry, start);
    }
    squares = block_squares(squares, scratch);
    if (threadIdx.x == 0) {
        float* to = partial + 6 * (u64)blockIdx.x;
        to[0] = squares.big.hi, to[1] = squares.big.lo;
        to[2] = squares.medium.hi, to[3] = squares.medium.lo;
        to[4] = squares.small.hi, to[5] = squares.small.lo;
    }
}

__device__ __forceinline__ Sum scaled(Sum sum, float factor) { return {sum.hi * factor, sum.lo * factor}; }

// Launch: one block.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) grad_norm(const float* partial, u64 blocks, float* out) {
    __shared__ float scratch[64];
    Squares squares = {{0.0f, 0.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    for (u64 b = threadIdx.x; b < blocks; b += NORM_THREADS) {
        const float* from = partial + 6 * b;
        squares.big = sum_merge(squares.big, {from[0], from[1]});
        squares.medium = sum_merge(squares.medium, {from[2], from[3]});
        squares.small = sum_merge(squares.small, {from[4], from[5]});
    }
    squares = block_squares(squares, scratch);
    if (threadIdx.x != 0) return;
    // Of two neighbouring classes the lower one still counts, of the third nothing does - but NaN must come through.
    float norm;
    if (squares.big.hi != 0.0f) {
        Sum lower = scaled(scaled(squares.medium, DOWN), DOWN);
        norm = sqrtf(sum_value(sum_merge(squares.big, lower))) * UP;
    } else if (squares.medium.hi != 0.0f) {
        Sum lower = scaled(scaled(squares.small, DOWN), DOWN);
        norm = sqrtf(sum_value(sum_merge(squares.medium, lower)));
    } else {
        norm = sqrtf(sum_value(squares.small)) * DOWN;
    }
    int nan = squares.big.hi != squares.big.hi || squares.medium.hi != squares.medium.hi ||
              squares.small.hi != squares.small.hi;
    out[0] = nan ? NAN_F : norm;
}
