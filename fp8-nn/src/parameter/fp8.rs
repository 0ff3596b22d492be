//! A parameter's value as FP8 codes.

use super::{Parameter, Value};
use crate::Result;
use crate::arguments::Argument;
use fp8_kernels::{DType, Fp8Tensor, MemoryKind, Tensor};
use fp8_recipe::WeightQuantizer;

/// The codes of a weight, and how a new value is quantized.
#[derive(Debug)]
pub(super) struct Fp8Value {
    pub(super) codes: Fp8Tensor,
    pub(super) quantizer: WeightQuantizer,
    /// The dtype of the value that was quantized.
    pub(super) dtype: DType,
}

/// The parts of a stored value: a suffix of the parameter's name in files, and the tensor.
pub(crate) type StoredPart<'a> = (&'static str, &'a Tensor);

/// The suffix of the dequantization factors' name in files.
pub(crate) const SCALE_INV: &str = "_scale_inv";

impl Fp8Value {
    fn new(codes: Fp8Tensor, quantizer: WeightQuantizer, dtype: DType) -> Self {
        let value = Self { codes, quantizer, dtype };
        value.count_as_parameters();
        value
    }

    /// Quantizes a new value, for backward passes too if those read the present one.
    pub(super) fn set(&mut self, value: &Tensor, columnwise: bool, name: &str) -> Result<()> {
        let value = value.to_device(self.codes.device())?;
        let columnwise = columnwise || self.codes.columnwise().is_some();
        overwrite_codes(&mut self.codes, self.quantizer.quantize(&value, columnwise)?, name)?;
        self.count_as_parameters();
        Ok(())
    }

    fn count_as_parameters(&self) {
        let parts = [Some(self.codes.scale_inv()), self.codes.rowwise(), self.codes.columnwise()];
        let parts = parts.into_iter().chain([self.codes.columnwise_scale_inv()]);
        parts.flatten().for_each(|part| part.set_memory_kind(MemoryKind::Parameters));
    }
}

/// Gives `codes` the elements of `new`: in place, which recorded steps need, unless a `Saved` still reads the old codes or the
/// layouts differ.
pub(crate) fn overwrite_codes(codes: &mut Fp8Tensor, new: Fp8Tensor, name: &str) -> Result<()> {
    let has_same_layouts = (codes.rowwise().is_some(), codes.columnwise().is_some())
        == (new.rowwise().is_some(), new.columnwise().is_some());
    if codes.device().capture_number().is_some() || (codes.holders() == 0 && has_same_layouts) {
        return Ok(codes.copy_from(&new, name)?);
    }
    *codes = new;
    Ok(())
}

impl Parameter {
    /// Stores the value in FP8 and returns the tensor that it replaces, or `None` if it already was in FP8. The codes are those of
    /// `main_param`, a finer copy of the value, if there is one. `columnwise` says whether backward passes read the weight.
    pub(crate) fn store_in_fp8(
        &mut self,
        quantizer: &WeightQuantizer,
        main_param: Option<&Tensor>,
        columnwise: bool,
    ) -> Result<Option<Tensor>> {
        let Value::High(tensor) = &self.value else { return Ok(None) };
        let remedy = "store weights in FP8 before a step is recorded";
        tensor.device().expect_eager("quantize_weights", remedy)?;
        let codes = quantizer.quantize(main_param.unwrap_or(tensor), columnwise)?;
        let value = Value::Fp8(Fp8Value::new(codes, quantizer.clone(), tensor.dtype()));
        self.version.advance();
        self.agreement.forget_groups();
        match std::mem::replace(&mut self.value, value) {
            Value::High(tensor) => Ok(Some(tensor)),
            Value::Fp8(_) => Ok(None),
        }
    }

    /// Replaces the value by codes, as those of a file: the parameter is stored in FP8 from now on, with `quantizer` for later
    /// values. [`quantize_weights`](crate::quantize_weights) quantizes the value that there is.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let options = LinearOptions { in_features: 32, out_features: 16, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// let quantizers = Recipe::from(CurrentScaling::default()).weight_quantizers(&fc)?;
    /// let codes = Tensor::from_vec(vec![0x38u8; 512], [16, 32], &Device::cpu())?; // 1 in E4M3
    /// let factor = Tensor::full(0.5, [], DType::F32, &Device::cpu())?;
    /// let codes = Fp8Tensor::from_codes(codes, [16, 32], Encoding::E4M3, factor)?;
    ///
    /// let weight = parameters_mut(&mut fc).swap_remove(0);
    /// weight.store_codes(codes, &quantizers["fc.weight"])?;
    /// assert_eq!(weight.values(DType::F32)?.to_f32_vec()?, [0.5; 512]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Codes of another shape than the parameter's, or on another device; a step that is being recorded.
    pub fn store_codes(&mut self, codes: Fp8Tensor, quantizer: &WeightQuantizer) -> Result<()> {
        let remedy = "store weights in FP8 before a step is recorded";
        self.device().expect_eager("store_codes", remedy)?;
        let name = self.name.clone();
        let argument = Argument::codes(&name, "codes", &codes).on(self.device())?;
        argument.shape(codes.shape() == self.shape(), || format!("{}, the parameter's", self.shape()))?;
        self.value = Value::Fp8(Fp8Value::new(codes, quantizer.clone(), self.dtype()));
        self.version.advance();
        self.agreement.forget_groups();
        Ok(())
    }

    /// Returns the tensors that hold the value: one, or codes and factors.
    pub(crate) fn stored(&self) -> Vec<StoredPart<'_>> {
        let codes = match &self.value {
            Value::High(tensor) => return vec![("", tensor)],
            Value::Fp8(value) => &value.codes,
        };
        let columnwise = codes.columnwise().zip(codes.columnwise_scale_inv());
        let columnwise =
            columnwise.map(|(codes, factors)| [("_columnwise", codes), ("_columnwise_scale_inv", factors)]);
        [("", self.tensor()), (SCALE_INV, codes.scale_inv())]
            .into_iter()
            .chain(columnwise.into_iter().flatten())
            .collect()
    }

    /// Replaces the value by tensors in the order of [`stored`](Self::stored), which are of its form.
    pub(crate) fn set_stored(&mut self, parts: Vec<Tensor>) -> Result<()> {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Ok(()) };
        let (Value::Fp8(value), Some(scale_inv)) = (&mut self.value, parts.next()) else {
            return self.set(first);
        };
        let new = value.codes.joined(first, scale_inv, parts.next().zip(parts.next()))?;
        self.set_codes(new)
    }

    /// Replaces the codes by others of the same format and granularity. Those of the transpose are kept where there are some.
    pub(crate) fn set_codes(&mut self, new: Fp8Tensor) -> Result<()> {
        if let Value::Fp8(value) = &mut self.value {
            let new = match value.codes.columnwise() {
                Some(_) => new.quantize_columnwise(&value.quantizer.slot(true))?,
                None => new,
            };
            overwrite_codes(&mut value.codes, new, &self.name)?;
            value.count_as_parameters();
            self.version.advance();
            self.agreement.forget_groups();
        }
        Ok(())
    }
}
