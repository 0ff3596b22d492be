//! `quantization_config`: how the matrices of a checkpoint are quantized.

use super::fields::Fields;
use serde_json::{Map, Value};

/// The `quantization_config` of a checkpoint, which describes how its matrices in FP8 or NVFP4 are stored.
///
/// Every scale of FP8 in a file is a dequantization factor: value = code · scale. Weights in NVFP4 have a second one, of the whole tensor:
/// [`WeightScales::TensorGroup`]. The example of [`quantize`](crate::quantize) reads one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// The format, which decides the names of the tensors.
    pub method: QuantMethod,
    /// The elements of a weight that share a scale.
    pub weights: WeightScales,
    /// The quantization of the inputs of quantized layers.
    pub inputs: InputScales,
    /// Whether scales of inputs that are computed when the model runs are rounded up to powers of two (`scale_fmt` "ue8m0",
    /// which DeepSeek writes since V3.1).
    pub power_2_scales: bool,
    /// The layers that are not quantized, as the format writes them.
    pub ignored: Vec<String>,
}

/// The format of a quantized checkpoint. The example of [`quantize`](crate::quantize) reads one in a [`Quantization`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantMethod {
    /// `compressed-tensors`, format `float-quantized` or `naive-quantized`: scales are in `X.weight_scale`. In the format
    /// `nvfp4-pack-quantized`, codes are in `X.weight_packed`, and the factor that values were multiplied by is in
    /// `X.weight_global_scale`.
    CompressedTensors,
    /// `fp8`: scales of blocks are in `X.weight_scale_inv`, those of whole tensors in `X.weight_scale` (vLLM) or
    /// `X.weight_scale_inv` (transformers).
    Fp8,
    /// `modelopt`, algorithm `NVFP4`: codes are in `X.weight`, their scales in `X.weight_scale`, and the factor that values are
    /// multiplied by when they are read is in `X.weight_scale_2`.
    ModelOpt,
}

impl QuantMethod {
    /// Returns the name that `config.json` has for it. The example of [`quantize`](crate::quantize) prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::Fp8 => "fp8",
            Self::ModelOpt => "modelopt",
        }
    }
}

/// The elements of a quantized weight `[out, in]` that share a scale. The example of [`quantize`](crate::quantize)
/// reads one in a [`Quantization`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightScales {
    /// The whole tensor.
    Tensor,
    /// A row, which is an output channel.
    Channel,
    /// A block of `[rows, columns]`, counted from the top left. Those at the end are smaller.
    Block([usize; 2]),
    /// 16 columns of a row, beside a factor for the whole tensor: NVFP4, two codes a byte. value = (code · scale) · factor.
    TensorGroup,
}

/// The columns of a row that share a scale in NVFP4.
pub(crate) const GROUP: usize = 16;

impl WeightScales {
    /// Returns the number of scales of a weight, down and across.
    pub(crate) fn grid(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Tensor => [1, 1],
            Self::Channel => [rows, 1],
            Self::Block([height, width]) => [rows.div_ceil(height), cols.div_ceil(width)],
            Self::TensorGroup => [rows, cols.div_ceil(GROUP)],
        }
    }
}

/// The way in which the input of a quantized layer is quantized when the model runs. The example of
/// [`quantize`](crate::quantize) reads one in a [`Quantization`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InputScales {
    /// Inputs stay in high precision.
    None,
    /// With a scale from the file.
    Static,
    /// With amax / 448 of the whole input.
    Tensor,
    /// With amax / 448 of each token.
    Token,
    /// With amax / 448 of each group of this many columns of a token.
    Group(usize),
    /// In NVFP4: with a scale for each 16 columns of a token, and a factor of the whole input from the file.
    TensorGroup,
}

const METHODS: &str =
    "\"compressed-tensors\", \"fp8\" or \"modelopt\": other quantizations are not supported";

/// The format of compressed-tensors for NVFP4.
const NVFP4: &str = "nvfp4-pack-quantized";

/// The names of the field, the one that wins first. Old files of Neural Magic have the second.
pub(super) const KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// Reads the field `quantization_config`, or `compression_config` if that is absent.
pub(super) fn quantization(config: Fields<'_>) -> Result<Option<Quantization>, String> {
    let Some(key) = KEYS.into_iter().find(|key| config.get(key).is_some()) else { return Ok(None) };
    let Some(object) = config.object(key)? else { return Ok(None) };
    let path = format!("{key}.");
    let fields = Fields::new(object, &path);
    match fields.text("quant_method")? {
        Some("compressed-tensors") => compressed_tensors(fields).map(Some),
        Some("fp8") => fp8(fields).map(Some),
        Some("modelopt") => modelopt(fields).map(Some),
        _ => Err(fields.wrong("quant_method", METHODS)),
    }
}

fn fp8(fields: Fields<'_>) -> Result<Quantization, String> {
    let weights = match block(fields, "weight_block_size")? {
        Some(block) => WeightScales::Block(block),
        None => WeightScales::Tensor,
    };
    expect_plain_cache(fields)?;
    if fields.text("fmt")?.is_some_and(|format| format != "e4m3") {
        return Err(fields.wrong("fmt", "\"e4m3\""));
    }
    let inputs = match (fields.text("activation_scheme")?, weights) {
        (Some("static"), WeightScales::Tensor) => InputScales::Static,
        (Some("dynamic") | None, WeightScales::Block([_, width])) => InputScales::Group(width),
        (Some("dynamic") | None, _) => InputScales::Tensor,
        _ => return Err(fields.wrong("activation_scheme", "\"dynamic\", or \"static\" without blocks")),
    };
    let power_2_scales = match fields.text("scale_fmt")? {
        None => false,
        Some("ue8m0") => true,
        Some(_) => return Err(fields.wrong("scale_fmt", "\"ue8m0\", or null for f32 scales")),
    };
    if fields.get("modules_to_convert").is_some() {
        let expected = "null: only `modules_to_not_convert` is supported";
        return Err(fields.wrong("modules_to_convert", expected));
    }
    let mut ignored = fields.texts("ignored_layers")?;
    ignored.extend(fields.texts("modules_to_not_convert")?);
    Ok(Quantization { method: QuantMethod::Fp8, weights, inputs, power_2_scales, ignored })
}

/// Returns the `quantization_config` that `text`, an `hf_quant_config.json` of ModelOpt, describes.
pub(crate) fn of_modelopt(text: &str) -> Result<Value, String> {
    let map = crate::json::object(text)?;
    let Some(fields) = Fields::new(&map, "").object("quantization")? else {
        return Err("`quantization` is missing: expected what ModelOpt writes".into());
    };
    let mut fields = fields.clone();
    fields.insert("quant_method".into(), "modelopt".into());
    Ok(fields.into())
}

/// Reads what ModelOpt writes: `config.json` has groups as compressed-tensors does, or the fields of `hf_quant_config.json`.
fn modelopt(fields: Fields<'_>) -> Result<Quantization, String> {
    if fields.text("quant_algo")? != Some("NVFP4") {
        return Err(fields.wrong("quant_algo", "\"NVFP4\": other algorithms are not supported"));
    }
    if fields.size("group_size")?.is_some_and(|size| size != GROUP) {
        return Err(fields.wrong("group_size", "16"));
    }
    expect_plain_cache(fields)?;
    if fields.get("kv_cache_quant_algo").is_some() {
        return Err(fields.wrong("kv_cache_quant_algo", PLAIN_CACHE));
    }
    let mut ignored = fields.texts("ignore")?;
    ignored.extend(fields.texts("exclude_modules")?);
    Ok(Quantization {
        method: QuantMethod::ModelOpt,
        weights: WeightScales::TensorGroup,
        inputs: InputScales::TensorGroup,
        power_2_scales: false,
        ignored,
    })
}

fn compressed_tensors(fields: Fields<'_>) -> Result<Quantization, String> {
    // The second is the older name, and that of files with weights alone in FP8. Both have the same layout.
    let bits = match fields.text("format")? {
        Some("float-quantized" | "naive-quantized") => 8,
        Some(NVFP4) => 4,
        _ => {
            let expected = "\"float-quantized\", \"naive-quantized\" or \"nvfp4-pack-quantized\": other formats are not supported";
            return Err(fields.wrong("format", expected));
        }
    };
    expect_plain_cache(fields)?;
    for key in ["sparsity_config", "transform_config"] {
        let is_dense = |object: &Map<String, Value>| {
            object.is_empty() || object.get("format").is_some_and(|format| format == "dense")
        };
        if fields.object(key)?.is_some_and(|object| !is_dense(object)) {
            return Err(fields.wrong(key, "nothing: it changes the weights and is not supported"));
        }
    }
    let groups = fields.object("config_groups")?;
    let group = match groups.map(|groups| groups.values().collect::<Vec<_>>()).as_deref() {
        Some(&[Value::Object(group)]) => group,
        _ => return Err(fields.wrong("config_groups", "one group, for all Linears")),
    };
    let path = fields.path_of("config_groups");
    let group = Fields::new(group, &path);
    if group.texts("targets")? != ["Linear"] {
        return Err(group.wrong("targets", "[\"Linear\"]"));
    }
    if group.get("output_activations").is_some() {
        return Err(group.wrong("output_activations", "null: quantized outputs are not supported"));
    }
    let Some(weights) = group.object("weights")? else {
        return Err(group.wrong("weights", "an object that says how weights are quantized"));
    };
    let path = group.path_of("weights");
    let weights = Fields::new(weights, &path);
    expect_floats(weights, bits)?;
    if weights.flag("dynamic")? == Some(true) {
        return Err(weights.wrong("dynamic", "false: the scales of weights are in the files"));
    }
    let scales = match (weights.text("strategy")?, block(weights, "block_structure")?) {
        _ if bits == 4 => {
            expect_groups(weights)?;
            WeightScales::TensorGroup
        }
        (Some("tensor"), _) => WeightScales::Tensor,
        (Some("channel"), _) => WeightScales::Channel,
        (Some("block"), Some(block)) => WeightScales::Block(block),
        _ => {
            return Err(
                weights.wrong("strategy", "\"tensor\", \"channel\", or \"block\" with block_structure")
            );
        }
    };
    let inputs = compressed_inputs(group, bits)?;
    let ignored = fields.texts("ignore")?;
    let method = QuantMethod::CompressedTensors;
    Ok(Quantization { method, weights: scales, inputs, power_2_scales: false, ignored })
}

/// Reads how compressed-tensors quantizes inputs.
fn compressed_inputs(group: Fields<'_>, bits: usize) -> Result<InputScales, String> {
    let Some(inputs) = group.object("input_activations")? else { return Ok(InputScales::None) };
    let path = group.path_of("input_activations");
    let inputs = Fields::new(inputs, &path);
    expect_floats(inputs, bits)?;
    if bits == 4 {
        // The scales of groups are found when the model runs, and the factor of the tensor is in the file: `dynamic` is "local".
        expect_groups(inputs)?;
        return Ok(InputScales::TensorGroup);
    }
    match (inputs.flag("dynamic")?.unwrap_or(false), inputs.text("strategy")?, inputs.size("group_size")?) {
        (false, Some("tensor"), _) => Ok(InputScales::Static),
        (true, Some("tensor"), _) => Ok(InputScales::Tensor),
        (true, Some("token"), _) => Ok(InputScales::Token),
        (true, Some("group"), Some(width)) if width > 0 => Ok(InputScales::Group(width)),
        _ => Err(inputs.wrong("strategy", "\"tensor\", or with dynamic \"token\" or \"group\"")),
    }
}

const PLAIN_CACHE: &str = "null, which keeps the KV cache in high precision: a cache in FP8 is not supported";

/// Refuses scales for a cache of keys and values in FP8.
fn expect_plain_cache(fields: Fields<'_>) -> Result<(), String> {
    match fields.get("kv_cache_scheme") {
        None => Ok(()),
        Some(_) => Err(fields.wrong("kv_cache_scheme", PLAIN_CACHE)),
    }
}

/// Expects scales for groups of 16 below one for the tensor.
fn expect_groups(fields: Fields<'_>) -> Result<(), String> {
    if fields.text("strategy")? != Some("tensor_group") {
        return Err(fields.wrong("strategy", "\"tensor_group\""));
    }
    if fields.size("group_size")? != Some(GROUP) {
        return Err(fields.wrong("group_size", "16"));
    }
    Ok(())
}

fn expect_floats(fields: Fields<'_>, bits: usize) -> Result<(), String> {
    if fields.size("num_bits")? != Some(bits) {
        return Err(fields.wrong("num_bits", &bits.to_string()));
    }
    if fields.text("type")? != Some("float") {
        return Err(fields.wrong("type", "\"float\""));
    }
    match fields.flag("symmetric")? {
        Some(false) => Err(fields.wrong("symmetric", "true: FP8 and NVFP4 have no zero point")),
        _ => Ok(()),
    }
}

/// Reads two positive integers.
fn block(fields: Fields<'_>, key: &str) -> Result<Option<[usize; 2]>, String> {
    let Some(value) = fields.get(key) else { return Ok(None) };
    let side =
        |value: &Value| value.as_u64().and_then(|side| usize::try_from(side).ok()).filter(|&side| side > 0);
    match value.as_array().map(|sides| sides.iter().map(side).collect::<Vec<_>>()).as_deref() {
        Some(&[Some(rows), Some(cols)]) => Ok(Some([rows, cols])),
        _ => Err(fields.wrong(key, "two positive integers")),
    }
}
