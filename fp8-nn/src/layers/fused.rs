//! Linears whose input or `dy` is quantized by an operation of the caller, such as an activation or a norm.

use super::linear::{Fused, Input, LinearCore, Ran};
use crate::arguments::Argument;
use crate::fp8_output::{Destination, in_high_precision};
use crate::{Error, Linear, LinearSaved, Parameter, Result, precision};
use fp8_kernels::ops::GradientMut;
use fp8_kernels::{DType, Operand, Slot, Tensor};
use fp8_recipe::{Backward, Forward};

/// The column sums of `dy`, which are the gradient of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasSums {
    /// The operation that quantizes `dy` returns them.
    Returned,
    /// It adds them to the gradient, if it is given one.
    InPass,
}

impl Linear {
    /// Computes `y = x · wᵀ + b` for an `x` that `quantize` computes and quantizes in one operation, as
    /// [`LayerNormMlp`](crate::LayerNormMlp) does with its activation: in FP8, `x` is never stored in high precision.
    ///
    /// `quantize` takes the slot of this layer's input and passes it to an operation that takes one, such as
    /// [`ops::activation`](fp8_kernels::ops::activation()), [`ops::norm`](fp8_kernels::ops::norm()) or [`ops::quantize`](fp8_kernels::ops::quantize()). It returns the operand `[…, in_features]`. In high precision
    /// the slot is off, and the operation returns values. Under a recipe that runs only some GEMMs in FP8
    /// (`override_linear_precision`), while [`Scaling::set_measuring_sqnr`](fp8_recipe::Scaling::set_measuring_sqnr) is on, and if the
    /// layer has low-rank adapters, `quantize` is called once more, with a slot that is off and records nothing. With sequence parallelism,
    /// it is called once more for a scale that the ranks find together, and where values are gathered: up to three times.
    ///
    /// `input_dtype` is the dtype of the tensor that `quantize` reads. The layer computes in the scope's `compute_dtype`. If
    /// the scope has none, it computes in `input_dtype`, which its parameters must then have.
    /// [`backward`](crate::Module::backward) takes the result's `Saved` and returns the gradient of `x` in `input_dtype`.
    ///
    /// A gated MLP outside this crate, with the activation fused into both passes:
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
    /// use fp8_nn::{LayerNormLinearSaved, LinearSaved};
    ///
    /// #[derive(Debug)]
    /// struct GatedMlp {
    ///     fc1: LayerNormLinear, // two halves: the activated one first
    ///     fc2: Linear,
    /// }
    /// composite!(GatedMlp { fc1, fc2 });
    ///
    /// impl Module for GatedMlp {
    ///     type Saved = (LayerNormLinearSaved, Tensor, LinearSaved);
    ///
    ///     fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
    ///         let (h, fc1) = self.fc1.forward(cx, x)?;
    ///         let swiglu = |slot: &Slot<'_>| Ok(ops::activation(&h, Activation::Swiglu, slot)?);
    ///         let (y, fc2) = self.fc2.forward_fused(cx, h.dtype(), swiglu)?;
    ///         Ok((y, (fc1, h, fc2)))
    ///     }
    ///
    ///     fn backward(&mut self, cx: &mut Backward<'_>, (fc1, h, fc2): Self::Saved, dy: &Tensor) -> Result<Tensor> {
    ///         let da = self.fc2.backward(cx, fc2, dy)?;
    ///         self.fc1.backward_fused(cx, fc1, |slot| {
    ///             let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, Activation::Swiglu, slot)?;
    ///             Ok((dh, Some(db)))
    ///         })
    ///     }
    /// }
    ///
    /// let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(1));
    /// let fc1 = LayerNormLinearOptions { in_features: 32, out_features: 2 * 48, ..Default::default() };
    /// let fc2 = LinearOptions { in_features: 48, out_features: 32, ..Default::default() };
    /// let mut mlp = GatedMlp {
    ///     fc1: LayerNormLinear::new("mlp.fc1", fc1, &device, &mut rng)?,
    ///     fc2: Linear::new("mlp.fc2", fc2, &device, &mut rng)?,
    /// };
    /// let mut scaling = Scaling::new(&mlp, &device)?;
    /// let recipe = Recipe::from(DelayedScaling::default());
    /// let x = Tensor::full(0.5, [4, 32], DType::F32, &device)?;
    /// let (y, saved) = scaling.in_autocast(&recipe, |cx| mlp.forward(cx, &x))?;
    /// let dx = scaling.in_backward(|cx| mlp.backward(cx, saved, &y))?;
    /// assert_eq!(dx.shape(), x.shape());
    /// let quantized = |name: &str| scaling.slot_reports().map(|all| all.iter().any(|slot| &*slot.name == name));
    /// assert!(quantized("mlp.fc2.input")? && quantized("mlp.fc1.grad_output")?);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `quantize`. An operand whose last dimension is not `in_features`, on another device, of a dtype that is
    /// not a float, or not quantized as the slot requires. Parameters of another dtype than `input_dtype` in a scope without
    /// `compute_dtype`. A layer that the scope's `Scaling` does not know.
    pub fn forward_fused(
        &self,
        cx: &mut Forward<'_>,
        input_dtype: DType,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<Operand>,
    ) -> Result<(Tensor, LinearSaved)> {
        cx.attempt(|cx| {
            let dtype = precision::compute_dtype(cx, self.path(), input_dtype, self.parameters())?;
            let (y, core, x, ()) = self
                .fused_forward(cx, dtype, input_dtype, Destination::High, |slot| Ok((quantize(slot)?, ())))?;
            Ok((in_high_precision(y)?, core.with_input(self.for_wgrad(cx, x))))
        })
    }

    /// Runs [`forward_fused`](Self::forward_fused) in `dtype`, for an operation with a second result. Returns the output, what
    /// backward needs besides the input, the input and the second result.
    pub(crate) fn fused_forward<T>(
        &self,
        cx: &mut Forward<'_>,
        dtype: DType,
        input_dtype: DType,
        output: Destination<'_>,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
    ) -> Result<(Operand, LinearCore, Input, T)> {
        let mut shape = None;
        let mut quantize = quantize;
        let quantize = |slot: &Slot<'_>| {
            let (x, rest) = quantize(slot)?;
            shape = Some(*x.shape());
            Ok((x, rest))
        };
        let (x, rest) = self.input_of(cx, dtype, quantize)?;
        let shape = shape.unwrap_or(*x.whole.operand().shape());
        let (y, core) = self.forward_quantized(cx, &x, shape, dtype, input_dtype, output)?;
        Ok((y, core, x, rest))
    }

    /// Computes and quantizes the input by `quantize`, and gathers it if ranks have tokens of their own.
    pub(crate) fn input_of<T>(
        &self,
        cx: &mut Forward<'_>,
        dtype: DType,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
    ) -> Result<(Input, T)> {
        self.part().enter(cx);
        let name = &self.gemm_slots().input;
        let gemms = cx.fp8_gemms(name);
        let (needs_values, measures) = (self.needs_values(gemms.fprop, gemms.wgrad), cx.measures_sqnr());
        let fused = Fused { layer: self.path(), name: "input", dtype, needs_values, measures };
        let weight = self.weight();
        let check = |x: &Operand| {
            let argument = Argument::operand(self.path(), "input", x).float()?.on(weight.device())?;
            argument.features(weight.shape().last_dim(), "in_features").map(drop)
        };
        if let Some(tokens) = self.input_tokens() {
            return tokens.gather_input(cx, &fused, quantize, check);
        }
        let Ran { quantized, values, rest } = fused.run(&self.for_gemms(cx.slot(name)?), quantize, check)?;
        if let Some(values) = values {
            cx.measure_sqnr(name, &values, quantized.operand())?;
        }
        Ok((quantized.into(), rest))
    }

    /// Computes the gradients for a `dy` that `quantize` computes and quantizes in one operation, as
    /// [`LayerNormMlp`](crate::LayerNormMlp) does with its activation's backward. Returns the gradient of the input and adds
    /// those of the parameters to their `main_grad`.
    ///
    /// `quantize` takes the slot of this layer's `dy` and passes it to an operation that takes one, such as
    /// [`ops::activation_backward_quantize_dbias`](fp8_kernels::ops::activation_backward_quantize_dbias()). It returns the operand, which has the output's shape, and for a layer
    /// with a bias the column sums of `dy` before quantization, `[out_features]`. A layer without a bias ignores them. It may be called
    /// two or three times: see [`forward_fused`](Self::forward_fused), which has an example.
    ///
    /// # Errors
    /// The errors of `quantize`. A `Saved` that [`backward`](crate::Module::backward) would refuse. An operand that is not of
    /// the output's shape, on another device, of a dtype that is not a float, or not quantized as the slot requires; column
    /// sums that are missing or of another shape. No gradient has changed then.
    pub fn backward_fused(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LinearSaved,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        self.backward_of(cx, saved, BiasSums::Returned, |slot, _| quantize(slot))
    }

    /// Runs [`backward_fused`](Self::backward_fused) for a `quantize` that may take the gradient of the bias, to which it then adds the
    /// column sums itself, and returns none.
    pub(crate) fn backward_of(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LinearSaved,
        sums: BiasSums,
        mut quantize: impl FnMut(&Slot<'_>, Option<&mut GradientMut<'_>>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            if self.part().gathers_output_gradient().is_some() {
                let (dy, db) = self.gather_gradient(cx, &saved.core, |slot| quantize(slot, None))?;
                self.check_bias_gradient(db.as_ref())?;
                return in_high_precision(self.backward_quantized(cx, saved, &dy, db.as_ref(), None)?);
            }
            self.expect_saved(&saved)?;
            let LinearCore { origin, dtype, output, .. } = &saved.core;
            let gemms = cx.fp8_gemms(origin);
            let (dtype, needs_values) = (*dtype, self.needs_values(gemms.dgrad, gemms.wgrad));
            let measures = cx.measures_sqnr(origin);
            let (layer, recipe) = (self.path().clone(), cx.lone_recipe());
            let fused = Fused { layer: &layer, name: "dy", dtype, needs_values, measures };
            let slot = self.gradient_slot(cx, &saved.core)?;
            // A layer whose later steps may fail on another rank keeps its sums until then.
            let in_pass = sums == BiasSums::InPass && self.part().ranks().is_none();
            let mut bias = self.bias_mut().filter(|bias| in_pass && bias.is_trainable());
            let is_added = bias.is_some();
            // The first of the calls adds.
            let quantize = |slot: &Slot<'_>| match bias.take() {
                Some(bias) => {
                    Parameter::store_in_pass(Some(bias), recipe.clone(), |dbias| quantize(slot, dbias))
                }
                None => quantize(slot, None),
            };
            let ran = fused.run(&slot, quantize, |dy| output.check_operand(dy))?;
            let Ran { quantized: dy, values, rest: db } = ran;
            if let Some(values) = values {
                cx.measure_sqnr(origin, &self.gemm_slots().grad_output, &values, dy.operand())?;
            }
            let db = db.filter(|_| !is_added);
            if !is_added {
                self.check_bias_gradient(db.as_ref())?;
            }
            in_high_precision(self.backward_quantized(cx, saved, &dy, db.as_ref(), None)?)
        })
    }

    fn check_bias_gradient(&self, db: Option<&Tensor>) -> Result<()> {
        let Some(bias) = self.bias() else { return Ok(()) };
        let db = db.ok_or_else(|| Error::BiasGradient { layer: self.path().to_string() })?;
        let argument = Argument::new(self.path(), "db", db).float()?.on(bias.device())?;
        let shape = bias.shape();
        argument.shape(db.shape() == shape, || format!("{shape}, the bias's shape")).map(drop)
    }
}
