// The tensors of one launch.

// As the host writes it; addresses are 0 for none.
struct Entry {
    const void* x;
    u8* codes;
    u8* columnwise;
    const float* scale;
    float* scale_inv;
    int* amax;
    u64* counters;
    u64 rows;
    u64 cols;
    // dtype, and format << 8.
    u64 types;
    u64 first_tile;
};

// The last entry whose first tile is not beyond this one.
__device__ __forceinline__ int entry_of(const Entry* list, int entries, u64 tile) {
    int low = 0, high = entries;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (list[middle].first_tile <= tile) low = middle;
        else high = middle;
    }
    return low;
}
