//! A launch and the state that its warps share.

use crate::lanes::lanes;
use crate::memory::Space;
use crate::module::Kernel;
use crate::race::Span;
use crate::region::Region;

/// The configuration of a kernel launch.
///
/// ```
/// let launch = ptx_interp::Launch { grid: [4, 1, 1], block: [256, 1, 1], ..Default::default() };
/// assert_eq!(launch.seed, 0);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// The parameters' bytes, laid out as [`Kernel::params`] says.
    pub params: &'a [u8],
    /// 0 runs blocks, warps and lanes in order; any other number permutes blocks, warps and the order of atomics, and
    /// interrupts warps anywhere.
    pub seed: u64,
    /// Instructions one warp may run in a block before it counts as stuck.
    pub step_limit: u64,
    /// Data races are looked for, which takes up to a third of the time.
    pub races: bool,
}

impl Default for Launch<'_> {
    fn default() -> Self {
        Self {
            grid: [1; 3],
            block: [1; 3],
            dynamic_shared: 0,
            params: &[],
            seed: 0,
            step_limit: 1 << 25,
            races: true,
        }
    }
}

/// Counts of the instructions and barriers that a launch executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Instructions, counted once for each thread that ran them.
    pub thread_instructions: u64,
    /// Instructions, counted once for each group of lanes that ran them together.
    pub warp_instructions: u64,
    /// Barriers of blocks.
    pub barriers: u64,
}

/// Advances the generator SplitMix64 and returns its next number.
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A small generator for orders.
#[derive(Clone, Debug)]
pub(crate) struct Order(pub(super) u64);

impl Order {
    pub(super) fn next(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// The state of a launch that its warps share.
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) space: &'a mut Space,
    pub(crate) shared: Region,
    pub(crate) variables: Vec<Region>,
    /// The allocation each instruction met last.
    pub(crate) met: Vec<usize>,
    pub(crate) span: Span,
    pub(crate) phase: u32,
    pub(crate) block: [u32; 3],
    pub(crate) order: Option<Order>,
    pub(crate) stats: Stats,
}

impl Machine<'_> {
    /// The lanes of `mask` in the order in which their atomics happen.
    pub(crate) fn atomic_order(&mut self, mask: u32) -> Vec<usize> {
        let mut all: Vec<usize> = lanes(mask).collect();
        if let Some(order) = &mut self.order {
            order.shuffle(&mut all);
        }
        all
    }
}

/// The coordinates of a thread of a block.
pub(crate) fn coordinates(index: u32, block: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = block.map(|n| n.max(1));
    [index % x, index / x % y, index / x / y]
}
