// A tensor with its dimensions in another order: src/backend/cpu/permute.rs.
//
// d1 to d5 are the result's extents but the first, s0 to s5 how far neighbours along each of its dimensions are apart in x, all
// in units of 16, 8, 4, 2 or 1 bytes.

// Adds the place along the last dimension that is left, and takes that dimension off.
__device__ __forceinline__ void take(u64& rest, u64& from, u64 dim, u64 stride) {
    u64 left = quotient(rest, dim);
    from += (rest - left * dim) * stride;
    rest = left;
}

template <typename T>
__device__ __forceinline__ void gather(const T* x, T* y, u64 item, u64 from) {
    y[item] = x[from];
}

extern "C" __global__ void __launch_bounds__(256)
    permute(const void* x, void* y, u64 n, u64 d1, u64 d2, u64 d3, u64 d4, u64 d5, u64 s0, u64 s1, u64 s2, u64 s3, u64 s4,
            u64 s5, int unit) {
    for (u64 item = grid_thread(); item < n; item += grid_threads()) {
        u64 rest = item, from = 0;
        take(rest, from, d5, s5);
        take(rest, from, d4, s4);
        take(rest, from, d3, s3);
        take(rest, from, d2, s2);
        take(rest, from, d1, s1);
        from += rest * s0;
        if (unit == 16) gather((const uint4*)x, (uint4*)y, item, from);
        else if (unit == 8) gather((const u64*)x, (u64*)y, item, from);
        else if (unit == 4) gather((const u32*)x, (u32*)y, item, from);
        else if (unit == 2) gather((const u16*)x, (u16*)y, item, from);
        else gather((const u8*)x, (u8*)y, item, from);
    }
}
