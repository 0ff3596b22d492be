//! A file with a layer, and the judgement of what was computed.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use fp8_nn::prelude::{Activation, Norm};
use safetensors::{Dtype, SafeTensors};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// The largest difference in high precision, relative to the largest value of the tensor.
pub(crate) const HIGH_PRECISION: f64 = 1e-5;

/// Less error than this means that nothing was quantized.
pub(crate) const QUANTIZED: f64 = 1e-4;

pub(crate) type Check<T = ()> = Result<T, String>;

/// The layer of a file, with its options under Transformer Engine's names.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "layer", deny_unknown_fields)]
pub(crate) enum Config {
    Linear {
        in_features: usize,
        out_features: usize,
    },
    LayerNormLinear {
        in_features: usize,
        out_features: usize,
        #[serde(deserialize_with = "by_name")]
        normalization: Norm,
        zero_centered_gamma: bool,
        eps: f64,
    },
    LayerNormMlp {
        hidden_size: usize,
        ffn_hidden_size: usize,
        #[serde(deserialize_with = "by_name")]
        normalization: Norm,
        zero_centered_gamma: bool,
        #[serde(deserialize_with = "by_name")]
        activation: Activation,
        eps: f64,
    },
    MultiheadAttention {
        hidden_size: usize,
        num_attention_heads: usize,
        num_gqa_groups: usize,
        causal: bool,
        rope: bool,
    },
    TransformerLayer {
        hidden_size: usize,
        ffn_hidden_size: usize,
        num_attention_heads: usize,
        num_gqa_groups: usize,
        #[serde(deserialize_with = "by_name")]
        normalization: Norm,
        zero_centered_gamma: bool,
        #[serde(deserialize_with = "by_name")]
        activation: Activation,
        causal: bool,
        rope: bool,
        eps: f64,
    },
}

/// A value that its crate parses, by its name.
pub(crate) fn by_name<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The layer alone, as the tolerances tell them apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Linear,
    LayerNormLinear,
    LayerNormMlp,
    MultiheadAttention,
    TransformerLayer,
}

impl Config {
    pub(super) fn layer(&self) -> Kind {
        match self {
            Self::Linear { .. } => Kind::Linear,
            Self::LayerNormLinear { .. } => Kind::LayerNormLinear,
            Self::LayerNormMlp { .. } => Kind::LayerNormMlp,
            Self::MultiheadAttention { .. } => Kind::MultiheadAttention,
            Self::TransformerLayer { .. } => Kind::TransformerLayer,
        }
    }

    pub(super) fn activation(&self) -> Option<Activation> {
        match self {
            Self::LayerNormMlp { activation, .. } | Self::TransformerLayer { activation, .. } => {
                Some(*activation)
            }
            _ => None,
        }
    }
}

/// A file, read and checked: `x`, `dy`, `y`, `dx` are there, and each gradient belongs to a parameter of its shape.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(super) config: Config,
    pub(crate) tensors: BTreeMap<String, Array>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl Sample {
    pub(super) fn parse(bytes: &[u8]) -> Check<Self> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let config = metadata.metadata().as_ref().and_then(|metadata| metadata.get("config"));
        let config = config.ok_or("the metadata has no key `config`: nothing says which layer this is")?;
        let config = serde_json::from_str(config).map_err(|error| format!("config {config}: {error}"))?;

        let mut tensors = BTreeMap::new();
        for (name, view) in SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?.iter() {
            if view.dtype() != Dtype::F32 {
                return Err(format!("{name} is {:?}: reference tensors are F32", view.dtype()));
            }
            let bytes = view.data().chunks_exact(4);
            let values = bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            tensors.insert(name.to_owned(), Array { shape: view.shape().to_vec(), values });
        }
        let sample = Self { config, tensors };
        sample.check()?;
        Ok(sample)
    }

    pub(super) fn tensor(&self, name: &str) -> Check<&Array> {
        self.tensors.get(name).ok_or_else(|| format!("tensor {name} is missing"))
    }

    /// Names and values of the parameters, sorted by name.
    pub(super) fn parameters(&self) -> impl Iterator<Item = (&str, &Array)> {
        let is_parameter =
            |name: &str| !matches!(name, "x" | "dy" | "y" | "dx") && !name.starts_with("grad.");
        let named = self.tensors.iter().map(|(name, array)| (name.as_str(), array));
        named.filter(move |(name, _)| is_parameter(name))
    }

    pub(crate) fn check(&self) -> Check {
        let pairs = [("dy", "y"), ("dx", "x")].map(|(gradient, of)| (gradient.to_owned(), of));
        let parameters = self.parameters().map(|(name, _)| (format!("grad.{name}"), name));
        for (gradient, of) in pairs.into_iter().chain(parameters) {
            let (is, should) = (&self.tensor(&gradient)?.shape, &self.tensor(of)?.shape);
            if is != should {
                return Err(format!("{gradient} has shape {is:?}, {of} has {should:?}"));
            }
        }
        match self.tensors.keys().find(|name| {
            name.strip_prefix("grad.").is_some_and(|parameter| !self.tensors.contains_key(parameter))
        }) {
            Some(gradient) => Err(format!("{gradient} has no parameter")),
            None => Ok(()),
        }
    }
}

/// Describes what is wrong with a tensor computed in high precision; `None` if nothing is.
pub(crate) fn judge_high_precision(name: &str, expected: &[f32], actual: &[f32]) -> Option<String> {
    if expected.len() != actual.len() {
        return Some(format!("{name}: {} values, expected {}", actual.len(), expected.len()));
    }
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let bound = HIGH_PRECISION * f64::from(largest);
    // A NaN is within no bound.
    let is_within = |e: f32, a: f32| (f64::from(e) - f64::from(a)).abs() <= bound;
    let mut outside = expected.iter().zip(actual).enumerate().filter(|&(_, (&e, &a))| !is_within(e, a));
    let (index, (expected_value, value)) = outside.next()?;
    let (bits, expected_bits) = (value.to_bits(), expected_value.to_bits());
    Some(format!(
        "{name}[{index}] is {value:e} ({bits:#010x}), expected {expected_value:e} ({expected_bits:#010x}), \
         at most {bound:.1e} off; {} of {} differ",
        outside.count() + 1,
        expected.len()
    ))
}

/// Describes what is wrong with a tensor computed in FP8 with this relative RMS error; `None` if nothing is.
pub(crate) fn judge(
    layer: Kind,
    activation: Option<Activation>,
    name: &str,
    relative_rms: f64,
) -> Option<String> {
    let most = match (name, layer) {
        ("y", Kind::TransformerLayer) => 0.03,
        ("y", _) => 0.06,
        (_, Kind::Linear) => 0.08,
        // Noise flips the mask where the activation's input is near 0.
        _ if matches!(activation, Some(Activation::Relu | Activation::Reglu)) => 0.45,
        _ => 0.20,
    };
    if relative_rms.is_nan() || relative_rms > most {
        return Some(format!("{name}: relative RMS error {relative_rms:.4}: at most {most}"));
    }
    (went_through_fp8(name) && relative_rms <= QUANTIZED).then(|| {
        format!("{name}: relative RMS error {relative_rms:.1e}: above {QUANTIZED:.0e} if FP8 really ran")
    })
}

/// Bias gradients sum the unquantized `dy`, and norms are not quantized.
pub(crate) fn went_through_fp8(name: &str) -> bool {
    match name.strip_prefix("grad.") {
        None => matches!(name, "y" | "dx"),
        Some(parameter) => parameter.ends_with("weight") && !parameter.ends_with("norm.weight"),
    }
}

/// ‖actual − expected‖ / ‖expected‖; 0 for two tensors of zeros.
pub(crate) fn relative_rms(expected: &[f32], actual: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let error: f64 = expected.iter().zip(actual).map(|(&e, &a)| square(f64::from(a) - f64::from(e))).sum();
    let norm: f64 = expected.iter().map(|&e| square(e.into())).sum();
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}
