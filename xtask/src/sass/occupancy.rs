//! The number of warps that a multiprocessor of an sm_90 holds at once.

/// Registers, shared memory and warps of a multiprocessor, and what the system keeps of a block's shared memory.
const REGISTERS: u32 = 65536;
const SHARED: u32 = 233_472;
const WARPS: u32 = 64;
const BLOCKS: u32 = 32;
const RESERVED: u32 = 1024;
/// Registers are given to a warp in groups of so many a thread.
const GROUP: u32 = 8;

/// The warps of as many blocks as fit.
pub(super) fn warps(threads: u32, registers: u32, shared: u32) -> u32 {
    let of_block = threads.div_ceil(32).max(1);
    let of_warp = registers.next_multiple_of(GROUP).max(GROUP) * 32;
    let blocks = [
        REGISTERS / of_warp / of_block,
        WARPS / of_block,
        BLOCKS,
        SHARED / (shared.next_multiple_of(128) + RESERVED),
    ];
    blocks.into_iter().min().unwrap_or(0) * of_block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_resource_limits_the_warps() {
        // From NVIDIA's table of an sm_90: threads, registers, shared memory.
        let cases = [(256, 80, 10368, 24), (256, 61, 8320, 32), (256, 106, 10368, 16), (256, 128, 18560, 16)];
        for (threads, registers, shared, expected) in cases {
            assert_eq!(warps(threads, registers, shared), expected, "{threads} {registers} {shared}");
        }
        assert_eq!(warps(128, 223, 65536 + 544), 8);
        assert_eq!(warps(128, 16, 0), 64);
        assert_eq!(warps(32, 16, 0), 32);
        assert_eq!(warps(512, 255, 0), 0);
    }
}
