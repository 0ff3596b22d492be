//! The operations on tensors: quantization, matrix products, activations, norms, attention, losses and AdamW.
//!
//! Every function checks its arguments, runs on their device, and returns its result or an error that states the offending
//! shapes or values and what would be right. What follows holds for all of them.
//!
//! **Shapes.** Tensors are row-major and contiguous. An operation on rows or matrices, `[.., cols]`, takes any number of
//! leading dimensions and treats their product as the number of rows.
//!
//! **Dtypes.** *A float* is f32, bf16 or f16. Unless the documentation says otherwise, float arguments may have different
//! dtypes, values are computed in f32, and results are rounded once.
//!
//! **Slots.** Functions that take a [`Slot`](crate::Slot) quantize their result, or leave it in high precision if the slot is
//! off. They return an [`Operand`](crate::Operand).
//!
//! **In place.** A tensor that is changed must not share its storage with a clone. A function that changes one takes a
//! `name`, which identifies the tensor in errors.
//!
//! **Bits.** Codes, amaxes and scales have the same bits on every backend. Sums (products, norms, reductions) may be ordered
//! differently by each backend, but in an order that depends on the shapes alone: the same call gives the same bits each
//! time.
//!
//! **On a GPU.** An operation queues its work and returns. It does not wait, except that its first use may compile a kernel
//! or plan a product, and that custom scale policies and amax rules run on the host. Errors that only the device can detect,
//! such as an id outside a table, are returned by the next call that waits: [`Tensor::to_vec`](crate::Tensor::to_vec),
//! [`Cell::read`](crate::Cell::read) or [`Device::synchronize`](crate::Device::synchronize). Any operation can also fail
//! because the device is out of memory, or because it failed before.
//!
//! | | |
//! |---|---|
//! | FP8 | [`quantize`](quantize()), [`quantize_dbias`], [`quantize_dbias_into`], [`quantize_many`], [`amax`](amax()), [`scale_from_amax`](scale_from_amax()), [`update_scales`](update_scales()), [`check_scales`] |
//! | matrix products | [`fprop`], [`fprop_quantize`], [`dgrad`], [`dgrad_quantize`], [`wgrad`], [`gemm`](gemm()), [`gemm_accumulate`], [`gemm_fp8`](gemm_fp8()), [`gemm_fp8_accumulate`], [`gemm_fp8_quantize`], [`can_multiply`], [`emulation`](emulation()) |
//! | activations | [`activation`](activation()), [`activate`], [`activation_backward`], [`activation_backward_quantize_dbias`], [`activation_backward_quantize_dbias_into`] |
//! | norms | [`norm`](norm()), [`norm_backward`], [`norm_backward_add`], [`norm_backward_into`] |
//! | attention | [`attention`](attention()), [`attention_backward`], [`attention_backward_to`], [`attention_fp8`](attention_fp8()), [`attention_fp8_backward`], [`attention_fp8_backward_to`], [`softmax`](softmax()), [`softmax_backward`], [`rope`](rope()), [`rope_backward`], [`rope_in_place`], [`rope_backward_in_place`] |
//! | embeddings and losses | [`embedding`](embedding()), [`embedding_backward`], [`cross_entropy`](cross_entropy()), [`cross_entropy_backward`] |
//! | parts of a vocabulary | [`embedding_part`], [`embedding_part_backward`], [`cross_entropy_part`], [`cross_entropy_part_sums`], [`cross_entropy_of_parts`], [`cross_entropy_part_backward`], [`cross_entropy_part_backward_scaled`] |
//! | generation | [`kv_cache_append`], [`sample`](sample()) |
//! | optimizer | [`adamw`](adamw()), [`adamw_many`], [`adamw_groups`], [`optimizer_step`], [`accumulate`](accumulate()), [`grad_norm`](grad_norm()), [`clip_in_place`] |
//! | loss scaling | [`apply_loss_scale`], [`undo_loss_scale`], [`check_finite`], [`check_amaxes`], [`adamw_groups_scaled`], [`update_loss_scale`], [`cross_entropy_backward_scaled`] |
//! | element by element | [`add`], [`mul`], [`bias`](bias()), [`scale`], [`scale_in_place`], [`cast`](cast()), [`dropout`](dropout()), [`dropout_backward`], [`dropout_add`], [`dropout_add_backward`] |
//! | shapes and sums | [`split`](split()), [`concat`](concat()), [`rows`](rows()), [`transpose`](transpose()), [`permute`](permute()), [`sum`], [`mean`], [`max`], [`column_sums`], [`column_sums_into`] |
//! | many processes | [`compare_calls`](compare_calls()) |

mod accumulate;
mod activation;
mod adamw;
mod adamw_step;
mod amax;
mod attention;
mod attention_fp8;
mod attention_grads;
mod attention_problem;
mod cast;
mod compare_calls;
mod cross_entropy;
mod cross_entropy_part;
mod dropout;
mod elementwise;
mod embedding;
mod emulation;
mod gemm;
mod gemm_fp8;
mod grad_norm;
mod gradient;
mod heads;
mod kv_cache;
mod linear;
mod loss_scale;
mod norm;
mod nvfp4_amax;
mod optimizer;
mod part;
mod permute;
mod quantize;
mod reduce;
mod rope;
mod rows;
mod sample;
mod scale_from_amax;
mod sequences;
mod softmax;
mod split;
mod transpose;
mod update_scales;

pub use accumulate::{accumulate, store};
pub use activation::{
    Activation, activate, activation, activation_backward, activation_backward_quantize_dbias,
    activation_backward_quantize_dbias_into,
};
pub use adamw::{
    AdamWFactors, AdamWGroup, AdamWTensor, NormCheck, SkippedSteps, adamw, adamw_groups, adamw_many,
};
pub use adamw_step::AdamWStep;
pub(crate) use adamw_step::Factors;
pub use amax::amax;
pub use attention::{AttentionSaved, ScoreOptions, attention, attention_backward, attention_backward_to};
pub(crate) use attention::{BackwardCall, Call};
pub use attention_fp8::{attention_fp8, attention_fp8_backward, attention_fp8_backward_to};
pub(crate) use attention_grads::GradPlace;
pub use attention_grads::{AttentionGrads, GradLayout};
pub use attention_problem::Diagonal;
pub(crate) use attention_problem::Problem;
pub use cast::cast;
pub use compare_calls::compare_calls;
pub(crate) use cross_entropy::Factor;
pub use cross_entropy::{
    CrossEntropyOptions, CrossEntropySaved, cross_entropy, cross_entropy_backward,
    cross_entropy_backward_scaled,
};
pub use cross_entropy_part::{
    CrossEntropyPart, cross_entropy_of_parts, cross_entropy_part, cross_entropy_part_backward,
    cross_entropy_part_backward_scaled, cross_entropy_part_sums,
};
pub use dropout::{Dropout, DropoutKey, dropout, dropout_add, dropout_add_backward, dropout_backward};
pub use elementwise::{add, bias, clip_in_place, mul, scale, scale_in_place};
pub use embedding::{embedding, embedding_backward, embedding_part, embedding_part_backward};
pub use emulation::{Emulation, emulation};
pub use gemm::{Layout, Update, gemm, gemm_accumulate, gemm_add, gemm_into};
pub(crate) use gemm::{Terms, check_output, output_shape};
pub(crate) use gemm_fp8::product_then_quantize;
pub use gemm_fp8::{
    Accumulation, can_multiply, gemm_fp8, gemm_fp8_accumulate, gemm_fp8_add, gemm_fp8_into, gemm_fp8_quantize,
};
pub use grad_norm::grad_norm;
pub use gradient::GradientMut;
pub use heads::{Heads, HeadsTensor};
pub use kv_cache::kv_cache_append;
pub use linear::{dgrad, dgrad_quantize, fprop, fprop_add, fprop_quantize, wgrad, wgrad_into};
pub use loss_scale::{
    LossScale, LossScaleRule, LossScaleState, ScaledStep, UpdateCount, adamw_groups_scaled, apply_loss_scale,
    check_amaxes, check_finite, undo_loss_scale, update_loss_scale,
};
pub use norm::{Norm, NormOptions, NormStats, norm, norm_backward, norm_backward_add, norm_backward_into};
pub use nvfp4_amax::nvfp4_amax;
pub use optimizer::{
    MOMENT_BLOCK, Moment, OptimizerGroup, OptimizerTensor, StepCheck, UpdateRule, moment_scales,
    optimizer_step,
};
pub use part::Part;
pub(crate) use permute::Order;
pub use permute::permute;
pub use quantize::{quantize, quantize_dbias, quantize_dbias_into, quantize_many};
pub use reduce::{column_sums, column_sums_into, max, mean, sum};
pub use rope::{
    Positions, RopeScaling, RopeTable, rope, rope_backward, rope_backward_in_place, rope_in_place,
};
pub use rows::rows;
pub(crate) use sample::Sampling;
pub use sample::{SampleOptions, sample};
pub use scale_from_amax::scale_from_amax;
pub(crate) use sequences::Ends;
#[cfg(feature = "cuda")]
pub(crate) use sequences::TILE;
pub use sequences::{Packing, PackingCapacity, Sequences};
pub use softmax::{softmax, softmax_backward};
pub use split::{concat, split};
pub use transpose::transpose;
pub use update_scales::{AmaxRule, ScaleUpdate, check_scales, update_scales};
