// Calls and scales of the ranks of a group: a difference from rank 0, or a scale that is not committed, is a fault.

// As src/backend/cuda/ops/fault.rs numbers them.
#define FAULT_SCALES 7
#define FAULT_CALLS 8
// The bits of infinity, less one: those of finite numbers above 0, less one, are below.
#define COMMITTED 0x7f7fffffu

// Entries of `calls`, and of `scales` unless that is null, one a rank. One warp; the first rank that differs is reported.
extern "C" __global__ void __launch_bounds__(WARP)
    compare_calls(const u32* calls, const u32* scales, u64 ranks, u64 name, i64* fault) {
    const u32 lane = threadIdx.x, call = calls[0], scale = scales ? scales[0] : 0;
    for (u64 first = 0; first < ranks; first += WARP) {
        const u64 rank = first + lane;
        bool differs = false;
        u32 own = scale;
        i64 code = FAULT_SCALES;
        if (rank < ranks) {
            if (scales) {
                own = scales[rank];
                differs = own != scale || own - 1u >= COMMITTED;
            }
            if (calls[rank] != call) {
                differs = true;
                code = FAULT_CALLS;
            }
        }
        const u32 wrong = __ballot_sync(FULL_WARP, differs);
        if (wrong != 0) {
            if (lane == (u32)__ffs((int)wrong) - 1) {
                report_fault(fault, code, (i64)((u64)scale << 32 | own), rank, name);
            }
            return;
        }
    }
}
