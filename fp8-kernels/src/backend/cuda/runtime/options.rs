//! How a GPU is opened.

use super::tuning::GemmTuning;
use crate::CudaAllocator;
use std::path::PathBuf;

/// What [`Device::cuda_with`](crate::Device::cuda_with) takes; the defaults are [`Device::cuda`](crate::Device::cuda)'s.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which GPU, as the driver numbers them.
    pub ordinal: usize,
    /// A library that stands for the driver and NVRTC both, instead of a search: a simulated device.
    pub library: Option<PathBuf>,
    /// Where compiled kernels are kept, instead of what the environment says.
    pub cache_dir: Option<PathBuf>,
    /// How freed memory is kept, instead of what the environment says.
    pub allocator: Option<CudaAllocator>,
    /// How kernels of matrix products are chosen, instead of what the environment says.
    pub gemm_tuning: Option<GemmTuning>,
}
