#include "adamw.cuh"
// AdamW over all tensors of a step in one launch, with the FP8 codes of the new parameters where slots ask for them.
//
// A table of records, one for each tensor, and the number of each tensor's first tile lie on the device, and so do the
// step's factors: nothing of a step is in the launch. A tile is 8192 consecutive elements, or 128 rows of 64 columns where
// the transposed codes are wanted. Blocks take consecutive tiles.
//
// Codes whose scale is known beforehand are written by the update. The others need the new parameter's own amax: a
// second, small kernel makes scales of amaxes, and a third writes those codes alone.
//
// Where the gradients' norm is there and not finite, nothing is updated, and codes are those of the parameters as they are.

#define FLAT_ELEMENTS 8192

// Where a tensor's scale comes from.
enum { SLOT_NONE = 0, SLOT_OFF = 1, SLOT_CELL = 2, SLOT_OWN = 3, SLOT_FIXED = 4 };

// One tensor. All members are eight bytes, in the host's order (cuda/adamw.rs).
struct Record {
    void* param;
    float* main;  // null: none
    const float* grad;
    float* exp_avg;
    float* exp_avg_sq;
    u8* codes;
    u8* transposed;
    float* scale;  // the slot's cell
    float* scale_inv;
    int* amax;
    u64* counters;
    u64 elements;
    u64 rows;
    u64 cols;
    u64 kinds;  // dtype, format, slot, whether a first scale is kept: a byte each
    u64 fixed;  // the bits of a known scale; above them the rule's kind
    u64 limits;  // the rule's fp8_max; above it its scaled_max
    u64 bounds;  // the rule's margin; above it its epsilon
};

__device__ __forceinline__ int dtype_of(const Record& r) { return (int)(r.kinds & 0xff); }
__device__ __forceinline__ int format_of(const Record& r) { return (int)(r.kinds >> 8 & 0xff); }
__device__ __forceinline__ int slot_of(const Record& r) { return (int)(r.kinds >> 16 & 0xff); }
__device__ __forceinline__ int keeps(const Record& r) { return (int)(r.kinds >> 24 & 0xff); }
__device__ __forceinline__ float low_float(u64 v) { return __int_as_float((int)(u32)v); }
__device__ __forceinline__ float high_float(u64 v) { return __int_as_float((int)(v >> 32)); }

// Eight elements that this launch writes too.
__device__ __forceinline__ void plain8(float v[8], const void* p, int dtype, u64 i) {
    widen8(v, raw8_cached(p, dtype, i), dtype);
}

// The value that a parameter of this type holds after `v` is stored in it.
__device__ __forceinline__ float rounded(float v, int dtype) {
    if (dtype == F32) return v;
    return dtype == BF16 ? bf16_to_f32(f32_to_bf16(v)) : f16_to_f32(f32_to_f16(v));
}

// The update, leaving the new values of the parameter; where the step is skipped, the old ones.
struct Update {
    const Record& r;
    const Factors& f;
    int skips;

    // Eight elements from i on, a multiple of eight.
    __device__ __forceinline__ void eight(float p[8], u64 i) const {
        const int dtype = dtype_of(r);
        if (skips) {
            plain8(p, r.param, dtype, i);
            return;
        }
        float g[8], m[8], v[8];
        if (r.main) plain8(p, r.main, F32, i);
        else plain8(p, r.param, dtype, i);
        load8(g, r.grad, F32, i);
        plain8(m, r.exp_avg, F32, i);
        plain8(v, r.exp_avg_sq, F32, i);
#pragma unroll
        for (int k = 0; k < 8; k++) p[k] = step(f, p[k], g[k], m[k], v[k]);
        store8(r.exp_avg, F32, i, m);
        store8(r.exp_avg_sq, F32, i, v);
        if (r.main) store8(r.main, F32, i, p);
        store8(r.param, dtype, i, p);
#pragma unroll
        for (int k = 0; k < 8; k++) p[k] = rounded(p[k], dtype);
    }

    __device__ __forceinline__ float one(u64 i) const {
        const int dtype = dtype_of(r);
        if (skips) return load1(r.param, dtype, i);
        float m = r.exp_avg[i], v = r.exp_avg_sq[i];
        const float p = step(f, r.main ? r.main[i] : load1(r.param, dtype, i), r.grad[i], m, v);
        r.exp_avg[i] = m;
        r.exp_avg_sq[i] = v;
        if (r.main) r.main[i] = p;
        store1(r.param, dtype, i, p);
        return rounded(p, dtype);
    }
};

// The values of a parameter as they are.
struct Read {
    const Record& r;

    __device__ __forceinline__ void eight(float p[8], u64 i) const { load8(p, r.param, dtype_of(r), i); }
    __device__ __forceinline__ float one(u64 i) const { return load1(r.param, dtype_of(r), i); }
};

// A tile with its transpose, one row of a thread at a time: an update has loads enough under way, and no registers for
// more.
template <typename Elements>
__device__ __forceinline__ void square_tile(u32* tile, Codes& out, const Record& r, u64 row0, u64 col0, int coding,
                                            const Elements& elements) {
    const u64 row = row0 + tile_row(), col = col0 + tile_col();
    const int n = tile_width(col, r.cols), whole = r.cols % 8 == 0;
    u32 columns[8];
#pragma unroll
    for (int k = 0; k < 8; k++) columns[k] = 0;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        const u64 i = (row + k) * r.cols + col;
        const int live = row + k < r.rows ? n : 0;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = 0.0f;
        if (whole) {
            if (live) elements.eight(v, i);
        } else {
            // From the last to the first, each moving the others up.
#pragma unroll 1
            for (int j = live - 1; j >= 0; j--) {
#pragma unroll
                for (int l = 7; l > 0; l--) v[l] = v[l - 1];
                v[0] = elements.one(i + j);
            }
        }
        const uint2 codes = code8(out, v);
        if (coding && live) store_codes8(r.codes + i, codes, live, whole);
        push_row(columns, codes);
    }
    if (!coding) return;
#pragma unroll
    for (int j = 0; j < 8; j++) put_column(tile, j, columns[j]);
    __syncthreads();
    store_columns(tile, r.transposed, r.rows, r.cols, row0, col0);
    __syncthreads();
}

// `coding`: whether codes are written; amaxes are kept either way.
template <typename Elements>
__device__ __forceinline__ void flat_tile(Codes& out, const Record& r, u64 start, int coding, const Elements& elements) {
#pragma unroll 1
    for (u64 i = start + threadIdx.x * 8; i < start + FLAT_ELEMENTS && i < r.elements; i += TILE_THREADS * 8) {
        if (i + 8 <= r.elements) {
            float v[8];
            elements.eight(v, i);
            if (coding) {
                *(uint2*)(r.codes + i) = code8(out, v);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++) out.amax = fmaxf(out.amax, fabsf(v[k]));
            }
        } else {
#pragma unroll 1
            for (u64 j = i; j < r.elements; j++) {
                const float v = elements.one(j);
                if (coding) r.codes[j] = (u8)code1(out, v);
                else out.amax = fmaxf(out.amax, fabsf(v));
            }
        }
    }
}

template <typename Elements>
__device__ __forceinline__ void any_tile(u32* tile, Codes& out, const Record& r, u64 index, int coding,
                                         const Elements& elements) {
    if (r.transposed) {
        const u64 across = tiles_across(r.cols), down = quotient(index, across);
        square_tile(tile, out, r, down * TILE_ROWS, (index - down * across) * TILE_COLS, coding, elements);
    } else {
        flat_tile(out, r, index * FLAT_ELEMENTS, coding, elements);
    }
}

#define RECORD_WORDS (sizeof(Record) / 8)

// The record into shared memory: its members are uniform, and registers are dear. All threads of the block come here.
__device__ __forceinline__ void take_record(Record* to, const Record* from) {
    __syncthreads();
    if (threadIdx.x < RECORD_WORDS) ((u64*)to)[threadIdx.x] = ((const u64*)from)[threadIdx.x];
    __syncthreads();
}

// Updates every tensor; with the codes of those whose scale is known, and the amax of all that have a slot. `first_tiles`
// ends with the number of tiles. `norm` may be null; so may `skipped`, which counts steps that are skipped.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    adamw_update(const Record* records, const u64* first_tiles, int tensors, const float* factors, int* amaxes,
                 const float* norm, u64* skipped) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    __shared__ Record r;
    const Factors f = factors_at(factors);
    const int skips = skips_step(norm);
    if (skips && skipped && blockIdx.x == 0 && threadIdx.x == 0) *skipped += 1;
    const u64 tiles = first_tiles[tensors];
    u64 next = tiles * blockIdx.x / gridDim.x;
    const u64 last = tiles * (blockIdx.x + 1) / gridDim.x;
    while (next < last) {
        const int tensor = tensor_of(first_tiles, tensors, next);
        take_record(&r, records + tensor);
        const u64 first = first_tiles[tensor], end = first_tiles[tensor + 1] < last ? first_tiles[tensor + 1] : last;
        const int slot = slot_of(r);
        if (skips && slot == SLOT_NONE) {
            next = end;
            continue;
        }
        float scale = low_float(r.fixed);
        if (slot == SLOT_CELL) scale = *r.scale;
        const int coding = slot == SLOT_FIXED || (slot == SLOT_CELL && scale != -1.0f);
        Codes out = begin_codes(nullptr, format_of(r), r.counters);
        out.scale = fabsf(scale);
        if (!coding) out.counters = nullptr;
        out.is_careful = out.counters || !keeps_numbers(out.scale);
        const Update update = {r, f, skips};
        for (; next < end; next++) any_tile(tile, out, r, next - first, coding, update);
        finish_codes(out, slot == SLOT_NONE ? nullptr : amaxes + tensor, coding ? r.counters : nullptr, 0, scratch);
    }
}

// From the amaxes of the new parameters: into their slots' cells, and to scales. `late` gets the scale of each tensor
// whose codes are still to be written, 0 for the others.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    adamw_scales(const Record* records, int tensors, const int* amaxes, float* late) {
    const int tensor = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (tensor >= tensors) return;
    const Record r = records[tensor];
    const int slot = slot_of(r);
    late[tensor] = 0.0f;
    if (slot == SLOT_NONE) return;
    // At rest where the tensor has no elements: nothing is recorded, and its amax is 0.
    const float recorded = __int_as_float(amaxes[tensor]);
    if (r.amax && recorded >= 0.0f) record_amax(r.amax, recorded);
    if (slot == SLOT_OFF) return;
    const float amax = recorded < 0.0f ? 0.0f : recorded;
    const Rule rule = {(int)(r.fixed >> 32), low_float(r.limits), high_float(r.limits), (int)(u32)r.bounds,
                       high_float(r.bounds)};
    float scale = low_float(r.fixed);
    if (slot == SLOT_CELL) scale = *r.scale;
    if (slot == SLOT_OWN) {
        scale = scale_of(rule, amax, 1.0f);
        late[tensor] = scale;
    } else if (slot == SLOT_CELL && scale == -1.0f) {
        const int usable = usable_amax(amax);
        scale = usable ? scale_of(rule, amax, 1.0f) : 1.0f;
        if (usable && keeps(r)) *r.scale = -scale;
        late[tensor] = scale;
    }
    *r.scale_inv = 1.0f / fabsf(scale);
    if (r.counters) atomicAdd(r.counters + 2, r.elements);
}

// The codes that the update could not write.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    adamw_codes(const Record* records, const u64* first_tiles, int tensors, const float* late) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    __shared__ Record r;
    const u64 tiles = first_tiles[tensors];
    u64 next = tiles * blockIdx.x / gridDim.x;
    const u64 last = tiles * (blockIdx.x + 1) / gridDim.x;
    while (next < last) {
        const int tensor = tensor_of(first_tiles, tensors, next);
        const u64 first = first_tiles[tensor], end = first_tiles[tensor + 1] < last ? first_tiles[tensor + 1] : last;
        if (late[tensor] == 0.0f) {
            next = end;
            continue;
        }
        take_record(&r, records + tensor);
        Codes out = begin_codes(late + tensor, format_of(r), r.counters);
        const Read read = {r};
        for (; next < end; next++) any_tile(tile, out, r, next - first, 1, read);
        finish_codes(out, nullptr, r.counters, 0, scratch);
    }
}
