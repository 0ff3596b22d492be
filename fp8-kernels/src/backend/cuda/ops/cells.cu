// Blocks of cells: numbers that operations write while others read the table they stand in.

#define CELL_THREADS 256

// Keeps the larger of each: a signed maximum of the bits, see record_amax.
extern "C" __global__ void __launch_bounds__(CELL_THREADS) cells_merge_max(int* cells, const int* values, u64 n) {
    u64 step = (u64)gridDim.x * CELL_THREADS;
    for (u64 i = (u64)blockIdx.x * CELL_THREADS + threadIdx.x; i < n; i += step) {
        int old = cells[i], value = values[i];
        cells[i] = value > old ? value : old;
    }
}

// Replaces what is below zero; NaN stays.
extern "C" __global__ void __launch_bounds__(CELL_THREADS) cells_replace_negative(float* cells, float value, u64 n) {
    u64 step = (u64)gridDim.x * CELL_THREADS;
    for (u64 i = (u64)blockIdx.x * CELL_THREADS + threadIdx.x; i < n; i += step) {
        if (cells[i] < 0.0f) cells[i] = value;
    }
}
