//! The FP8 formats that checkpoints are written in.

use super::config::WeightScales;
use super::encode::Rule;
use crate::Error;
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;

/// An FP8 format of Hugging Face folders: what shares a scale, and who reads it.
///
/// Codes are E4M3, and every scale is amax / 448, in f32. Inputs are quantized when the model runs: with scales
/// that are found then, or with those of [`QuantizeOptions::input_scales`](super::QuantizeOptions::input_scales).
///
/// ```
/// use fp8_hf::Scheme;
/// assert_eq!("block128".parse::<Scheme>()?, Scheme::Block128);
/// let error = "int4".parse::<Scheme>().unwrap_err().to_string();
/// assert_eq!(error, "quantize: scheme = int4: expected one of tensor, channel, block128, vllm");
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
}

/// The side of a block.
pub(super) const BLOCK: usize = 128;

impl Scheme {
    /// All schemes.
    pub const ALL: [Self; 4] = [Self::Tensor, Self::Channel, Self::Block128, Self::Vllm];

    /// Returns the name by which the program `fp8` knows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Channel => "channel",
            Self::Block128 => "block128",
            Self::Vllm => "vllm",
        }
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
        matches!(self, Self::Tensor | Self::Vllm)
    }

    pub(super) const fn rule(self) -> Rule {
        match self {
            Self::Tensor | Self::Channel => Rule::COMPRESSED_TENSORS,
            Self::Block128 | Self::Vllm => Rule::FP8,
        }
    }

    pub(super) const fn granularity(self) -> WeightScales {
        match self {
            Self::Tensor | Self::Vllm => WeightScales::Tensor,
            Self::Channel => WeightScales::Channel,
            Self::Block128 => WeightScales::Block([BLOCK, BLOCK]),
        }
    }

    /// Returns the end of the name of a weight's scales, and their shape.
    pub(super) fn scales(self, [rows, cols]: [usize; 2]) -> (&'static str, Vec<usize>) {
        match self {
            Self::Tensor => ("weight_scale", vec![1]),
            Self::Channel => ("weight_scale", vec![rows, 1]),
            Self::Block128 => ("weight_scale_inv", vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)]),
            Self::Vllm => ("weight_scale", Vec::new()),
        }
    }

    /// Returns the `quantization_config`.
    pub(super) fn config(self, ignored: &[String], is_static: bool) -> Value {
        match self {
            Self::Tensor => compressed_tensors("tensor", "tensor", is_static, ignored),
            Self::Channel => compressed_tensors("channel", "token", false, ignored),
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

fn compressed_tensors(weights: &str, inputs: &str, is_static: bool, ignored: &[String]) -> Value {
    let quantized = |strategy: &str, dynamic: bool| {
        json!({
            "dynamic": dynamic, "group_size": null, "num_bits": 8, "strategy": strategy, "symmetric": true,
            "type": "float",
        })
    };
    json!({
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": quantized(inputs, !is_static),
                "output_activations": null,
                "targets": ["Linear"],
                "weights": quantized(weights, false),
            },
        },
        "format": "float-quantized",
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
