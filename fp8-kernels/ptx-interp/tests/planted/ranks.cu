// The places of x in order of its keys of four bits, a warp for each 64 elements: lanes of one key are found by votes, and
// the places handed out so far stand in shared memory. Elements of a key keep their order.
extern "C" __global__ void __launch_bounds__(64) ranks(const u32* x, u32* places) {
    __shared__ u32 next[2][16];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32* mine = x + warp * 64;
    if (lane < 16) {
        u32 before = 0;
#pragma unroll 1
        for (u32 i = 0; i < 64; i++) before += mine[i] < lane;
        next[warp][lane] = before;
    }
    __syncwarp();
#pragma unroll
    for (u32 round = 0; round < 2; round++) {
        const u32 key = mine[round * 32 + lane];
        u32 peers = 0xffffffff;
#pragma unroll
        for (u32 bit = 0; bit < 4; bit++) {
            const bool set = (key >> bit & 1) != 0;
            const u32 lanes = __ballot_sync(0xffffffff, set);
            peers &= set ? lanes : ~lanes;
        }
        const u32 before = __popc(peers & ((1u << lane) - 1)), start = next[warp][key];
#ifdef BUG_VOTE_FOR_BARRIER
        // Waits for all lanes as well, and orders nothing they did to memory.
        __any_sync(0xffffffff, before == 0);
#else
        __syncwarp();
#endif
        places[warp * 64 + round * 32 + lane] = start + before;
        if (before == 0) next[warp][key] = start + __popc(peers);
#ifndef BUG_VOTES_OF_THE_NEXT_ROUND
        __syncwarp();
#endif
    }
}
