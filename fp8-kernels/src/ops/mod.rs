//! Every operation, one file each: checks shapes, dtypes and devices, then dispatches to the backend.
//!
//! The file of the same name below a backend computes it, the one below `tests/conformance` proves it.

mod accumulate;
mod activation;
mod adamw;
mod adamw_step;
mod amax;
mod attention;
mod cast;
mod compare_calls;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod gemm;
mod gemm_fp8;
mod grad_norm;
mod linear;
mod norm;
mod quantize;
mod reduce;
mod rope;
mod scale_from_amax;
mod softmax;
mod split;
mod transpose;
mod update_scales;

pub use accumulate::accumulate;
pub use activation::{Activation, activation, activation_backward, activation_backward_quantize_dbias};
pub(crate) use adamw::Numbers;
pub use adamw::{
    AdamWFactors, AdamWGroup, AdamWTensor, NormCheck, SkippedSteps, adamw, adamw_groups, adamw_many,
    adamw_many_from,
};
pub use adamw_step::AdamWStep;
pub(crate) use adamw_step::Factors;
pub use amax::amax;
pub(crate) use attention::Problem;
pub use attention::{AttentionOptions, AttentionSaved, attention, attention_backward};
pub use cast::cast;
pub use compare_calls::compare_calls;
pub use cross_entropy::{CrossEntropyOptions, CrossEntropySaved, cross_entropy, cross_entropy_backward};
pub use dropout::{DropoutKey, dropout, dropout_backward};
pub use elementwise::{add, bias, clip_in_place, scale, scale_in_place};
pub use embedding::{embedding, embedding_backward};
pub use gemm::{Layout, gemm, gemm_accumulate};
pub(crate) use gemm::{check_output, output_shape};
pub(crate) use gemm_fp8::product_then_quantize;
pub use gemm_fp8::{Accumulation, gemm_fp8, gemm_fp8_accumulate, gemm_fp8_quantize};
pub use grad_norm::grad_norm;
pub use linear::{dgrad, fprop, wgrad};
pub use norm::{Norm, NormOptions, NormStats, norm, norm_backward, norm_backward_add};
pub use quantize::{quantize, quantize_dbias, quantize_many};
pub use reduce::{column_sums, max, mean, sum};
pub use rope::{RopeTable, rope, rope_backward};
pub use scale_from_amax::scale_from_amax;
pub use softmax::{softmax, softmax_backward};
pub use split::{concat, split};
pub use transpose::transpose;
pub use update_scales::{AmaxRule, ScaleUpdate, check_scales, update_scales};
