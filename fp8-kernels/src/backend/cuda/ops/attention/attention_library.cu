// What attention by cuDNN needs besides the library: the lengths of sequences, checked.

#define THREADS 256

// The numbers of real queries of all batch entries, and from `keys_at` on those of real keys. One that is out of range is reported,
// and clamped.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_lengths(const int* query_lengths, const int* key_lengths, int* lengths, u64 keys_at, i64* fault, u64 batch,
                      u32 queries, u32 keys, int backward) {
    for (u64 i = grid_thread(); i < 2 * batch; i += grid_threads()) {
        const int of_keys = i >= batch;
        const u64 entry = of_keys ? i - batch : i;
        const int* given = of_keys ? key_lengths : query_lengths;
        const u32 most = of_keys ? keys : queries;
        const int length = given ? given[entry] : (int)most;
        const int is_real = (u32)length <= most;
        // Numbers of `fault.rs`: keys forward and backward, queries forward and backward.
        const i64 code = of_keys ? (backward ? 6 : 5) : (backward ? 10 : 9);
        if (!is_real) report_fault(fault, code, length, entry, (u64)most + 1);
        lengths[of_keys ? keys_at + entry : entry] = is_real ? length : (length < 0 ? 0 : (int)most);
    }
}

// Sets the numbers of the rows that see no key: of all behind their entry's real queries, and of entries without real keys.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_unseen(const int* lengths, u64 keys_at, float* log_sums, u32 rows, u32 heads, u32 queries,
                     float value) {
    for (u32 row = (u32)grid_thread(); row < rows; row += (u32)grid_threads()) {
        const u32 head = row / queries, entry = head / heads;
        const u32 query = row - head * queries;
        if (query >= (u32)lengths[entry] || lengths[keys_at + entry] == 0) log_sums[row] = value;
    }
}
