//! One GPU: its libraries, stream, memory, launches and graphs.

mod cache;
mod capture;
pub(super) mod cublaslt;
mod fault;
mod gpu;
pub mod interop;
mod known;
pub(super) mod launch;
mod loader;
pub(super) mod matmul;
mod memory;
mod module;
mod nvrtc;
mod options;
mod staging;
mod tuning;

use super::ops::source;
pub(crate) use capture::CudaGraph;
pub(crate) use gpu::Gpu;
pub(crate) use known::Known;
pub(super) use launch::{Grid, args};
pub(crate) use memory::Buffer;
pub use options::CudaOptions;
pub use tuning::GemmTuning;
