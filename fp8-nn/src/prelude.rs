//! The items that a training program needs from this crate and the crates below it: `use fp8_nn::prelude::*`.
//!
//! They are the layers with their options, the optimizer and the functions over models, the recipes and scopes, devices and
//! tensors. [`ops`] is a module, so its items keep the prefix, as in [`ops::norm`]. The layers come with
//! their options and their `Saved` types.
//!
//! The pages of items from other crates have examples that name those crates. If your program depends on `fp8-nn` alone, read
//! `fp8_kernels` there as `fp8_nn::fp8_kernels`, and `fp8_format`, `fp8_recipe` and `fp8_dist` likewise.

pub use crate::checkpoint;
pub use crate::layers::*;
pub use crate::{
    AdamW, AdamWOptions, AttentionOptions, Block, CachedLayer, DynBlock, DynModule, Error, GenerateOptions,
    Generation, Gpt, GptOptions, Gradients, GradientsOptions, InitOptions, KvCache, Layer, Lion, LionOptions,
    LossScaler, LossScalerOptions, Module, MomentDtype, NormOptions, Optimizer, ParallelMode, Parameter,
    ParameterGroup, Recompute, RecomputeLevel, Result, Schedule, Scopes, SequenceInfo, Sgd, SgdOptions,
    Stack, TensorParallel, TensorParallelOptions, agree, all_reduce_gradients, backward_dw,
    broadcast_parameters, broadcast_state, clip_grad_norm, composite, num_parameters, parameters,
    parameters_mut, quantize_weights, zero_grad,
};
pub use fp8_dist::{Environment, Mesh, MeshOptions, ProcessGroup, ReduceOp, local, tcp};
pub use fp8_format::{E4M3, E5M2, Fp8};
pub use fp8_kernels::ops::{Activation, Diagonal, Norm, Packing, Sequences};
pub use fp8_kernels::{
    Cell, DType, Device, Encoding, Fp8Tensor, Graph, Operand, Scale, Shape, Slot, Tensor, TransposePolicy,
    bf16, f16, ops,
};
pub use fp8_kernels::{MemoryKind, MemoryReport};
pub use fp8_recipe::{
    Advice, AmaxComputeAlgo, AmaxGroup, AutocastOptions, Backward, BlockScaling, CurrentScaling,
    CustomRecipe, DelayedScaling, DelayedWgrad, Direction, Format, Forward, GemmSlots, GradientSink,
    Granularity, Mxfp8, Nvfp4, Origin, QParams, QParamsByRole, Quantizer, Recipe, Scaling,
    ScalingFactorComputeAlgo, SlotName, SlotReport, SlotRole, SlotTrace, SlotUpdate, Slots, Snapshot,
};
