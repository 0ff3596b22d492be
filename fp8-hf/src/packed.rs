//! Weights in NVFP4: which tensors of a folder belong to one, and their values.

use super::config::{GROUP, InputScales, QuantMethod, WeightScales};
use super::family::TensorSpec;
use super::folder::{Folder, Scales};
use super::values::read_rows;
use super::weights::WeightInfo;
use crate::Result;
use fp8_format::slice::Codec;
use fp8_format::{Blocks, E4M3, TensorScale};
use safetensors::Dtype;
use std::collections::BTreeSet;
use std::ops::Range;

/// The tensors of a weight in NVFP4 that FP8 weights do not have, by the end of their names.
pub(super) const PACKED: [&str; 4] =
    ["weight_packed", "weight_global_scale", "weight_scale_2", "input_global_scale"];

/// The codes of a weight in NVFP4 and the factor of the whole.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    /// The tensor with the codes.
    pub(super) codes: String,
    /// What they are codes of: F4, with the shape that the model gives the weight.
    pub(super) info: WeightInfo,
    /// The tensor with the factor.
    pub(super) tensor_scale: String,
    /// Whether it is the factor that values were multiplied by, or the one that brings them back.
    is_encode: bool,
}

/// The names that a format gives the tensors of a weight.
struct Names {
    codes: String,
    scale: String,
    tensor_scale: String,
    input: String,
}

impl Names {
    /// Returns `None` for a format without NVFP4.
    fn new(method: QuantMethod, module: &str) -> Option<Self> {
        let named = |end: &str| format!("{module}.{end}");
        let [codes, tensor_scale, input] = match method {
            QuantMethod::CompressedTensors => ["weight_packed", "weight_global_scale", "input_global_scale"],
            QuantMethod::ModelOpt => ["weight", "weight_scale_2", "input_scale"],
            QuantMethod::Fp8 => return None,
        };
        Some(Self {
            codes: named(codes),
            scale: named("weight_scale"),
            tensor_scale: named(tensor_scale),
            input: named(input),
        })
    }
}

impl Folder {
    /// Checks the tensors of a weight that is in NVFP4; returns false for another.
    pub(super) fn check_packed(
        &mut self,
        spec: &TensorSpec,
        name: &str,
        expected: &mut BTreeSet<String>,
    ) -> Result<bool, String> {
        let Some(quantization) = &self.config.quantization else { return Ok(false) };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let Some(names) = Names::new(quantization.method, module) else { return Ok(false) };
        let Some(codes) = self.weights.info(&names.codes) else { return Ok(false) };
        if quantization.weights != WeightScales::TensorGroup
            || (names.codes == name && codes.dtype != Dtype::U8)
        {
            return Ok(false);
        }
        let &[rows, cols] = &spec.shape[..] else {
            return Err(format!("`{}` has codes of 4 bits and is no matrix", names.codes));
        };
        if !spec.kind.is_linear() {
            return Err(format!(
                "`{}` has codes of 4 bits: only the projections of the layers can be quantized",
                names.codes
            ));
        }
        let find = |name: &str, dtype: Dtype, shapes: &[&[usize]]| {
            let info = self.weights.info(name);
            let info =
                info.ok_or_else(|| format!("`{name}` is missing: `{}` has codes of 4 bits", names.codes))?;
            match info.dtype == dtype && shapes.contains(&&info.shape[..]) {
                true => Ok(info),
                false => Err(format!(
                    "`{name}` is {:?} {:?}: expected {dtype:?} {:?} for a weight in NVFP4 of {rows} × {cols}",
                    info.dtype, info.shape, shapes[0]
                )),
            }
        };
        let codes = find(&names.codes, Dtype::U8, &[&[rows, cols.div_ceil(2)]])?;
        let info = WeightInfo { dtype: Dtype::F4, shape: vec![rows, cols], bytes: codes.bytes };
        find(&names.scale, Dtype::F8_E4M3, &[&[rows, cols.div_ceil(GROUP)]])?;
        find(&names.tensor_scale, Dtype::F32, &[&[1], &[]])?;
        let has_input = self.weights.info(&names.input).is_some();
        if has_input || quantization.inputs == InputScales::TensorGroup {
            find(&names.input, Dtype::F32, &[&[1], &[]])?;
        }
        let is_encode = quantization.method == QuantMethod::CompressedTensors;
        let granularity = WeightScales::TensorGroup;
        let input = has_input.then_some(names.input);
        expected.extend([names.codes.clone(), names.scale.clone(), names.tensor_scale.clone()]);
        expected.extend(input.clone());
        let packed = Some(Packed { codes: names.codes, info, tensor_scale: names.tensor_scale, is_encode });
        self.quantized.insert(name.to_owned(), Scales { weight: names.scale, input, granularity, packed });
        Ok(true)
    }

    /// Returns the name of the weight whose codes are in this tensor of the files, or the name itself.
    pub(super) fn logical<'a>(&'a self, stored: &'a str) -> &'a str {
        let name = stored.strip_suffix("_packed").and_then(|name| self.quantized.get_key_value(name));
        name.filter(|(_, scales)| scales.packed.is_some()).map_or(stored, |(name, _)| name)
    }

    /// Returns the names of all tensors, with those of weights in place of their codes'.
    pub(super) fn logical_names(&self) -> impl Iterator<Item = &str> {
        self.weights.names().map(|name| self.logical(name))
    }

    /// Returns the tensor of the files with the codes of a weight, or the weight itself.
    pub(super) fn codes_of<'a>(&'a self, name: &'a str) -> &'a str {
        let packed = self.quantized.get(name).and_then(|scales| scales.packed.as_ref());
        packed.map_or(name, |packed| &packed.codes)
    }

    /// Reads the factors of a whole weight in NVFP4.
    pub(super) fn tensor_scale(&self, packed: &Packed) -> Result<TensorScale> {
        let scale = self.scales(&packed.tensor_scale)?.first().copied().unwrap_or(1.0);
        Ok(if packed.is_encode { TensorScale::from_encode(scale) } else { TensorScale::from_decode(scale) })
    }

    /// Reads the bytes of rows of a weight's codes in NVFP4.
    pub(super) fn packed_rows(&self, packed: &Packed, rows: &Range<usize>) -> Result<Vec<u8>> {
        let missing = || self.problem(format!("there is no tensor `{}`", packed.codes));
        let info = self.weights.info(&packed.codes).ok_or_else(missing)?;
        read_rows(&self.weights, &packed.codes, info, rows)
    }

    /// Reads the scales of the blocks of rows of a weight in NVFP4. One that is negative or NaN is an error.
    pub(super) fn group_scales(&self, name: &str, rows: &Range<usize>) -> Result<Vec<E4M3>> {
        let info = self.info(name)?;
        let scales: Vec<E4M3> =
            read_rows(&self.weights, name, info, rows)?.into_iter().map(E4M3::from_bits).collect();
        match scales.iter().position(|scale| !(scale.to_f32() >= 0.0)) {
            None => Ok(scales),
            Some(at) => Err(self.problem(format!(
                "`{name}` is {} at element {}: expected scales that are 0 or positive",
                scales[at],
                rows.start * info.matrix()[1] + at
            ))),
        }
    }

    /// Reads rows of a weight in NVFP4 as f32: (code · scale) · factor.
    pub(super) fn packed_values(
        &self,
        scales: &Scales,
        packed: &Packed,
        rows: &Range<usize>,
    ) -> Result<Vec<f32>> {
        let cols = packed.info.shape[1];
        let codes = self.packed_rows(packed, rows)?;
        let groups = self.group_scales(&scales.weight, rows)?;
        let tensor = self.tensor_scale(packed)?;
        let mut values = vec![0.0; rows.len() * cols];
        // The lengths fit, which is all that this checks.
        let read = Codec::new().dequantize_nvfp4(
            &codes,
            rows.len(),
            cols,
            Blocks::B1x16,
            &groups,
            tensor,
            &mut values,
        );
        read.map_err(|error| self.problem(format!("`{}`: {error}", packed.codes)))?;
        Ok(values)
    }
}
