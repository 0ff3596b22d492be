// Rotary position embedding: src/backend/cpu/rope.rs. The gradient turns the other way: `direction` is 1 or -1.
//
// x and y are [batch · sequence, pitch], of which the first `heads` heads of 2 · half elements are turned, `rows` of them in all;
// cosines and sines are [positions, half] in f32. x and y may be the same memory. A thread turns
// eight pairs at a time, one where half is not a multiple of eight. A token's position is given, or counted from `start` on in
// each sequence; one outside the table is reported and taken for 0. Heads of a token lie next to each other and share
// a row of the table, which the first of them brings into the cache.

extern "C" __global__ void __launch_bounds__(256)
    rope(const void* x, void* y, const float* cos, const float* sin, const int* positions, u64 rows, u64 sequence,
         u64 heads, u64 half, u64 pitch, u64 start, u64 limit, int dtype, float direction, i64* fault) {
    int wide = half % 8 == 0 ? 8 : 1;
    u64 pieces = wide == 8 ? half / 8 : half;
    for (u64 item = grid_thread(); item < rows * pieces; item += grid_threads()) {
        u64 row = quotient(item, pieces), j = (item - row * pieces) * wide;
        u64 token = quotient(row, heads);
        u64 position = start + token - quotient(token, sequence) * sequence;
        if (positions) {
            int given = positions[token];
            int valid = given >= 0 && (u64)given < limit;
            if (!valid && j == 0 && row == token * heads) report_fault(fault, direction > 0.0f ? 11 : 12, given, token, limit);
            position = valid ? (u64)given : 0;
        }
        u64 at = position * half + j;
        u64 first = token * pitch + (row - token * heads) * half * 2 + j, second = first + half;
        if (wide == 8) {
            Raw8 raw_1 = raw8_cached(x, dtype, first), raw_2 = raw8_cached(x, dtype, second);
            float x_1[8], x_2[8], c[8], s[8];
            widen8(c, raw8_cached(cos, F32, at), F32);
            widen8(s, raw8_cached(sin, F32, at), F32);
            widen8(x_1, raw_1, dtype);
            widen8(x_2, raw_2, dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float turn = s[k] * direction, left = x_1[k], right = x_2[k];
                x_1[k] = left * c[k] - right * turn;
                x_2[k] = right * c[k] + left * turn;
            }
            store8(y, dtype, first, x_1);
            store8(y, dtype, second, x_2);
        } else {
            float c = cos[at], turn = sin[at] * direction;
            float left = load1(x, dtype, first), right = load1(x, dtype, second);
            store1(y, dtype, first, left * c - right * turn);
            store1(y, dtype, second, right * c + left * turn);
        }
    }
}
