//! NVIDIA GPUs through the driver's API: kernels compiled at run time, one stream a device, memory that is kept.
//!
//! One file an operation, named as in `ops`, which has checked the arguments; its device code is the file of the same name
//! below `kernels`. Nothing here waits for the device but downloads and `synchronize`.

#![expect(unsafe_code, reason = "the driver's API is C")]

pub(crate) mod accumulate;
pub(crate) mod activation;
pub(crate) mod adamw;
pub(crate) mod amax;
pub(crate) mod attention;
mod cache;
mod capture;
pub(crate) mod cast;
pub(crate) mod cells;
pub(crate) mod compare_calls;
pub(crate) mod cross_entropy;
mod cublaslt;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
mod fault;
pub(crate) mod gemm;
pub(crate) mod gemm_fp8;
pub(crate) mod gpu;
pub(crate) mod grad_norm;
pub mod interop;
mod known;
pub(crate) mod launch;
mod loader;
mod matmul;
mod memory;
mod module;
pub(crate) mod norm;
mod nvrtc;
mod options;
pub(crate) mod quantize;
pub(crate) mod reduce;
pub(crate) mod rope;
mod rule;
pub(crate) mod scale_from_amax;
mod slot;
pub(crate) mod softmax;
pub(crate) mod source;
pub(crate) mod split;
mod staging;
mod tiles;
pub(crate) mod transpose;
mod tuning;
pub(crate) mod update_scales;

pub(crate) use capture::CudaGraph;
pub(crate) use gpu::Gpu;
pub(crate) use known::Known;
pub(crate) use launch::{Grid, args};
pub(crate) use memory::Buffer;
pub use options::CudaOptions;
pub(crate) use source::Source;
pub use tuning::GemmTuning;

use crate::{DType, Encoding};

/// What kernels call an element type.
pub(crate) const fn dtype_number(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F32 | DType::I32 | DType::U8 => 0,
    }
}

/// What kernels call an FP8 format.
pub(crate) const fn format_number(encoding: Encoding) -> i32 {
    match encoding {
        Encoding::E4M3 => 0,
        Encoding::E5M2 => 1,
    }
}
