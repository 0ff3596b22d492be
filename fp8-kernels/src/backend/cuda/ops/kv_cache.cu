// New keys or values into a cache: src/backend/cpu/kv_cache.rs. An entry of the batch that does not fit into the cache is
// reported and not written.

template <typename T>
__device__ __forceinline__ void append(T* cache, const T* values, const int* starts, const int* lengths, u64 batch,
                                       u64 capacity, u64 seq, u64 width, i64* fault) {
    for (u64 item = grid_thread(); item < batch * seq * width; item += grid_threads()) {
        u64 token = quotient(item, width), row = quotient(token, seq), i = token - row * seq;
        i64 start = starts[row], length = lengths ? lengths[row] : (i64)seq;
        if (length < 0 || (u64)length > seq) {
            report_fault(fault, 14, length, row, seq + 1);
        } else if (length > 0 && (start < 0 || (u64)(start + length) > capacity)) {
            report_fault(fault, 13, start < 0 ? start : start + length - 1, row, capacity);
        } else if (i < (u64)length) {
            cache[(row * (capacity - seq) + start) * width + item] = values[item];
        }
    }
}

// `width` counts units of a position; a unit has 16, 8, 4 or 2 bytes.
extern "C" __global__ void __launch_bounds__(256)
    kv_cache_append(void* cache, const void* values, const int* starts, const int* lengths, u64 batch, u64 capacity,
                    u64 seq, u64 width, int unit, i64* fault) {
    if (unit == 16) append((uint4*)cache, (const uint4*)values, starts, lengths, batch, capacity, seq, width, fault);
    else if (unit == 8) append((u64*)cache, (const u64*)values, starts, lengths, batch, capacity, seq, width, fault);
    else if (unit == 4) append((u32*)cache, (const u32*)values, starts, lengths, batch, capacity, seq, width, fault);
    else append((u16*)cache, (const u16*)values, starts, lengths, batch, capacity, seq, width, fault);
}
