//! Opening a GPU with the defaults.

use super::ops::fault;
use super::{CudaOptions, Gpu};
use crate::Result;

/// Opens the GPU with this ordinal, on a stream of its own.
pub(crate) fn open(ordinal: usize) -> Result<Gpu> {
    Gpu::open(&CudaOptions { ordinal, ..CudaOptions::default() }, fault::error)
}
