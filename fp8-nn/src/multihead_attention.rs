//! Self-attention with several heads.

use crate::arguments::{Argument, Output};
use crate::dropout::Rate;
use crate::{
    AttentionOptions, Error, InitOptions, Layer, LayerNormLinear, LayerNormLinearOptions,
    LayerNormLinearSaved, Linear, LinearOptions, LinearSaved, Module, NormOptions, Parameter, Result,
    SequenceInfo, composite, init, parameters, precision,
};
use fp8_kernels::ops::{self, AttentionSaved, Dropout, RopeTable};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward, SlotName, Slots};
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
    /// The dtype of the parameters, f32 or bf16. Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all
    /// weights.
    pub init: InitOptions,
}

impl Default for MultiheadAttentionOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            attention: AttentionOptions::default(),
            input_layernorm: None,
            bias: true,
            params_dtype: DType::F32,
            init: InitOptions::default(),
        }
    }
}

/// Self-attention: `y = softmax(q · kᵀ / √d + mask) · v · wₒᵀ + bₒ`, with `[q, k, v] = norm(x) · wᵀ + b`.
///
/// The two projections, `qkv` and `proj`, run in FP8; the attention between them runs in high precision, with f32 sums. A
/// norm before `qkv` and rotary position embeddings (RoPE) are optional. Input and output are `[batch, seq, hidden_size]`;
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
/// | `<path>.proj.weight` | `[hidden_size, H · d]` | normal, `output_layer_init_std` |
/// | `<path>.proj.bias`, if asked for | `[hidden_size]` | 0 |
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
/// assert_eq!((&**qkv.name(), &**qkv.tensor().shape()), ("attention.qkv.weight", &[(4 + 2 * 2) * 8, 32][..]));
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [2, 6, 32], DType::F32, &device)?;
/// // Only the first four positions of the second sequence are real.
/// let lengths = Tensor::from_vec(vec![6i32, 4], [2], &device)?;
/// let info = SequenceInfo::padded(&lengths);
/// let (y, saved) = scaling.autocast_with(&recipe, |cx| layer.forward_with(cx, &x, &info))?;
/// let dx = scaling.backward_with(|cx| layer.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiheadAttention {
    path: Arc<str>,
    qkv: Qkv,
    proj: Linear,
    rope: Option<RopeTable>,
    heads: usize,
    groups: usize,
    head_dim: usize,
    options: ops::AttentionOptions<'static>,
    dropout: Rate,
}

composite!(MultiheadAttention { qkv, proj });

/// The values that the backward pass of [`MultiheadAttention`] needs.
#[derive(Debug)]
pub struct MultiheadAttentionSaved {
    qkv: QkvSaved,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    attention: AttentionSaved,
    dropout: Option<Dropout>,
    info: SequenceInfo,
    proj: LinearSaved,
    output: Output,
}

/// The projection to queries, keys and values, with or without a norm in front.
#[expect(clippy::large_enum_variant, reason = "one a layer, in the layer's own memory")]
#[derive(Debug)]
enum Qkv {
    Plain(Linear),
    Normed(LayerNormLinear),
}

/// The values that the backward pass of the projection needs.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
enum QkvSaved {
    Plain(LinearSaved),
    Normed(LayerNormLinearSaved),
}

impl Qkv {
    /// Parameters are `<path>.norm.*`, with a norm, and `<path>.qkv.*`.
    fn new(
        path: &str,
        norm: Option<NormOptions>,
        options: LinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let qkv_path = format!("{path}.qkv");
        let Some(norm) = norm else {
            return Linear::new(&qkv_path, options, device, rng).map(Self::Plain);
        };
        let LinearOptions { in_features, out_features, bias, params_dtype, init_std } = options;
        let options =
            LayerNormLinearOptions { in_features, out_features, bias, norm, params_dtype, init_std };
        let norm_path = format!("{path}.norm");
        LayerNormLinear::with_paths(&norm_path, &qkv_path, options, device, rng).map(Self::Normed)
    }

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, QkvSaved)> {
        Ok(match self {
            Self::Plain(linear) => {
                let (y, saved) = linear.forward(cx, x)?;
                (y, QkvSaved::Plain(saved))
            }
            Self::Normed(linear) => {
                let (y, saved) = linear.forward(cx, x)?;
                (y, QkvSaved::Normed(saved))
            }
        })
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: QkvSaved, dy: &Tensor) -> Result<Tensor> {
        match (self, saved) {
            (Self::Plain(linear), QkvSaved::Plain(saved)) => linear.backward(cx, saved, dy),
            (Self::Normed(linear), QkvSaved::Normed(saved)) => linear.backward(cx, saved, dy),
            (Self::Plain(linear), QkvSaved::Normed(_)) => Err(another_layer(linear, "with a norm before it")),
            (Self::Normed(layer), QkvSaved::Plain(_)) => {
                Err(another_layer(&layer.linear, "without a norm before it"))
            }
        }
    }

    fn layer(&self) -> &dyn Layer {
        match self {
            Self::Plain(linear) => linear,
            Self::Normed(linear) => linear,
        }
    }

    fn layer_mut(&mut self) -> &mut dyn Layer {
        match self {
            Self::Plain(linear) => linear,
            Self::Normed(linear) => linear,
        }
    }
}

fn another_layer(linear: &Linear, found: &str) -> Error {
    let (layer, found) = (linear.path().to_string(), format!("a layer {found}"));
    fp8_recipe::Error::Origin { layer, found }.into()
}

impl Slots for Qkv {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.layer().slots(f);
    }
}

impl Layer for Qkv {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        self.layer().visit(f);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        self.layer_mut().visit_mut(f);
    }
}

impl MultiheadAttention {
    /// Creates a layer at `path`, with weights drawn from `rng`: `qkv`'s, then `proj`'s.
    ///
    /// # Errors
    /// A size of 0, heads that do not divide `hidden_size` where `kv_channels` is `None`, groups that do not divide the
    /// heads, an odd head size with RoPE, a softmax scale that is not finite, a dropout outside `[0, 1)`, a weight that is too large for a tensor, an ε that is not finite and greater than
    /// 0, a `params_dtype` other than f32 and bf16.
    pub fn new(
        path: &str,
        options: MultiheadAttentionOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let MultiheadAttentionOptions { hidden_size, attention, input_layernorm, bias, params_dtype, init } =
            options;
        let heads = attention.num_attention_heads;
        let groups = attention.num_gqa_groups.unwrap_or(heads);
        init::check_positive(
            path,
            &[("hidden_size", hidden_size), ("num_attention_heads", heads), ("num_gqa_groups", groups)],
        )?;
        let refuse = |option, value: usize, remedy: String| {
            Err(Error::Option { layer: path.to_owned(), option, value: value.to_string(), remedy })
        };
        if attention.kv_channels.is_none() && !hidden_size.is_multiple_of(heads) {
            let remedy = format!("expected a divisor of hidden_size {hidden_size}, or kv_channels given");
            return refuse("num_attention_heads", heads, remedy);
        }
        if !heads.is_multiple_of(groups) {
            return refuse("num_gqa_groups", groups, format!("expected a divisor of the {heads} heads"));
        }
        let head_dim = attention.kv_channels.unwrap_or(hidden_size / heads);
        init::check_positive(path, &[("kv_channels", head_dim)])?;
        let width = |heads: usize| heads.checked_mul(head_dim);
        let qkv_width = groups.checked_mul(2).and_then(|both| heads.checked_add(both)).and_then(width);
        let (Some(q_width), Some(qkv_width)) = (width(heads), qkv_width) else {
            return refuse(
                "kv_channels",
                head_dim,
                format!("{heads} heads of this size do not fit into memory"),
            );
        };
        init::check_parameter(&format!("{path}.qkv"), "weight", [qkv_width, hidden_size])?;
        if let Some(scale) = attention.softmax_scale.filter(|scale| !scale.is_finite()) {
            let (layer, value) = (path.to_owned(), scale.to_string());
            let remedy = "expected a finite number, or None for 1/√(size of a head)".to_owned();
            return Err(Error::Option { layer, option: "softmax_scale", value, remedy });
        }
        let dropout = Rate::new(path, "attention_dropout", attention.attention_dropout)?;
        let rope = || RopeTable::new(attention.max_seq_length, head_dim, attention.rope_base, device);
        // Checked first, so that a length for which there is no table is refused before weights are drawn.
        let rope = attention.rope.then(rope).transpose()?;
        let qkv = LinearOptions {
            in_features: hidden_size,
            out_features: qkv_width,
            bias,
            params_dtype,
            init_std: init.init_std,
        };
        let proj = LinearOptions {
            in_features: q_width,
            out_features: hidden_size,
            bias,
            params_dtype,
            init_std: init.output_layer_init_std,
        };
        Ok(Self {
            path: path.into(),
            qkv: Qkv::new(path, input_layernorm, qkv, device, rng)?,
            proj: Linear::new(&format!("{path}.proj"), proj, device, rng)?,
            rope,
            heads,
            groups,
            head_dim,
            options: ops::AttentionOptions {
                causal: attention.causal,
                window: attention.window,
                softmax_scale: attention.softmax_scale,
                ..Default::default()
            },
            dropout,
        })
    }

    /// Returns `[batch, seq]`. Errors name the path `layer`: that of this layer or of the block around it.
    pub(crate) fn check_input(&self, layer: &str, x: &Tensor, info: &SequenceInfo) -> Result<[usize; 2]> {
        let weight = self.proj.weight().tensor();
        let [hidden, _] = weight.shape().matrix();
        let longest = self.rope.as_ref().map(|table| table.cos().shape().matrix()[0]);
        let fits = |seq| longest.is_none_or(|longest| info.longest(seq) <= longest);
        let sizes = match **x.shape() {
            [batch, seq, last] if last == hidden && fits(seq) => Some([batch, seq]),
            _ => None,
        };
        let expected = || {
            let limit = longest.map(|longest| format!(" with seq at most {longest}, RoPE's max_seq_length"));
            format!("[batch, seq, {hidden}]{}", limit.unwrap_or_default())
        };
        let argument = Argument::new(layer, "input", x).float()?.on(weight.device())?;
        let sizes = argument.sizes(sizes, expected)?;
        info.check(layer, sizes, weight.device())?;
        Ok(sizes)
    }

    fn inconsistent(&self, found: String) -> Error {
        Error::Option {
            layer: self.path.to_string(),
            option: "qkv",
            value: found,
            remedy: "expected query, key and value".to_owned(),
        }
    }
}

impl Module for MultiheadAttention {
    type Saved = MultiheadAttentionSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, MultiheadAttentionSaved)> {
        self.forward_with(cx, x, &SequenceInfo::default())
    }

    fn forward_with(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, MultiheadAttentionSaved)> {
        cx.attempt(|cx| {
            let [batch, seq] = self.check_input(&self.path, x, info)?;
            // Checked before the parts compute anything, so that an error names this layer.
            precision::compute_dtype(cx, &self.path, x.dtype(), parameters(self))?;
            let (qkv, qkv_saved) = self.qkv.forward(cx, x)?;
            let sizes = [self.heads, self.groups, self.groups];
            let parts = ops::split(&qkv, &sizes.map(|heads| heads * self.head_dim))?;
            let [q, k, v] = <[Tensor; 3]>::try_from(parts)
                .map_err(|parts| self.inconsistent(format!("qkv split into {} parts", parts.len())))?;
            let shape = |heads| [batch, seq, heads, self.head_dim];
            let (q, k, v) =
                (q.reshape(shape(sizes[0]))?, k.reshape(shape(sizes[1]))?, v.reshape(shape(sizes[2]))?);
            let (q, k) = match &self.rope {
                Some(table) => (ops::rope(&q, table, info.rotary())?, ops::rope(&k, table, info.rotary())?),
                None => (q, k),
            };
            let dropout = self.dropout.draw(cx)?;
            let options = ops::AttentionOptions { dropout: dropout.as_ref(), ..self.options };
            let (o, attention) = ops::attention(&q, &k, &v, &info.sequences, options)?;
            let (y, proj) = self.proj.forward(cx, &o.reshape([batch, seq, self.heads * self.head_dim])?)?;
            let (info, output) = (info.clone(), Output::of(&self.path, &y));
            let qkv = qkv_saved;
            let saved = MultiheadAttentionSaved { qkv, q, k, v, o, attention, dropout, info, proj, output };
            Ok((y, saved))
        })
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            let MultiheadAttentionSaved { qkv, q, k, v, o, attention, dropout, info, proj, .. } = saved;
            let options = ops::AttentionOptions { dropout: dropout.as_ref(), ..self.options };
            let d_o = self.proj.backward(cx, proj, dy)?.reshape(*o.shape())?;
            let (dq, dk, dv) =
                ops::attention_backward(&d_o, &q, &k, &v, &o, &attention, &info.sequences, options)?;
            let (dq, dk) = match &self.rope {
                Some(table) => (
                    ops::rope_backward(&dq, table, info.rotary())?,
                    ops::rope_backward(&dk, table, info.rotary())?,
                ),
                None => (dq, dk),
            };
            let flat = |t: &Tensor| {
                let &[batch, seq, heads, d] = &**t.shape() else { return Ok(t.clone()) };
                t.reshape([batch, seq, heads * d])
            };
            let dqkv = ops::concat(&[&flat(&dq)?, &flat(&dk)?, &flat(&dv)?])?;
            self.qkv.backward(cx, qkv, &dqkv)
        })
    }
}
