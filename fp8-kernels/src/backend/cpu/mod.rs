//! The CPU backend: a real one, and the reference for the others.
//!
//! One file an operation, named as in `ops`, which has checked the arguments. Results do not depend on the number of
//! threads: work is split by shape alone.

pub(crate) mod accumulate;
pub(crate) mod activation;
pub(crate) mod adamw;
pub(crate) mod amax;
pub(crate) mod attention;
pub(crate) mod attention_fp8;
mod buffer;
pub(crate) mod cast;
pub(crate) mod codec;
pub(crate) mod compare_calls;
pub(crate) mod cross_entropy;
pub(crate) mod dispatch;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod emulation;
mod floats;
pub(crate) mod gemm;
pub(crate) mod gemm_fp8;
pub(crate) mod grad_norm;
pub(crate) mod kv_cache;
mod lanes;
pub(crate) mod loss_scale;
#[expect(
    unsafe_code,
    reason = "vector instructions, and threads that write parts of one output; see each SAFETY line"
)]
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod nvfp4;
pub(crate) mod optimizer;
pub(crate) mod parallel;
pub(crate) mod permute;
pub(crate) mod quantize;
mod quantize_blocks;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod sample;
pub(crate) mod scale_from_amax;
mod scratch;
pub(crate) mod softmax;
pub(crate) mod split;
pub(crate) mod transpose;
pub(crate) mod update_scales;

pub(crate) use crate::element::Buffer;
pub(crate) use buffer::Widened;
pub(crate) use floats::Floats;
pub use matmul::CpuPath;
