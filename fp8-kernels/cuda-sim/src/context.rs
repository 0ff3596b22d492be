//! The contents of the device's context: memory blocks, pinned host memory, streams, events and modules.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::fmt::Write;

use ptx_interp::Memory;

use crate::capture::Captures;
use crate::code::{Code, Outcome};
use crate::fault::Fault;
use crate::ffi::Host;
use crate::module::Modules;
use crate::queue::{Queue, Until};
use crate::work::Work;

#[derive(Debug, Default)]
pub(crate) struct Context {
    memory: Memory,
    pub(crate) blocks: Blocks,
    pub(crate) pinned: BTreeMap<usize, Pinned>,
    pub(crate) queue: Queue,
    pub(crate) modules: Modules,
    pub(crate) captures: Captures,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, and the three reuse switches before it.
    pub(crate) pool_threshold: u64,
    pub(crate) pool_reuse: [i32; 3],
    allocations: u64,
}

/// Device allocations by address.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    by_address: BTreeMap<u64, Block>,
    used: u64,
    high: u64,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) bytes: u64,
    /// The number of the allocation in its context, and the function that made it.
    pub(crate) label: String,
    /// Allocated in stream order, from the pool.
    pub(crate) pooled: bool,
    /// The free was called and waits in its stream.
    pub(crate) freed: bool,
}

/// Page-locked host memory.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: usize,
    layout: Layout,
}

impl Context {
    pub(crate) fn new() -> Self {
        Self { pool_reuse: [1; 3], ..Self::default() }
    }

    /// Allocates; what is `pooled` is there when its stream runs [`Work::Allocate`].
    pub(crate) fn allocate(&mut self, bytes: u64, function: &str, pooled: bool) -> Outcome<u64> {
        // CUDA Driver API, CUDA_ERROR_OUT_OF_MEMORY: "unable to allocate enough memory or other resources".
        let size = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        self.allocations += 1;
        let label = format!("allocation {} ({function}, {bytes} bytes)", self.allocations);
        let address =
            if pooled { self.memory.reserve(size, &label) } else { self.memory.allocate(size, &label) };
        self.blocks.insert(address, Block { bytes, label, pooled, freed: false });
        Ok(address)
    }

    /// Frees without waiting for anybody.
    pub(crate) fn free_now(&mut self, address: u64) -> Outcome {
        self.blocks.remove(address);
        // Its stream may not have come to the allocation, and need not.
        self.memory.open(address);
        self.memory.free(address).map_err(|_| Code::INVALID_VALUE)
    }

    /// Runs one queued task towards the condition.
    pub(crate) fn step(&mut self, until: Until, seed: u64) -> Result<bool, Fault> {
        let Self { memory, blocks, pinned, queue, .. } = self;
        queue.step(until, seed, &mut |work| {
            match &work {
                Work::Free { address } => blocks.remove(*address),
                Work::UploadPinned { from, bytes, .. } if !holds(pinned, *from, *bytes) => {
                    return Err(unpinned("upload", "from", *from, *bytes));
                }
                Work::Download { to, bytes, pinned: true, .. } if !holds(pinned, *to, *bytes) => {
                    return Err(unpinned("download", "to", *to, *bytes));
                }
                _ => {}
            }
            work.perform(memory)
        })
    }

    /// After the queue was dropped: what was freed in stream order counts as freed.
    pub(crate) fn settle_frees(&mut self) {
        for address in self.blocks.freed() {
            // The block is known and live, so its memory is too.
            let _ = self.free_now(address);
        }
    }

    /// Whether `bytes` at a host address lie in one block of pinned memory.
    pub(crate) fn is_pinned(&self, host: Host, bytes: usize) -> bool {
        holds(&self.pinned, host, bytes)
    }

    /// One line for each allocation and pinned block, and for each kind of handle with its count. Empty if nothing lives.
    pub(crate) fn live(&self) -> String {
        let mut text = String::new();
        for (address, block) in self.blocks.live() {
            let _ = writeln!(text, "device {address:#x} {} bytes: {}", block.bytes, block.label);
        }
        for (address, pinned) in &self.pinned {
            let _ = writeln!(text, "pinned {address:#x} {} bytes", pinned.layout.size());
        }
        let counts = [
            ("streams", self.queue.open_streams()),
            ("events", self.queue.events()),
            ("modules", self.modules.count()),
        ];
        for (kind, count) in counts.iter().filter(|(_, count)| *count > 0) {
            let _ = writeln!(text, "{kind} {count}");
        }
        text + &self.captures.live()
    }
}

fn holds(pinned: &BTreeMap<usize, Pinned>, host: Host, bytes: usize) -> bool {
    let block = pinned.range(..=host.address()).next_back();
    block.is_some_and(|(start, pinned)| {
        host.address().checked_add(bytes).is_some_and(|end| end <= start + pinned.layout.size())
    })
}

/// A graph's copy whose pinned memory was freed after the capture.
fn unpinned(copy: &str, side: &str, host: Host, bytes: usize) -> Fault {
    let address = host.address();
    let text = format!("use after free: {copy} of {bytes} bytes {side} {address:#x}, pinned no more");
    Fault { code: Code::ILLEGAL_ADDRESS, text }
}

impl Blocks {
    fn insert(&mut self, address: u64, block: Block) {
        self.used += block.bytes;
        self.high = self.high.max(self.used);
        self.by_address.insert(address, block);
    }

    fn remove(&mut self, address: u64) {
        if let Some(block) = self.by_address.remove(&address) {
            self.used -= block.bytes;
        }
    }

    /// The block that starts at `address` and whose free was not called.
    pub(crate) fn start_mut(&mut self, address: u64) -> Option<&mut Block> {
        self.by_address.get_mut(&address).filter(|block| !block.freed)
    }

    /// Whether `bytes` at `address` lie in one block. One whose free still waits in its stream counts: a use behind it
    /// is found when the use runs.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        let block = self.by_address.range(..=address).next_back();
        block.is_some_and(|(start, block)| {
            address.checked_add(bytes).is_some_and(|end| end <= start + block.bytes)
        })
    }

    /// Bytes allocated, those whose free waits in a stream included.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// The most bytes ever in use.
    pub(crate) fn high(&self) -> u64 {
        self.high
    }

    pub(crate) fn reset_high(&mut self) {
        self.high = self.used;
    }

    fn live(&self) -> impl Iterator<Item = (&u64, &Block)> {
        self.by_address.iter().filter(|(_, block)| !block.freed)
    }

    fn freed(&self) -> Vec<u64> {
        self.by_address.iter().filter(|(_, block)| block.freed).map(|(address, _)| *address).collect()
    }
}

impl Pinned {
    /// A page-aligned block, filled with 0xA5: nothing promises zeros.
    pub(crate) fn new(bytes: usize) -> Outcome<Self> {
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| Code::OUT_OF_MEMORY)?;
        if layout.size() == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: `start` was just allocated with room for `layout.size()` bytes.
        unsafe { start.write_bytes(0xa5, layout.size()) };
        Ok(Self { start: start.expose_provenance(), layout })
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: `start` came from `alloc` with this layout in `new`, and is freed only here.
        unsafe { std::alloc::dealloc(start, self.layout) };
    }
}
