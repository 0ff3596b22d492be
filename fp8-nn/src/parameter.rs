//! A named tensor that training changes, and its gradient.

mod accumulate;
mod agreement;
mod cleared;
mod fp8;
mod gradient;
mod part;
mod store;

use crate::{Cut, Error, Placement, Result, TensorParallel};
pub(crate) use agreement::{Agreement, LoadedState};
use fp8::Fp8Value;
pub(crate) use fp8::{NOT_CUT, SCALE_INV, StoredPart, TENSOR_SCALE, overwrite_codes};
use fp8_kernels::{DType, Device, Fp8Tensor, MemoryKind, Operand, Shape, Tensor, ops};
use fp8_recipe::{Forward, SlotName, WeightQuantizer, WeightVersion};
pub(crate) use gradient::{Event, Gradient};
use gradient::{gradient_of, no_gradient};
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

/// A tensor that training changes, such as a weight, with its name and its gradient.
///
/// The name is the parameter's path in the model, such as `blocks.0.mlp.fc1.weight`, and never changes. Checkpoints and
/// optimizers identify the parameter by it. The gradient, `main_grad`, has the parameter's shape and is f32 whatever the
/// parameter's dtype. Backward adds to it; [`zero_grad`](crate::zero_grad) clears it. A [frozen](Self::set_trainable) parameter
/// has none.
///
/// The value is a tensor in high precision. Weights of FP8 GEMMs can be stored as codes alone: see
/// [`quantize_weights`](crate::quantize_weights).
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let mut scale = Parameter::new("head.scale", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
/// assert_eq!(scale.main_grad().to_f32_vec()?, [0.0, 0.0]);
/// let version = scale.version();
/// scale.set(Tensor::from_vec(vec![2.0f32, 3.0], [2], &Device::cpu())?)?;
/// assert_eq!(scale.tensor().to_f32_vec()?, [2.0, 3.0]);
/// assert_ne!(scale.version(), version); // so that layers quantize it again
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub struct Parameter {
    name: Arc<str>,
    value: Value,
    /// The slot that quantizes it, for a weight of an FP8 GEMM.
    slot: Option<SlotName>,
    /// Without elements if the parameter is frozen.
    gradient: Gradient,
    is_trainable: bool,
    version: Arc<WeightVersion>,
    agreement: Agreement,
    /// Whether it is a matrix of a low-rank adapter.
    is_adapter: bool,
    placement: Placement,
    /// The ranks that the placement is about.
    tensor_parallel: Option<TensorParallel>,
}

/// The value as it is stored.
#[expect(clippy::large_enum_variant, reason = "one a parameter, in the layer's own memory")]
#[derive(Debug)]
enum Value {
    High(Tensor),
    Fp8(Fp8Value),
}

/// The stored value, for an optimizer's step to change.
#[derive(Debug)]
pub(crate) enum ValueMut<'a> {
    High(&'a mut Tensor),
    Fp8(&'a mut Fp8Tensor, &'a WeightQuantizer),
}

/// The parts that an optimizer's step uses.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) name: &'a Arc<str>,
    pub(crate) value: ValueMut<'a>,
    pub(crate) main_grad: &'a Tensor,
    pub(crate) version: &'a Arc<WeightVersion>,
}

/// Writes one line: `Parameter(fc.weight, [64, 8], f32)`, or `E4M3` in place of the dtype for a value stored in FP8.
impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parameter({}, {}, ", self.name, self.shape())?;
        match &self.value {
            Value::High(tensor) => write!(f, "{})", tensor.dtype()),
            Value::Fp8(value) => write!(f, "{})", value.codes.encoding()),
        }
    }
}

impl Parameter {
    /// Creates a trainable parameter with this value and a gradient of 0.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(name: impl Into<Arc<str>>, tensor: Tensor) -> Result<Self> {
        let is_trainable = !CREATED_FROZEN.get();
        let main_grad = match is_trainable {
            true => gradient_of(*tensor.shape(), tensor.device())?,
            false => no_gradient(tensor.device())?,
        };
        tensor.set_memory_kind(MemoryKind::Parameters);
        Ok(Self {
            name: name.into(),
            value: Value::High(tensor),
            slot: None,
            gradient: Gradient::new(main_grad),
            is_trainable,
            version: Arc::default(),
            agreement: Agreement::default(),
            is_adapter: false,
            placement: Placement::Whole,
            tensor_parallel: None,
        })
    }

    /// Returns the parameter as one of a layer with tensor parallelism, with the part of it that this rank has: for layers of your own.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::{Placement, TensorParallel, TensorParallelOptions};
    /// use std::{thread, time::Duration};
    ///
    /// let run = |group: std::sync::Arc<dyn ProcessGroup>| -> Result<()> {
    ///     let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
    ///     let Some(ranks) = TensorParallel::new(group, &options)? else { return Ok(()) };
    ///     // A factor of each feature, which multiplies the tokens of this rank.
    ///     let ones = Tensor::full(1.0, [4], DType::F32, &Device::cpu())?;
    ///     let gain = Parameter::new("gain", ones)?.placed(Placement::Partial, &ranks);
    ///     assert_eq!(gain.placement(), &Placement::Partial);
    ///     Ok(())
    /// };
    /// thread::scope(|scope| {
    ///     let groups = local("tp", 2, Duration::from_secs(10))?.into_iter();
    ///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    /// })?;
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    #[must_use]
    pub fn placed(mut self, placement: Placement, ranks: &TensorParallel) -> Self {
        self.placement = placement;
        self.tensor_parallel = Some(ranks.clone());
        self
    }

    /// Notes where the parts of the parameter are, if nobody has.
    pub(crate) fn place_if_unplaced(&mut self, placement: Placement, ranks: &TensorParallel) {
        if self.tensor_parallel.is_none() {
            self.placement = placement;
            self.tensor_parallel = Some(ranks.clone());
        }
    }

    /// Returns which part of the parameter this rank has.
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the ranks that share the parameter's layer, if there are others.
    pub const fn tensor_parallel(&self) -> Option<&TensorParallel> {
        self.tensor_parallel.as_ref()
    }

    /// Returns the ranges of it that ranks have, if this one has a part.
    pub(crate) const fn cut(&self) -> Option<&Cut> {
        match &self.placement {
            Placement::Cut(cut) => Some(cut),
            Placement::Whole | Placement::Partial => None,
        }
    }

    /// Returns an error if this rank has a part of the parameter, which `call` cannot use.
    pub(crate) fn expect_whole(&self, call: &'static str, remedy: &'static str) -> Result<()> {
        let parameter = &self.name;
        self.cut().map_or(Ok(()), |_| Err(Error::Cut { call, parameter: parameter.clone(), remedy }))
    }

    /// Returns the shape of the whole parameter, of which this rank may have a part.
    pub fn global_shape(&self) -> &Shape {
        self.cut().map_or_else(|| self.shape(), Cut::global)
    }

    /// Notes that it is a matrix of a low-rank adapter.
    pub(crate) fn of_adapter(mut self) -> Self {
        self.is_adapter = true;
        self
    }

    /// Returns whether it is a matrix of a low-rank adapter ([`Lora`](crate::Lora)). Layers cast those to the dtype that they compute
    /// in, so it may have another dtype than the other parameters.
    ///
    /// ```
    /// use fp8_nn::LoraOptions;
    /// use fp8_nn::prelude::*;
    ///
    /// let mut rng = fp8_nn::rand::rng();
    /// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
    /// fc.loras_mut().add("all", 0..4, &LoraOptions { rank: 2, ..Default::default() }, &mut rng)?;
    /// for parameter in parameters_mut(&mut fc) {
    ///     let trains = parameter.is_adapter();
    ///     parameter.set_trainable(trains)?;
    /// }
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub const fn is_adapter(&self) -> bool {
        self.is_adapter
    }

    /// Returns the parameter with the slot that quantizes it. [`quantize_weights`](crate::quantize_weights) can then store it in
    /// FP8; the layer reads it by [`operand`](Self::operand).
    #[must_use]
    pub fn with_weight_slot(mut self, slot: &SlotName) -> Self {
        self.slot = Some(slot.clone());
        self
    }

    /// Returns the slot that quantizes it, for a weight of GEMMs that run in FP8.
    pub fn weight_slot(&self) -> Option<&SlotName> {
        self.slot.as_ref()
    }

    /// Notes that its GEMMs run in high precision whatever the recipe.
    pub(crate) fn forget_weight_slot(&mut self) {
        self.slot = None;
    }

    /// Returns the path in the model.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the value; for a parameter [stored in FP8](crate::quantize_weights), its codes (u8).
    /// [`values`](Self::values) returns the values of both.
    pub fn tensor(&self) -> &Tensor {
        match &self.value {
            Value::High(tensor) => tensor,
            Value::Fp8(value) => value.codes.stored_codes(),
        }
    }

    /// Returns the codes and their factors, if the parameter is [stored in FP8](crate::quantize_weights).
    pub fn fp8(&self) -> Option<&Fp8Tensor> {
        match &self.value {
            Value::High(_) => None,
            Value::Fp8(value) => Some(&value.codes),
        }
    }

    /// Returns the values in `dtype`: those of the codes, if the parameter is stored in FP8.
    ///
    /// # Errors
    /// A dtype that is not a float; the device is out of memory or failed.
    pub fn values(&self, dtype: DType) -> Result<Tensor> {
        match &self.value {
            Value::High(tensor) => Ok(ops::cast(tensor, dtype)?),
            Value::Fp8(value) => Ok(value.codes.dequantize(dtype)?),
        }
    }

    /// Returns the weight as the GEMMs of a scope read it, for a layer with a GEMM of its own: quantized once per version
    /// ([`Forward::quantize_parameter`]), or the codes if it is stored in FP8 ([`Forward::fp8_weight`]). In high precision, the
    /// operand has the dtype that the layer computes in.
    ///
    /// # Errors
    /// Those of the two methods.
    pub fn operand(&self, cx: &mut Forward<'_>, slot: &SlotName, dtype: DType) -> Result<Operand> {
        match &self.value {
            Value::High(tensor) => {
                let operand = match cx.quantize_parameter(slot, &self.version, self.is_trainable, tensor)? {
                    Operand::High(w) => Operand::High(ops::cast(&w, dtype)?),
                    operand => operand,
                };
                cx.measure_sqnr(slot, tensor, &operand)?;
                Ok(operand)
            }
            Value::Fp8(value) => Ok(cx.fp8_weight(slot, &value.codes, dtype)?),
        }
    }

    /// Returns the shape of the values, which codes of 4 bits do not have: two are in a byte.
    pub fn shape(&self) -> &Shape {
        match &self.value {
            Value::High(tensor) => tensor.shape(),
            Value::Fp8(value) => value.codes.shape(),
        }
    }

    /// Returns the device that the parameter is on.
    pub fn device(&self) -> &Device {
        self.tensor().device()
    }

    /// Returns the dtype of the value; for a parameter stored in FP8, the dtype that it had before.
    pub fn dtype(&self) -> DType {
        match &self.value {
            Value::High(tensor) => tensor.dtype(),
            Value::Fp8(value) => value.dtype,
        }
    }

    /// Returns whether training changes the parameter. It is true until [`set_trainable`](Self::set_trainable) freezes it.
    pub fn is_trainable(&self) -> bool {
        self.is_trainable
    }

    /// Freezes the parameter, or makes it trainable again. A frozen parameter has no gradient, and optimizers leave it as it is:
    /// backward skips the wgrad GEMM of a frozen weight. (The gradients of a norm's weight and of a bias are sums that come with the
    /// gradient of the input; backward drops them.) Checkpoints and broadcasts contain frozen parameters all the same.
    ///
    /// A step that was recorded before keeps updating the parameters that were trainable then: record it again. Run one scope
    /// between freezing a weight and recording: otherwise each replay quantizes it with the scale of that time and records its
    /// amax again.
    ///
    /// [`AdamW`](crate::AdamW) stores no moments and no f32 copy of a frozen parameter: its next step frees those of parameters
    /// that were frozen since the last step. If a parameter becomes trainable again, its moments start at 0 and its f32 copy at
    /// its value. The bias correction counts the steps of the optimizer, so late in training it corrects nothing. For a constant
    /// gradient, the first updates are then 0.4 to 1.1 times as large as the learning rate with the default `beta2` of 0.95, and
    /// 3 to 6.6 times with 0.999: use a warm-up there, or a [group](crate::ParameterGroup) with a smaller rate.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let mut w = Parameter::new("w", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
    /// w.set_trainable(false)?;
    /// assert_eq!(w.main_grad().numel(), 0);
    /// w.set_trainable(true)?;
    /// assert_eq!(w.main_grad().to_f32_vec()?, [0.0, 0.0]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// A step is being recorded; the device is out of memory or failed.
    pub fn set_trainable(&mut self, trainable: bool) -> Result<()> {
        if self.is_trainable == trainable {
            return Ok(());
        }
        self.device().expect_eager("set_trainable", "freeze parameters before a step is recorded")?;
        self.gradient = Gradient::new(match trainable {
            true => gradient_of(*self.shape(), self.device())?,
            false => no_gradient(self.device())?,
        });
        self.is_trainable = trainable;
        self.agreement.forget_groups();
        Ok(())
    }

    /// Returns the version of the value, which every update changes. Versions are unique in the process: equal versions mean
    /// equal bytes.
    pub fn version(&self) -> u64 {
        self.version.current()
    }

    /// Returns the version as it is shared with the cache of FP8 copies and with recorded steps.
    ///
    /// An optimizer of your own calls [`end_step`](WeightVersion::end_step) on that of every parameter, also of those that it
    /// leaves as they are, if it trains with frozen weights under Transformer Engine's rules: see
    /// [`Forward::quantize_parameter`].
    pub fn shared_version(&self) -> &Arc<WeightVersion> {
        &self.version
    }

    /// Calls `f` with the value, which it may change in place, and the gradient. Afterwards the parameter has a new version, and
    /// the gradient counts as used by a step. This is for optimizers of your own:
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let mut w = Parameter::new("w", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
    /// *w.main_grad_mut() = Tensor::from_vec(vec![2.0f32, -2.0], [2], &Device::cpu())?;
    /// w.update(|value, grad| {
    ///     *value = ops::add(value, &ops::scale(grad, -0.25)?)?; // SGD with a rate of 0.25
    ///     Ok(())
    /// })?;
    /// assert_eq!(w.tensor().to_f32_vec()?, [0.5, 1.5]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `f`; a parameter that is stored in FP8.
    pub fn update<T>(&mut self, f: impl FnOnce(&mut Tensor, &Tensor) -> Result<T>) -> Result<T> {
        let Value::High(tensor) = &mut self.value else {
            // Its codes are too coarse for an optimizer's updates, which would be lost to rounding.
            return Err(Error::StoredInFp8 { parameter: self.name.clone() });
        };
        self.version.advance();
        let result = f(tensor, self.gradient.tensor())?;
        self.gradient.note(Event::Stepped);
        Ok(result)
    }

    /// The error of a backward pass that lacks the input of `layer`, because this weight was frozen in the forward pass.
    pub(crate) fn was_frozen(&self, layer: &str) -> Error {
        Error::Option {
            part: layer.to_owned(),
            option: "set_trainable",
            value: self.is_trainable.to_string(),
            remedy: "the weight was frozen in the forward pass, which kept nothing for its gradient: run that again".to_owned(),
        }
    }

    /// Returns which groups have compared this parameter.
    pub(crate) fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    pub(crate) fn agreement_mut(&mut self) -> &mut Agreement {
        &mut self.agreement
    }

    /// Returns the parts that an optimizer's step uses.
    pub(crate) fn parts_mut(&mut self) -> Parts<'_> {
        let value = match &mut self.value {
            Value::High(tensor) => ValueMut::High(tensor),
            Value::Fp8(Fp8Value { codes, quantizer, .. }) => ValueMut::Fp8(codes, quantizer),
        };
        Parts { name: &self.name, value, main_grad: self.gradient.tensor(), version: &self.version }
    }

    /// Replaces the value.
    ///
    /// It is written in place, so recorded steps continue with it, unless the old value shares its storage with another
    /// tensor: then the parameter gets new storage. A recorded step quantizes a frozen weight with the scale that it had when the
    /// step was recorded: record it again after setting one. An optimizer that keeps f32 copies overwrites the value in its next step,
    /// unless [`AdamW::reload_params`](crate::AdamW::reload_params) is called before.
    ///
    /// With several ranks, set it to the same value on all of them. The next
    /// [`all_reduce_gradients`](crate::all_reduce_gradients) compares them.
    ///
    /// A parameter that is stored in FP8 takes any float dtype and quantizes the value.
    ///
    /// # Errors
    /// Another shape or dtype; the device failed.
    pub fn set(&mut self, value: Tensor) -> Result<()> {
        let (lhs, rhs) = (*self.shape(), *value.shape());
        if lhs != rhs {
            let remedy = "a parameter keeps its shape";
            return Err(fp8_kernels::Error::Shapes {
                op: "set",
                what: "parameter and value",
                lhs,
                rhs,
                remedy,
            }
            .into());
        }
        match &mut self.value {
            Value::High(tensor) => {
                if tensor.dtype() != value.dtype() {
                    let (found, expected) = (value.dtype(), tensor.dtype().name());
                    return Err(
                        fp8_kernels::Error::DType { op: "set", what: "the value", found, expected }.into()
                    );
                }
                overwrite(tensor, value, &self.name)?;
                tensor.set_memory_kind(MemoryKind::Parameters);
            }
            Value::Fp8(stored) => stored.set(&value, self.is_trainable, &self.name)?,
        }
        self.version.advance();
        self.agreement.forget_groups();
        Ok(())
    }
}

thread_local! {
    /// Whether parameters that this thread creates are frozen.
    static CREATED_FROZEN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, in which new parameters are [frozen](Parameter::set_trainable) from the start: no gradients are allocated for a model
/// that will not be trained. It holds for parameters that this thread makes.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 64, out_features: 32, ..Default::default() };
/// let fc = fp8_nn::frozen(|| Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng()))?;
/// assert!(!fc.weight().is_trainable());
/// assert_eq!(fc.weight().main_grad().numel(), 0);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub fn frozen<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            CREATED_FROZEN.set(self.0);
        }
    }
    let _restore = Restore(CREATED_FROZEN.replace(true));
    f()
}

/// Gives `tensor` the elements of `value`, which has the same shape and dtype. Writes them in place, unless `tensor` shares
/// its storage: then `value` replaces it.
pub(crate) fn overwrite(tensor: &mut Tensor, value: Tensor, name: &str) -> Result<()> {
    let value = value.to_device(tensor.device())?;
    if tensor.holders() == 0 {
        return Ok(tensor.copy_from(&value, name)?);
    }
    *tensor = value;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_are_created_frozen_have_no_gradient() {
        let new = || Parameter::new("w", Tensor::zeros([3], DType::F32, &Device::cpu()).unwrap()).unwrap();
        let mut w = frozen(|| frozen(new));
        assert!(!w.is_trainable() && w.main_grad().numel() == 0);
        w.set_trainable(true).unwrap();
        assert_eq!(w.main_grad().numel(), 3);
        let _ = std::panic::catch_unwind(|| frozen(|| panic!("a layer that panics")));
        assert!(new().is_trainable());
    }
}
