// The update of delayed scaling for a whole arena in one launch: src/backend/cpu/update_scales.rs, slot by slot.
//
// A block owns SLOTS neighbouring slots: 32 bytes of each row, a whole memory sector. Thread t serves slot t % SLOTS and
// every (blockDim / SLOTS)-th row, so the window moves down by one row in passes: read, barrier, write. A pass reads rows
// that no earlier one has written, so it needs one barrier. An average depends on the order of the rows: one thread for
// each slot takes it before the first pass.

#define SLOTS 8
#define SLOT_ROWS 8
#define MAX_WARPS 32

#define NO_AVERAGE 0.0f

// Adds an amax to an average, which is NaN before the first. Amaxes of 0 and NaN are skipped.
static __device__ __forceinline__ float average_of(float average, float amax, float decay) {
    if (!(amax > 0.0f)) return average;
    return average >= 0.0f ? (decay * average) + ((1.0f - decay) * amax) : amax;
}

// The average of the rows of a slot from the oldest to the newest. A batch of them is loaded at a time.
static __device__ __forceinline__ float average_of_rows(const float* history, u64 slot, u64 slots, u64 rows, float decay) {
    float average = NAN_F;
    for (u64 first = 1; first < rows; first += SLOT_ROWS) {
        float row[SLOT_ROWS];
#pragma unroll
        for (int k = 0; k < SLOT_ROWS; k++) {
            row[k] = first + (u64)k < rows ? history[(first + (u64)k) * slots + slot] : NAN_F;
        }
#pragma unroll
        for (int k = 0; k < SLOT_ROWS; k++) average = average_of(average, row[k], decay);
    }
    return average;
}

// Launch: a block for each 8 slots, 32 to 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
update_scales(float* history, float* scale, float* cast_scale, u64* skipped, u64* clock, u64* last_updates, u64 slots,
              u64 rows, float rest, int recompute, u64 counted, float decay, int record_non_finite, int kind, float largest,
              float scaled_max, int margin, float epsilon) {
    __shared__ float maxima[MAX_WARPS][SLOTS];
    u64 slot = (u64)blockIdx.x * SLOTS + threadIdx.x % SLOTS;
    int lane_row = (int)threadIdx.x / SLOTS, row_step = (int)blockDim.x / SLOTS;
    int live = slot < slots;

    float newest = live ? history[slot] : rest;
    int finite = fabsf(newest) < INFINITY_F;
    int ran = live && __float_as_int(newest) != __float_as_int(rest);
    int rolls = ran && (finite || record_non_finite);

    float average = NAN_F;
    if (decay != NO_AVERAGE && rolls && threadIdx.x < SLOTS) average = average_of_rows(history, slot, slots, rows, decay);

    // NaN is what a maximum skips. It covers the newest amax and the rows from `oldest` on. The oldest row drops out and
    // may still count.
    u64 oldest = rows - counted + 1;
    float amax = rolls && lane_row == 0 && rows > 1 && oldest == 1 ? history[slots + slot] : NAN_F;
    for (u64 first = 1; first + 1 < rows; first += (u64)row_step * SLOT_ROWS) {
        float next[SLOT_ROWS];
        u64 row = first + (u64)lane_row;
#pragma unroll
        for (int k = 0; k < SLOT_ROWS; k++) {
            u64 source = row + (u64)(k * row_step) + 1;
            next[k] = rolls && source < rows ? history[source * slots + slot] : NAN_F;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SLOT_ROWS; k++) {
            u64 to = row + (u64)(k * row_step);
            if (rolls && to + 1 < rows) history[to * slots + slot] = next[k];
            if (to + 1 >= oldest) amax = fmaxf(amax, next[k]);
        }
    }
    amax = fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, 8));
    amax = fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, 16));
    if (threadIdx.x % WARP < SLOTS) maxima[threadIdx.x / WARP][threadIdx.x % WARP] = amax;
    // Orders the reads of staging and of the newest row before the writes below, too.
    __syncthreads();
    if (threadIdx.x >= SLOTS || !live) return;

    history[slot] = rest;
    float stored = scale[slot];
    int first = stored < 0.0f;
    // Whether a recorded amax has determined the scale. If so, tensors of this scope are quantized again by it.
    int determined = cast_scale[slot] > 0.0f;
    if (determined) cast_scale[slot] = stored;
    if (!rolls) {
        if (first) scale[slot] = __int_as_float(REST_BITS);
        if (ran) skipped[slot] += 1;
        return;
    }
    // This thread alone has the slot: no other launch runs meanwhile.
    u64 reading = clock[slot] + 1;
    clock[slot] = reading;
    last_updates[slot] = reading;
    if (rows > 1) history[(rows - 1) * slots + slot] = newest;
    if (!recompute && !first) return;
    amax = newest;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) amax = fmaxf(amax, maxima[w][threadIdx.x]);
    if (decay != NO_AVERAGE) amax = fmaxf(amax, average_of(average, newest, decay));
    // A slot is calibrated from its first finite amax > 0; before that it stays unset.
    Rule rule = {kind, largest, scaled_max, margin, epsilon};
    int usable = usable_amax(amax);
    float next = first && !usable ? __int_as_float(REST_BITS) : scale_of(rule, amax, first ? 1.0f : stored);
    scale[slot] = next;
    if (usable && !determined) cast_scale[slot] = next;
}
