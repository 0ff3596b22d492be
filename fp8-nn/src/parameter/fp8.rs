//! FP8 codes of a parameter's value.

use crate::Result;
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

/// The suffix of the name in files of the factors of a whole tensor in NVFP4.
pub(crate) const TENSOR_SCALE: &str = "_tensor_scale";

/// The remedy for a weight of which each rank has a part.
pub(crate) const NOT_CUT: &str =
    "weights stored in codes would have scales of their own on each rank: keep it in high precision";

impl Fp8Value {
    pub(super) fn new(codes: Fp8Tensor, quantizer: WeightQuantizer, dtype: DType) -> Self {
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

    pub(super) fn count_as_parameters(&self) {
        let parts = [Some(self.codes.scale_inv()), self.codes.rowwise(), self.codes.columnwise()];
        let of_copies = [
            self.codes.columnwise_scale_inv(),
            self.codes.tensor_scale(),
            self.codes.columnwise_tensor_scale(),
        ];
        let parts = parts.into_iter().chain(of_copies);
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
