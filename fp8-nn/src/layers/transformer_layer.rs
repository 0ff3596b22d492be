//! A transformer block.

use super::layer_norm::NormCore;
use super::residual::{Around, Residual, ResidualSaved};
use crate::arguments::Output;
use crate::dropout::Rate;
use crate::hand_over_gradients;
use crate::kv_cache::CachedLayer;
use crate::recompute::{Recomputable, RecomputableSaved, RecomputeSaved};
use crate::{
    AttentionOptions, Block, Error, InitOptions, LayerNormMlp, LayerNormMlpOptions, LayerNormMlpSaved,
    Module, MultiheadAttention, MultiheadAttentionOptions, MultiheadAttentionSaved, NormOptions,
    RecomputeLevel, Result, SequenceInfo, TensorParallel, composite,
};
use fp8_kernels::ops::{self, Activation, NormStats, RopeTable};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`TransformerLayer`]. The two sizes and `attention.num_attention_heads` are required; the other fields have
/// defaults.
///
/// See [`TransformerLayer`] for an example.
#[derive(Debug, Clone)]
pub struct TransformerLayerOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The inner dimension of the MLP, often four times `hidden_size`. Required. PyTorch's
    /// `TransformerEncoderLayer` has 2048 by default.
    pub ffn_hidden_size: usize,
    /// The heads, the mask and the positions. Required, because `num_attention_heads` is. The other defaults
    /// are causal attention without RoPE.
    pub attention: AttentionOptions,
    /// The activation of the MLP. Default: [`Activation::Gelu`], the tanh form. PyTorch's
    /// `TransformerEncoderLayer` has ReLU.
    pub activation: Activation,
    /// The normalization before the attention and before the MLP. Default: `NormOptions::default()`, a
    /// LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// Whether attention and MLP read the same input: `y = x + attention(norm(x)) + mlp(norm(x))`, each with a norm of its own.
    /// Not together with `output_layernorm`. Default: false.
    pub parallel_attention_mlp: bool,
    /// Whether the norm in front of the attention moves to the end of the block: `r = x + attention(x)`,
    /// `y = norm(r + mlp(norm(r)))`. Default: false.
    pub output_layernorm: bool,
    /// Whether the residual connections take the outputs of the norms in place of their inputs: `r = n₁ + attention(n₁)` with
    /// `n₁ = norm(x)`, `y = n₂ + mlp(n₂)` with `n₂ = norm(r)`. Not together with the two options above. Default: false.
    pub apply_residual_connection_post_layernorm: bool,
    /// Whether the residual additions and the output are f32 whatever the layer computes in, so that many layers add up without
    /// rounding. The output is f32 then. Default: false, they are in the dtype that the layer computes in.
    pub fp32_residual_connection: bool,
    /// The part of the block that backward recomputes instead of keeping it. Default: [`RecomputeLevel::None`].
    pub recompute: RecomputeLevel,
    /// The probability that an element of a residual branch is dropped in training before it is added, at least 0 and less
    /// than 1. The attention has one of its own, `attention.attention_dropout`, and
    /// [`Scaling::set_dropout_seed`](crate::fp8_recipe::Scaling::set_dropout_seed) sets the seed. Default: 0.
    /// Transformer Engine's default is 0.1.
    pub hidden_dropout: f32,
    /// The probability that a residual branch is dropped in training for a whole entry of the batch (stochastic depth), at least 0
    /// and less than 1. Packed sequences are one entry. Default: 0.
    pub drop_path_rate: f32,
    /// Whether the four Linears have biases. Default: true.
    pub bias: bool,
    /// Whether `qkv` has a bias. Default: `None`, as `bias` says.
    pub qkv_bias: Option<bool>,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all
    /// weights.
    pub init: InitOptions,
    /// The ranks that share the layer: each has some heads of the attention and some inner features of the MLP. With sequence parallelism,
    /// input and output are this rank's tokens, `[tokens / ranks, hidden_size]`, and [`SequenceInfo::batch_and_length`] is required.
    /// Not together with `drop_path_rate` then. Default: `None`, this rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for TransformerLayerOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            attention: AttentionOptions::default(),
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            parallel_attention_mlp: false,
            output_layernorm: false,
            apply_residual_connection_post_layernorm: false,
            fp32_residual_connection: false,
            recompute: RecomputeLevel::None,
            hidden_dropout: 0.0,
            drop_path_rate: 0.0,
            bias: true,
            qkv_bias: None,
            params_dtype: DType::F32,
            init: InitOptions::default(),
            tensor_parallel: None,
        }
    }
}

/// A transformer block with the norms in front of attention and MLP: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`.
///
/// Its four Linears (`qkv`, `proj`, `fc1`, `fc2`) run in FP8; residual additions run in high precision, and so does attention,
/// unless `attention.fp8_dpa` is set. Input
/// and output are `[batch, seq, hidden_size]`; dtypes are those of [`Linear`](crate::Linear). PyTorch's
/// `TransformerEncoderLayer` normalizes after the addition by default (`norm_first=False`), has dropout of 0.1 and is not causal.
///
/// With `hidden_dropout` and `drop_path_rate`, each branch is added as `x + path(hidden(branch))`, by one kernel.
///
/// Its parameters are those of [`MultiheadAttention`] with a norm, below `<path>.attention`, and those of [`LayerNormMlp`],
/// below `<path>.mlp`; with `output_layernorm`, those of the norm at the end, `<path>.norm.*`, in place of the attention's.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = TransformerLayerOptions {
///     hidden_size: 32,
///     ffn_hidden_size: 4 * 32,
///     attention: AttentionOptions { num_attention_heads: 4, rope: true, ..Default::default() },
///     norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
///     activation: Activation::Swiglu,
///     bias: false,
///     ..Default::default()
/// };
/// let mut block = TransformerLayer::new("blocks.0", options, &device, &mut fp8_nn::rand::rng())?;
/// let names: Vec<_> = parameters(&block).iter().map(|parameter| parameter.name().to_string()).collect();
/// assert_eq!(names[..3], ["blocks.0.attention.norm.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.proj.weight"]);
/// let mut scaling = Scaling::new(&block, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 6, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| block.forward(cx, &x))?;
/// let dx = scaling.in_backward(|cx| block.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct TransformerLayer {
    path: Arc<str>,
    attention: Recomputable<MultiheadAttention>,
    mlp: Recomputable<LayerNormMlp>,
    /// At the end of the block.
    norm: Option<NormCore>,
    /// Whether the MLP reads what the attention reads.
    is_parallel: bool,
    /// Whether the residual connections take the outputs of the norms.
    adds_normed: bool,
    residual: Residual,
    recompute: RecomputeLevel,
}

composite!(TransformerLayer { attention, mlp, norm; skip path, is_parallel, adds_normed, residual, recompute });

/// The values that the backward pass of [`TransformerLayer`] needs.
#[derive(Debug)]
pub struct TransformerLayerSaved(Saved);

#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
enum Saved {
    Stored(Parts),
    Again { saved: RecomputeSaved, output: Output },
}

#[derive(Debug)]
struct Parts {
    attention: RecomputableSaved<MultiheadAttentionSaved>,
    mlp: RecomputableSaved<LayerNormMlpSaved>,
    /// The input of the norm at the end, and its statistics.
    normed: Option<(Tensor, NormStats)>,
    /// The dropout masks of the residual additions of the attention and of the MLP.
    residuals: [ResidualSaved; 2],
    output: Output,
}

impl TransformerLayerOptions {
    /// Refuses options that ask for two orders of norms and additions.
    fn expect_one_order(&self, path: &str) -> Result<()> {
        let refuse = |option, other: &str| {
            let (part, value) = (path.to_owned(), "true".to_owned());
            let remedy = format!("not together with {other}: set one of the two");
            Err(Error::Option { part, option, value, remedy })
        };
        let post = "apply_residual_connection_post_layernorm";
        let adds_normed = self.apply_residual_connection_post_layernorm;
        if self.parallel_attention_mlp && self.output_layernorm {
            return refuse("parallel_attention_mlp", "output_layernorm");
        }
        if adds_normed && self.parallel_attention_mlp {
            return refuse(post, "parallel_attention_mlp");
        }
        if adds_normed && self.output_layernorm {
            return refuse(post, "output_layernorm");
        }
        Ok(())
    }

    /// The residual additions, with the parts of masks that this rank draws.
    fn residual(&self, path: &str) -> Result<Residual> {
        let of_ranks = |rate: Rate| match &self.tensor_parallel {
            Some(ranks) => rate.of_ranks(ranks),
            None => rate,
        };
        let drop_path = Rate::new(path, "drop_path_rate", self.drop_path_rate)?;
        let cuts_tokens = self.tensor_parallel.as_ref().is_some_and(TensorParallel::is_sequence_parallel);
        if cuts_tokens && !drop_path.is_zero() {
            return Err(Error::Option {
                part: path.to_owned(),
                option: "drop_path_rate",
                value: self.drop_path_rate.to_string(),
                remedy: "it drops whole sequences, of which ranks have parts (sequence parallelism): expected 0, or \
                         sequence_parallel = false"
                    .to_owned(),
            });
        }
        Ok(Residual {
            hidden: of_ranks(Rate::new(path, "hidden_dropout", self.hidden_dropout)?),
            path: of_ranks(drop_path),
            is_f32: self.fp32_residual_connection,
            params_dtype: self.params_dtype,
        })
    }
}

impl TransformerLayer {
    /// Returns the attention.
    pub fn attention(&self) -> &MultiheadAttention {
        &self.attention.inner
    }

    /// Returns the MLP.
    pub fn mlp(&self) -> &LayerNormMlp {
        &self.mlp.inner
    }

    /// Creates a block at `path`, with weights drawn from `rng`: the attention's, then the MLP's.
    ///
    /// # Errors
    /// The errors of [`MultiheadAttention::new`] and [`LayerNormMlp::new`]; a dropout outside `[0, 1)`; options that cannot be
    /// combined, as their descriptions say.
    pub fn new(
        path: &str,
        options: TransformerLayerOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        Self::with_rope_table(path, options, &mut None, device, rng)
    }

    /// As [`new`](Self::new), with the RoPE table that a layer with the same attention before this one left in `table`: the layers of
    /// a model share one table.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let (device, mut rng) = (Device::cpu(), fp8_nn::rand::rng());
    /// let attention = AttentionOptions { num_attention_heads: 2, rope: true, max_seq_length: 64, ..Default::default() };
    /// let options = TransformerLayerOptions { hidden_size: 32, ffn_hidden_size: 64, attention, ..Default::default() };
    /// let mut table = None;
    /// let layers: Vec<TransformerLayer> = (0..4)
    ///     .map(|i| TransformerLayer::with_rope_table(&format!("layers.{i}"), options.clone(), &mut table, &device, &mut rng))
    ///     .collect::<Result<_>>()?;
    /// assert!(table.is_some() && layers.len() == 4);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_rope_table(
        path: &str,
        options: TransformerLayerOptions,
        table: &mut Option<RopeTable>,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        options.expect_one_order(path)?;
        let residual = options.residual(path)?;
        let TransformerLayerOptions {
            hidden_size,
            ffn_hidden_size,
            attention,
            activation,
            norm,
            parallel_attention_mlp,
            output_layernorm,
            apply_residual_connection_post_layernorm: adds_normed,
            recompute,
            bias,
            qkv_bias,
            params_dtype,
            init,
            tensor_parallel: ranks,
            ..
        } = options;
        let input_layernorm = (!output_layernorm).then_some(norm);
        let output_norm = || -> Result<NormCore> {
            let norm = NormCore::new(&format!("{path}.norm"), hidden_size, norm, params_dtype, device)?;
            Ok(norm.of_tokens(ranks.as_ref()))
        };
        // What is computed again as a whole has nothing to leave out.
        let again = |whole: RecomputeLevel, part: RecomputeLevel| {
            recompute >= part && recompute < whole.min(RecomputeLevel::Block)
        };
        let attention = MultiheadAttentionOptions {
            hidden_size,
            attention,
            input_layernorm,
            bias,
            qkv_bias,
            params_dtype,
            init,
            return_bias: false,
            recompute_norm: again(RecomputeLevel::Attention, RecomputeLevel::Norm),
            tensor_parallel: ranks.clone(),
        };
        let mlp = LayerNormMlpOptions {
            hidden_size,
            ffn_hidden_size,
            bias,
            activation,
            norm,
            params_dtype,
            init,
            return_bias: false,
            recompute_norm: again(RecomputeLevel::Mlp, RecomputeLevel::Norm),
            recompute_activation: again(RecomputeLevel::Mlp, RecomputeLevel::Activation),
            tensor_parallel: ranks.clone(),
        };
        let attention_path = format!("{path}.attention");
        let attention = MultiheadAttention::with_table(&attention_path, attention, table, device, rng)?;
        let mlp = LayerNormMlp::new(&format!("{path}.mlp"), mlp, device, rng)?;
        let part = |part| again(RecomputeLevel::Block, part);
        Ok(Self {
            path: path.into(),
            attention: Recomputable::new(attention, part(RecomputeLevel::Attention)),
            mlp: Recomputable::new(mlp, part(RecomputeLevel::Mlp)),
            norm: output_layernorm.then(output_norm).transpose()?,
            is_parallel: parallel_attention_mlp,
            adds_normed,
            residual,
            recompute,
        })
    }

    fn evaluated(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            self.attention.inner.check_input(&self.path, x, info)?;
            Ok(self.forward_parts(cx, x, info, cache)?.0)
        })
    }

    fn forward_parts(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<(Tensor, Parts)> {
        let Self { attention, mlp, residual, .. } = self;
        let input = residual.input_of_branch(cx, x)?;
        let (r, attention, of_attention) = if self.adds_normed {
            let sum = residual.dtype_in_product(cx, input.dtype());
            let ((a, normed), saved) = attention.forward_by(cx, &input, info, |attention, cx| {
                let (a, normed, saved) =
                    attention.cached_with_layernorm_output(cx, &input, info, cache, sum)?;
                Ok(((a, normed), saved))
            })?;
            let (r, masks) = residual.add(cx, &normed, a, sum.is_some())?;
            (r, saved, masks)
        } else {
            let addend = residual.addend(cx, x, input.dtype())?;
            let run = |attention: &MultiheadAttention, cx: &mut Forward<'_>| {
                attention.cached(cx, &input, info, cache, addend.as_ref())
            };
            let (a, saved) = attention.forward_by(cx, &input, info, run)?;
            let (r, masks) = residual.add(cx, x, a, addend.is_some())?;
            (r, saved, masks)
        };
        let (y, mlp, of_mlp) = if self.adds_normed {
            let input = residual.input_of_branch(cx, &r)?;
            let sum = residual.dtype_in_product(cx, input.dtype());
            let ((m, normed), saved) = mlp.forward_by(cx, &input, &SequenceInfo::default(), |mlp, cx| {
                let (m, normed, saved) = mlp.forward_adding_layernorm_output(cx, &input, sum)?;
                Ok(((m, normed), saved))
            })?;
            let (y, masks) = residual.add(cx, &normed, m, sum.is_some())?;
            (y, saved, masks)
        } else {
            let input = if self.is_parallel { input } else { residual.input_of_branch(cx, &r)? };
            let addend = residual.addend(cx, &r, input.dtype())?;
            let run =
                |mlp: &LayerNormMlp, cx: &mut Forward<'_>| mlp.forward_adding(cx, &input, addend.as_ref());
            let (m, saved) = mlp.forward_by(cx, &input, &SequenceInfo::default(), run)?;
            let (y, masks) = residual.add(cx, &r, m, addend.is_some())?;
            (y, saved, masks)
        };
        let (y, normed) = match &self.norm {
            Some(norm) => {
                let sum = residual.input_of_branch(cx, &y)?;
                let (normed, stats) = norm.forward(&sum)?;
                (residual.output(&normed)?, Some((sum, stats)))
            }
            None => (y, None),
        };
        let output = Output::of(&self.path, &y);
        Ok((y, Parts { attention, mlp, normed, residuals: [of_attention, of_mlp], output }))
    }

    fn backward_parts(&mut self, cx: &mut Backward<'_>, saved: Parts, dy: &Tensor) -> Result<Tensor> {
        let Self { attention, mlp, residual, .. } = self;
        let Parts { attention: saved_attention, mlp: saved_mlp, normed, residuals, .. } = saved;
        let [of_attention, of_mlp] = residuals;
        let normed = match (&mut self.norm, normed) {
            (Some(norm), Some((x, stats))) => {
                let dx = norm.backward(cx, &x, &stats, &ops::cast(dy, x.dtype())?)?;
                hand_over_gradients(cx, norm)?;
                Some(dx)
            }
            _ => None,
        };
        let dy = normed.as_ref().unwrap_or(dy);
        let da = of_mlp.backward(dy)?;
        if self.adds_normed {
            // The gradient of the addition goes to the branch and to the norm's output.
            let forward = |mlp: &LayerNormMlp, cx: &mut Forward<'_>, x: &Tensor, _: &SequenceInfo| {
                Ok(mlp.forward_with_layernorm_output(cx, x)?.2)
            };
            let saved = mlp.restore(cx, saved_mlp, forward)?;
            let dr = mlp.inner.backward_with_layernorm_output(cx, saved, &da, dy)?;
            hand_over_gradients(cx, mlp)?;
            let forward =
                |attention: &MultiheadAttention, cx: &mut Forward<'_>, x: &Tensor, info: &SequenceInfo| {
                    Ok(attention.forward_with_layernorm_output(cx, x, info)?.2)
                };
            let saved = attention.restore(cx, saved_attention, forward)?;
            let da = of_attention.backward(&dr)?;
            return attention.inner.backward_with_layernorm_output(cx, saved, &da, &dr);
        }
        if self.is_parallel {
            let dm = mlp.backward(cx, saved_mlp, &da)?;
            hand_over_gradients(cx, mlp)?;
            let da = of_attention.backward(dy)?;
            let dx = attention.backward_by(cx, saved_attention, |attention, cx, saved| {
                attention.backward_around(cx, saved, &da, Around::of_layer(&dm))
            })?;
            return residual.around(dy).sum(&dx);
        }
        let around = residual.around(dy);
        let dr =
            mlp.backward_by(cx, saved_mlp, |mlp, cx, saved| mlp.backward_around(cx, saved, &da, around))?;
        hand_over_gradients(cx, mlp)?;
        let (da, around) = (of_attention.backward(&dr)?, residual.around(&dr));
        attention.backward_by(cx, saved_attention, |attention, cx, saved| {
            attention.backward_around(cx, saved, &da, around)
        })
    }
}

impl Block for TransformerLayer {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        self.evaluated(cx, x, info, cache)
    }

    fn kv_heads(&self) -> [usize; 2] {
        self.attention.inner.kv_heads()
    }
}

impl Module for TransformerLayer {
    type Saved = TransformerLayerSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, TransformerLayerSaved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, TransformerLayerSaved)> {
        cx.attempt(|cx| {
            self.attention.inner.check_input(&self.path, x, info)?;
            // Before the layer runs: what it draws from there on is drawn again.
            let snapshot = (self.recompute == RecomputeLevel::Block).then(|| cx.snapshot());
            let (y, parts) = self.forward_parts(cx, x, info, None)?;
            let saved = match snapshot {
                Some(snapshot) => {
                    let saved = RecomputeSaved::new(x.clone(), info.clone(), snapshot);
                    Saved::Again { saved, output: parts.output }
                }
                None => Saved::Stored(parts),
            };
            Ok((y, TransformerLayerSaved(saved)))
        })
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: TransformerLayerSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let output = match &saved.0 {
                Saved::Stored(parts) => &parts.output,
                Saved::Again { output, .. } => output,
            };
            output.check(dy)?;
            output.expect_layer(&self.path)?;
            let parts = match saved.0 {
                Saved::Stored(parts) => parts,
                Saved::Again { saved, .. } => {
                    saved.run(cx, |cx, x, info| Ok(self.forward_parts(cx, x, info, None)?.1))?
                }
            };
            self.backward_parts(cx, parts, dy)
        })
    }
}
