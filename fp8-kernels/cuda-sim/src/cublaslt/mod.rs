//! The entry points of cuBLASLt that FP8 training calls: descriptors, heuristics, and the product itself in f32.
//!
//! Sums run over k in order, in f32; hardware orders them otherwise. What the documentation refuses is refused, each
//! refusal with its source. Outputs in FP4, grouped and batched products, epilogues other than the bias and
//! on-stack descriptors (`…Init_internal`) are not simulated: CUBLAS_STATUS_NOT_SUPPORTED.
//!
//! Source of numbers: cuBLAS documentation, "Using the cuBLASLt API", and the header `cublasLt.h`.

mod blas;
mod check;
pub(crate) mod clock;
mod descriptors;
mod factors;
mod matmul;
mod product;
mod types;
mod version;

pub(crate) use blas::Blas;
pub(crate) use product::Product;
pub(crate) use version::set_version;

#[cfg(test)]
pub(crate) use {descriptors::NAMES as DESCRIPTOR_NAMES, matmul::NAMES as MATMUL_NAMES};
