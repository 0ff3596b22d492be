//! Self-attention with several heads.

use super::attention::{Attention, AttentionPassed, Inputs, Place};
use super::heads::Heads;
use super::operands::Operands;
use super::projection::{Projection, ProjectionSaved};
use super::qk_norm::{self, QkNorm, QkNormSaved};
use super::residual::Around;
use crate::arguments::{Argument, Output};
use crate::fp8_output::in_high_precision;
use crate::kv_cache::CachedLayer;
use crate::{
    AttentionOptions, Block, Error, InitOptions, LayerNormLinear, Linear, LinearOptions, LinearSaved, Module,
    NormOptions, ParallelMode, Parameter, Result, SequenceInfo, TensorParallel, composite, init, parameters,
    precision,
};
use fp8_kernels::ops::{self, AttentionGrads, Diagonal, GradLayout, RopeTable};
use fp8_kernels::{DType, Device, Operand, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`MultiheadAttention`]. `hidden_size` and `attention.num_attention_heads` are required; the other fields have
/// defaults.
///
/// See [`MultiheadAttention`] for an example.
#[derive(Debug, Clone)]
pub struct MultiheadAttentionOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The heads, the mask and the positions. Required, because `num_attention_heads` is. The other defaults
    /// are causal attention without RoPE.
    pub attention: AttentionOptions,
    /// The normalization of the input. Default: `None`, so that `qkv` reads the input unchanged.
    pub input_layernorm: Option<NormOptions>,
    /// Whether `qkv` and `proj` have biases. Default: true.
    pub bias: bool,
    /// Whether `qkv` has a bias. Default: `None`, as `bias` says.
    pub qkv_bias: Option<bool>,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all
    /// weights.
    pub init: InitOptions,
    /// Whether adding `proj`'s bias is left to the caller: see [`LinearOptions::return_bias`]. Default: false.
    pub return_bias: bool,
    /// Whether backward computes the norm's output again
    /// ([`LayerNormLinearOptions::recompute_norm`](crate::LayerNormLinearOptions::recompute_norm)), and quantizes the attention's
    /// output, which is kept anyway, again for `proj` ([`LinearOptions::save_original_input`]). Default: false.
    pub recompute_norm: bool,
    /// The ranks that share the layer: each has some heads of queries, and of keys and values. With sequence parallelism, input and output
    /// are this rank's tokens, `[tokens / ranks, hidden_size]`, and [`SequenceInfo::batch_and_length`] is required. Default: `None`, this
    /// rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for MultiheadAttentionOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            attention: AttentionOptions::default(),
            input_layernorm: None,
            bias: true,
            qkv_bias: None,
            params_dtype: DType::F32,
            init: InitOptions::default(),
            return_bias: false,
            recompute_norm: false,
            tensor_parallel: None,
        }
    }
}

/// Self-attention: `y = softmax(q · kᵀ / √d + mask) · v · wₒᵀ + bₒ`, with `[q, k, v] = norm(x) · wᵀ + b`.
///
/// The two projections, `qkv` and `proj`, run in FP8; the attention between them runs in high precision, with f32 sums, or with
/// [`fp8_dpa`](AttentionOptions::fp8_dpa) in FP8, too. A norm before `qkv` and rotary position embeddings (RoPE) are optional. Input and output are `[batch, seq, hidden_size]`;
/// dtypes are those of [`Linear`].
///
/// With H = `num_attention_heads`, G = `num_gqa_groups` and d = `kv_channels`, the rows of `qkv` are all query heads, then
/// all key heads, then all value heads. Query head i reads key and value head `i / (H / G)`.
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.norm.weight`, with `input_layernorm` | `[hidden_size]` | γ = 1 |
/// | `<path>.norm.bias`, with LayerNorm | `[hidden_size]` | 0 |
/// | `<path>.qkv.weight` | `[(H + 2 · G) · d, hidden_size]` | normal, `init_std` |
/// | `<path>.qkv.bias`, if asked for | `[(H + 2 · G) · d]` | 0 |
/// | `<path>.q_norm.weight`, `<path>.k_norm.weight`, with `qk_norm` | `[d]` | γ = 1 |
/// | `<path>.proj.weight` | `[hidden_size, H · d]` | normal, `output_layer_init_std` |
/// | `<path>.proj.bias`, if asked for | `[hidden_size]` | 0 |
///
/// With `fp8_dpa`, of the layer or of the recipe, the layer has four more slots, each with one scale: `<path>.q.input`, `<path>.k.input`, `<path>.v.input` and
/// `<path>.o.grad_output`. With [`fp8_mha`](AttentionOptions::fp8_mha), `<path>.proj.grad_input` takes the place of the last one, and
/// without RoPE `<path>.qkv.output` that of the first three.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = MultiheadAttentionOptions {
///     hidden_size: 32,
///     attention: AttentionOptions { num_attention_heads: 4, num_gqa_groups: Some(2), rope: true, ..Default::default() },
///     input_layernorm: Some(NormOptions::default()),
///     ..Default::default()
/// };
/// let mut layer = MultiheadAttention::new("attention", options, &device, &mut fp8_nn::rand::rng())?;
/// let qkv = parameters(&layer)[2];
/// assert_eq!((&**qkv.name(), &**qkv.shape()), ("attention.qkv.weight", &[(4 + 2 * 2) * 8, 32][..]));
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 6, 32], DType::F32, &device)?;
/// // Only the first four positions of the second sequence are real.
/// let lengths = Tensor::from_vec(vec![6i32, 4], [2], &device)?;
/// let info = SequenceInfo::padded(&lengths);
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| layer.forward_with_info(cx, &x, &info))?;
/// let dx = scaling.in_backward(|cx| layer.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiheadAttention {
    path: Arc<str>,
    qkv: Projection,
    attention: Attention,
    proj: Linear,
    qk_norm: Option<QkNorm>,
    rope: Option<RopeTable>,
    /// Those of this rank.
    heads: Heads,
    ranks: Option<TensorParallel>,
}

composite!(MultiheadAttention { qkv, qk_norm, attention, proj; skip path, rope, heads, ranks });

/// The values that the backward pass of [`MultiheadAttention`] needs.
#[derive(Debug)]
pub struct MultiheadAttentionSaved {
    qkv: ProjectionSaved,
    qk_norm: Option<QkNormSaved>,
    attention: AttentionPassed,
    info: SequenceInfo,
    proj: LinearSaved,
    output: Output,
}

impl MultiheadAttention {
    /// Returns the projection of queries, keys and values.
    pub fn qkv(&self) -> &Linear {
        self.qkv.linear()
    }

    /// Returns the projection of the output.
    pub fn proj(&self) -> &Linear {
        &self.proj
    }

    /// Returns γ of the norm in front, `[hidden_size]`, if the layer has one.
    pub fn norm_weight(&self) -> Option<&Parameter> {
        self.qkv.normed().map(LayerNormLinear::norm_weight)
    }

    /// Returns β of the norm in front, `[hidden_size]`, if the layer has one and it is a LayerNorm.
    pub fn norm_bias(&self) -> Option<&Parameter> {
        self.qkv.normed().and_then(LayerNormLinear::norm_bias)
    }

    /// Returns γ of the norm of the queries' heads, `[head_dim]`, if the layer has `qk_norm`.
    pub fn q_norm_weight(&self) -> Option<&Parameter> {
        self.qk_norm.as_ref().map(QkNorm::q_weight)
    }

    /// Returns γ of the norm of the keys' heads, `[head_dim]`, if the layer has `qk_norm`.
    pub fn k_norm_weight(&self) -> Option<&Parameter> {
        self.qk_norm.as_ref().map(QkNorm::k_weight)
    }

    /// Creates a layer at `path`, with weights drawn from `rng`: `qkv`'s, then `proj`'s.
    ///
    /// # Errors
    /// A size of 0, heads that do not divide `hidden_size` where `kv_channels` is `None`, groups that do not divide the
    /// heads, an odd head size with RoPE, a softmax scale that is not finite, a dropout outside `[0, 1)`, a
    /// weight that is too large for a tensor, an ε that is not finite and greater than 0, a `params_dtype` that is not a float; heads or
    /// groups that the ranks of `tensor_parallel` cannot share evenly.
    pub fn new(
        path: &str,
        options: MultiheadAttentionOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        Self::with_table(path, options, &mut None, device, rng)
    }

    /// As [`new`](Self::new), with the RoPE table that a layer with the same options before this one left in `table`.
    pub(crate) fn with_table(
        path: &str,
        options: MultiheadAttentionOptions,
        table: &mut Option<RopeTable>,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let MultiheadAttentionOptions { hidden_size, attention, input_layernorm, bias, params_dtype, .. } =
            options;
        let (init, ranks) = (options.init, options.tensor_parallel);
        let heads = Heads::new(path, hidden_size, &attention)?;
        let of_rank = heads.of_rank(path, ranks.as_ref())?;
        let (q_width, qkv_width) = (heads.q_width(), heads.q_width() + heads.kv_width());
        let output_parts = heads.widths().to_vec();
        let head_dim = of_rank.head_dim;
        init::check_parameter(&format!("{path}.qkv"), "weight", [qkv_width, hidden_size])?;
        let (base, scaling) = (attention.rope_base, attention.rope_scaling);
        // Checked first, so that a length for which there is no table is refused before weights are drawn.
        if attention.rope && table.is_none() {
            let length = attention.max_seq_length;
            *table = Some(RopeTable::with_scaling(length, head_dim, base, scaling, device)?);
        }
        let rope = table.as_ref().filter(|_| attention.rope).cloned();
        let qkv = LinearOptions {
            in_features: hidden_size,
            out_features: qkv_width,
            bias: options.qkv_bias.unwrap_or(bias),
            params_dtype,
            init_std: init.init_std,
            tensor_parallel: ranks.clone(),
            output_parts,
            ..Default::default()
        };
        let proj = LinearOptions {
            in_features: q_width,
            out_features: hidden_size,
            bias,
            params_dtype,
            init_std: init.output_layer_init_std,
            return_bias: options.return_bias,
            save_original_input: options.recompute_norm,
            tensor_parallel: ranks.clone(),
            parallel_mode: ParallelMode::Row,
            ..Default::default()
        };
        let norm = input_layernorm.map(|norm| (norm, options.recompute_norm));
        let (qkv_path, proj_path) = (format!("{path}.qkv"), format!("{path}.proj"));
        // RoPE and the norms of heads come between.
        let is_read_as_is = !attention.rope && attention.qk_norm.is_none();
        let outputs = if is_read_as_is { vec![&*qkv_path] } else { vec![] };
        let place = Place { layer: path, slots: path, outputs: &outputs, proj: &proj_path };
        Ok(Self {
            path: path.into(),
            qkv: Projection::new(path, "qkv", norm, qkv, device, rng)?,
            attention: Attention::new(&place, &attention)?.of_rank(ranks.as_ref(), of_rank.heads),
            proj: Linear::new(&proj_path, proj, device, rng)?,
            qk_norm: attention
                .qk_norm
                .map(|norm| QkNorm::new(path, head_dim, norm, params_dtype, ranks.as_ref(), device))
                .transpose()?,
            rope,
            heads: of_rank,
            ranks,
        })
    }

    /// Returns `[batch, seq]`. Errors name the path `layer`: that of this layer or of the block around it.
    pub(crate) fn check_input(&self, layer: &str, x: &Tensor, info: &SequenceInfo) -> Result<[usize; 2]> {
        let weight = self.proj.weight().tensor();
        let [hidden, _] = weight.shape().matrix();
        let longest = self.rope.as_ref().map(|table| table.cos().shape().matrix()[0]);
        let fits = |seq| longest.is_none_or(|longest| info.longest(seq) <= longest);
        let tokens = self.tokens(layer, info, hidden)?;
        let sizes = match (&**x.shape(), tokens) {
            (&[batch, seq, last], None) if last == hidden && fits(seq) => Some([batch, seq]),
            (&[tokens, last], Some((of_rank, [batch, seq])))
                if tokens == of_rank && last == hidden && fits(seq) =>
            {
                Some([batch, seq])
            }
            _ => None,
        };
        let expected = || {
            let limit = longest.map(|longest| format!(" with seq at most {longest}, RoPE's max_seq_length"));
            let limit = limit.unwrap_or_default();
            match tokens {
                None => format!("[batch, seq, {hidden}]{limit}"),
                Some((of_rank, [batch, seq])) => {
                    format!("[{of_rank}, {hidden}], this rank's tokens of [{batch}, {seq}, {hidden}]{limit}")
                }
            }
        };
        let argument = Argument::new(layer, "input", x).float()?.on(weight.device())?;
        let sizes = argument.sizes(sizes, expected)?;
        info.check(layer, sizes, weight.device())?;
        Ok(sizes)
    }

    /// Returns the number of this rank's tokens and `[batch, seq]`, if ranks have tokens of their own.
    fn tokens(&self, layer: &str, info: &SequenceInfo, hidden: usize) -> Result<Option<(usize, [usize; 2])>> {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.is_sequence_parallel()) else {
            return Ok(None);
        };
        let sizes @ [batch, seq] = info.batch_and_length.ok_or_else(|| Error::Option {
            part: layer.to_owned(),
            option: "batch_and_length",
            value: "None".to_owned(),
            remedy: "ranks have parts of the tokens (sequence parallelism): set SequenceInfo::batch_and_length to [batch, seq]"
                .to_owned(),
        })?;
        let tokens = batch.saturating_mul(seq);
        Ok(Some((ranks.tokens_of_rank(layer, tokens, hidden)?, sizes)))
    }

    /// Returns the output, the output of the norm, and what [`backward_with_layernorm_output`] takes: see
    /// [`LayerNormLinear::forward_with_layernorm_output`](crate::LayerNormLinear::forward_with_layernorm_output).
    ///
    /// [`backward_with_layernorm_output`]: Self::backward_with_layernorm_output
    ///
    /// # Errors
    /// Those of [`forward_with_info`](Module::forward_with_info); a layer without `input_layernorm`.
    pub fn forward_with_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Tensor, MultiheadAttentionSaved)> {
        self.cached_with_layernorm_output(cx, x, info, None, None)
    }

    /// As [`forward_with_layernorm_output`](Self::forward_with_layernorm_output), behind a cache if there is one: see
    /// [`cached`](Self::cached). With `sum`, the output of the norm is added to the output, which has this dtype then.
    pub(crate) fn cached_with_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
        sum: Option<DType>,
    ) -> Result<(Tensor, Tensor, MultiheadAttentionSaved)> {
        cx.attempt(|cx| {
            let entered = self.enter(cx, x, info)?;
            let output = self.attention.output(0).filter(|_| cache.is_none());
            let (qkv, normed, qkv_saved) =
                self.qkv.forward_with_layernorm_output(cx, &self.path, x, output)?;
            let residual = sum.map(|dtype| ops::cast(&normed, dtype)).transpose()?;
            let residual = residual.as_ref();
            let (y, saved) = self.finish(cx, entered, qkv, qkv_saved, info, cache, residual)?;
            Ok((y, normed, saved))
        })
    }

    /// Returns the output and what backward needs. With a cache, keys and values are appended to it, and attention, which must be
    /// causal, reads all of it. What it reads then is in high precision until it quantizes it itself, and a backward pass would
    /// find the cache in `saved`. With `residual`, this is added to the output, which has its dtype then.
    pub(crate) fn cached(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, MultiheadAttentionSaved)> {
        cx.attempt(|cx| {
            let entered = self.enter(cx, x, info)?;
            let output = self.attention.output(0).filter(|_| cache.is_none());
            let (qkv, qkv_saved) = self.qkv.forward(cx, x, output)?;
            self.finish(cx, entered, qkv, qkv_saved, info, cache, residual)
        })
    }

    /// Runs backward for the gradients of both results of
    /// [`forward_with_layernorm_output`](Self::forward_with_layernorm_output): `dy` of the output and `dnormed` of the norm's
    /// output. Returns the gradient of the input.
    ///
    /// # Errors
    /// Those of [`backward`](Module::backward); a `dnormed` that has not the input's shape. No gradient has changed then.
    pub fn backward_with_layernorm_output(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
        dnormed: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            saved.output.check_named("dnormed", dnormed)?;
            self.backward_both(cx, saved, dy, Some(dnormed), None)
        })
    }

    /// Runs [`backward`](Module::backward) with a residual connection around the layer.
    pub(crate) fn backward_around(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
        around: Around<'_>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| self.backward_both(cx, saved, dy, None, Some(around)))
    }

    /// Checks the input before the parts compute anything, so that an error names this layer. Returns `[batch, seq]` and the
    /// dtype that the layer computes in.
    fn enter(&self, cx: &Forward<'_>, x: &Tensor, info: &SequenceInfo) -> Result<([usize; 2], DType)> {
        let sizes = self.check_input(&self.path, x, info)?;
        Ok((sizes, precision::compute_dtype(cx, &self.path, x.dtype(), parameters(self))?))
    }

    /// Computes attention and `proj`, and adds the residual.
    #[expect(clippy::too_many_arguments, reason = "the rest of both forward passes")]
    fn finish(
        &self,
        cx: &mut Forward<'_>,
        ([batch, seq], dtype): ([usize; 2], DType),
        qkv: Operand,
        qkv_saved: ProjectionSaved,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, MultiheadAttentionSaved)> {
        let heads = self.heads;
        let in_tokens = [batch, seq, heads.q_width() + heads.kv_width()];
        let (mut qk_norm, mut diagonal) = (None, None);
        let inputs = match qkv {
            Operand::Fp8(codes) => Inputs::Fp8(Operands::Qkv(codes.reshape(in_tokens)?, heads)),
            Operand::High(output) => {
                let qkv = output.reshape(in_tokens)?;
                // What is rotated in place has one holder.
                drop(output);
                let operands = match &self.qk_norm {
                    Some(norm) => {
                        let [q, k, v] = heads.split_qkv(&qkv)?;
                        let (q, k, saved) = qk_norm::forward(norm, q, k)?;
                        qk_norm = Some(saved);
                        Operands::Three([q, k, v])
                    }
                    None => Operands::Qkv(qkv, heads),
                };
                let operands = self.rotate(operands, info)?;
                Inputs::High(match cache {
                    Some(cache) => {
                        self.expect_causal()?;
                        diagonal = Some(Diagonal::BottomRight);
                        let [_, k, v] = operands.heads()?;
                        let (k, v) = cache.append(&self.path, k, v)?;
                        operands.with_cached([k, v])
                    }
                    None => operands,
                })
            }
        };
        let (o, attention) = self.attention.forward_at(cx, inputs, &info.sequences, dtype, diagonal)?;
        let o = o.reshape([batch, seq, heads.q_width()])?;
        let (y, proj) = self.proj.forward_to(cx, &o, residual.into())?;
        let y = in_high_precision(y)?;
        let (info, output) = (info.clone(), Output::of(&self.path, &y));
        let saved = MultiheadAttentionSaved { qkv: qkv_saved, qk_norm, attention, info, proj, output };
        Ok((y, saved))
    }

    /// Applies RoPE, if the layer has it, where the queries and keys are.
    fn rotate(&self, operands: Operands<Tensor>, info: &SequenceInfo) -> Result<Operands<Tensor>> {
        let Some(table) = &self.rope else { return Ok(operands) };
        let Heads { heads, groups, .. } = self.heads;
        let rotate = |x: &mut Tensor, heads| ops::rope_in_place(x, heads, table, info.rotary(), &self.path);
        Ok(match operands {
            Operands::Qkv(mut qkv, sizes) => {
                rotate(&mut qkv, heads + groups)?;
                Operands::Qkv(qkv, sizes)
            }
            Operands::Three([mut q, mut k, v]) => {
                rotate(&mut q, heads)?;
                rotate(&mut k, groups)?;
                Operands::Three([q, k, v])
            }
            // Those of other layers.
            operands @ (Operands::QueriesAndKv(..) | Operands::Cached(..)) => operands,
        })
    }

    /// Refuses a cache for an attention whose queries see keys that are not there yet.
    fn expect_causal(&self) -> Result<()> {
        if self.attention.is_causal() {
            return Ok(());
        }
        Err(Error::Option {
            part: self.path.to_string(),
            option: "kv_cache",
            value: "a cache".to_owned(),
            remedy: "its queries see keys to their right, which are not known yet: create the layer with causal = true"
                .to_owned(),
        })
    }

    fn backward_both(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
        dnormed: Option<&Tensor>,
        around: Option<Around<'_>>,
    ) -> Result<Tensor> {
        saved.output.check(dy)?;
        let MultiheadAttentionSaved { qkv, qk_norm, attention, info, proj, .. } = saved;
        let d_o = self.proj.backward_to(cx, proj, dy, self.attention.grad_input(&attention))?;
        // The norms of heads read the gradients of queries and keys each by itself.
        let layout = if self.qk_norm.is_some() { GradLayout::Separate } else { GradLayout::Qkv };
        let grads = self.attention.backward(cx, attention, d_o, &info.sequences, layout)?;
        let back = |x: &mut Tensor, heads| match &self.rope {
            Some(table) => ops::rope_backward_in_place(x, heads, table, info.rotary(), &self.path),
            None => Ok(()),
        };
        let Heads { heads, groups, .. } = self.heads;
        let dqkv = match grads {
            AttentionGrads::Qkv(mut dqkv) => {
                back(&mut dqkv, heads + groups)?;
                dqkv
            }
            AttentionGrads::Separate { mut dq, mut dk, dv } => {
                back(&mut dq, heads)?;
                back(&mut dk, groups)?;
                let (dq, dk) = qk_norm::backward(cx, self.qk_norm.as_mut(), qk_norm.as_ref(), dq, dk)?;
                ops::concat(&[&in_tokens(&dq)?, &in_tokens(&dk)?, &in_tokens(&dv)?])?
            }
            AttentionGrads::Kv { dq, dkv } => ops::concat(&[&in_tokens(&dq)?, &dkv])?,
        };
        let dqkv = match **dqkv.shape() {
            [batch, seq, features]
                if self.ranks.as_ref().is_some_and(TensorParallel::is_sequence_parallel) =>
            {
                dqkv.reshape([batch * seq, features])?
            }
            _ => dqkv,
        };
        self.qkv.backward(cx, qkv, &dqkv, dnormed, around)
    }
}

/// Returns `[batch, seq, heads, head_dim]` as `[batch, seq, features]`.
fn in_tokens(x: &Tensor) -> Result<Tensor> {
    let &[batch, seq, heads, head_dim] = &**x.shape() else { return Ok(x.clone()) };
    Ok(x.reshape([batch, seq, heads * head_dim])?)
}

/// For blocks of your own around an attention, which pass the cache on to it. The attention itself has no residual connection.
impl Block for MultiheadAttention {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        Ok(self.cached(cx, x, info, cache, None)?.0)
    }

    fn kv_heads(&self) -> [usize; 2] {
        [self.heads.groups, self.heads.head_dim]
    }
}

impl Module for MultiheadAttention {
    type Saved = MultiheadAttentionSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, MultiheadAttentionSaved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, MultiheadAttentionSaved)> {
        self.cached(cx, x, info, None, None)
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| self.backward_both(cx, saved, dy, None, None))
    }
}
