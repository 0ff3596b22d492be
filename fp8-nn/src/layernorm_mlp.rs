//! A norm and a feed-forward network in one layer.

use crate::arguments::{Argument, Output};
use crate::{
    Error, InitOptions, LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved, Linear, LinearOptions,
    LinearSaved, Module, NormOptions, Result, composite, init,
};
use fp8_kernels::ops::{self, Activation};
use fp8_kernels::{DType, Device, Slot, Tensor};
use fp8_recipe::{Backward, Forward};
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
/// assert_eq!((&**fc1.name(), &**fc1.tensor().shape()), ("mlp.fc1.weight", &[2 * 48, 32][..]));
/// let mut scaling = Scaling::new(&mlp, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(0.5, [4, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.autocast_with(&recipe, |cx| mlp.forward(cx, &x))?;
/// let dx = scaling.backward_with(|cx| mlp.backward(cx, saved, &y))?;
/// assert_eq!((y.shape(), dx.shape()), (x.shape(), x.shape()));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNormMlp {
    path: Arc<str>,
    fc1: LayerNormLinear,
    fc2: Linear,
    activation: Activation,
}

composite!(LayerNormMlp { fc1, fc2 });

/// The values that the backward pass of [`LayerNormMlp`] needs.
#[derive(Debug)]
pub struct LayerNormMlpSaved {
    fc1: LayerNormLinearSaved,
    h: Tensor,
    fc2: LinearSaved,
    output: Output,
}

impl LayerNormMlp {
    /// Creates a layer at `path`, with weights drawn from `rng`: `fc1`'s, then `fc2`'s.
    ///
    /// # Errors
    /// A size of 0, a weight that is too large for a tensor, an ε that is not finite and greater than 0, a `params_dtype`
    /// that is not a float.
    pub fn new(
        path: &str,
        options: LayerNormMlpOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormMlpOptions { hidden_size, ffn_hidden_size, bias, activation, norm, params_dtype, init } =
            options;
        init::check_positive(path, &[("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)])?;
        let halves = if activation.is_gated() { 2 } else { 1 };
        let out_features = ffn_hidden_size.checked_mul(halves).ok_or_else(|| Error::Option {
            layer: path.to_owned(),
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
        };
        let fc2 = LinearOptions {
            in_features: ffn_hidden_size,
            out_features: hidden_size,
            bias,
            params_dtype,
            init_std: init.output_layer_init_std,
        };
        let (norm_path, fc1_path) = (format!("{path}.norm"), format!("{path}.fc1"));
        Ok(Self {
            path: path.into(),
            fc1: LayerNormLinear::with_paths(&norm_path, &fc1_path, fc1, device, rng)?,
            fc2: Linear::new(&format!("{path}.fc2"), fc2, device, rng)?,
            activation,
        })
    }
}

impl Module for LayerNormMlp {
    type Saved = LayerNormMlpSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormMlpSaved)> {
        cx.attempt(|cx| {
            let weight = self.fc2.weight().tensor();
            let [hidden_size, _] = weight.shape().matrix();
            let argument = Argument::new(&self.path, "input", x).float()?.on(weight.device())?;
            argument.features(hidden_size, "hidden_size")?;
            let (h, fc1) = self.fc1.forward(cx, x)?;
            let activation = |slot: &Slot<'_>| Ok(ops::activation(&h, self.activation, slot)?);
            let (y, fc2) = self.fc2.forward_fused(cx, h.dtype(), activation)?;
            let output = Output::of(&self.path, &y);
            Ok((y, LayerNormMlpSaved { fc1, h, fc2, output }))
        })
    }

    fn is_positionwise(&self) -> bool {
        true
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LayerNormMlpSaved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| {
            let LayerNormMlpSaved { fc1, h, fc2, output } = saved;
            output.check(dy)?;
            let da = self.fc2.backward(cx, fc2, dy)?;
            let activation = self.activation;
            self.fc1.backward_fused(cx, fc1, |slot| {
                let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, activation, slot)?;
                Ok((dh, Some(db)))
            })
        })
    }
}
