// Partial sums of columns, a row of them for each 16 rows of x; a block of 64 threads takes two of these rows. `partial`
// has room for a row more.
extern "C" __global__ void __launch_bounds__(64) sums(const float* x, float* partial, int rows, int cols) {
    const int pieces = (rows + 15) / 16;
#ifdef BUG_DBIAS_ROW_TOO_MANY
    for (int piece = blockIdx.x * 2; piece <= blockIdx.x * 2 + 2 && piece <= pieces; piece++) {
#else
    for (int piece = blockIdx.x * 2; piece < blockIdx.x * 2 + 2 && piece < pieces; piece++) {
#endif
        for (int col = threadIdx.x; col < cols; col += blockDim.x) {
            float sum = 0.0f;
            for (int row = piece * 16; row < piece * 16 + 16 && row < rows; row++) sum += x[row * cols + col];
            partial[piece * cols + col] = sum;
        }
    }
}
