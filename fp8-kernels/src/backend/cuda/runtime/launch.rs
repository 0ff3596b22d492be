//! Launching a kernel: arguments on the stack, nothing allocated.

use super::context::Context;
use super::parameters::{List, Parameter};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bytes of dynamic shared memory that every kernel may have; more must be asked for once per function.
const SHARED_BYTES: u32 = 48 << 10;

/// The size of a launch, in one dimension.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// Blocks; for 0 nothing is launched.
    pub(crate) blocks: u32,
    /// Threads of a block, a multiple of 32.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

/// The most blocks that a grid has in its first dimension, on every GPU.
const MOST_BLOCKS: u64 = i32::MAX as u64;

impl Grid {
    /// `blocks` blocks of `threads` threads, no dynamic shared memory.
    ///
    /// # Errors
    /// More blocks than a grid can have.
    pub(crate) fn new(op: &'static str, blocks: u64, threads: u32) -> Result<Self> {
        match u32::try_from(blocks) {
            Ok(count) if blocks <= MOST_BLOCKS => Ok(Self { blocks: count, threads, shared: 0 }),
            _ => Err(Error::Option {
                op,
                option: "blocks",
                value: blocks.to_string(),
                remedy: format!("a GPU starts at most {MOST_BLOCKS} at once: use smaller tensors"),
            }),
        }
    }

    /// A grid of 256 threads a block for `len` elements, of which each thread takes eight at a time.
    pub(crate) fn flat(context: &Context, len: usize) -> Self {
        Self::strided(context, len.div_ceil(8) as u64)
    }

    /// A grid of 256 threads a block for `items`, of which each thread takes one at a time.
    pub(crate) fn strided(context: &Context, items: u64) -> Self {
        const THREADS: u32 = 256;
        Self { blocks: context.blocks(items, THREADS.into(), 8), threads: THREADS, shared: 0 }
    }

    /// The same grid, with `bytes` of dynamic shared memory in each block.
    pub(crate) const fn with_shared(self, bytes: u32) -> Self {
        Self { shared: bytes, ..self }
    }
}

/// A number of tensors as kernels count them.
///
/// # Errors
/// More than fit into 31 bits.
pub(crate) fn count(op: &'static str, tensors: usize) -> Result<i32> {
    i32::try_from(tensors).map_err(|_| Error::Option {
        op,
        option: "tensors",
        value: tensors.to_string(),
        remedy: format!("give at most {} at once", i32::MAX),
    })
}

/// A loaded kernel with the parameters `P`.
pub(crate) struct TypedKernel<P> {
    kernel: Kernel,
    parameters: PhantomData<fn() -> P>,
}

impl<P: Parameter> TypedKernel<P> {
    pub(super) const fn new(kernel: Kernel) -> Self {
        Self { kernel, parameters: PhantomData }
    }

    /// Enqueues the kernel on the device's stream.
    ///
    /// # Safety
    /// Each address names memory of the device that holds as much as the kernel reads and has room for what it writes, on
    /// its stream.
    pub(crate) unsafe fn launch(&self, context: &Context, grid: Grid, parameters: &P) -> Result<()> {
        let mut list = List::new();
        parameters.list(&mut list);
        // SAFETY: the list is that of the kernel's signature; the caller vouches for the memory.
        unsafe { self.kernel.launch(context, grid, list) }
    }
}

/// A loaded function. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub(super) function: Function,
    pub(super) name: &'static str,
    /// Sizes of its parameters, as the driver tells them.
    pub(super) parameters: Arc<[usize]>,
    /// Bytes of dynamic shared memory that the driver has granted it.
    shared: Arc<AtomicU32>,
}

/// A driver handle; the module it belongs to lives as long as the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: a CUfunction is a handle that the driver lets every thread use.
unsafe impl Send for Function {}
// SAFETY: as above; launching does not change it.
unsafe impl Sync for Function {}

impl Kernel {
    pub(super) fn new(function: sys::CUfunction, name: &'static str, parameters: Vec<usize>) -> Self {
        let shared = Arc::new(AtomicU32::new(SHARED_BYTES));
        Self { function: Function(function), name, parameters: parameters.into(), shared }
    }

    /// Asks the driver for more than the usual dynamic shared memory, once for each function.
    fn allow_shared(&self, context: &Context, bytes: u32) -> Result<()> {
        if bytes <= self.shared.load(Relaxed) {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded in the context that is current; the call keeps no pointer.
        let status = unsafe { sys::cuFuncSetAttribute(self.function.0, attribute, bytes.cast_signed()) };
        status.result().map_err(|error| context.driver_error("cuFuncSetAttribute", self.name, error))?;
        self.shared.fetch_max(bytes, Relaxed);
        Ok(())
    }

    /// Enqueues the kernel on the device's stream.
    ///
    /// # Safety
    /// The list is that of the kernel's signature, and its addresses are as [`TypedKernel::launch`] says.
    unsafe fn launch(&self, context: &Context, grid: Grid, mut list: List<'_>) -> Result<()> {
        if grid.blocks == 0 {
            return Ok(());
        }
        self.check(&list)?;
        self.allow_shared(context, grid.shared)?;
        let Grid { blocks, threads, shared } = grid;
        let (stream, places) = (context.raw_stream(), list.places.as_mut_ptr());
        let none = std::ptr::null_mut();
        // SAFETY: the function is loaded in the context that is current; each place is that of a parameter which lives
        // through the call and has its size (checked above); the caller vouches for the rest.
        let status = unsafe {
            sys::cuLaunchKernel(self.function.0, blocks, 1, 1, threads, 1, 1, shared, stream, places, none)
        };
        status.result().map_err(|error| context.driver_error("cuLaunchKernel", self.name, error))
    }

    fn check(&self, list: &List<'_>) -> Result<()> {
        match list.sizes.get(..list.len) {
            Some(sizes) if *sizes == *self.parameters => Ok(()),
            sizes => Err(Error::Driver {
                call: "cuLaunchKernel",
                op: self.name.to_owned(),
                code: 1,
                text: format!(
                    "{} arguments of {:?} bytes do not fit the kernel's {:?}: the compiled kernel is not this version's",
                    list.len,
                    sizes.unwrap_or_default(),
                    self.parameters
                ),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_of_more_blocks_than_a_gpu_starts_is_refused() {
        let blocks = |blocks| Grid::new("sum", blocks, 256).map(|grid| grid.blocks);
        assert_eq!((blocks(0).unwrap(), blocks(MOST_BLOCKS).unwrap()), (0, i32::MAX as u32));
        for many in [MOST_BLOCKS + 1, u64::from(u32::MAX), 1 << 40, u64::MAX] {
            let remedy = "a GPU starts at most 2147483647 at once: use smaller tensors";
            assert_eq!(blocks(many).unwrap_err().to_string(), format!("sum: blocks = {many}: {remedy}"));
        }
    }

    #[test]
    fn more_tensors_than_kernels_count_are_refused() {
        assert_eq!(count("adamw", 7).unwrap(), 7);
        let text = count("adamw", 1 << 31).unwrap_err().to_string();
        assert_eq!(text, "adamw: tensors = 2147483648: give at most 2147483647 at once");
    }
}
