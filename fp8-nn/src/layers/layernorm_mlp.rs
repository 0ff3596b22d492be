//! A norm and a feed-forward network in one layer.

use super::linear::LinearCore;
use super::residual::Around;
use crate::arguments::{Argument, Output};
use crate::fp8_output::in_high_precision;
use crate::{
    Error, InitOptions, LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved, Linear, LinearOptions,
    LinearSaved, Module, NormOptions, ParallelMode, Result, TensorParallel, composite, init, precision,
};
use fp8_kernels::ops::{self, Activation};
use fp8_kernels::{DType, Device, Slot, Tensor};
use fp8_recipe::{Backward, Forward, Snapshot};
use rand::Rng;
use std::sync::Arc;

/// Options of a [`LayerNormMlp`]. The two sizes are required; the other fields have defaults.
///
/// See [`LayerNormMlp`] for an example.
#[derive(Debug, Clone)]
pub struct LayerNormMlpOptions {
    /// The last dimension of input and output. Required.
    pub hidden_size: usize,
    /// The last dimension of the activation's output, which is `fc2`'s input. Required.
    pub ffn_hidden_size: usize,
    /// Whether `fc1` and `fc2` have biases. Default: true.
    pub bias: bool,
    /// The activation. Default: [`Activation::Gelu`], the tanh form. PyTorch's `GELU` is the exact form by
    /// default.
    pub activation: Activation,
    /// The normalization of the input. Default: `NormOptions::default()`, a LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviations of the initial weights. Default: `InitOptions::default()`, which is 0.023 for all
    /// weights.
    pub init: InitOptions,
    /// Whether adding `fc2`'s bias is left to the caller: see [`LinearOptions::return_bias`]. Default: false.
    pub return_bias: bool,
    /// Whether backward computes the norm's output again: see [`LayerNormLinearOptions::recompute_norm`]. Default: false.
    pub recompute_norm: bool,
    /// Whether backward computes the activation's output again and quantizes it with the scale of the forward pass, in place of
    /// keeping its codes. Default: false.
    pub recompute_activation: bool,
    /// The ranks that share the layer: each has some of `fc1`'s rows and of `fc2`'s columns, `ffn_hidden_size / ranks` of the inner
    /// features. With sequence parallelism, input and output are this rank's tokens, `[tokens / ranks, hidden_size]`. Default: `None`,
    /// this rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for LayerNormMlpOptions {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            ffn_hidden_size: 0,
            bias: true,
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            params_dtype: DType::F32,
            init: InitOptions::default(),
            return_bias: false,
            recompute_norm: false,
            recompute_activation: false,
            tensor_parallel: None,
        }
    }
}

/// A norm followed by a feed-forward network: `y = act(norm(x) · w₁ᵀ + b₁) · w₂ᵀ + b₂`.
///
/// Norm and activation are fused into the quantization for the GEMM that follows. The backward of the activation is fused
/// into the quantization for `fc1`. Input and output are `[…, hidden_size]`; dtypes are those of [`Linear`]. There is no
/// residual addition: [`TransformerLayer`](crate::TransformerLayer) adds it.
///
/// Gated activations (`Glu`, `Geglu`, `Reglu`, `Swiglu`, `Qgeglu`, `Sreglu`) compute `act(a) · b` for the halves `[a, b]` of
/// `fc1`'s output, so `fc1` has twice as many rows: the activated half first.
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.norm.weight` | `[hidden_size]` | γ = 1 |
/// | `<path>.norm.bias`, with LayerNorm | `[hidden_size]` | 0 |
/// | `<path>.fc1.weight` | `[ffn_hidden_size, hidden_size]`; gated: `[2 · ffn_hidden_size, hidden_size]` | normal, `init_std` |
/// | `<path>.fc1.bias`, if asked for | `fc1`'s rows | 0 |
/// | `<path>.fc2.weight` | `[hidden_size, ffn_hidden_size]` | normal, `output_layer_init_std` |
/// | `<path>.fc2.bias`, if asked for | `[hidden_size]` | 0 |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let activation = Activation::Swiglu;
/// let options = LayerNormMlpOptions { hidden_size: 32, ffn_hidden_size: 48, activation, ..Default::default() };
/// let mut mlp = LayerNormMlp::new("mlp", options, &device, &mut fp8_nn::rand::rng())?;
/// let fc1 = parameters(&mlp)[2];
/// assert_eq!((&**fc1.name(), &**fc1.shape()), ("mlp.fc1.weight", &[2 * 48, 32][..]));
/// let mut scaling = Scaling::new(&mlp, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [4, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| mlp.forward(cx, &x))?;
/// let dx = scaling.in_backward(|cx| mlp.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNormMlp {
    path: Arc<str>,
    fc1: LayerNormLinear,
    fc2: Linear,
    activation: Activation,
    recomputes_activation: bool,
}

composite!(LayerNormMlp { fc1, fc2; skip path, activation, recomputes_activation });

/// The values that the backward pass of [`LayerNormMlp`] needs.
#[derive(Debug)]
pub struct LayerNormMlpSaved {
    fc1: LayerNormLinearSaved,
    h: Tensor,
    fc2: SavedFc2,
    output: Output,
}

#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
enum SavedFc2 {
    Stored(LinearSaved),
    WithoutInput { core: LinearCore, snapshot: Snapshot },
}

impl LayerNormMlp {
    /// Returns the norm and the first Linear.
    pub fn fc1(&self) -> &LayerNormLinear {
        &self.fc1
    }

    /// Returns the second Linear.
    pub fn fc2(&self) -> &Linear {
        &self.fc2
    }

    /// Creates a layer at `path`, with weights drawn from `rng`: `fc1`'s, then `fc2`'s.
    ///
    /// # Errors
    /// A size of 0, a weight that is too large for a tensor, an ε that is not finite and greater than 0, a `params_dtype`
    /// that is not a float, an `ffn_hidden_size` that the ranks of `tensor_parallel` cannot share evenly.
    pub fn new(
        path: &str,
        options: LayerNormMlpOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormMlpOptions {
            hidden_size, ffn_hidden_size, bias, activation, norm, params_dtype, ..
        } = options;
        let (init, ranks) = (options.init, options.tensor_parallel);
        init::check_positive(path, &[("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)])?;
        if let Some(ranks) = &ranks {
            ranks.expect_even(path, "ffn_hidden_size", ffn_hidden_size)?;
        }
        let halves = if activation.is_gated() { 2 } else { 1 };
        let out_features = ffn_hidden_size.checked_mul(halves).ok_or_else(|| Error::Option {
            part: path.to_owned(),
            option: "ffn_hidden_size",
            value: ffn_hidden_size.to_string(),
            remedy: "twice this many rows do not fit into memory".to_owned(),
        })?;
        init::check_parameter(&format!("{path}.fc2"), "weight", [hidden_size, ffn_hidden_size])?;
        let fc1 = LayerNormLinearOptions {
            in_features: hidden_size,
            out_features,
            bias,
            norm,
            params_dtype,
            init_std: init.init_std,
            recompute_norm: options.recompute_norm,
            tensor_parallel: ranks.clone(),
            output_parts: vec![ffn_hidden_size; halves],
            ..Default::default()
        };
        let fc2 = LinearOptions {
            in_features: ffn_hidden_size,
            out_features: hidden_size,
            bias,
            params_dtype,
            init_std: init.output_layer_init_std,
            return_bias: options.return_bias,
            tensor_parallel: ranks,
            parallel_mode: ParallelMode::Row,
            ..Default::default()
        };
        let (norm_path, fc1_path) = (format!("{path}.norm"), format!("{path}.fc1"));
        Ok(Self {
            path: path.into(),
            fc1: LayerNormLinear::with_paths(&norm_path, &fc1_path, fc1, device, rng)?,
            fc2: Linear::new(&format!("{path}.fc2"), fc2, device, rng)?,
            activation,
            recomputes_activation: options.recompute_activation,
        })
    }
}

impl LayerNormMlp {
    /// Returns the output, the output of the norm, and what [`backward_with_layernorm_output`] takes: see
    /// [`LayerNormLinear::forward_with_layernorm_output`].
    ///
    /// [`backward_with_layernorm_output`]: Self::backward_with_layernorm_output
    ///
    /// # Errors
    /// Those of [`forward`](Module::forward).
    pub fn forward_with_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
    ) -> Result<(Tensor, Tensor, LayerNormMlpSaved)> {
        self.forward_adding_layernorm_output(cx, x, None)
    }

    /// Runs [`forward_with_layernorm_output`](Self::forward_with_layernorm_output). With `sum`, the output of the norm is added to the
    /// output, which has this dtype then.
    pub(crate) fn forward_adding_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        sum: Option<DType>,
    ) -> Result<(Tensor, Tensor, LayerNormMlpSaved)> {
        cx.attempt(|cx| {
            self.check_input(x)?;
            let (h, normed, fc1) = self.fc1.forward_with_layernorm_output(cx, x)?;
            let residual = sum.map(|dtype| ops::cast(&normed, dtype)).transpose()?;
            let (y, saved) = self.finish(cx, h, fc1, residual.as_ref())?;
            Ok((y, normed, saved))
        })
    }

    /// Runs [`forward`](Module::forward). With `residual`, this is added to the output, which has its dtype then.
    pub(crate) fn forward_adding(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, LayerNormMlpSaved)> {
        cx.attempt(|cx| {
            self.check_input(x)?;
            let (h, fc1) = self.fc1.forward(cx, x)?;
            self.finish(cx, h, fc1, residual)
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
        saved: LayerNormMlpSaved,
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
        saved: LayerNormMlpSaved,
        dy: &Tensor,
        around: Around<'_>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| self.backward_both(cx, saved, dy, None, Some(around)))
    }

    fn check_input(&self, x: &Tensor) -> Result<()> {
        let weight = self.fc2.weight().tensor();
        let [hidden_size, _] = weight.shape().matrix();
        let argument = Argument::new(&self.path, "input", x).float()?.on(weight.device())?;
        argument.features(hidden_size, "hidden_size").map(drop)
    }

    /// Computes activation and `fc2`, and adds the residual.
    fn finish(
        &self,
        cx: &mut Forward<'_>,
        h: Tensor,
        fc1: LayerNormLinearSaved,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, LayerNormMlpSaved)> {
        let activation = |slot: &Slot<'_>| Ok((ops::activation(&h, self.activation, slot)?, ()));
        let dtype = precision::compute_dtype(cx, self.fc2.path(), h.dtype(), self.fc2.parameters())?;
        let (y, core, x, ()) = self.fc2.fused_forward(cx, dtype, h.dtype(), residual.into(), activation)?;
        let y = in_high_precision(y)?;
        let fc2 = if self.recomputes_activation && self.fc2.weight().is_trainable() {
            SavedFc2::WithoutInput { core, snapshot: cx.snapshot() }
        } else {
            SavedFc2::Stored(core.with_input(self.fc2.for_wgrad(cx, x)))
        };
        let output = Output::of(&self.path, &y);
        Ok((y, LayerNormMlpSaved { fc1, h, fc2, output }))
    }

    fn backward_both(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormMlpSaved,
        dy: &Tensor,
        dnormed: Option<&Tensor>,
        around: Option<Around<'_>>,
    ) -> Result<Tensor> {
        let LayerNormMlpSaved { fc1, h, fc2, output } = saved;
        output.check(dy)?;
        let activation = self.activation;
        let fc2 = match fc2 {
            SavedFc2::Stored(fc2) => fc2,
            SavedFc2::WithoutInput { core, .. } if !self.fc2.weight().is_trainable() => core.with_input(None),
            SavedFc2::WithoutInput { core, snapshot } => {
                let activation = |slot: &Slot<'_>| Ok(ops::activation(&h, activation, slot)?);
                let x = self.fc2.input_again(cx, &snapshot, &core, activation)?;
                core.with_input(Some(x))
            }
        };
        let da = self.fc2.backward(cx, fc2, dy)?;
        self.fc1.backward_both(cx, fc1, dnormed, around, |slot, dbias| match dbias {
            Some(dbias) => {
                let dh = ops::activation_backward_quantize_dbias_into(&da, &h, activation, slot, dbias)?;
                Ok((dh, None))
            }
            None => {
                let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, activation, slot)?;
                Ok((dh, Some(db)))
            }
        })
    }
}

impl Module for LayerNormMlp {
    type Saved = LayerNormMlpSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormMlpSaved)> {
        self.forward_adding(cx, x, None)
    }

    fn is_positionwise(&self) -> bool {
        true
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LayerNormMlpSaved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| self.backward_both(cx, saved, dy, None, None))
    }
}
