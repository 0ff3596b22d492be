// New keys or values into a cache: src/backend/cpu/kv_cache.rs. An entry of the batch that does not fit into the cache is
// reported and not written.

// `width` counts units of a position, `pitch` those from one position of the values to the next; a unit has 16, 8, 4 or 2 bytes.
extern "C" __global__ void __launch_bounds__(256)
    kv_cache_append(void* cache, const void* values, const int* starts, const int* lengths, u64 batch, u64 capacity,
                    u64 seq, u64 width, u64 pitch, int unit, i64* fault) {
    for (u64 item = grid_thread(); item < batch * seq * width; item += grid_threads()) {
        u64 token = quotient(item, width), row = quotient(token, seq), i = token - row * seq;
        i64 start = starts[row], length = lengths ? lengths[row] : (i64)seq;
        if (length < 0 || (u64)length > seq) {
            report_fault(fault, 14, length, row, seq + 1);
        } else if (length > 0 && (start < 0 || (u64)(start + length) > capacity)) {
            report_fault(fault, 13, start < 0 ? start : start + length - 1, row, capacity);
        } else if (i < (u64)length) {
            u64 to = (row * (capacity - seq) + start) * width + item, from = token * (pitch - width) + item;
            if (unit == 16) ((uint4*)cache)[to] = ((const uint4*)values)[from];
            else if (unit == 8) ((u64*)cache)[to] = ((const u64*)values)[from];
            else if (unit == 4) ((u32*)cache)[to] = ((const u32*)values)[from];
            else ((u16*)cache)[to] = ((const u16*)values)[from];
        }
    }
}
