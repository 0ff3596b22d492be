// ---- an id out of range: told to the host at its next synchronising call ----

// `fault` holds state (0: none), value, position and limit. The first to report wins.
__device__ __forceinline__ void report_fault(i64* fault, i64 code, i64 value, u64 position, u64 limit) {
    u64 old;
    asm volatile("{ .reg .u64 p; cvta.to.global.u64 p, %1; atom.global.cas.b64 %0, [p], 0, %2; }"
                 : "=l"(old) : "l"(fault), "l"(code) : "memory");
    if (old != 0ull) return;
    fault[1] = value;
    fault[2] = (i64)position;
    fault[3] = (i64)limit;
}

