//! Each operation once more, in f64 or integers, as plain as possible, sharing nothing with the crate's sources.

pub(crate) mod activation;
pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod attention_fp8;
pub(crate) mod cross_entropy;
pub(crate) mod differences;
pub(crate) mod fp8;
pub(crate) mod gemm;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod philox;
pub(crate) mod scales;
pub(crate) mod softmax;
