//! Linear layers.

use crate::arguments::{Argument, Output};
use crate::fp8_output::{Destination, GradInput, in_high_precision};
use crate::lora::{LoraSaved, Loras};
use crate::precision::{self, Entered};
use crate::{Cut, Layer, Module, ParallelMode, Parameter, Result, TensorParallel, fp8_output, init};
use fp8_kernels::{DType, Device, Operand, Shape, Slot, Tensor, ops};
use fp8_recipe::{Backward, DelayedWgrad, Forward, GemmSlots, Origin, SlotName, Slots, Snapshot};
use rand::Rng;
use std::sync::Arc;

#[cfg(test)]
mod copies;
mod fused_operand;
mod gathered;
mod input;
mod parallel;
mod quantized;

pub(crate) use fused_operand::{Fused, Ran};
pub(crate) use gathered::Tokens;
pub(crate) use input::{Input, Kept, WgradInput};
pub(crate) use parallel::Part;
pub(crate) use quantized::Quantized;

/// Options of a [`Linear`]. The two sizes are required; the other fields have defaults.
///
/// See [`Linear`] for an example.
#[derive(Debug, Clone)]
pub struct LinearOptions {
    /// k, the last dimension of the input. Required.
    pub in_features: usize,
    /// n, the last dimension of the output. Required.
    pub out_features: usize,
    /// Whether the layer has a bias. Default: true, as in PyTorch.
    pub bias: bool,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviation of the weight's initial values, which are normally distributed with mean 0. Default:
    /// 0.023. PyTorch's `Linear` draws from a uniform distribution instead.
    pub init_std: f32,
    /// Whether backward keeps the input as it was given and quantizes it again for wgrad, in place of keeping its codes. This saves
    /// memory if another layer keeps the same tensor. The codes are the same: they are made with the scale of the forward
    /// pass. Default: false.
    pub save_original_input: bool,
    /// Whether adding the bias is left to the caller, who takes it from [`Linear::bias`], for instance to fuse it with another
    /// addition. Backward takes the gradient of the sum, and computes the bias's gradient from it. Default: false.
    pub return_bias: bool,
    /// The ranks that share the layer, each with a part of its weight. Default: `None`, this rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
    /// The dimension of the weight that is cut. Default: [`ParallelMode::Column`].
    pub parallel_mode: ParallelMode,
    /// The numbers of features that the output consists of, in order, where each rank has a part of each: `[q, k, v]` for a projection of
    /// queries, keys and values. Default: empty, the output is one.
    pub output_parts: Vec<usize>,
}

impl Default for LinearOptions {
    fn default() -> Self {
        Self {
            in_features: 0,
            out_features: 0,
            bias: true,
            params_dtype: DType::F32,
            init_std: 0.023,
            save_original_input: false,
            return_bias: false,
            tensor_parallel: None,
            parallel_mode: ParallelMode::Column,
            output_parts: Vec::new(),
        }
    }
}

/// A fully connected layer, `y = x · wᵀ + b`, whose three GEMMs run in FP8.
///
/// | pass | product | operands |
/// |---|---|---|
/// | fprop | `y[m, n] = x[m, k] · w[n, k]ᵀ + b[n]` | E4M3 × E4M3, fast accumulation |
/// | dgrad | `dx[m, k] = dy[m, n] · w[n, k]` | E5M2 × E4M3 under HYBRID, split accumulation |
/// | wgrad | `dw[n, k] += dy[m, n]ᵀ · x[m, k]` | E5M2 × E4M3 under HYBRID, split accumulation |
///
/// A recipe may choose other formats and another accumulation, or run a product in high precision.
///
/// `db[n]` sums the unquantized `dy` in f32. The input is `[…, in_features]` in f32, bf16 or f16. The output is
/// `[…, out_features]` in the scope's `compute_dtype` or, if the scope has none, in the input's dtype. Sizes need not be
/// multiples of 16.
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.weight` | `[out_features, in_features]` | normal with deviation `init_std` |
/// | `<path>.bias`, if asked for | `[out_features]` | 0 |
///
/// With `tensor_parallel`, each rank has some rows or columns of the weight: see [`ParallelMode`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 32, out_features: 16, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &device, &mut fp8_nn::rand::rng())?;
/// // Values whose FP8 scales are powers of two, so that nothing is rounded.
/// for parameter in parameters_mut(&mut fc) {
///     parameter.set(Tensor::full(0.875, *parameter.shape(), DType::F32, &device)?)?;
/// }
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let x = Tensor::full(1.75, [4, 32], DType::F32, &device)?;
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
/// assert_eq!(y.to_f32_vec()?, [32.0 * 1.75 * 0.875 + 0.875; 4 * 16]);
/// let dy = Tensor::full(0.875, [4, 16], DType::F32, &device)?;
/// let dx = scaling.in_backward(|cx| fc.backward(cx, saved, &dy))?;
/// assert_eq!(dx.to_f32_vec()?, [16.0 * 0.875 * 0.875; 4 * 32]);
/// assert_eq!(fc.weight().main_grad().to_f32_vec()?, [4.0 * 0.875 * 1.75; 16 * 32]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
    loras: Loras,
    pub(crate) slots: GemmSlots,
    saves_original_input: bool,
    returns_bias: bool,
    part: Part,
}

/// The values that the backward pass of [`Linear`] needs: input and weight, quantized in FP8, in the layout that its GEMMs
/// read.
#[derive(Debug)]
pub struct LinearSaved {
    x: SavedInput,
    pub(crate) core: LinearCore,
}

/// The input that wgrad reads.
#[derive(Debug)]
enum SavedInput {
    /// As wgrad reads it.
    Operand(Operand),
    /// This rank's tokens, of which wgrad gathers all.
    Shard(Kept),
    /// As it was given, with the scale that it was quantized with.
    Original { x: Tensor, snapshot: Snapshot },
    /// The weight is frozen, so there is no wgrad.
    Unneeded,
}

/// The parts of [`LinearSaved`] other than the input.
#[derive(Debug)]
pub(crate) struct LinearCore {
    pub(crate) origin: Origin,
    /// The weight, as dgrad reads it.
    w: Operand,
    /// The dtype that the layer computed in.
    pub(crate) dtype: DType,
    input_dtype: DType,
    input_shape: Shape,
    pub(crate) output: Output,
    lora: Option<LoraSaved>,
}

impl LinearCore {
    /// Completes it with the input; `None` if the weight is frozen.
    pub(crate) fn with_input(self, x: Option<WgradInput>) -> LinearSaved {
        let x = match x {
            Some(WgradInput::Operand(x)) => SavedInput::Operand(x),
            Some(WgradInput::Shard(x)) => SavedInput::Shard(x),
            None => SavedInput::Unneeded,
        };
        LinearSaved { x, core: self }
    }
}

impl Linear {
    /// Creates a layer at `path`, with weights drawn from `rng` and a bias of 0.
    ///
    /// # Errors
    /// A size of 0, a weight that is too large for a tensor, a `params_dtype` that is not a float; features that the ranks of
    /// `tensor_parallel` cannot share evenly; `output_parts` that do not add up to `out_features`.
    pub fn new(path: &str, options: LinearOptions, device: &Device, rng: &mut impl Rng) -> Result<Self> {
        let LinearOptions { in_features, out_features, parallel_mode, .. } = options;
        let (ranks, parts) = (options.tensor_parallel.as_ref(), &options.output_parts);
        let part = Part::new(path, ranks, parallel_mode, [out_features, in_features], parts)?;
        Self::of_part(path, options, part, device, rng)
    }

    /// Creates the layer with the part of its weight that this rank has.
    pub(crate) fn of_part(
        path: &str,
        options: LinearOptions,
        part: Part,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let LinearOptions { in_features, out_features, bias, params_dtype, init_std, .. } = options;
        init::check_params_dtype(path, params_dtype)?;
        init::check_positive(path, &[("in_features", in_features), ("out_features", out_features)])?;
        init::check_parameter(path, "weight", [out_features, in_features])?;
        let shape = [out_features, in_features];
        let weight = init::normal(shape, part.weight(), init_std, params_dtype, device, rng)?;
        let weight = part.place_weight(Parameter::new(format!("{path}.weight"), weight)?);
        let zeros = || {
            let shape = part.bias().map_or_else(|| [out_features].into(), Cut::shape);
            let zeros = Tensor::zeros(shape, params_dtype, device)?;
            Ok::<_, crate::Error>(part.place_bias(Parameter::new(format!("{path}.bias"), zeros)?))
        };
        let slots = GemmSlots::new(path);
        Ok(Self {
            weight: weight.with_weight_slot(&slots.weight),
            bias: bias.then(zeros).transpose()?,
            loras: Loras::new(slots.weight.layer(), shape, &part, device),
            slots,
            saves_original_input: options.save_original_input,
            returns_bias: options.return_bias,
            part,
        })
    }

    /// Returns which part of the layer this rank has.
    pub(crate) const fn part(&self) -> &Part {
        &self.part
    }

    /// Returns the weight, `[out_features, in_features]`, or this rank's rows or columns of it ([`ParallelMode`](crate::ParallelMode)).
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// Returns the bias, `[out_features]` or this rank's part of it, if the layer has one.
    pub fn bias(&self) -> Option<&Parameter> {
        self.bias.as_ref()
    }

    pub(crate) fn bias_mut(&mut self) -> Option<&mut Parameter> {
        self.bias.as_mut()
    }

    /// Returns the low-rank adapters beside the weight: none at first.
    pub fn loras(&self) -> &Loras {
        &self.loras
    }

    /// Returns the low-rank adapters, to add some.
    pub fn loras_mut(&mut self) -> &mut Loras {
        &mut self.loras
    }

    /// Returns the names of the slots that quantize this layer's input, weight and `dy`: `<path>.input`, `<path>.weight` and
    /// `<path>.grad_output`. Reports and checkpoints show them.
    pub fn gemm_slots(&self) -> &GemmSlots {
        &self.slots
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.weight].into_iter().chain(&self.bias)
    }

    pub(crate) fn path(&self) -> &Arc<str> {
        self.slots.weight.layer()
    }

    /// Computes the output from an input that was quantized for fprop and wgrad. Returns it with what backward needs besides the
    /// input. A residual is added after the sum over ranks and after the products of adapters.
    pub(crate) fn forward_quantized(
        &self,
        cx: &mut Forward<'_>,
        input: &Input,
        input_shape: Shape,
        dtype: DType,
        input_dtype: DType,
        output: Destination<'_>,
    ) -> Result<(Operand, LinearCore)> {
        let (name, x) = (&self.slots.weight, &input.whole);
        self.part.check(cx, &self.slots)?;
        let gemms = cx.fp8_gemms(name);
        let operand = self.weight.operand(cx, name, dtype)?;
        let w = Quantized::new(operand, !(gemms.fprop && gemms.dgrad), || self.weight.values(dtype))?;
        let bias = self.bias.as_ref().filter(|_| !self.returns_bias).map(Parameter::tensor);
        let accumulation = cx.accumulation(name).fprop;
        let operands = [x.pick(gemms.fprop), w.pick(gemms.fprop)];
        let summed = self.part.sums_output();
        let (y, lora) = if self.loras.is_empty() && summed.is_none() {
            (fp8_output::fprop(cx, output, &operands, bias, dtype, accumulation)?, None)
        } else {
            let [x_operand, w] = &operands;
            // A bias is added once, to the sum.
            let (own_bias, of_sum) = if summed.is_some() { (None, bias) } else { (bias, None) };
            let part_dtype = summed.map_or(dtype, |ranks| ranks.partial_dtype(dtype));
            let mut y = ops::fprop(x_operand, w, own_bias, part_dtype, accumulation)?;
            let mut lora = None;
            if !self.loras.is_empty() {
                let (sum, saved) = self.loras.forward(x.values(dtype)?, &y, dtype)?;
                lora = Some(saved.with_shard(input.values.as_ref()));
                y = sum;
            }
            if let Some(ranks) = summed {
                y = ranks.sum(&format!("{}.output", self.path()), y, part_dtype)?;
                y = of_sum.map_or(Ok(y.clone()), |bias| ops::bias(&y, bias))?;
                y = ops::cast(&y, dtype)?;
            }
            (fp8_output::forward_result(cx, output, y)?, lora)
        };
        let w = w.pick(gemms.dgrad).for_backward();
        let output = Output::of_operand(self.path(), &y);
        let origin = cx.origin(name);
        Ok((y, LinearCore { origin, w, dtype, input_dtype, input_shape, output, lora }))
    }

    /// Returns an input as it is kept for wgrad; `None` if the weight is frozen.
    pub(crate) fn for_wgrad(&self, cx: &Forward<'_>, x: Input) -> Option<WgradInput> {
        let Input { whole, shard, .. } = x;
        if !self.weight.is_trainable() {
            return None;
        }
        Some(match shard {
            Some(shard) => WgradInput::Shard(shard),
            None => WgradInput::Operand(whole.pick(cx.fp8_gemms(&self.slots.input).wgrad).for_backward()),
        })
    }

    /// Returns a slot of the input or of `dy`, whose columnwise copy is not made for a frozen weight, because only wgrad reads it.
    pub(crate) fn for_gemms<'a>(&self, slot: Slot<'a>) -> Slot<'a> {
        Slot { columnwise: slot.columnwise && self.weight.is_trainable(), ..slot }
    }

    /// Returns the slot that quantizes this rank's part of `dy`, the gradient of the output that `core` is of.
    pub(crate) fn gradient_slot<'a>(&self, cx: &'a mut Backward<'_>, core: &LinearCore) -> Result<Slot<'a>> {
        let seed = cx.dropout_seed();
        let slot = self.for_gemms(cx.slot(&core.origin, &self.slots.grad_output)?);
        self.part.number(slot, core.output.rows(), seed)
    }

    /// Returns the slot that quantizes an input in forward. An input that is kept as it is will be quantized again for wgrad.
    fn input_slot<'a>(&self, cx: &'a mut Forward<'_>) -> Result<Slot<'a>> {
        let slot = self.for_gemms(cx.slot(&self.slots.input)?);
        Ok(Slot { columnwise: slot.columnwise && !self.saves_original_input, ..slot })
    }

    /// Returns whether a GEMM that reads the input or `dy` runs in high precision: `other`, or wgrad if it runs at all, each given by
    /// whether it runs in FP8; or one of an adapter.
    pub(crate) fn needs_values(&self, other: bool, wgrad: bool) -> bool {
        !other || self.weight.is_trainable() && !wgrad || !self.loras.is_empty()
    }

    /// Returns an error, before any gradient changes, if the layer's parameters are not those with which `saved` was made.
    pub(crate) fn expect_saved(&self, saved: &LinearSaved) -> Result<()> {
        if matches!(saved.x, SavedInput::Unneeded) && self.weight.is_trainable() {
            return Err(self.weight.was_frozen(self.path()));
        }
        self.loras.expect_saved(saved.core.lora.as_ref())
    }

    /// Computes the gradients from a `dy` that was quantized for dgrad and wgrad; `db` holds its column sums, unless they are in the
    /// bias's gradient. With `grad_input`, the gradient of the input is quantized.
    pub(crate) fn backward_quantized(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LinearSaved,
        dy: &Quantized,
        db: Option<&Tensor>,
        grad_input: Option<GradInput<'_>>,
    ) -> Result<Operand> {
        self.expect_saved(&saved)?;
        let LinearSaved { x, core: mut saved } = saved;
        let gemms = cx.fp8_gemms(&saved.origin);
        let accumulation = cx.accumulation(&saved.origin);
        let operands = [&dy.pick(gemms.dgrad), &saved.w];
        let x = match x {
            _ if !self.weight.is_trainable() => None,
            SavedInput::Operand(x) => Some(WgradInput::Operand(x)),
            SavedInput::Shard(x) => Some(WgradInput::Shard(x)),
            SavedInput::Original { x, snapshot } => {
                Some(self.input_again(cx, &snapshot, &saved, |slot| Ok(ops::quantize(&x, slot)?))?)
            }
            SavedInput::Unneeded => return Err(self.weight.was_frozen(self.path())),
        };
        let summed = self.part.sums_input_gradient().cloned();
        let dx = if saved.lora.is_none() && summed.is_none() {
            fp8_output::dgrad(cx, &saved.origin, grad_input, operands, saved.dtype, accumulation.dgrad)?
        } else {
            let part_dtype = summed.as_ref().map_or(saved.dtype, |ranks| ranks.partial_dtype(saved.dtype));
            let mut dx = ops::dgrad(operands[0], operands[1], part_dtype, accumulation.dgrad)?;
            if let Some(mut lora) = saved.lora.take() {
                if let Some(ranks) = self.part.gathers_input() {
                    lora.gather_input(ranks, &format!("{}, of adapters, again", self.slots.input.name()))?;
                }
                dx = self.loras.backward(cx, lora, &dy.values(saved.dtype)?, dx, saved.dtype)?;
            }
            if let Some(ranks) = &summed {
                dx = ranks.sum(&format!("{}.grad_input", self.path()), dx, saved.dtype)?;
            }
            fp8_output::backward_result(cx, &saved.origin, grad_input, dx)?
        };
        let x = match x {
            Some(WgradInput::Shard(x)) => match self.input_tokens() {
                Some(tokens) => Some(tokens.gather_again(cx, x)?),
                None => return Err(self.weight.was_frozen(self.path())), // cannot be: such a layer keeps no shard
            },
            Some(WgradInput::Operand(x)) => Some(x),
            None => None,
        };
        let (dy, accumulation, lone_recipe) = (dy.pick(gemms.wgrad), accumulation.wgrad, cx.lone_recipe());
        match (x, cx.delayed_wgrads()) {
            (None, _) => {}
            (Some(x), Some(delayed)) => {
                let weight = self.weight.name().clone();
                delayed.push(DelayedWgrad { weight, dy, x, accumulation, lone_recipe });
            }
            (Some(x), None) => self.weight.store(lone_recipe, |grad, update, name| {
                Ok(ops::wgrad_into(&dy, &x, grad, update, name, accumulation)?)
            })?,
        }
        if let (Some(bias), Some(db)) = (&mut self.bias, db) {
            bias.accumulate_in(cx, db)?;
        }
        Ok(match dx {
            Operand::High(dx) => {
                Operand::High(ops::cast(&dx.reshape(saved.input_shape)?, saved.input_dtype)?)
            }
            codes => codes,
        })
    }

    /// Returns the input as wgrad reads it, for an input that `quantize` computes and quantizes again as in the forward pass.
    pub(crate) fn input_again(
        &self,
        cx: &mut Backward<'_>,
        snapshot: &Snapshot,
        core: &LinearCore,
        mut quantize: impl FnMut(&Slot<'_>) -> Result<Operand>,
    ) -> Result<WgradInput> {
        let (dtype, name) = (core.dtype, &self.gemm_slots().input);
        let in_fp8 = cx.fp8_gemms(&core.origin).wgrad;
        let fused =
            Fused { layer: self.path(), name: "input", dtype, needs_values: !in_fp8, measures: false };
        let mut cx = cx.replay(snapshot)?;
        let quantize = |slot: &Slot<'_>| Ok((quantize(slot)?, ()));
        if let Some(tokens) = self.input_tokens() {
            let kept = tokens.keep_again(&mut cx, &fused, quantize)?;
            return kept.map(WgradInput::Shard).ok_or_else(|| self.weight.was_frozen(self.path()));
        }
        let ran = fused.run(&cx.slot(name)?, quantize, |_| Ok(()))?;
        Ok(WgradInput::Operand(ran.quantized.pick(in_fp8).for_backward()))
    }

    fn tokens<'a>(&'a self, ranks: &'a TensorParallel, name: &'a SlotName) -> Tokens<'a> {
        let (device, is_trainable) = (self.weight.device(), self.weight.is_trainable());
        Tokens { ranks, name, device, is_trainable, has_adapters: !self.loras.is_empty() }
    }

    /// The input, if ranks have tokens of their own of it.
    pub(crate) fn input_tokens(&self) -> Option<Tokens<'_>> {
        Some(self.tokens(self.part.gathers_input()?, &self.slots.input))
    }

    /// Quantizes this rank's tokens of `dy` by `quantize`, and gathers it for dgrad and wgrad: see [`Tokens::gather_gradient`].
    pub(crate) fn gather_gradient(
        &self,
        cx: &mut Backward<'_>,
        core: &LinearCore,
        quantize: impl FnMut(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>,
    ) -> Result<(Quantized, Option<Tensor>)> {
        let (origin, dtype, gemms) = (&core.origin, core.dtype, cx.fp8_gemms(&core.origin));
        let (needs_values, measures) =
            (self.needs_values(gemms.dgrad, gemms.wgrad), cx.measures_sqnr(origin));
        let fused = Fused { layer: self.path(), name: "dy", dtype, needs_values, measures };
        let check = |dy: &Operand| core.output.check_operand(dy);
        let Some(ranks) = self.part.gathers_output_gradient() else {
            let ran = fused.run(&self.gradient_slot(cx, core)?, quantize, check)?;
            return Ok((ran.quantized, ran.rest));
        };
        self.tokens(ranks, &self.slots.grad_output).gather_gradient(cx, origin, &fused, quantize, check)
    }

    /// Notes that its GEMMs run in high precision under every recipe, so that its weight is not stored in FP8.
    pub(crate) fn in_high_precision(mut self) -> Self {
        self.weight.forget_weight_slot();
        self
    }

    /// Runs [`forward`](Module::forward) with another destination of the output.
    pub(crate) fn forward_to(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        output: Destination<'_>,
    ) -> Result<(Operand, LinearSaved)> {
        cx.attempt(|cx| {
            self.part.enter(cx);
            self.check_input(x)?;
            let Entered { x, input_dtype } = precision::enter(cx, self.path(), x, self.parameters())?;
            let gemms = cx.fp8_gemms(&self.slots.input);
            let input = if let Some(tokens) = self.input_tokens() {
                let needs_values = self.needs_values(gemms.fprop, gemms.wgrad);
                let (dtype, measures) = (x.dtype(), cx.measures_sqnr());
                let fused = Fused { layer: self.path(), name: "input", dtype, needs_values, measures };
                let quantize = |slot: &Slot<'_>| Ok((ops::quantize(&x, slot)?, ()));
                tokens.gather_input(cx, &fused, quantize, |_| Ok(()))?.0
            } else {
                let operand = ops::quantize(&x, &self.input_slot(cx)?)?;
                cx.measure_sqnr(&self.slots.input, &x, &operand)?;
                let needs_values = self.needs_values(gemms.fprop, gemms.wgrad);
                Quantized::new(operand, needs_values, || Ok(x.clone()))?.into()
            };
            let (y, core) = self.forward_quantized(cx, &input, *x.shape(), x.dtype(), input_dtype, output)?;
            let saved = if self.saves_original_input && self.weight.is_trainable() {
                LinearSaved { x: SavedInput::Original { x, snapshot: cx.snapshot() }, core }
            } else {
                core.with_input(self.for_wgrad(cx, input))
            };
            Ok((y, saved))
        })
    }

    /// Runs [`backward`](Module::backward) with a gradient of the input that is quantized.
    pub(crate) fn backward_to(
        &mut self,
        cx: &mut Backward<'_>,
        saved: LinearSaved,
        dy: &Tensor,
        grad_input: Option<GradInput<'_>>,
    ) -> Result<Operand> {
        cx.attempt(|cx| {
            let core = &saved.core;
            core.output.check(dy)?;
            let dy = ops::cast(dy, core.dtype)?;
            if self.part.gathers_output_gradient().is_some() {
                let has_bias = self.bias.is_some();
                let (quantized, db) = self.gather_gradient(cx, core, |slot| {
                    if !has_bias {
                        return Ok((ops::quantize(&dy, slot)?, None));
                    }
                    let (operand, db) = ops::quantize_dbias(&dy, slot)?;
                    Ok((operand, Some(db)))
                })?;
                return self.backward_quantized(cx, saved, &quantized, db.as_ref(), grad_input);
            }
            self.expect_saved(&saved)?;
            let (gemms, recipe) = (cx.fp8_gemms(&core.origin), cx.lone_recipe());
            let slot = self.gradient_slot(cx, core)?;
            let (operand, db) = if self.part.ranks().is_none() {
                let operand = Parameter::store_in_pass(self.bias.as_mut(), recipe, |dbias| match dbias {
                    Some(dbias) => Ok(ops::quantize_dbias_into(&dy, &slot, dbias)?),
                    None => Ok(ops::quantize(&dy, &slot)?),
                })?;
                (operand, None)
            } else if self.bias.is_some() {
                let (operand, db) = ops::quantize_dbias(&dy, &slot)?;
                (operand, Some(db))
            } else {
                (ops::quantize(&dy, &slot)?, None)
            };
            cx.measure_sqnr(&core.origin, &self.slots.grad_output, &dy, &operand)?;
            let needs_values = self.needs_values(gemms.dgrad, gemms.wgrad);
            let quantized = Quantized::new(operand, needs_values, || Ok(dy.clone()))?;
            self.backward_quantized(cx, saved, &quantized, db.as_ref(), grad_input)
        })
    }

    pub(crate) fn check_input(&self, x: &Tensor) -> Result<()> {
        let weight = &self.weight;
        let argument = Argument::new(self.path(), "input", x).float()?.on(weight.device())?;
        argument.features(weight.shape().last_dim(), "in_features").map(drop)
    }
}

impl Module for Linear {
    type Saved = LinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let (y, saved) = self.forward_to(cx, x, Destination::High)?;
        Ok((in_high_precision(y)?, saved))
    }

    fn is_positionwise(&self) -> bool {
        true
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LinearSaved, dy: &Tensor) -> Result<Tensor> {
        in_high_precision(self.backward_to(cx, saved, dy, None)?)
    }
}

impl Slots for Linear {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.slots.slots(f);
    }
}

impl Layer for Linear {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        f(&self.weight);
        self.bias.iter().for_each(&mut *f);
        self.loras.parameters().for_each(f);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(&mut *f);
        self.loras.parameters_mut().for_each(f);
    }

    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        f(&self.loras);
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        f(&mut self.loras);
    }
}
