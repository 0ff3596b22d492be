//! Options for opening a GPU.

use super::tuning::GemmTuning;
use crate::CudaAllocator;
use std::path::PathBuf;

/// Options of [`Device::cuda_with_options`](crate::Device::cuda_with_options). The defaults are those of
/// [`Device::cuda`](crate::Device::cuda).
///
/// ```
/// use fp8_kernels::{CudaAllocator, CudaOptions, Device, GemmTuning};
/// let options = CudaOptions {
///     allocator: Some(CudaAllocator::Exact),
///     gemm_tuning: Some(GemmTuning { candidates: 16, file: Some("gemm.json".into()) }),
///     ..Default::default()
/// };
/// match Device::cuda_with_options(&options) {
///     Ok(device) => println!("{device}: {}", device.description()),
///     Err(error) => println!("{error}"), // names the library or GPU that was not found
/// }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The driver's number of the GPU. Default: 0.
    pub ordinal: usize,
    /// A library with the functions of the driver and of NVIDIA's other libraries, such as a simulated GPU. Default: `None`,
    /// which searches for NVIDIA's libraries.
    pub library: Option<PathBuf>,
    /// The folder of the cache of compiled kernels. Default: `None`, which uses the environment variable `FP8_CACHE_DIR`.
    pub cache_dir: Option<PathBuf>,
    /// The policy for freed device memory. Default: `None`, which uses the environment variable `FP8_CUDA_ALLOCATOR`.
    pub allocator: Option<CudaAllocator>,
    /// The tuning of matrix products, which chooses their kernels. Default: `None`, which uses the environment variables
    /// `FP8_GEMM_TUNING` and `FP8_GEMM_TUNING_FILE`.
    pub gemm_tuning: Option<GemmTuning>,
    /// Whether cuDNN, if it is installed, computes the attention that it has kernels for. Planning each new shape takes about a
    /// second. In a measurement through torch on an H100, cuDNN's forward pass was about twice as fast as this crate's. Default:
    /// `None`, which uses the environment variable `FP8_CUDNN`.
    pub cudnn: Option<bool>,
}
