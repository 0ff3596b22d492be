//! Methods of [`Device`] that only this backend has.

use super::ops::fault;
use super::{CudaOptions, Gpu};
use crate::{Device, Result};
use cudarc::driver::CudaStream;
use std::sync::Arc;

impl Device {
    /// Opens a GPU like [`cuda`](Self::cuda), with options. Each call opens a separate device; tensors of two devices
    /// cannot meet in one operation.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda); a library other than the one that this process already uses.
    pub fn cuda_with_options(options: &CudaOptions) -> Result<Self> {
        Gpu::open(options, fault::error).map(Self::on_gpu)
    }

    /// Opens a GPU on a stream of the caller's, which orders the work of this crate with the caller's own.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda).
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self> {
        Gpu::adopt(stream, &CudaOptions::default(), fault::error).map(Self::on_gpu)
    }
}
