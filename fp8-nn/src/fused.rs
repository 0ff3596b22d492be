//! Linears whose input or `dy` is quantized by an operation of the caller, such as an activation or a norm.

use crate::arguments::Argument;
use crate::fp8_output::in_high_precision;
use crate::linear::LinearCore;
use crate::{Error, LayerNormLinear, LayerNormLinearSaved, Linear, LinearSaved, Result, precision};
use fp8_kernels::{DType, Operand, Slot, Tensor, ops};
use fp8_recipe::{Backward, Forward, SlotName, Snapshot};

/// A tensor that two GEMMs read. The recipe may run either of them in high precision.
#[derive(Debug)]
pub(crate) struct Quantized {
    /// The operand as it was quantized.
    operand: Operand,
    /// The values in high precision, if one GEMM needs them in addition to the codes.
    high: Option<Tensor>,
}

impl Quantized {
    /// Takes the quantized operand, and for each of the two GEMMs whether it runs in FP8.
    ///
    /// `values` computes the same tensor in high precision. It is called only if a GEMM needs it. Its result is rounded, so
    /// it is never quantized: the codes must not depend on the precision of other GEMMs.
    pub(crate) fn new(
        operand: Operand,
        in_fp8: [bool; 2],
        values: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        let high = (operand.is_fp8() && in_fp8.contains(&false)).then(values).transpose()?;
        Ok(Self { operand, high })
    }

    /// Returns the operand as it was quantized.
    pub(crate) fn operand(&self) -> &Operand {
        &self.operand
    }

    /// Returns the operand for a GEMM that runs in FP8, or in high precision.
    pub(crate) fn pick(&self, fp8: bool) -> Operand {
        match (&self.high, fp8) {
            (Some(high), false) => Operand::High(high.clone()),
            _ => self.operand.clone(),
        }
    }
}

/// A tensor of a layer that a closure of the caller computes and quantizes.
struct Fused<'a> {
    layer: &'a str,
    /// The name of the tensor in errors.
    name: &'static str,
    /// The dtype that the layer computes in.
    dtype: DType,
    /// Whether each of the two GEMMs that read the tensor runs in FP8.
    in_fp8: [bool; 2],
    /// Whether the scope measures how exact the codes are, which needs the values, too.
    measures: bool,
}

/// The results of the caller's closure.
struct Ran<T> {
    quantized: Quantized,
    /// The values in the dtype of the layer, if they are measured.
    values: Option<Tensor>,
    rest: T,
}

impl Fused<'_> {
    /// Calls `quantize` with the slot. If only one of the two GEMMs runs in FP8, or the codes are measured, calls it again
    /// with a slot that is off. `check` refuses operands that do not fit the layer.
    fn run<T>(
        &self,
        slot: &Slot<'_>,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
        check: impl Fn(&Operand) -> Result<()>,
    ) -> Result<Ran<T>> {
        let mut checked = |slot: &Slot<'_>| {
            let (operand, rest) = quantize(slot)?;
            check(&operand)?;
            self.check_slot(&operand, slot)?;
            match operand {
                Operand::High(values) => Ok((Operand::High(ops::cast(&values, self.dtype)?), rest)),
                operand => Ok::<_, Error>((operand, rest)),
            }
        };
        let (operand, rest) = checked(slot)?;
        let mut compute = || Ok(checked(&Slot::off(slot.encoding))?.0.dequantize(self.dtype)?);
        let values = (self.measures && operand.is_fp8()).then(&mut compute).transpose()?;
        let quantized = Quantized::new(operand, self.in_fp8, || match &values {
            Some(values) => Ok(values.clone()),
            None => compute(),
        })?;
        Ok(Ran { quantized, values, rest })
    }

    /// Refuses an operand in another format than the slot's, which another slot must have quantized.
    fn check_slot(&self, operand: &Operand, slot: &Slot<'_>) -> Result<()> {
        let found = operand.as_fp8().map(|codes| codes.encoding());
        let expected = (!slot.is_off()).then_some(slot.encoding);
        if found == expected {
            return Ok(());
        }
        let [found, expected] = [found, expected].map(|encoding| match encoding {
            Some(encoding) => encoding.to_string(),
            None => "high precision".to_owned(),
        });
        Err(Error::FusedOperand { layer: self.layer.to_owned(), argument: self.name, found, expected })
    }
}

impl Linear {
    /// Computes `y = x · wᵀ + b` for an `x` that `quantize` computes and quantizes in one operation, as
    /// [`LayerNormMlp`](crate::LayerNormMlp) does with its activation: in FP8, `x` is never stored in high precision.
    ///
    /// `quantize` takes the slot of this layer's input and passes it to an operation that takes one, such as
    /// [`ops::activation`], [`ops::norm`] or [`ops::quantize`]. It returns the operand `[…, in_features]`. In high precision
    /// the slot is off, and the operation returns values. Under a recipe that runs only some GEMMs in FP8
    /// (`override_linear_precision`), and while [`Scaling::set_measuring_sqnr`](fp8_recipe::Scaling::set_measuring_sqnr) is on,
    /// `quantize` is called once more, with a slot that is off and records nothing.
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
            let (y, core, x, ()) =
                self.fused_forward(cx, dtype, input_dtype, None, |slot| Ok((quantize(slot)?, ())))?;
            Ok((in_high_precision(y)?, core.with_input(self.for_wgrad(cx, &x))))
        })
    }

    /// Runs [`forward_fused`](Self::forward_fused) in `dtype`, for an operation with a second result. Returns the output, what
    /// backward needs besides the input, the input and the second result. With `output`, a slot of this layer, the output is quantized.
    pub(crate) fn fused_forward<T>(
        &self,
        cx: &mut Forward<'_>,
        dtype: DType,
        input_dtype: DType,
        output: Option<&SlotName>,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, T)>,
    ) -> Result<(Operand, LinearCore, Quantized, T)> {
        let gemms = cx.fp8_gemms(&self.gemm_slots().input);
        let (in_fp8, measures) = (self.readers(gemms.fprop, gemms.wgrad), cx.measures_sqnr());
        let fused = Fused { layer: self.path(), name: "input", dtype, in_fp8, measures };
        let name = &self.gemm_slots().input;
        let weight = self.weight().tensor();
        let check = |x: &Operand| {
            let argument = Argument::operand(self.path(), "input", x).float()?.on(weight.device())?;
            argument.features(weight.shape().last_dim(), "in_features").map(drop)
        };
        let Ran { quantized: x, values, rest } =
            fused.run(&self.for_gemms(cx.slot(name)?), quantize, check)?;
        if let Some(values) = values {
            cx.measure_sqnr(name, &values, x.operand())?;
        }
        let (y, core) = self.forward_quantized(cx, &x, dtype, input_dtype, output)?;
        Ok((y, core, x, rest))
    }

    /// Returns the input as wgrad reads it, for an input that `quantize` computes and quantizes again as in the forward pass.
    pub(crate) fn input_again(
        &self,
        cx: &mut Backward<'_>,
        snapshot: &Snapshot,
        core: &LinearCore,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<Operand>,
    ) -> Result<Operand> {
        let (dtype, name) = (core.dtype, &self.gemm_slots().input);
        let in_fp8 = cx.fp8_gemms(&core.origin).wgrad;
        let fused = Fused { layer: self.path(), name: "input", dtype, in_fp8: [in_fp8; 2], measures: false };
        let mut cx = cx.replay(snapshot)?;
        let ran = fused.run(&cx.slot(name)?, |slot| Ok((quantize(slot)?, ())), |_| Ok(()))?;
        Ok(ran.quantized.pick(in_fp8).for_backward())
    }

    /// Computes the gradients for a `dy` that `quantize` computes and quantizes in one operation, as
    /// [`LayerNormMlp`](crate::LayerNormMlp) does with its activation's backward. Returns the gradient of the input and adds
    /// those of the parameters to their `main_grad`.
    ///
    /// `quantize` takes the slot of this layer's `dy` and passes it to an operation that takes one, such as
    /// [`ops::activation_backward_quantize_dbias`]. It returns the operand, which has the output's shape, and for a layer
    /// with a bias the column sums of `dy` before quantization, `[out_features]`. A layer without a bias ignores them. It may
    /// be called twice: see [`forward_fused`](Self::forward_fused), which has an example.
    ///
    /// # Errors
    /// The errors of `quantize`. A `Saved` that [`backward`](crate::Module::backward) would refuse. An operand that is not of
    /// the output's shape, on another device, of a dtype that is not a float, or not quantized as the slot requires; column
    /// sums that are missing or of another shape. No gradient has changed then.
    pub fn backward_fused(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LinearSaved,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let LinearCore { origin, dtype, output, .. } = &saved.core;
            let gemms = cx.fp8_gemms(origin);
            let (dtype, in_fp8) = (*dtype, self.readers(gemms.dgrad, gemms.wgrad));
            let measures = cx.measures_sqnr(origin);
            let fused = Fused { layer: self.path(), name: "dy", dtype, in_fp8, measures };
            let slot = self.for_gemms(cx.slot(origin, &self.gemm_slots().grad_output)?);
            let ran = fused.run(&slot, quantize, |dy| output.check_operand(dy))?;
            let Ran { quantized: dy, values, rest: db } = ran;
            if let Some(values) = values {
                cx.measure_sqnr(origin, &self.gemm_slots().grad_output, &values, dy.operand())?;
            }
            self.check_bias_gradient(db.as_ref())?;
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

impl LayerNormLinear {
    /// Runs [`Linear::backward_fused`], then the backward of the norm, for a `dy` that `quantize` computes and quantizes in
    /// one operation.
    ///
    /// # Errors
    /// As [`Linear::backward_fused`].
    pub fn backward_fused(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        cx.attempt(|cx| self.backward_both(cx, saved, None, quantize))
    }

    /// Runs [`backward_fused`](Self::backward_fused) where the norm's output has another reader, with the gradient `dnormed`.
    pub(crate) fn backward_both(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LayerNormLinearSaved,
        dnormed: Option<&Tensor>,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<Tensor> {
        let (linear, normed) = self.restore(cx, saved)?;
        let dn = self.linear.backward_fused(cx, linear, quantize)?;
        self.backward_norm(cx, normed, &dn, dnormed)
    }
}
