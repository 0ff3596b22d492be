//! Weights in NVFP4: which tensors of a folder belong to one.

use super::config::{GROUP, InputScales, QuantMethod, Quantization, WeightScales};
use super::family::TensorSpec;
use super::weights::{WeightInfo, Weights};
use fp8_format::TensorScale;
use safetensors::Dtype;

/// The tensors of a weight in NVFP4 that FP8 weights do not have, by the end of their names.
pub(super) const PACKED: [&str; 4] =
    ["weight_packed", "weight_global_scale", "weight_scale_2", "input_global_scale"];

/// The codes of a weight in NVFP4 and the factor of the whole.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    /// The tensor with the codes.
    pub(super) codes: String,
    /// The weight that they are codes of: F4, with the shape that the model gives the weight.
    pub(super) info: WeightInfo,
    /// The tensor with the factor.
    pub(super) tensor_scale: String,
    /// Whether it is the factor that values were multiplied by, or the one that brings them back.
    is_encode: bool,
}

impl Packed {
    /// Returns the factors of the whole of which the files have this one.
    pub(super) fn factors(&self, factor: f32) -> TensorScale {
        if self.is_encode { TensorScale::from_encode(factor) } else { TensorScale::from_decode(factor) }
    }
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

/// The tensors of a weight in NVFP4.
pub(super) struct PackedTensors {
    /// The tensor with the scales of blocks.
    pub(super) scale: String,
    /// The tensor with the factor of the layer's input, if there is one.
    pub(super) input: Option<String>,
    pub(super) packed: Packed,
}

impl PackedTensors {
    /// Finds and checks the tensors of the weight `name`; returns `None` for one that is not in NVFP4.
    pub(super) fn find(
        weights: &Weights,
        quantization: &Quantization,
        spec: &TensorSpec,
        name: &str,
    ) -> Result<Option<Self>, String> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let Some(names) = Names::new(quantization.method, module) else { return Ok(None) };
        let Some(codes) = weights.info(&names.codes) else { return Ok(None) };
        if quantization.weights != WeightScales::TensorGroup
            || (names.codes == name && codes.dtype != Dtype::U8)
        {
            return Ok(None);
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
            let info = weights.info(name);
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
        let has_input = weights.info(&names.input).is_some();
        if has_input || quantization.inputs == InputScales::TensorGroup {
            find(&names.input, Dtype::F32, &[&[1], &[]])?;
        }
        let is_encode = quantization.method == QuantMethod::CompressedTensors;
        let packed = Packed { codes: names.codes, info, tensor_scale: names.tensor_scale, is_encode };
        Ok(Some(Self { scale: names.scale, input: has_input.then_some(names.input), packed }))
    }
}
