// A step of delayed scaling in an arena of floats: cells [slots], scales [slots], their inverses [slots], history
// [length, slots]. The history moves up by one row, the cell becomes its first and is reset; the scale follows from the
// largest of the column.
extern "C" __global__ void __launch_bounds__(64) scales(float* arena, int slots, int length) {
    float *cells = arena, *scale = cells + slots, *inverse = scale + slots, *history = inverse + slots;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG_ONE_SLOT_TOO_MANY
    if (i > slots) return;
#else
    if (i >= slots) return;
#endif
    float top = cells[i];
#ifdef BUG_WRONG_ROLL
    for (int row = 1; row < length; row++) history[row * slots + i] = history[(row - 1) * slots + i];
#else
    for (int row = length - 1; row > 0; row--) history[row * slots + i] = history[(row - 1) * slots + i];
#endif
    history[i] = top;
    for (int row = 1; row < length; row++) top = fmaxf(top, history[row * slots + i]);
    if (top > 0.0f) {
        scale[i] = 448.0f / top;
        inverse[i] = top / 448.0f;
    }
    cells[i] = -1.0f;
}
