//! A norm and a Linear in one layer.

use super::fused::BiasSums;
use super::layer_norm::NormCore;
use super::linear::{LinearCore, WgradInput};
use super::residual::Around;
use crate::arguments::Output;
use crate::fp8_output::in_high_precision;
use crate::precision::{self, Entered};
use crate::{
    Linear, LinearOptions, LinearSaved, Module, NormOptions, Parameter, Result, TensorParallel, composite,
    init,
};
use fp8_kernels::ops::{self, GradientMut, NormStats};
use fp8_kernels::{DType, Device, Operand, Slot, Tensor};
use fp8_recipe::{Backward, Forward, SlotName, Snapshot};
use rand::Rng;

/// Options of a [`LayerNormLinear`]. The two sizes are required; the other fields have defaults.
///
/// See [`LayerNormLinear`] for an example.
#[derive(Debug, Clone)]
pub struct LayerNormLinearOptions {
    /// The last dimension of the input. Required.
    pub in_features: usize,
    /// The last dimension of the output. Required.
    pub out_features: usize,
    /// Whether the Linear has a bias. Default: true.
    pub bias: bool,
    /// The normalization of the input. Default: `NormOptions::default()`, a LayerNorm with ε = 1e-5.
    pub norm: NormOptions,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviation of the weight's initial values, which are normally distributed with mean 0. Default:
    /// 0.023. PyTorch's `Linear` draws from a uniform distribution instead.
    pub init_std: f32,
    /// Whether adding the bias is left to the caller: see [`LinearOptions::return_bias`]. Default: false.
    pub return_bias: bool,
    /// Whether backward normalizes and quantizes the input again, in place of keeping the norm's output. The codes are the same:
    /// they are made with the scale of the forward pass. It does nothing for a frozen weight, for which the input is not kept, and
    /// low-rank adapters keep the norm's output all the same. Default: false.
    pub recompute_norm: bool,
    /// The ranks that share the layer: each has some rows of the weight, as in [`ParallelMode::Column`](crate::ParallelMode::Column).
    /// With sequence parallelism, input and norm are those of this rank's tokens, `[tokens / ranks, in_features]`, and the output is of
    /// all tokens. Default: `None`, this rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
    /// The numbers of features that the output consists of: see [`LinearOptions::output_parts`]. Default: empty, the output is one.
    pub output_parts: Vec<usize>,
}

impl Default for LayerNormLinearOptions {
    fn default() -> Self {
        Self {
            in_features: 0,
            out_features: 0,
            bias: true,
            norm: NormOptions::default(),
            params_dtype: DType::F32,
            init_std: 0.023,
            return_bias: false,
            recompute_norm: false,
            tensor_parallel: None,
            output_parts: Vec::new(),
        }
    }
}

/// A norm followed by a fully connected layer: `y = norm(x) · wᵀ + b`.
///
/// The output of the norm is quantized in the same pass that computes it. In FP8 it is never stored in high precision, and it
/// is not rounded to a 16-bit dtype first. The input is `[…, in_features]`, the output `[…, out_features]`; dtypes are
/// those of [`Linear`].
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.norm.weight` | `[in_features]` | γ = 1 |
/// | `<path>.norm.bias`, with LayerNorm | `[in_features]` | 0 |
/// | `<path>.weight` | `[out_features, in_features]` | normal with deviation `init_std` |
/// | `<path>.bias`, if asked for | `[out_features]` | 0 |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let norm = NormOptions { normalization: Norm::RmsNorm, ..Default::default() };
/// let options = LayerNormLinearOptions { in_features: 32, out_features: 16, norm, ..Default::default() };
/// let mut layer = LayerNormLinear::new("qkv", options, &device, &mut fp8_nn::rand::rng())?;
/// let names: Vec<_> = parameters(&layer).iter().map(|parameter| parameter.name().to_string()).collect();
/// assert_eq!(names, ["qkv.norm.weight", "qkv.weight", "qkv.bias"]);
/// let mut scaling = Scaling::new(&layer, &device)?;
/// let recipe = Recipe::from(CurrentScaling::default());
/// let x = Tensor::full(0.5, [4, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| layer.forward(cx, &x))?;
/// let dx = scaling.in_backward(|cx| layer.backward(cx, saved, &y))?;
/// assert_eq!((&**y.shape(), &**dx.shape()), (&[4, 16][..], &[4, 32][..]));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNormLinear {
    pub(crate) norm: NormCore,
    pub(crate) linear: Linear,
    recomputes_norm: bool,
}

composite!(LayerNormLinear { norm, linear; skip recomputes_norm });

/// The values that the backward pass of [`LayerNormLinear`] needs.
#[derive(Debug)]
pub struct LayerNormLinearSaved {
    normed: Normed,
    linear: SavedLinear,
}

/// The values that the backward pass of the norm needs.
#[derive(Debug)]
pub(crate) struct Normed {
    x: Tensor,
    stats: NormStats,
    input_dtype: DType,
}

/// The values that the backward pass of the Linear needs.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
enum SavedLinear {
    Stored(LinearSaved),
    /// All but its input. `is_rounded` if the input was rounded before it was quantized, to be returned.
    WithoutInput {
        core: LinearCore,
        snapshot: Snapshot,
        is_rounded: bool,
    },
}

impl LayerNormLinear {
    /// Returns the Linear behind the norm, with its weight and bias.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }

    /// Returns γ of the norm, `[in_features]`.
    pub fn norm_weight(&self) -> &Parameter {
        &self.norm.weight
    }

    /// Returns β of the norm, `[in_features]`, if it is a LayerNorm.
    pub fn norm_bias(&self) -> Option<&Parameter> {
        self.norm.bias.as_ref()
    }

    /// Creates a layer at `path`, with weights drawn from `rng`.
    ///
    /// # Errors
    /// A size of 0, a weight that is too large for a tensor, an ε that is not finite and greater than 0, a `params_dtype`
    /// that is not a float.
    pub fn new(
        path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        Self::with_paths(&format!("{path}.norm"), path, options, device, rng)
    }

    /// Creates the layer with separate paths for norm and Linear, for layers that name their parts.
    pub(crate) fn with_paths(
        norm_path: &str,
        linear_path: &str,
        options: LayerNormLinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LayerNormLinearOptions { in_features, out_features, bias, norm, params_dtype, init_std, .. } =
            options;
        // Checked before the norm's parameters are allocated, which are as long as the rows of the weight.
        init::check_parameter(linear_path, "weight", [out_features, in_features])?;
        let (return_bias, ranks) = (options.return_bias, options.tensor_parallel);
        let norm =
            NormCore::new(norm_path, in_features, norm, params_dtype, device)?.of_tokens(ranks.as_ref());
        let linear = LinearOptions {
            in_features,
            out_features,
            bias,
            params_dtype,
            init_std,
            return_bias,
            tensor_parallel: ranks,
            output_parts: options.output_parts,
            ..Default::default()
        };
        Ok(Self {
            norm,
            linear: Linear::new(linear_path, linear, device, rng)?,
            recomputes_norm: options.recompute_norm,
        })
    }

    /// Returns the output, the output of the norm, and what [`backward_with_layernorm_output`] takes. The output of the norm is in
    /// the dtype that the layer computes in, and the Linear quantizes it as it is: rounded, unlike in
    /// [`forward`](Module::forward).
    ///
    /// [`backward_with_layernorm_output`]: Self::backward_with_layernorm_output
    ///
    /// # Errors
    /// Those of [`forward`](Module::forward).
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let device = Device::cpu();
    /// let options = LayerNormLinearOptions { in_features: 2, out_features: 2, ..Default::default() };
    /// let mut layer = LayerNormLinear::new("fc", options, &device, &mut fp8_nn::rand::rng())?;
    /// let mut scaling = Scaling::new(&layer, &device)?;
    /// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2], &device)?;
    /// let recipe = Recipe::from(CurrentScaling::default());
    /// let (y, normed, saved) = scaling.in_autocast(&recipe, |cx| layer.forward_with_layernorm_output(cx, &x))?;
    /// assert_eq!(normed.to_f32_vec()?, [-0.999995, 0.999995]);
    /// // The gradients of both results.
    /// let dx = scaling.in_backward(|cx| layer.backward_with_layernorm_output(cx, saved, &y, &normed))?;
    /// assert_eq!(dx.shape(), x.shape());
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn forward_with_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
    ) -> Result<(Tensor, Tensor, LayerNormLinearSaved)> {
        let (y, normed, saved) = self.forward_with_layernorm_output_to(cx, x, None)?;
        Ok((in_high_precision(y)?, normed, saved))
    }

    /// Runs [`forward_with_layernorm_output`](Self::forward_with_layernorm_output) with an output that `output`, a slot of the
    /// Linear, quantizes.
    pub(crate) fn forward_with_layernorm_output_to(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        output: Option<&SlotName>,
    ) -> Result<(Operand, Tensor, LayerNormLinearSaved)> {
        cx.attempt(|cx| {
            let Entered { x, input_dtype } = self.enter(cx, x)?;
            let (normed, stats) = self.norm.forward(&x)?;
            let quantize = |slot: &Slot<'_>| Ok((ops::quantize(&normed, slot)?, ()));
            let (y, core, operand, ()) =
                self.linear.fused_forward(cx, x.dtype(), x.dtype(), output.into(), quantize)?;
            let operand = self.linear.for_wgrad(cx, operand);
            let linear = self.saved(cx, core, operand, true);
            Ok((y, normed, LayerNormLinearSaved { normed: Normed { x, stats, input_dtype }, linear }))
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
        saved: LayerNormLinearSaved,
        dy: &Tensor,
        dnormed: &Tensor,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            Output::of(self.linear.path(), &saved.normed.x).check_named("dnormed", dnormed)?;
            self.backward_around(cx, saved, dy, Some(dnormed), None)
        })
    }

    /// Runs [`backward`](Module::backward) for a norm whose output has another reader with the gradient `dnormed`, and for a layer
    /// with a residual connection around it.
    pub(crate) fn backward_around(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        dy: &Tensor,
        dnormed: Option<&Tensor>,
        around: Option<Around<'_>>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let (linear, normed) = self.restore(cx, saved)?;
            let dn = self.linear.backward(cx, linear, dy)?;
            self.backward_norm(cx, normed, &dn, dnormed, around)
        })
    }

    /// Runs [`forward`](Module::forward) with an output that `output`, a slot of the Linear, quantizes.
    pub(crate) fn forward_to(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        output: Option<&SlotName>,
    ) -> Result<(Operand, LayerNormLinearSaved)> {
        cx.attempt(|cx| {
            let Entered { x, input_dtype } = self.enter(cx, x)?;
            let dtype = x.dtype();
            let norm = |slot: &Slot<'_>| self.norm.forward_slot(&x, slot);
            let (y, core, operand, stats) =
                self.linear.fused_forward(cx, dtype, dtype, output.into(), norm)?;
            let operand = self.linear.for_wgrad(cx, operand);
            let linear = self.saved(cx, core, operand, false);
            Ok((y, LayerNormLinearSaved { normed: Normed { x, stats, input_dtype }, linear }))
        })
    }

    fn enter(&self, cx: &Forward<'_>, x: &Tensor) -> Result<Entered> {
        self.linear.check_input(x)?;
        let parameters = self.norm.parameters().chain(self.linear.parameters());
        precision::enter(cx, self.linear.path(), x, parameters)
    }

    fn saved(
        &self,
        cx: &mut Forward<'_>,
        core: LinearCore,
        operand: Option<WgradInput>,
        is_rounded: bool,
    ) -> SavedLinear {
        if self.recomputes_norm && self.linear.weight().is_trainable() {
            SavedLinear::WithoutInput { core, snapshot: cx.snapshot(), is_rounded }
        } else {
            SavedLinear::Stored(core.with_input(operand))
        }
    }

    /// Normalizes the input again if its codes were not kept.
    pub(crate) fn restore(
        &self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
    ) -> Result<(LinearSaved, Normed)> {
        let LayerNormLinearSaved { normed, linear } = saved;
        let linear = match linear {
            SavedLinear::Stored(linear) => linear,
            SavedLinear::WithoutInput { core, .. } if !self.linear.weight().is_trainable() => {
                core.with_input(None)
            }
            SavedLinear::WithoutInput { core, snapshot, is_rounded } => {
                let operand = self.linear.input_again(cx, &snapshot, &core, |slot| {
                    Ok(if is_rounded {
                        ops::quantize(&self.norm.forward(&normed.x)?.0, slot)?
                    } else {
                        self.norm.forward_slot(&normed.x, slot)?.0
                    })
                })?;
                core.with_input(Some(operand))
            }
        };
        Ok((linear, normed))
    }

    /// Returns the gradient of the input from those of the norm's output: the Linear's, and that of its other reader. Adds that of
    /// a residual connection.
    fn backward_norm(
        &mut self,
        cx: &Backward<'_>,
        normed: Normed,
        dn: &Tensor,
        other: Option<&Tensor>,
        around: Option<Around<'_>>,
    ) -> Result<Tensor> {
        let Normed { x, stats, input_dtype } = normed;
        let sum = other.map(|other| ops::add(dn, &ops::cast(other, dn.dtype())?)).transpose()?;
        let residual = around.and_then(|around| around.in_norm(x.dtype(), input_dtype));
        let dx = self.norm.backward_add(cx, &x, &stats, sum.as_ref().unwrap_or(dn), residual)?;
        let dx = ops::cast(&dx, input_dtype)?;
        match around {
            Some(around) if residual.is_none() => around.sum(&dx),
            _ => Ok(dx),
        }
    }

    /// Runs [`Linear::backward_fused`], then the backward of the norm, for a `dy` that `quantize` computes and quantizes in
    /// one operation.
    ///
    /// # Errors
    /// As [`Linear::backward_fused`].
    pub fn backward_fused(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let (linear, normed) = self.restore(cx, saved)?;
            let dn = self.linear.backward_fused(cx, linear, &mut quantize)?;
            self.backward_norm(cx, normed, &dn, None, None)
        })
    }

    /// Runs [`Linear::backward_of`], then the backward of the norm, where its output may have another reader, with the gradient
    /// `dnormed`, and a residual connection may be around the layer.
    pub(crate) fn backward_both(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        dnormed: Option<&Tensor>,
        around: Option<Around<'_>>,
        quantize: impl FnMut(&Slot<'_>, Option<&mut GradientMut<'_>>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        let (linear, normed) = self.restore(cx, saved)?;
        let dn = self.linear.backward_of(cx, linear, BiasSums::InPass, quantize)?;
        self.backward_norm(cx, normed, &dn, dnormed, around)
    }
}

impl Module for LayerNormLinear {
    type Saved = LayerNormLinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LayerNormLinearSaved)> {
        let (y, saved) = self.forward_to(cx, x, None)?;
        Ok((in_high_precision(y)?, saved))
    }

    fn is_positionwise(&self) -> bool {
        true
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        self.backward_around(cx, saved, dy, None, None)
    }
}
