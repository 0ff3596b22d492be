//! Options of a training.

use crate::{Error, Fp8Weights, Result};
use fp8_dist::{Mesh, ProcessGroup};
use fp8_kernels::{DType, Device};
use fp8_nn::{AdamWOptions, AnyOptimizerOptions, RecomputeLevel, TensorParallelOptions};
use fp8_recipe::Recipe;
use std::sync::Arc;

/// Options of [`Trainer::new`](crate::Trainer::new), where there is an example.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// The recipe of the GEMMs in the blocks. Default: [`Recipe::off`], which trains in high precision.
    pub recipe: Recipe,
    /// The weights of an FP8 checkpoint beside an adapter: kept as the codes of its files, which `recipe` must read as they are
    /// ([`Folder::recipe`](crate::Folder::recipe) does), or dequantized, and quantized again under `recipe`. A model without an adapter
    /// is dequantized. Default: [`Fp8Weights::Dequantize`].
    pub fp8: Fp8Weights,
    /// The dtype of activations: f32, bf16 or f16. f16 scales the loss. Default: f32.
    pub compute_dtype: DType,
    /// The dtype of the parameters that are trained; adapters, if there are some. Default: f32.
    pub params_dtype: DType,
    /// The optimizer. Patterns of its groups are of Hugging Face's names of tensors, as those of `frozen`. Default: that of
    /// [`AdamW`](fp8_nn::AdamW) without weight decay.
    pub optimizer: AnyOptimizerOptions,
    /// The largest norm of all gradients together, to which larger ones are scaled; `None`: any. Default: `Some(1)`.
    pub max_grad_norm: Option<f32>,
    /// Patterns of tensors that are not trained, by Hugging Face's names: `*` stands for any text, as in `model.layers.0.*`, and a pattern
    /// without `*` is a part between dots, such as `embed_tokens`. Tensors that the model holds as one, such as the weights of q, k and
    /// v, are frozen together. Default: none.
    pub frozen: Vec<String>,
    /// Whether the trained weights of the blocks are stored in FP8, with f32 values in the optimizer. Ranks that share layers cannot
    /// ([`TrainRanks`]). Default: false.
    pub fp8_weights: bool,
    /// The part of each block that backward recomputes. Default: [`RecomputeLevel::None`].
    pub recompute: RecomputeLevel,
    /// The most tokens of a sequence. Required.
    pub seq: usize,
    /// The sequences that a rank computes at once; a step has as many of these micro-batches as it needs. Default: 1.
    pub micro_batch: usize,
    /// Whether a GPU records a step and replays it. All micro-batches have `micro_batch · seq` tokens then. Default: false.
    pub graph: bool,
}

impl Default for TrainerOptions {
    fn default() -> Self {
        Self {
            recipe: Recipe::off(),
            fp8: Fp8Weights::Dequantize,
            compute_dtype: DType::F32,
            params_dtype: DType::F32,
            optimizer: AnyOptimizerOptions::AdamW(AdamWOptions { weight_decay: 0.0, ..Default::default() }),
            max_grad_norm: Some(1.0),
            frozen: Vec::new(),
            fp8_weights: false,
            recompute: RecomputeLevel::None,
            seq: 0,
            micro_batch: 1,
            graph: false,
        }
    }
}

impl TrainerOptions {
    /// Checks what depends on no model.
    ///
    /// ```
    /// use fp8_hf::TrainerOptions;
    /// use fp8_nn::prelude::*;
    /// TrainerOptions { seq: 512, ..Default::default() }.check(&Device::cpu())?;
    /// let error = TrainerOptions { seq: 512, graph: true, ..Default::default() }.check(&Device::cpu()).unwrap_err();
    /// assert_eq!(error.to_string(), "Trainer: graph = true: a CPU does not record steps: expected a GPU");
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// An option out of its range, or one that the device does not have.
    pub fn check(&self, device: &Device) -> Result<()> {
        let refused = |option, value: String, remedy: &str| {
            Err(Error::Option { part: "Trainer".to_owned(), option, value, remedy: remedy.to_owned() })
        };
        for (option, value) in [("seq", self.seq), ("micro_batch", self.micro_batch)] {
            if value == 0 {
                return refused(option, "0".into(), "expected at least 1");
            }
        }
        let tokens = self.seq.checked_mul(self.micro_batch);
        if tokens.is_none_or(|tokens| i32::try_from(tokens).is_err()) {
            return refused(
                "micro_batch",
                self.micro_batch.to_string(),
                "expected fewer than 2³¹ tokens at once",
            );
        }
        for (option, dtype) in [("compute_dtype", self.compute_dtype), ("params_dtype", self.params_dtype)] {
            if !dtype.is_float() {
                return refused(option, dtype.to_string(), "expected f32, bf16 or f16");
            }
        }
        if let Some(norm) = self.max_grad_norm
            && (norm.is_nan() || norm <= 0.0)
        {
            return refused("max_grad_norm", norm.to_string(), "expected greater than 0, or none");
        }
        if self.graph && device.is_same(&Device::cpu()) {
            return refused("graph", "true".into(), "a CPU does not record steps: expected a GPU");
        }
        if self.graph && self.compute_dtype == DType::F16 {
            return refused(
                "graph",
                "true".into(),
                "f16 divides by the targets of each step: expected bf16 or f32",
            );
        }
        Ok(())
    }
}

/// The processes that train one model, from one of them. Replicas have their parts of every step, and the ranks of a replica share its
/// layers.
///
/// ```
/// use fp8_hf::TrainRanks;
/// use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
/// use std::{thread, time::Duration};
///
/// thread::scope(|scope| {
///     for world in local("world", 4, Duration::from_secs(10)).unwrap() {
///         scope.spawn(move || {
///             let mesh = Mesh::new(world, &MeshOptions { dp: 2, tp: 2 }).unwrap();
///             let ranks = TrainRanks { control: mesh.world().clone(), mesh, tensor_parallel: Default::default() };
///             assert_eq!(ranks.layout(), "dp 2, tp 2");
///         });
///     }
/// });
/// ```
#[derive(Debug, Clone)]
pub struct TrainRanks {
    /// The ranks, arranged by what they divide. Its groups reduce gradients, activations and amaxes, which are on the devices.
    pub mesh: Mesh,
    /// Options of the ranks that share layers, if there are several.
    pub tensor_parallel: TensorParallelOptions,
    /// The group of all processes, in the same order, in which they exchange a few numbers from the hosts' memory; on CPUs
    /// `mesh.world()`.
    pub control: Arc<dyn ProcessGroup>,
}

impl TrainRanks {
    /// Returns the arrangement of the ranks in words, such as `dp 2, tp 4, sequence parallel`.
    #[must_use]
    pub fn layout(&self) -> String {
        let [dp, tp] = [self.mesh.dp(), self.mesh.tp()].map(|group| group.world_size());
        let tokens =
            if tp > 1 && self.tensor_parallel.sequence_parallel { ", sequence parallel" } else { "" };
        format!("dp {dp}, tp {tp}{tokens}")
    }
}
