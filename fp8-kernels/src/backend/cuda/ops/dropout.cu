#include "dropout.cuh"
// Dropout: src/backend/cpu/dropout.rs. Eight elements of a thread take two counters of Philox4x32-10.

extern "C" __global__ void __launch_bounds__(256)
    dropout(const void* x, void* y, u64 n, int dtype, const DropoutKey* key, u64 first, u32 threshold, float factor) {
    DropoutKey k = *key;
    k.offset += first;
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        u32 r[8];
        if (i + 8 <= n) {
            Raw8 raw = raw8(x, dtype, i);
            philox4x32_10(r, k.offset + chunk * 2, k.seed);
            philox4x32_10(r + 4, k.offset + chunk * 2 + 1, k.seed);
            float v[8];
            widen8(v, raw, dtype);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = r[j] >= threshold ? v[j] * factor : 0.0f;
            store8(y, dtype, i, v);
        } else {
            for (u64 part = chunk * 2; i < n; part++) {
                philox4x32_10(r, k.offset + part, k.seed);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (i < n) store1(y, dtype, i, r[j] >= threshold ? load1(x, dtype, i) * factor : 0.0f);
                    i++;
                }
            }
        }
    }
}

// y = residual + x · mask · path, in f32, rounded once: the mask has n elements, that of the path one for each `entry`
// elements. The residual may be null, and so may the key of either mask: nothing is dropped by it then.
extern "C" __global__ void __launch_bounds__(256)
    dropout_add(const void* residual, const void* x, void* y, u64 n, u64 entry, int residual_type, int x_type, int y_type,
                const DropoutKey* hidden_key, u64 hidden_first, u32 hidden_threshold, float hidden_factor,
                const DropoutKey* path_key, u64 path_first, u32 path_threshold, float path_factor) {
    const Mask hidden = {hidden_key, hidden_first, hidden_threshold, hidden_factor};
    const Mask path = {path_key, path_first, path_threshold, path_factor};
    const DropoutKey none = {0, 0}, hidden_at = hidden_key ? *hidden_key : none, path_at = path_key ? *path_key : none;
    for (u64 chunk = grid_thread(); chunk * 8 < n; chunk += grid_threads()) {
        u64 i = chunk * 8;
        const u64 first = path_key ? quotient(i, entry) : 0;
        // Eight elements of one entry; those of a chunk that has fewer, or of several entries, go one by one.
        if (i + 8 <= n && (!path_key || i + 8 - first * entry <= entry)) {
            Raw8 raw = raw8(x, x_type, i), other = residual ? raw8(residual, residual_type, i) : raw;
            float v[8], w[8];
            widen8(v, raw, x_type);
            if (hidden_key) {
                u32 r[8];
                philox4x32_10(r, hidden_at.offset + hidden_first + chunk * 2, hidden_at.seed);
                philox4x32_10(r + 4, hidden_at.offset + hidden_first + chunk * 2 + 1, hidden_at.seed);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = r[j] >= hidden_threshold ? v[j] * hidden_factor : 0.0f;
            }
            if (path_key) {
                const int kept = is_kept(path_at, first, path);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = kept ? v[j] * path_factor : 0.0f;
            }
            if (residual) {
                widen8(w, other, residual_type);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = w[j] + v[j];
            }
            store8(y, y_type, i, v);
        } else {
            const u64 end = i + 8 < n ? i + 8 : n;
#pragma unroll 1
            for (; i < end; i++) {
                float v = load1(x, x_type, i);
                if (hidden_key) v = is_kept(hidden_at, i, hidden) ? v * hidden_factor : 0.0f;
                if (path_key) v = is_kept(path_at, quotient(i, entry), path) ? v * path_factor : 0.0f;
                if (residual) v = load1(residual, residual_type, i) + v;
                store1(y, y_type, i, v);
            }
        }
    }
}

// The key of the next scope, and one scope more: the state's seed and number of scopes go through SplitMix64.
extern "C" __global__ void __launch_bounds__(32) dropout_advance(u64* state, DropoutKey* key) {
    if (threadIdx.x != 0) return;
    const u64 scopes = state[1] + 1;
    u64 z = state[0] + scopes * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    *key = {z ^ (z >> 31), 0};
    state[1] = scopes;
}
