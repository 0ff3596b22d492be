//! Device memory: blocks that are kept when freed, so that a training step in its steady state asks the driver for none.
//!
//! Sizes are rounded up to classes that waste at most an eighth, and a freed block serves the next request of its class.
//! All work of a device is on one stream, so a block may be handed on while work on it is still queued: that work comes
//! first. When the driver has no more, the kept blocks are given back and it is asked once more.
//!
//! A captured graph names addresses, so whatever lived or was made while it was captured stays where it is until the graph
//! is gone: such blocks are held instead of handed on. What a capture itself frees serves its own later requests.

use super::gpu::Gpu;
use crate::environment::CudaAllocator;
use crate::{DType, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Vectorised accesses and the driver's own allocations have this alignment.
const ALIGNMENT: usize = 256;

/// Freed blocks by size, and those that graphs still name.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, Vec<u64>>,
    kept: usize,
    /// Counts beginnings and ends of captures; a block remembers the count when it was made, a graph that of its capture. So
    /// a graph may name blocks of its own number and of smaller ones.
    captures: u64,
    /// Blocks that the capture under way has freed again; None outside captures.
    recycled: Option<BTreeMap<usize, Vec<u64>>>,
    /// Graphs alive, by the number of their capture.
    graphs: BTreeSet<u64>,
    held: Vec<Freed>,
    shells: Vec<Arc<Block>>,
}

/// A block that nobody uses but perhaps graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Freed {
    address: u64,
    bytes: usize,
    born: u64,
}

impl Pool {
    fn take(&mut self, bytes: usize) -> Option<u64> {
        if let Some(address) = self.recycled.as_mut().and_then(|all| all.get_mut(&bytes)).and_then(Vec::pop) {
            return Some(address);
        }
        let address = self.free.get_mut(&bytes)?.pop()?;
        self.kept -= bytes;
        Some(address)
    }

    fn keep(&mut self, address: u64, bytes: usize) {
        self.free.entry(bytes).or_default().push(address);
        self.kept += bytes;
    }

    /// A block that its last holder has let go; given back if no graph names it.
    fn release(&mut self, freed: Freed, recycles: bool) -> Option<Freed> {
        match &mut self.recycled {
            Some(recycled) if recycles && freed.born == self.captures => {
                recycled.entry(freed.bytes).or_default().push(freed.address);
                None
            }
            recycled => {
                let is_named = recycled.is_some() || self.graphs.range(freed.born..).next().is_some();
                if is_named {
                    self.held.push(freed);
                }
                (!is_named).then_some(freed)
            }
        }
    }

    /// A capture begins; answers with its number.
    pub(super) fn begin_capture(&mut self) -> u64 {
        self.captures += 1;
        self.recycled = Some(BTreeMap::new());
        self.captures
    }

    /// It ends, and gives a graph or none; answers with what is free now.
    pub(super) fn end_capture(&mut self, has_graph: bool) -> Vec<Freed> {
        let born = self.captures;
        let recycled = self.recycled.take().unwrap_or_default();
        let freed = |(bytes, addresses): (usize, Vec<u64>)| {
            addresses.into_iter().map(move |address| Freed { address, bytes, born })
        };
        self.held.extend(recycled.into_iter().flat_map(freed));
        if has_graph {
            self.graphs.insert(born);
        }
        // What is made from now on is named by no graph that is there.
        self.captures += 1;
        self.drop_graph(if has_graph { 0 } else { born })
    }

    /// The number of the capture under way.
    pub(super) fn capture(&self) -> Option<u64> {
        self.recycled.as_ref().map(|_| self.captures)
    }

    /// The graph of that capture is gone; answers with what no other names.
    pub(super) fn drop_graph(&mut self, capture: u64) -> Vec<Freed> {
        self.graphs.remove(&capture);
        let graphs = &self.graphs;
        let is_named = |freed: &mut Freed| graphs.range(freed.born..).next().is_none();
        self.held.extract_if(.., is_named).collect()
    }

    /// All of it, no longer kept.
    pub(super) fn drain(&mut self) -> Vec<u64> {
        self.kept = 0;
        std::mem::take(&mut self.free).into_values().flatten().collect()
    }

    /// What was held, where no graph is left.
    pub(super) fn drain_held(&mut self) -> Vec<u64> {
        self.held.drain(..).map(|freed| freed.address).collect()
    }
}

/// The most shells that are kept.
const SHELLS: usize = 4096;

/// One allocation; freed when the last buffer on it goes.
#[derive(Debug)]
struct Block {
    /// None for a shell: host memory that the next allocation's block takes.
    gpu: Option<Gpu>,
    address: u64,
    bytes: usize,
    born: u64,
}

impl Block {
    /// Gives its memory back and is a shell; answers with the device.
    fn free(&mut self) -> Option<Gpu> {
        let gpu = self.gpu.take()?;
        let Self { address, bytes, born, .. } = *self;
        let recycles = gpu.allocator() == CudaAllocator::Caching;
        let freed = gpu.pool().lock().release(Freed { address, bytes, born }, recycles);
        gpu.recycle(freed);
        Some(gpu)
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
        let Some(gpu) = Arc::get_mut(&mut block).and_then(Block::free) else { return };
        let mut pool = gpu.pool().lock();
        if pool.shells.len() < SHELLS {
            pool.shells.push(block);
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

    /// What its elements take.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// How many others share it.
    pub(crate) fn holders(&self) -> usize {
        self.block.as_ref().map_or(0, |block| Arc::strong_count(block) - 1)
    }
}

impl Gpu {
    /// Room for `len` elements, which hold anything.
    pub(crate) fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else { return Err(self.out_of_memory(usize::MAX)) };
        if bytes == 0 {
            return Ok(Buffer { block: None, dtype, len });
        }
        self.ready()?;
        let bytes = match self.allocator() {
            CudaAllocator::Caching => size_class(bytes),
            CudaAllocator::Exact => bytes,
        };
        let (kept, born, shell) = {
            let mut pool = self.pool().lock();
            (pool.take(bytes), pool.captures, pool.shells.pop())
        };
        let address = match kept {
            Some(address) => address,
            None => self.driver_alloc(bytes)?,
        };
        let block = Block { gpu: Some(self.clone()), address, bytes, born };
        let block = match shell {
            Some(mut shell) => match Arc::get_mut(&mut shell) {
                Some(place) => {
                    *place = block;
                    shell
                }
                None => Arc::new(block), // nobody else holds a shell
            },
            None => Arc::new(block),
        };
        Ok(Buffer { block: Some(block), dtype, len })
    }

    /// `len` elements whose bytes are all 0.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let buffer = self.alloc(dtype, len)?;
        self.clear(&buffer)?;
        Ok(buffer)
    }

    /// `len` times `value`, in f32.
    pub(crate) fn filled_f32(&self, value: f32, len: usize) -> Result<Buffer> {
        let buffer = self.alloc(DType::F32, len)?;
        self.fill_f32(buffer.ptr(), value, len)?;
        Ok(buffer)
    }

    /// Hands freed blocks on: to later requests, or to the driver.
    pub(super) fn recycle(&self, freed: impl IntoIterator<Item = Freed>) {
        for Freed { address, bytes, .. } in freed {
            match self.allocator() {
                CudaAllocator::Caching => self.pool().lock().keep(address, bytes),
                CudaAllocator::Exact => self.driver_free(address),
            }
        }
    }

    /// Bytes that the device's own kept blocks take.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.pool().lock().kept
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

    #[test]
    fn a_pool_gives_back_what_it_was_given() {
        let mut pool = Pool::default();
        pool.keep(7, 256);
        assert_eq!((pool.take(512), pool.take(256), pool.take(256)), (None, Some(7), None));
        pool.keep(7, 256);
        pool.keep(9, 512);
        assert_eq!((pool.kept, pool.drain(), pool.kept), (768, vec![7, 9], 0));
    }

    #[test]
    fn what_a_graph_names_is_held_until_it_goes() {
        let mut pool = Pool::default();
        let block = |address, born| Freed { address, bytes: 256, born };
        assert_eq!(pool.release(block(1, 0), true), Some(block(1, 0)));
        let first = pool.begin_capture();
        assert_eq!(pool.capture(), Some(first));
        assert_eq!(pool.release(block(2, 0), true), None); // older than the capture, which may have used it
        assert_eq!(pool.release(block(3, first), true), None);
        assert_eq!(pool.take(256), Some(3)); // freed by the capture itself
        assert_eq!(pool.release(block(3, first), true), None);
        assert_eq!(pool.end_capture(true), []);
        let second = pool.begin_capture();
        assert_eq!(pool.release(block(4, first), true), None);
        assert_eq!(pool.end_capture(true), []);
        assert_eq!(pool.release(block(5, second), true), None);
        assert_eq!(pool.drop_graph(first), []); // the second capture came later than all of them
        assert_eq!(pool.drop_graph(second).len(), 4);
        assert_eq!(pool.release(block(6, 0), true), Some(block(6, 0)));
        pool.begin_capture();
        assert_eq!(pool.release(block(7, 0), true), None);
        assert_eq!(pool.end_capture(false), [block(7, 0)]); // no graph came of it
    }
}
