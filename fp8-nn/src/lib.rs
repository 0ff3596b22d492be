// These definitions win over those of README, which lead to files.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = "[which-recipe]: guide::which_recipe"]
#![doc = "[delayed-scaling]: guide::delayed_scaling"]
#![doc = "[from-transformer-engine]: guide::from_transformer_engine\n"]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod any_optimizer;
mod arguments;
mod block;
pub mod checkpoint;
mod chosen_optimizer;
mod clip;
mod data_parallel;
mod delayed_wgrad;
mod dropout;
mod error;
mod fp8_output;
mod generate;
mod gpt;
pub mod guide;
mod init;
mod kv_cache;
mod layers;
mod lion;
mod lora;
mod loss_scaler;
mod module;
mod optimizer;
mod options;
mod parameter;
mod placement;
mod precision;
pub mod prelude;
mod quantize_weights;
mod recompute;
mod schedule;
mod scopes;
mod sequence_info;
mod sgd;
mod stack;
mod tensor_parallel;

pub use any_optimizer::Optimizer;
pub use block::{Block, CachedLayer, DynBlock};
pub use chosen_optimizer::{AnyOptimizer, AnyOptimizerOptions};
pub use clip::clip_grad_norm;
pub use data_parallel::{
    Gradients, GradientsOptions, agree, all_reduce_gradients, broadcast_parameter, broadcast_parameters,
    broadcast_state, hand_over_gradients,
};
pub use delayed_wgrad::backward_dw;
pub use error::{Error, Result};
pub use fp8_recipe::matches_name;
pub use generate::{GenerateOptions, Generation};
pub use gpt::{Gpt, GptLossSaved, GptOptions, GptSaved};
pub use kv_cache::KvCache;
pub use layers::*;
pub use lion::{Lion, LionOptions};
pub use lora::{Lora, LoraOptions, Loras};
pub use loss_scaler::{LossScaler, LossScalerOptions};
pub use module::{Layer, Module, num_parameters, parameters, parameters_mut, zero_grad};
pub use optimizer::{AdamW, AdamWOptions, MomentDtype, ParameterGroup};
pub use options::{AttentionOptions, InitOptions, NormOptions, RecomputeLevel};
pub use parameter::{Parameter, frozen};
pub use placement::{Cut, Placement};
pub use quantize_weights::quantize_weights;
pub use recompute::{Recompute, RecomputeSaved};
pub use schedule::Schedule;
pub use scopes::Scopes;
pub use sequence_info::SequenceInfo;
pub use sgd::{Sgd, SgdOptions};
pub use stack::{AnySaved, DynModule, Stack};
pub use tensor_parallel::{Gather, ParallelMode, ReduceDtype, TensorParallel, TensorParallelOptions};

pub use fp8_dist;
pub use fp8_format;
pub use fp8_kernels;
pub use fp8_recipe;
pub use rand;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct WorkspaceReadme;
