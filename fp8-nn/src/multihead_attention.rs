//! [norm →] qkv → [RoPE] → attention → proj. The two Linears run in FP8, attention itself in high precision.
//!
//! `qkv` rows: all query heads, then all key heads, then all value heads. Query head i reads key/value group
//! `i / (num_attention_heads / num_gqa_groups)`.

use crate::arguments::{Argument, Output};
use crate::layer_norm::NormCore;
use crate::precision::{self, Entered};
use crate::{
    Error, Linear, LinearOptions, LinearSaved, Module, NormLayerOptions, Parameter, Result, composite, init,
};
use fp8_kernels::ops::{self, AttentionOptions, AttentionSaved, Norm, NormStats, RopeTable};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// How a [`MultiheadAttention`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct MultiheadAttentionOptions {
    /// The input's and output's last dimension.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; `None`: as many as query heads.
    pub num_gqa_groups: Option<usize>,
    /// Size of a head; `None`: `hidden_size / num_attention_heads`.
    pub kv_channels: Option<usize>,
    /// Whether a position sees only itself and those before it.
    pub causal: bool,
    /// Whether queries and keys are rotated by their position (all of the head, rotate-half).
    pub rope: bool,
    /// RoPE's base.
    pub rope_base: f64,
    /// The longest sequence that RoPE has angles for.
    pub max_seq_length: usize,
    /// Whether a norm comes first.
    pub input_layernorm: bool,
    /// LayerNorm or RMSNorm.
    pub normalization: Norm,
    /// The norm's ε.
    pub eps: f32,
    /// Whether the stored norm weight is γ − 1.
    pub zero_centered_gamma: bool,
    /// Whether the Linears have biases.
    pub bias: bool,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// Standard deviation of qkv's initial weight.
    pub init_std: f32,
    /// Standard deviation of proj's initial weight.
    pub output_layer_init_std: f32,
}

impl Default for MultiheadAttentionOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            num_attention_heads: 0,
            num_gqa_groups: None,
            kv_channels: None,
            causal: true,
            rope: false,
            rope_base: 10_000.0,
            max_seq_length: 2048,
            input_layernorm: false,
            normalization: Norm::LayerNorm,
            eps: 1e-5,
            zero_centered_gamma: false,
            bias: true,
            params_dtype: DType::F32,
            init_std: 0.023,
            output_layer_init_std: 0.023,
        }
    }
}

/// See the module's text. Parameters below `<path>`: `norm.*` (with `input_layernorm`), `qkv.*`, `proj.*`.
#[derive(Debug)]
pub struct MultiheadAttention {
    path: Arc<str>,
    norm: Option<NormCore>,
    qkv: Linear,
    proj: Linear,
    rope: Option<RopeTable>,
    heads: usize,
    groups: usize,
    head_dim: usize,
    options: AttentionOptions,
}

composite!(MultiheadAttention { norm, qkv, proj });

/// What its backward needs.
#[derive(Debug)]
pub struct MultiheadAttentionSaved {
    norm: Option<(Tensor, NormStats)>,
    input_dtype: DType,
    qkv: LinearSaved,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    attention: AttentionSaved,
    key_lengths: Option<Tensor>,
    proj: LinearSaved,
    output: Output,
}

impl MultiheadAttention {
    /// A layer at `path`.
    ///
    /// # Errors
    /// A size of 0, heads that do not divide `hidden_size`, groups that do not divide the heads, an odd head size with
    /// RoPE, an ε out of range, a dtype other than f32 and bf16.
    pub fn new(
        path: &str,
        options: MultiheadAttentionOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let MultiheadAttentionOptions { hidden_size, num_attention_heads: heads, params_dtype, bias, .. } =
            options;
        let groups = options.num_gqa_groups.unwrap_or(heads);
        init::check_positive(
            path,
            &[("hidden_size", hidden_size), ("num_attention_heads", heads), ("num_gqa_groups", groups)],
        )?;
        let refuse = |option, value: usize, remedy: String| {
            Err(Error::Option { layer: path.to_owned(), option, value: value.to_string(), remedy })
        };
        if options.kv_channels.is_none() && !hidden_size.is_multiple_of(heads) {
            let remedy = format!("expected a divisor of hidden_size {hidden_size}, or kv_channels given");
            return refuse("num_attention_heads", heads, remedy);
        }
        if !heads.is_multiple_of(groups) {
            return refuse("num_gqa_groups", groups, format!("expected a divisor of the {heads} heads"));
        }
        let head_dim = options.kv_channels.unwrap_or(hidden_size / heads);
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
        let norm = NormLayerOptions {
            hidden_size,
            eps: options.eps,
            zero_centered_gamma: options.zero_centered_gamma,
            params_dtype,
        };
        let norm = || NormCore::new(&format!("{path}.norm"), options.normalization, &norm, device);
        let rope = || RopeTable::new(options.max_seq_length, head_dim, options.rope_base, device);
        let linear = |name: &str, in_features, out_features, init_std, rng: &mut _| {
            let options = LinearOptions { in_features, out_features, bias, params_dtype, init_std };
            Linear::new(&format!("{path}.{name}"), options, device, rng)
        };
        // First: a length that no table has is refused before weights are drawn.
        let rope = options.rope.then(rope).transpose()?;
        Ok(Self {
            path: path.into(),
            norm: options.input_layernorm.then(norm).transpose()?,
            qkv: linear("qkv", hidden_size, qkv_width, options.init_std, rng)?,
            proj: linear("proj", q_width, hidden_size, options.output_layer_init_std, rng)?,
            rope,
            heads,
            groups,
            head_dim,
            options: AttentionOptions { causal: options.causal, ..Default::default() },
        })
    }

    /// With padding: `key_lengths` `[batch]` (i32) says how many positions of each sequence are real; the others are
    /// seen by none.
    ///
    /// # Errors
    /// An input that is not `[batch, seq, hidden_size]`, or longer than `max_seq_length` under RoPE; lengths of another
    /// batch size; all errors of the Linears.
    pub fn forward_padded(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        key_lengths: Option<&Tensor>,
    ) -> Result<(Tensor, MultiheadAttentionSaved)> {
        cx.attempt(|cx| {
            let [batch, seq] = self.check_input(&self.path, x, key_lengths)?;
            let parameters = self.all_parameters();
            let Entered { x, input_dtype } = precision::enter(cx, &self.path, x, &parameters)?;
            let (qkv, qkv_saved, norm) = match &self.norm {
                None => {
                    let (y, saved) = self.qkv.forward(cx, &x)?;
                    (y, saved, None)
                }
                Some(norm) => {
                    let (normed, stats) = norm.forward_quantized(cx, &x, &self.qkv.slots.input)?;
                    let (y, saved) = self.qkv.forward_quantized(cx, &normed, x.dtype(), x.dtype())?;
                    (y, saved, Some((x.clone(), stats)))
                }
            };
            let sizes = [self.heads, self.groups, self.groups];
            let parts = ops::split(&qkv, &sizes.map(|heads| heads * self.head_dim))?;
            let [q, k, v] = <[Tensor; 3]>::try_from(parts)
                .map_err(|parts| self.inconsistent(format!("qkv split into {} parts", parts.len())))?;
            let shape = |heads| [batch, seq, heads, self.head_dim];
            let (q, k, v) =
                (q.reshape(shape(sizes[0]))?, k.reshape(shape(sizes[1]))?, v.reshape(shape(sizes[2]))?);
            let (q, k) = match &self.rope {
                Some(table) => (ops::rope(&q, table, 0)?, ops::rope(&k, table, 0)?),
                None => (q, k),
            };
            let (o, attention) = ops::attention(&q, &k, &v, key_lengths, self.options)?;
            let (y, proj) = self.proj.forward(cx, &o.reshape([batch, seq, self.heads * self.head_dim])?)?;
            let key_lengths = key_lengths.cloned();
            let output = Output::of(&self.path, &y);
            let saved = MultiheadAttentionSaved {
                norm,
                input_dtype,
                qkv: qkv_saved,
                q,
                k,
                v,
                o,
                attention,
                key_lengths,
                proj,
                output,
            };
            Ok((y, saved))
        })
    }

    /// Returns `[batch, seq]`. `layer` is the path that errors name: this layer's, or that of the block around it.
    pub(crate) fn check_input(
        &self,
        layer: &str,
        x: &Tensor,
        key_lengths: Option<&Tensor>,
    ) -> Result<[usize; 2]> {
        let weight = self.proj.weight().tensor();
        let [hidden, _] = weight.shape().matrix();
        let longest = self.rope.as_ref().map(|table| table.cos().shape().matrix()[0]);
        let sizes = match **x.shape() {
            [batch, seq, last] if last == hidden && longest.is_none_or(|longest| seq <= longest) => {
                Some([batch, seq])
            }
            _ => None,
        };
        let expected = || {
            let limit = longest.map(|longest| format!(" with seq at most {longest}, RoPE's max_seq_length"));
            format!("[batch, seq, {hidden}]{}", limit.unwrap_or_default())
        };
        let argument = Argument::new(layer, "input", x).float()?.on(weight.device())?;
        let [batch, seq] = argument.sizes(sizes, expected)?;
        if let Some(lengths) = key_lengths {
            let argument = Argument::new(layer, "key_lengths", lengths).integer()?.on(weight.device())?;
            argument.shape(**lengths.shape() == [batch], || format!("[{batch}], one per sequence"))?;
        }
        Ok([batch, seq])
    }

    fn all_parameters(&self) -> Vec<&Parameter> {
        let mut parameters: Vec<_> = self.norm.iter().flat_map(NormCore::parameters).collect();
        parameters.extend(self.qkv.parameters());
        parameters.extend(self.proj.parameters());
        parameters
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
        self.forward_padded(cx, x, None)
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            saved.output.check(dy)?;
            let MultiheadAttentionSaved {
                norm,
                input_dtype,
                qkv,
                q,
                k,
                v,
                o,
                attention,
                key_lengths,
                proj,
                ..
            } = saved;
            let d_o = self.proj.backward(cx, proj, dy)?.reshape(*o.shape())?;
            let (dq, dk, dv) = ops::attention_backward(
                &d_o,
                &q,
                &k,
                &v,
                &o,
                &attention,
                key_lengths.as_ref(),
                self.options,
            )?;
            let (dq, dk) = match &self.rope {
                Some(table) => (ops::rope_backward(&dq, table, 0)?, ops::rope_backward(&dk, table, 0)?),
                None => (dq, dk),
            };
            let flat = |t: &Tensor| {
                let &[batch, seq, heads, d] = &**t.shape() else { return Ok(t.clone()) };
                t.reshape([batch, seq, heads * d])
            };
            let dqkv = ops::concat(&[&flat(&dq)?, &flat(&dk)?, &flat(&dv)?])?;
            let dn = self.qkv.backward(cx, qkv, &dqkv)?;
            let dx = match (&mut self.norm, norm) {
                (Some(layer), Some((x, stats))) => layer.backward(&x, &stats, &dn)?,
                _ => dn,
            };
            Ok(ops::cast(&dx, input_dtype)?)
        })
    }
}
