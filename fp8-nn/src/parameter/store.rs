//! Storing a parameter's value as codes.

use super::fp8::{Fp8Value, NOT_CUT, StoredPart, TENSOR_SCALE, overwrite_codes};
use super::{Parameter, SCALE_INV, Value};
use crate::Result;
use crate::arguments::Argument;
use fp8_kernels::{Fp8Tensor, Tensor};
use fp8_recipe::WeightQuantizer;

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
        let remedy = "store the codes of weights before a step is recorded";
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
    /// Codes of another shape than the parameter's, or on another device; a parameter that is [cut over ranks](crate::Placement::Cut); a
    /// step that is being recorded.
    pub fn store_codes(&mut self, codes: Fp8Tensor, quantizer: &WeightQuantizer) -> Result<()> {
        let remedy = "store the codes of weights before a step is recorded";
        self.device().expect_eager("store_codes", remedy)?;
        self.expect_whole("store_codes", NOT_CUT)?;
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
        [
            ("", Some(self.tensor())),
            (SCALE_INV, Some(codes.scale_inv())),
            (TENSOR_SCALE, codes.tensor_scale()),
            ("_columnwise", codes.columnwise()),
            ("_columnwise_scale_inv", codes.columnwise_scale_inv()),
            ("_columnwise_tensor_scale", codes.columnwise_tensor_scale()),
        ]
        .into_iter()
        .filter_map(|(suffix, part)| Some((suffix, part?)))
        .collect()
    }

    /// Replaces the value by tensors in the order of [`stored`](Self::stored), which are of its form.
    pub(crate) fn set_stored(&mut self, parts: Vec<Tensor>) -> Result<()> {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Ok(()) };
        let (Value::Fp8(value), Some(scale_inv)) = (&mut self.value, parts.next()) else {
            return self.set(first);
        };
        let own = &value.codes;
        let tensor_scale = own.tensor_scale().and_then(|_| parts.next());
        let columnwise = parts.next().zip(parts.next());
        let new = own.joined(first, scale_inv, columnwise)?;
        let new = match tensor_scale {
            Some(scale) => new.with_tensor_scale(scale, parts.next())?,
            None => new,
        };
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
