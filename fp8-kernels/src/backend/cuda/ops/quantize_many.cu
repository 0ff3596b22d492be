#include "tile_elements.cuh"
#include "quantize_many.cuh"
// Quantizes many tensors in one launch.

// A block takes `run` tiles in a row, of one tensor or of several; a tensor's first tile is its entry's.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    quantize_many(const u64* table, int entries, u64 tiles, u64 run) {
    __shared__ float scratch[WARP];
    __shared__ __align__(16) u32 tile[TILE_WORDS];
    const Entry* list = (const Entry*)table;
    u64 next = blockIdx.x * run;
    const u64 end = next + run < tiles ? next + run : tiles;
    for (int e = entry_of(list, entries, next); e < entries && next < end; e++) {
        const Entry entry = list[e];
        const u64 across = tiles_across(entry.cols), first = entry.first_tile;
        const u64 own = first + (entry.rows + TILE_ROWS - 1) / TILE_ROWS * across, last = own < end ? own : end;
        const int begins = next == first;
        Codes out = begin_codes(entry.scale, (int)(entry.types >> 8), entry.counters);
        if (begins && threadIdx.x == 0) *entry.scale_inv = 1.0f / fabsf(*entry.scale);
        Elements values = {entry.x, (int)(entry.types & 0xff), entry.cols, 0, {}};
        for (; next < last; next++) {
            const u64 row0 = (next - first) / across * TILE_ROWS, col0 = (next - first) % across * TILE_COLS;
            code_tile<1>(tile, out, entry.codes, entry.columnwise, entry.rows, entry.cols, row0, col0, values);
        }
        finish_codes(out, entry.amax, entry.counters, begins ? entry.rows * entry.cols : 0, scratch);
    }
}
