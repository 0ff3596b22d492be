//! The formats of FP8 and NVFP4 that checkpoints are written in.

use super::config::{GROUP, WeightScales};
use super::encode::Rule;
use crate::Error;
use fp8_format::TensorScale;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;

/// A format of Hugging Face folders for weights in FP8 or NVFP4: what shares a scale, and who reads it.
///
/// Codes of FP8 are E4M3, and every scale is amax / 448, in f32. NVFP4 has codes of 4 bits, a scale in E4M3 for 16 columns of a row, and a
/// factor of the whole ([`TensorScale`](fp8_format::TensorScale)). Inputs are quantized when the model runs: with scales
/// that are found then, or with those of [`QuantizeOptions::input_scales`](super::QuantizeOptions::input_scales).
///
/// ```
/// use fp8_hf::Scheme;
/// assert_eq!("block128".parse::<Scheme>()?, Scheme::Block128);
/// let error = "int4".parse::<Scheme>().unwrap_err().to_string();
/// assert_eq!(error, "quantize: scheme = int4: expected one of tensor, channel, block128, vllm, nvfp4, nvfp4a16");
/// # Ok::<(), fp8_hf::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scheme {
    /// One scale for a weight, in the format of compressed-tensors: for vLLM and transformers.
    Tensor,
    /// One scale for a row of a weight, in the format of compressed-tensors (`FP8_DYNAMIC`): for vLLM and transformers.
    Channel,
    /// One scale for a block of 128 × 128, in DeepSeek's format: for vLLM, transformers and others.
    Block128,
    /// One scale for all weights that vLLM computes as one (q, k and v; gate and up), in the format `fp8`: for vLLM.
    Vllm,
    /// 4.5 bits a value, weights and inputs in NVFP4, in the format of compressed-tensors: for vLLM and transformers. Weights that vLLM
    /// computes as one (q, k and v; gate and up) have one factor of the whole. It needs
    /// [`QuantizeOptions::input_scales`](super::QuantizeOptions::input_scales).
    Nvfp4,
    /// Weights in NVFP4 as [`Nvfp4`](Self::Nvfp4) has them, and inputs in high precision.
    Nvfp4a16,
}

/// The side of a block.
pub(super) const BLOCK: usize = 128;

impl Scheme {
    /// All schemes.
    pub const ALL: [Self; 6] =
        [Self::Tensor, Self::Channel, Self::Block128, Self::Vllm, Self::Nvfp4, Self::Nvfp4a16];

    /// Returns the name by which the program `fp8` knows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Channel => "channel",
            Self::Block128 => "block128",
            Self::Vllm => "vllm",
            Self::Nvfp4 => "nvfp4",
            Self::Nvfp4a16 => "nvfp4a16",
        }
    }

    /// Returns true if weights have codes of 4 bits.
    ///
    /// ```
    /// use fp8_hf::Scheme;
    /// assert!(Scheme::Nvfp4a16.is_nvfp4() && !Scheme::Channel.is_nvfp4());
    /// ```
    #[must_use]
    pub const fn is_nvfp4(self) -> bool {
        matches!(self, Self::Nvfp4 | Self::Nvfp4a16)
    }

    /// Returns the numbers that rows and columns of matrices are to be multiples of, without
    /// [`QuantizeOptions::allow_ragged`](super::QuantizeOptions::allow_ragged).
    ///
    /// ```
    /// use fp8_hf::Scheme;
    /// assert_eq!((Scheme::Block128.multiples(), Scheme::Nvfp4.multiples()), ([128, 128], [1, 16]));
    /// ```
    #[must_use]
    pub const fn multiples(self) -> [usize; 2] {
        match self {
            Self::Tensor | Self::Channel | Self::Vllm => [1, 1],
            Self::Block128 => [BLOCK, BLOCK],
            Self::Nvfp4 | Self::Nvfp4a16 => [1, GROUP],
        }
    }

    /// Returns whether weights that vLLM computes as one share a scale.
    pub(super) const fn shares_in_groups(self) -> bool {
        matches!(self, Self::Vllm | Self::Nvfp4 | Self::Nvfp4a16)
    }

    /// Returns true if the format can hold static scales of inputs, those of
    /// [`QuantizeOptions::input_scales`](super::QuantizeOptions::input_scales).
    ///
    /// ```
    /// use fp8_hf::Scheme;
    /// assert!(Scheme::Tensor.takes_input_scales() && !Scheme::Channel.takes_input_scales());
    /// ```
    #[must_use]
    pub const fn takes_input_scales(self) -> bool {
        matches!(self, Self::Tensor | Self::Vllm | Self::Nvfp4)
    }

    pub(super) const fn rule(self) -> Rule {
        match self {
            Self::Tensor | Self::Channel => Rule::COMPRESSED_TENSORS,
            // NVFP4 has a rule of its own.
            Self::Block128 | Self::Vllm | Self::Nvfp4 | Self::Nvfp4a16 => Rule::FP8,
        }
    }

    pub(super) const fn granularity(self) -> WeightScales {
        match self {
            Self::Tensor | Self::Vllm => WeightScales::Tensor,
            Self::Channel => WeightScales::Channel,
            Self::Block128 => WeightScales::Block([BLOCK, BLOCK]),
            Self::Nvfp4 | Self::Nvfp4a16 => WeightScales::TensorGroup,
        }
    }

    /// Returns the ends of the names of a weight's tensors, with their dtypes and shapes: codes, scales, and the factor of the whole if
    /// there is one.
    pub(super) fn parts(self, [rows, cols]: [usize; 2]) -> Vec<Part> {
        let fp8 = |end, shape| {
            vec![
                Part { end: "weight", dtype: Dtype::F8_E4M3, shape: vec![rows, cols] },
                Part { end, dtype: Dtype::F32, shape },
            ]
        };
        match self {
            Self::Tensor => fp8("weight_scale", vec![1]),
            Self::Channel => fp8("weight_scale", vec![rows, 1]),
            Self::Block128 => fp8("weight_scale_inv", vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)]),
            Self::Vllm => fp8("weight_scale", Vec::new()),
            Self::Nvfp4 | Self::Nvfp4a16 => vec![
                Part { end: "weight_packed", dtype: Dtype::U8, shape: vec![rows, cols.div_ceil(2)] },
                Part { end: "weight_scale", dtype: Dtype::F8_E4M3, shape: vec![rows, cols.div_ceil(GROUP)] },
                Part { end: "weight_global_scale", dtype: Dtype::F32, shape: vec![1] },
            ],
        }
    }

    /// Returns the name and shape of a layer's static input scale.
    pub(super) fn input(self) -> Part {
        let (end, shape) = match self {
            Self::Nvfp4 | Self::Nvfp4a16 => ("input_global_scale", vec![1]),
            Self::Vllm => ("input_scale", Vec::new()),
            Self::Tensor | Self::Channel | Self::Block128 => ("input_scale", vec![1]),
        };
        Part { end, dtype: Dtype::F32, shape }
    }

    /// Returns what is written for a layer whose largest input is 448 · `scale`.
    pub(super) fn input_value(self, scale: f32) -> f32 {
        if self.is_nvfp4() { TensorScale::from_amax(scale * 448.0).encode() } else { scale }
    }

    /// Returns the `quantization_config`.
    pub(super) fn config(self, ignored: &[String], is_static: bool) -> Value {
        match self {
            Self::Tensor => compressed_tensors(&FLOAT, "tensor", Some(("tensor", !is_static)), ignored),
            Self::Channel => compressed_tensors(&FLOAT, "channel", Some(("token", true)), ignored),
            Self::Nvfp4 => compressed_tensors(&NVFP4, "tensor_group", Some(("tensor_group", true)), ignored),
            Self::Nvfp4a16 => compressed_tensors(&NVFP4, "tensor_group", None, ignored),
            Self::Block128 => json!({
                "activation_scheme": "dynamic",
                "modules_to_not_convert": ignored,
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            }),
            Self::Vllm => {
                let inputs = if is_static { "static" } else { "dynamic" };
                json!({ "activation_scheme": inputs, "ignored_layers": ignored, "quant_method": "fp8" })
            }
        }
    }
}

/// One tensor of a quantized weight: the end of its name, dtype and shape.
pub(super) struct Part {
    pub(super) end: &'static str,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

/// The codes as compressed-tensors describes them.
struct Codes {
    format: &'static str,
    bits: usize,
    /// The columns of a group.
    group: Option<usize>,
}

const FLOAT: Codes = Codes { format: "float-quantized", bits: 8, group: None };
const NVFP4: Codes = Codes { format: "nvfp4-pack-quantized", bits: 4, group: Some(GROUP) };

/// `inputs` are the strategy and whether scales are found when the model runs; `None` leaves inputs as they are.
fn compressed_tensors(
    codes: &Codes,
    weights: &str,
    inputs: Option<(&str, bool)>,
    ignored: &[String],
) -> Value {
    let quantized = |strategy: &str, dynamic: Value| {
        let mut scheme = json!({
            "dynamic": dynamic, "group_size": codes.group, "num_bits": codes.bits, "strategy": strategy, "symmetric": true,
            "type": "float",
        });
        if codes.group.is_some() {
            scheme["scale_dtype"] = json!("torch.float8_e4m3fn");
        }
        scheme
    };
    // In NVFP4 the scales of groups are found when the model runs, and the factor of the tensor is in the file.
    let dynamic = |is_dynamic: bool| if codes.group.is_some() { json!("local") } else { json!(is_dynamic) };
    json!({
        "config_groups": {
            "group_0": {
                "format": codes.format,
                "input_activations": inputs.map(|(strategy, is_dynamic)| quantized(strategy, dynamic(is_dynamic))),
                "output_activations": null,
                "targets": ["Linear"],
                "weights": quantized(weights, json!(false)),
            },
        },
        "format": codes.format,
        "global_compression_ratio": null,
        "ignore": ignored,
        "kv_cache_scheme": null,
        "moe_sparsity_config": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    })
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let names = Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|scheme| scheme.name() == name).ok_or_else(|| Error::Option {
            part: "quantize".into(),
            option: "scheme",
            value: name.into(),
            remedy: format!("expected one of {names}"),
        })
    }
}
