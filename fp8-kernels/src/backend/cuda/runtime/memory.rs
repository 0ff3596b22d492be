//! Device memory: blocks that are kept when freed, so that a training step in its steady state asks the driver for none.
//!
//! Sizes are rounded up to classes that waste at most an eighth, and a freed block serves the next request of its class.
//! When the driver has no more, the kept blocks are given back and it is asked once more.
//!
//! Invariants:
//! - A block belongs to exactly one of these: one buffer and its clones, the free blocks, the blocks that the current
//!   capture has allocated and freed, and the held blocks. It moves between them behind one lock, so threads may allocate
//!   and drop buffers of a device at the same time.
//! - All work of a device is on one stream, so a block may be reused while work on it is still queued: that work comes
//!   first. Whoever uses a buffer on another stream keeps the buffer until the device's stream waits for that work
//!   ([`SideQueue::join`](super::interop::SideQueue::join)).
//! - A block that a captured graph may use is not reused before the graph is dropped ([`Pool`]).
//! - A block that is reused costs no call of the driver, on any thread: an allocation makes the device's context current
//!   only if the driver is asked for memory. Whoever calls the driver afterwards calls `ready` first.
//! - A block returns to the memory that it came from, whichever device's context is current, and that memory outlives
//!   its blocks.

use super::allocator::CudaAllocator;
use super::context::Context;
use super::pool::{Freed, Pool};
use crate::memory::{Counted, Ledger};
use crate::{DType, Error, MemoryKind, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaStream, sys};
use parking_lot::Mutex;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// Vectorised accesses and the driver's own allocations have this alignment.
const ALIGNMENT: usize = 256;

/// The memory of one device. It outlives the device while buffers are left.
pub(crate) struct Memory {
    context: Arc<Context>,
    allocator: CudaAllocator,
    kept: Mutex<Kept>,
    /// The stream on which memory is requested and freed while the device's own stream is in capture.
    side_stream: OnceLock<Arc<CudaStream>>,
    ledger: Arc<Ledger>,
}

/// Freed memory that later allocations use.
#[derive(Debug, Default)]
struct Kept {
    pool: Pool,
    shells: Vec<Arc<Block>>,
}

impl Deref for Memory {
    type Target = Arc<Context>;

    fn deref(&self) -> &Arc<Context> {
        &self.context
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({})", self.context)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Kept { pool, .. } = std::mem::take(self.kept.get_mut());
        let mut pool = pool;
        let _ = self.stream().context().bind_to_thread();
        let _ = self.stream().synchronize();
        pool.drain().into_iter().chain(pool.drain_held()).for_each(|address| self.driver_free(address));
        let _ = self.stream().synchronize();
    }
}

/// The most shells that are kept.
const SHELLS: usize = 4096;

/// One allocation; freed when the last buffer on it goes.
#[derive(Debug)]
struct Block {
    /// None for a shell: host memory that the next allocation's block takes.
    memory: Option<Arc<Memory>>,
    address: u64,
    bytes: usize,
    born: u64,
    /// The ledger entry for the bytes of its elements. `None` for a shell.
    counted: Option<Counted>,
}

impl Block {
    /// Gives its memory back and becomes a shell; returns where the memory was from.
    fn free(&mut self) -> Option<Arc<Memory>> {
        let memory = self.memory.take()?;
        self.counted = None;
        let Self { address, bytes, born, .. } = *self;
        let recycles = memory.allocator == CudaAllocator::Caching;
        let freed = memory.kept.lock().pool.release(Freed { address, bytes, born }, recycles);
        memory.recycle(freed);
        Some(memory)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.free();
    }
}

/// Elements on a device. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    /// None for no elements.
    block: Option<Arc<Block>>,
    dtype: DType,
    len: usize,
}

impl Drop for Buffer {
    /// The last holder leaves the block's host memory for the next, so that a step in its steady state allocates none.
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else { return };
        let Some(memory) = Arc::get_mut(&mut block).and_then(Block::free) else { return };
        let mut kept = memory.kept.lock();
        if kept.shells.len() < SHELLS {
            kept.shells.push(block);
        }
    }
}

impl Buffer {
    /// Its address; 0 for no elements.
    pub(crate) fn ptr(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.address)
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of bytes that its elements take.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Counts its memory as of another kind.
    pub(crate) fn set_memory_kind(&self, kind: MemoryKind) {
        if let Some(counted) = self.block.as_ref().and_then(|block| block.counted.as_ref()) {
            counted.set_kind(kind);
        }
    }

    /// Returns the number of other buffers that share its memory.
    pub(crate) fn holders(&self) -> usize {
        self.block.as_ref().map_or(0, |block| Arc::strong_count(block) - 1)
    }
}

impl Memory {
    pub(super) fn new(context: Context, allocator: CudaAllocator) -> Self {
        let context = Arc::new(context);
        Self {
            context,
            allocator,
            kept: Mutex::default(),
            side_stream: OnceLock::new(),
            ledger: Arc::default(),
        }
    }

    /// Room for `len` elements, which hold anything.
    pub(crate) fn alloc(self: &Arc<Self>, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else { return Err(self.out_of_memory(usize::MAX)) };
        if bytes == 0 {
            return Ok(Buffer { block: None, dtype, len });
        }
        self.expect_usable()?;
        let used = bytes;
        let bytes = match self.allocator {
            CudaAllocator::Caching => size_class(bytes),
            CudaAllocator::Exact => bytes,
        };
        let (kept, born, shell) = {
            let Kept { pool, shells } = &mut *self.kept.lock();
            (pool.take(bytes), pool.captures, shells.pop())
        };
        let address = match kept {
            Some(address) => address,
            None => {
                self.ready()?;
                self.driver_alloc(bytes)?
            }
        };
        let counted = Some(Counted::new(Some(self.ledger.clone()), used));
        let block = Block { memory: Some(Arc::clone(self)), address, bytes, born, counted };
        let block = match shell {
            Some(mut shell) => match Arc::get_mut(&mut shell) {
                Some(place) => {
                    *place = block;
                    shell
                }
                None => Arc::new(block), // cannot be: a shell has one holder
            },
            None => Arc::new(block),
        };
        Ok(Buffer { block: Some(block), dtype, len })
    }

    /// `len` elements whose bytes are all 0.
    pub(crate) fn zeros(self: &Arc<Self>, dtype: DType, len: usize) -> Result<Buffer> {
        let buffer = self.alloc(dtype, len)?;
        self.clear(&buffer)?;
        Ok(buffer)
    }

    /// `len` times `value`, in f32.
    pub(crate) fn filled_f32(self: &Arc<Self>, value: f32, len: usize) -> Result<Buffer> {
        let buffer = self.alloc(DType::F32, len)?;
        self.fill_f32(buffer.ptr(), value, len)?;
        Ok(buffer)
    }

    /// Hands freed blocks on: to later requests, or to the driver.
    fn recycle(&self, freed: impl IntoIterator<Item = Freed>) {
        for Freed { address, bytes, .. } in freed {
            match self.allocator {
                CudaAllocator::Caching => self.kept.lock().pool.put(address, bytes),
                CudaAllocator::Exact => self.driver_free(address),
            }
        }
    }

    /// Counts the bytes of its buffers.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Bytes that the device's own kept blocks take.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.kept.lock().pool.kept
    }

    pub(super) fn driver_alloc(&self, bytes: usize) -> Result<u64> {
        match self.driver_malloc(bytes) {
            Ok(address) => Ok(address),
            Err(Error::OutOfMemory { .. }) if self.kept_bytes() > 0 => {
                self.release_kept();
                self.driver_malloc(bytes)
            }
            Err(error) => Err(error),
        }
    }

    /// Copies between two places on the device that do not overlap.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.ready()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both name `bytes` bytes of this device's memory, as the caller says, used on its one stream.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyDtoDAsync", "copy", error))
    }

    /// All bytes 0.
    pub(crate) fn clear(&self, buffer: &Buffer) -> Result<()> {
        self.clear_bytes(buffer.ptr(), buffer.bytes())
    }

    pub(crate) fn clear_bytes(&self, address: u64, bytes: usize) -> Result<()> {
        self.ready()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `address` names that many bytes of this device's memory, used on its one stream.
        unsafe { result::memset_d8_async(address, 0, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemsetD8Async", "zeros", error))
    }

    /// `count` times `value` from `address` on.
    pub(crate) fn fill_f32(&self, address: u64, value: f32, count: usize) -> Result<()> {
        self.ready()?;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: `address` names that many f32 of this device's memory, used on its one stream.
        let status = unsafe { sys::cuMemsetD32Async(address, value.to_bits(), count, self.raw_stream()) };
        status.result().map_err(|error| self.driver_error("cuMemsetD32Async", "fill", error))
    }

    /// Begins a capture, whose memory comes from kept blocks or through a second stream; returns its number.
    pub(super) fn begin_capture(&self) -> u64 {
        let number = self.kept.lock().pool.begin_capture();
        self.set_capture(Some(number));
        number
    }

    /// Ends the capture, and frees what no graph names.
    pub(super) fn end_capture(&self, has_graph: bool) {
        let freed = self.kept.lock().pool.end_capture(has_graph);
        self.set_capture(None);
        self.recycle(freed);
    }

    /// Returns whether a graph exists that may run again.
    pub(crate) fn has_graphs(&self) -> bool {
        self.kept.lock().pool.has_graphs()
    }

    /// Frees what only the graph of that capture named.
    pub(super) fn drop_graph(&self, capture: u64) {
        let freed = self.kept.lock().pool.drop_graph(capture);
        self.recycle(freed);
    }

    /// Opens the second stream. A capture cannot open one, so this comes before it.
    pub(super) fn open_side_stream(&self) -> Result<()> {
        if self.side_stream.get().is_none() {
            let stream = self.stream().context().new_stream();
            let stream = stream.map_err(|error| self.driver_error("cuStreamCreate", "capture", error))?;
            self.side_stream.get_or_init(|| stream);
        }
        Ok(())
    }

    /// The stream on which memory is allocated and freed. During a capture that is the second one: the first has no work left,
    /// and an allocation on it would be recorded.
    fn memory_stream(&self) -> &Arc<CudaStream> {
        match self.side_stream.get() {
            Some(side) if self.is_capturing() => side,
            _ => self.stream(),
        }
    }

    pub(super) fn driver_malloc(&self, bytes: usize) -> Result<u64> {
        let asynchronous = self.stream().context().has_async_alloc();
        let stream = self.memory_stream();
        let address = if asynchronous {
            // SAFETY: any size may be asked for; the address is freed once, by `driver_free` or `release_kept`.
            unsafe { result::malloc_async(stream.cu_stream(), bytes) }
        } else {
            // SAFETY: as above.
            unsafe { result::malloc_sync(bytes) }
        };
        let address = address.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => self.out_of_memory(bytes),
            error => self.driver_error("cuMemAllocAsync", "allocate", error),
        })?;
        if asynchronous && !Arc::ptr_eq(stream, self.stream()) {
            // Nothing orders the device's own stream behind the other one.
            stream.synchronize().map_err(|error| {
                self.driver_free(address);
                self.driver_error("cuStreamSynchronize", "allocate", error)
            })?;
        }
        Ok(address)
    }

    /// Gives memory back, behind the work queued on it. In a destructor nothing can be done about a failure.
    pub(super) fn driver_free(&self, address: u64) {
        let _ = self.stream().context().bind_to_thread();
        if self.stream().context().has_async_alloc() {
            // SAFETY: allocated by `driver_malloc` and freed once.
            let _ = unsafe { result::free_async(address, self.memory_stream().cu_stream()) };
        } else {
            // SAFETY: as above; this waits for the device.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    /// Gives all kept memory back to the driver, and waits until it is there.
    pub(crate) fn release_kept(&self) {
        let kept = self.kept.lock().pool.drain();
        kept.into_iter().for_each(|address| self.driver_free(address));
        let _ = self.memory_stream().synchronize();
    }
}

/// The size that is allocated for `bytes`: eight steps per power of two, whole alignments.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 16).max(ALIGNMENT);
    bytes.div_ceil(step).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_an_eighth_at_most() {
        assert_eq!([1, 256, 257, 4096, 4097].map(size_class), [256, 256, 512, 4096, 4608]);
        for bytes in (4096..2_000_000).step_by(4093) {
            let class = size_class(bytes);
            assert!(
                class >= bytes && class - bytes <= bytes / 8 && class.is_multiple_of(ALIGNMENT),
                "{bytes}: {class}"
            );
            assert_eq!(size_class(class), class);
        }
    }
}
