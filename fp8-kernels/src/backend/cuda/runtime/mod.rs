//! One GPU: its libraries, stream, memory, launches and graphs.

mod allocator;
mod cache;
mod capture;
mod context;
pub(super) mod cublaslt;
pub(super) mod cudnn;
mod descriptors;
mod entry;
mod environment;
mod fault;
mod gpu;
pub mod interop;
mod known;
pub(super) mod launch;
mod loader;
mod matmul;
#[cfg(test)]
mod matmul_fp4;
mod memory;
mod module;
mod nvrtc;
mod options;
mod parameters;
mod pool;
pub(super) mod product;
mod queue;
mod staging;
mod trial;
mod tuning;

pub use allocator::CudaAllocator;
pub(super) use entry::{Entry, KernelFile};
pub(super) use fault::Faults;
pub(crate) use gpu::{CudaGraph, Gpu};
pub(crate) use known::Known;
pub(super) use launch::Grid;
pub(crate) use memory::Buffer;
pub use options::CudaOptions;
pub(super) use parameters::{Address, In, List, Out, Parameter, Void, parameters, pointees, signatures};
pub use tuning::GemmTuning;
