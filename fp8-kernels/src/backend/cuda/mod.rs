//! NVIDIA GPUs through the driver's API: kernels compiled at run time, one stream a device, memory that is kept.
//!
//! `runtime` is one GPU: its libraries, stream, memory, launches and graphs. `ops` has one file an operation, named as in
//! `crate::ops`, which has checked the arguments, and beside it the kernels in a file of the same name. Nothing here
//! waits for the device but downloads and `synchronize`.

#![expect(unsafe_code, reason = "the driver's API is C")]

mod device;
mod open;
pub(crate) mod ops;
mod runtime;

pub(crate) use open::open;
pub use runtime::interop;
pub(crate) use runtime::{Buffer, CudaGraph, Gpu, Known};
pub use runtime::{CudaAllocator, CudaOptions, GemmTuning};
