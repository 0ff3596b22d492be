//! The operations on a GPU: one file each, named as in `crate::ops`, which has checked the arguments. Its kernels are the
//! `.cu` file of the same name.

pub(crate) mod accumulate;
pub(crate) mod activation;
mod activation_sink;
mod activation_tiles;
pub(crate) mod adamw;
pub(crate) mod amax;
pub(crate) mod attention;
mod blocks;
pub(crate) mod cast;
pub(crate) mod cells;
pub(crate) mod compare_calls;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod emulation;
pub(super) mod fault;
pub(crate) mod gemm;
mod gemm_blocks;
pub(crate) mod gemm_fp8;
mod gemm_nvfp4;
mod gemm_place;
pub(crate) mod grad_norm;
mod kernels;
pub(crate) mod kv_cache;
pub(crate) mod loss_scale;
pub(crate) mod norm;
mod norm_backward;
mod numbers;
pub(crate) mod nvfp4;
pub(crate) mod optimizer;
mod padding;
pub(crate) mod permute;
pub(crate) mod quantize;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod rows;
mod rule;
pub(crate) mod sample;
pub(crate) mod scale_from_amax;
mod slot;
pub(crate) mod softmax;
mod source;
pub(crate) mod split;
mod tiles;
pub(crate) mod transpose;
pub(crate) mod update_scales;

pub(crate) use attention::attention_fp8;

use super::runtime::{
    Address, Buffer, Entry, Faults, Gpu, Grid, In, KernelFile, Known, Out, Void, cublaslt, cudnn, launch,
    product, signatures,
};
use numbers::{dtype_number, format_number};
