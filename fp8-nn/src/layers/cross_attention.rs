//! Attention from one sequence to another.

use super::attention::{Attention, AttentionPassed, Inputs, Place};
use super::heads::Heads;
use super::operands::Operands;
use super::projection::{Projection, ProjectionSaved};
use super::qk_norm::{self, QkNorm, QkNormSaved};
use super::residual::Around;
use crate::arguments::{Argument, Output};
use crate::fp8_output::in_high_precision;
use crate::sequence_info::check_sequences;
use crate::{
    AttentionOptions, Error, InitOptions, Linear, LinearOptions, LinearSaved, Module, NormOptions, Result,
    composite, init, parameters, precision,
};
use fp8_kernels::ops::{self, AttentionGrads, GradLayout, Sequences};
use fp8_kernels::{DType, Device, Operand, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`CrossAttention`]. `hidden_size` and `attention.num_attention_heads` are required; the other fields have defaults.
///
/// See [`CrossAttention`] for an example.
#[derive(Debug, Clone)]
pub struct CrossAttentionOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The last dimension of the encoder's output, which keys and values are computed from. Default: `None`, which is
    /// `hidden_size`.
    pub encoder_hidden_size: Option<usize>,
    /// The heads and the mask. Required, because `num_attention_heads` is. Default: every query sees every key. `rope` is refused.
    pub attention: AttentionOptions,
    /// The normalization of the input. The encoder's output is read as it is. Default: `None`.
    pub input_layernorm: Option<NormOptions>,
    /// Whether `q`, `kv` and `proj` have biases. Default: true.
    pub bias: bool,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all weights.
    pub init: InitOptions,
}

impl Default for CrossAttentionOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            encoder_hidden_size: None,
            attention: AttentionOptions { causal: false, ..Default::default() },
            input_layernorm: None,
            bias: true,
            params_dtype: DType::F32,
            init: InitOptions::default(),
        }
    }
}

/// Cross attention: `y = softmax(q · kᵀ / √d + mask) · v · wₒᵀ + bₒ`, with `q = norm(x) · w_qᵀ + b_q` and
/// `[k, v] = e · w_kvᵀ + b_kv`, where `e` is the output of an encoder.
///
/// The three projections run in FP8; the attention between them runs in high precision, with f32 sums, or with `fp8_dpa` in FP8. The input is
/// `[batch, queries, hidden_size]`, the encoder's output `[batch, keys, encoder_hidden_size]`, the output has the input's shape.
/// Dtypes are those of [`Linear`]. Transformer Engine's `MultiheadAttention` does this with `attention_type="cross"`.
///
/// With H = `num_attention_heads`, G = `num_gqa_groups` and d = `kv_channels`:
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.norm.*`, with `input_layernorm` | `[hidden_size]` | γ = 1, β = 0 |
/// | `<path>.q.weight` | `[H · d, hidden_size]` | normal, `init_std` |
/// | `<path>.kv.weight` | `[2 · G · d, encoder_hidden_size]`, keys first | normal, `init_std` |
/// | `<path>.proj.weight` | `[hidden_size, H · d]` | normal, `output_layer_init_std` |
/// | `<path>.q_norm.weight`, `<path>.k_norm.weight`, with `qk_norm` | `[d]` | γ = 1 |
/// | `.bias` of each, if asked for | its rows | 0 |
///
/// With `fp8_dpa` the layer has four more slots, each with one scale: `<path>.dpa.q.input`, `<path>.dpa.k.input`,
/// `<path>.dpa.v.input` and `<path>.dpa.o.grad_output`. With `fp8_mha` these are `<path>.q.output`, `<path>.kv.output` and
/// `<path>.proj.grad_input`.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = CrossAttentionOptions {
///     hidden_size: 32,
///     encoder_hidden_size: Some(48),
///     attention: AttentionOptions { num_attention_heads: 4, causal: false, ..Default::default() },
///     ..Default::default()
/// };
/// let mut layer = CrossAttention::new("cross", options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 3, 32], DType::F32, &device)?;
/// let encoder_output = Tensor::full(0.25, [2, 7, 48], DType::F32, &device)?;
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| layer.forward(cx, &x, &encoder_output, &Sequences::Full))?;
/// let (dx, de) = scaling.in_backward(|cx| layer.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape(), de.shape()), (x.shape(), x.shape(), encoder_output.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct CrossAttention {
    path: Arc<str>,
    q: Projection,
    kv: Linear,
    proj: Linear,
    qk_norm: Option<QkNorm>,
    attention: Attention,
    heads: Heads,
}

composite!(CrossAttention { q, kv, qk_norm, attention, proj; skip path, heads });

/// The values that the backward pass of [`CrossAttention`] needs.
#[derive(Debug)]
pub struct CrossAttentionSaved {
    q_saved: ProjectionSaved,
    kv_saved: LinearSaved,
    qk_norm: Option<QkNormSaved>,
    attention: AttentionPassed,
    sequences: Sequences,
    proj: LinearSaved,
    output: Output,
}

impl CrossAttention {
    /// Creates a layer at `path`, with weights drawn from `rng`: `q`'s, `kv`'s, then `proj`'s.
    ///
    /// # Errors
    /// `rope`; otherwise those of [`MultiheadAttention::new`](crate::MultiheadAttention::new).
    pub fn new(
        path: &str,
        options: CrossAttentionOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let CrossAttentionOptions {
            hidden_size, attention, input_layernorm, bias, params_dtype, init, ..
        } = options;
        if attention.rope {
            let (layer, value) = (path.to_owned(), "true".to_owned());
            let remedy =
                "queries and keys of cross attention have no common positions: expected false".to_owned();
            return Err(Error::Option { part: layer, option: "rope", value, remedy });
        }
        let heads = Heads::new(path, hidden_size, &attention)?;
        let encoder_hidden_size = options.encoder_hidden_size.unwrap_or(hidden_size);
        init::check_positive(path, &[("encoder_hidden_size", encoder_hidden_size)])?;
        init::check_parameter(&format!("{path}.q"), "weight", [heads.q_width(), hidden_size])?;
        init::check_parameter(&format!("{path}.kv"), "weight", [heads.kv_width(), encoder_hidden_size])?;
        let linear = |in_features, out_features, init_std| LinearOptions {
            in_features,
            out_features,
            bias,
            params_dtype,
            init_std,
            ..Default::default()
        };
        let q = linear(hidden_size, heads.q_width(), init.init_std);
        let kv = linear(encoder_hidden_size, heads.kv_width(), init.init_std);
        let proj = linear(heads.q_width(), hidden_size, init.output_layer_init_std);
        let norm = input_layernorm.map(|norm| (norm, false));
        let of = |name: &str| format!("{path}.{name}");
        // `<path>.q.input` is a slot of the projection.
        let [slots, q_path, kv_path, proj_path] = [of("dpa"), of("q"), of("kv"), of("proj")];
        // The norms of heads come between.
        let outputs = if attention.qk_norm.is_none() { vec![&*q_path, &*kv_path] } else { vec![] };
        let place = Place { layer: path, slots: &slots, outputs: &outputs, proj: &proj_path };
        Ok(Self {
            path: path.into(),
            q: Projection::new(path, "q", norm, q, device, rng)?,
            kv: Linear::new(&format!("{path}.kv"), kv, device, rng)?,
            proj: Linear::new(&format!("{path}.proj"), proj, device, rng)?,
            qk_norm: attention
                .qk_norm
                .map(|norm| QkNorm::new(path, heads.head_dim, norm, params_dtype, None, device))
                .transpose()?,
            attention: Attention::new(&place, &attention)?,
            heads,
        })
    }

    /// Returns the output for an input, an encoder's output and what is known of their sequences, and the value that
    /// [`backward`](Self::backward) takes.
    ///
    /// # Errors
    /// An input or encoder's output whose shape, dtype or device does not fit; `sequences` that do not fit them; a layer that the
    /// scope's `Scaling` does not know.
    pub fn forward(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        encoder_output: &Tensor,
        sequences: &Sequences,
    ) -> Result<(Tensor, CrossAttentionSaved)> {
        self.forward_adding(cx, x, encoder_output, sequences, None)
    }

    /// Runs [`forward`](Self::forward). With `residual`, this is added to the output, which has its dtype then.
    pub(crate) fn forward_adding(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        encoder_output: &Tensor,
        sequences: &Sequences,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, CrossAttentionSaved)> {
        cx.attempt(|cx| {
            let [batch, queries, _] = self.check_inputs(&self.path, x, encoder_output, sequences)?;
            precision::compute_dtype(cx, &self.path, encoder_output.dtype(), parameters(self))?;
            let dtype = precision::compute_dtype(cx, &self.path, x.dtype(), parameters(self))?;
            let sizes @ Heads { heads, head_dim, .. } = self.heads;
            let (q, q_saved) = self.q.forward(cx, x, self.attention.output(0))?;
            let (kv, kv_saved) = self.kv.forward_to(cx, encoder_output, self.attention.output(1).into())?;
            let of_queries = [batch, queries, heads, head_dim];
            let mut qk_norm = None;
            let inputs = match (q, kv) {
                (Operand::Fp8(q), Operand::Fp8(kv)) => {
                    Inputs::Fp8(Operands::QueriesAndKv(q.reshape(of_queries)?, kv, sizes))
                }
                (q, kv) => {
                    let (q, kv) = (q.dequantize(dtype)?.reshape(of_queries)?, kv.dequantize(dtype)?);
                    Inputs::High(match &self.qk_norm {
                        Some(norm) => {
                            let [k, v] = sizes.split_kv(&kv)?;
                            let (q, k, saved) = qk_norm::forward(norm, q, k)?;
                            qk_norm = Some(saved);
                            Operands::Three([q, k, v])
                        }
                        None => Operands::QueriesAndKv(q, kv, sizes),
                    })
                }
            };
            let (o, attention) = self.attention.forward(cx, inputs, sequences, dtype)?;
            let o = o.reshape([batch, queries, heads * head_dim])?;
            let (y, proj) = self.proj.forward_to(cx, &o, residual.into())?;
            let y = in_high_precision(y)?;
            let (sequences, output) = (sequences.clone(), Output::of(&self.path, &y));
            Ok((y, CrossAttentionSaved { q_saved, kv_saved, qk_norm, attention, sequences, proj, output }))
        })
    }

    /// Returns the gradients of the input and of the encoder's output, and adds those of the parameters to their `main_grad`.
    ///
    /// # Errors
    /// Those of [`Module::backward`].
    pub fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: CrossAttentionSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        self.backward_around(cx, saved, dy, None)
    }

    /// Runs [`backward`](Self::backward) with a residual connection around the layer.
    pub(crate) fn backward_around(
        &mut self,
        cx: &mut Backward<'_>,
        saved: CrossAttentionSaved,
        dy: &Tensor,
        around: Option<Around<'_>>,
    ) -> Result<(Tensor, Tensor)> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            let CrossAttentionSaved { q_saved, kv_saved, qk_norm, attention, sequences, proj, .. } = saved;
            let d_o = self.proj.backward_to(cx, proj, dy, self.attention.grad_input(&attention))?;
            // The norms of heads read the gradients of queries and keys each by itself.
            let layout = if self.qk_norm.is_some() { GradLayout::Separate } else { GradLayout::Kv };
            let flat = |t: &Tensor| {
                let &[batch, seq, heads, d] = &**t.shape() else { return Ok(t.clone()) };
                t.reshape([batch, seq, heads * d])
            };
            let (dq, dkv) = match self.attention.backward(cx, attention, d_o, &sequences, layout)? {
                AttentionGrads::Kv { dq, dkv } => (dq, dkv),
                AttentionGrads::Separate { dq, dk, dv } => {
                    let (dq, dk) = qk_norm::backward(cx, self.qk_norm.as_mut(), qk_norm.as_ref(), dq, dk)?;
                    (dq, ops::concat(&[&flat(&dk)?, &flat(&dv)?])?)
                }
                AttentionGrads::Qkv(dqkv) => {
                    let [dq, dk, dv] = self.heads.split_qkv(&dqkv)?;
                    (dq, ops::concat(&[&flat(&dk)?, &flat(&dv)?])?)
                }
            };
            let de = self.kv.backward(cx, kv_saved, &dkv)?;
            let dx = self.q.backward(cx, q_saved, &flat(&dq)?, None, around)?;
            Ok((dx, de))
        })
    }

    /// Returns `[batch, queries, keys]`. Errors name the path `layer`: that of this layer or of the block around it.
    pub(crate) fn check_inputs(
        &self,
        layer: &str,
        x: &Tensor,
        encoder_output: &Tensor,
        sequences: &Sequences,
    ) -> Result<[usize; 3]> {
        let (device, hidden) = (self.proj.weight().device(), self.proj.weight().shape().matrix()[0]);
        let encoder_hidden = self.kv.weight().shape().last_dim();
        let argument = Argument::new(layer, "input", x).float()?.on(device)?;
        let sizes = match **x.shape() {
            [batch, queries, last] if last == hidden => Some([batch, queries]),
            _ => None,
        };
        let [batch, queries] = argument.sizes(sizes, || format!("[batch, queries, {hidden}]"))?;
        let argument = Argument::new(layer, "encoder_output", encoder_output).float()?.on(device)?;
        let keys = match **encoder_output.shape() {
            [entries, keys, last] if (entries, last) == (batch, encoder_hidden) => Some(keys),
            _ => None,
        };
        let keys =
            argument.sizes(keys, || format!("[{batch}, keys, {encoder_hidden}], the input's batch first"))?;
        check_sequences(sequences, layer, [batch, queries, keys], device)?;
        Ok([batch, queries, keys])
    }
}
