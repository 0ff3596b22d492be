//! Device memory: blocks that are kept when freed, so that a training step in its steady state asks the driver for none.
//!
//! Sizes are rounded up to classes that waste at most an eighth, and a freed block serves the next request of its class.
//! All work of a device is on one stream, so a block may be handed on while work on it is still queued: that work comes
//! first. When the driver has no more, the kept blocks are given back and it is asked once more.

use super::gpu::Gpu;
use crate::environment::CudaAllocator;
use crate::{DType, Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Vectorised accesses and the driver's own allocations have this alignment.
const ALIGNMENT: usize = 256;

/// Freed blocks by size.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, Vec<u64>>,
    kept: usize,
}

impl Pool {
    fn take(&mut self, bytes: usize) -> Option<u64> {
        let address = self.free.get_mut(&bytes)?.pop()?;
        self.kept -= bytes;
        Some(address)
    }

    fn keep(&mut self, address: u64, bytes: usize) {
        self.free.entry(bytes).or_default().push(address);
        self.kept += bytes;
    }

    /// All of it, no longer kept.
    pub(super) fn drain(&mut self) -> Vec<u64> {
        self.kept = 0;
        std::mem::take(&mut self.free).into_values().flatten().collect()
    }
}

/// One allocation; freed when the last buffer on it goes.
#[derive(Debug)]
struct Block {
    gpu: Gpu,
    address: u64,
    bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.gpu.allocator() {
            CudaAllocator::Caching => self.gpu.pool().lock().keep(self.address, self.bytes),
            CudaAllocator::Exact => self.gpu.driver_free(self.address),
        }
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
        let kept = self.pool().lock().take(bytes);
        let address = match kept {
            Some(address) => address,
            None => self.driver_alloc(bytes)?,
        };
        let block = Block { gpu: self.clone(), address, bytes };
        Ok(Buffer { block: Some(Arc::new(block)), dtype, len })
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

    /// Bytes that the device's own kept blocks take.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.pool().lock().kept
    }

    fn driver_alloc(&self, bytes: usize) -> Result<u64> {
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
}
