// Copying a column range between row-major matrices: the whole of split and concat.
//
// Widths, pitches and offsets count units of 16, 8, 4, 2 or 1 bytes, the largest that divides all of them.

template <typename T>
__device__ __forceinline__ void copy(const T* from, T* to, u64 rows, u64 width, u64 from_pitch, u64 to_pitch) {
    for (u64 item = grid_thread(); item < rows * width; item += grid_threads()) {
        u64 row = quotient(item, width), col = item - row * width;
        to[row * to_pitch + col] = from[row * from_pitch + col];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    split_copy(const void* x, void* y, u64 rows, u64 width, u64 x_pitch, u64 x_offset, u64 y_pitch, u64 y_offset,
               int unit) {
    if (unit == 16) copy((const uint4*)x + x_offset, (uint4*)y + y_offset, rows, width, x_pitch, y_pitch);
    else if (unit == 8) copy((const u64*)x + x_offset, (u64*)y + y_offset, rows, width, x_pitch, y_pitch);
    else if (unit == 4) copy((const u32*)x + x_offset, (u32*)y + y_offset, rows, width, x_pitch, y_pitch);
    else if (unit == 2) copy((const u16*)x + x_offset, (u16*)y + y_offset, rows, width, x_pitch, y_pitch);
    else copy((const u8*)x + x_offset, (u8*)y + y_offset, rows, width, x_pitch, y_pitch);
}
