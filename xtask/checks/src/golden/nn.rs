//! Layers: every `*.safetensors` file, once in high precision and once in FP8.
//!
//! A file brings its own configuration (metadata key `config`, JSON) and f32 tensors: `x`, `dy`, `y`, `dx`, each
//! parameter under its name and its gradient as `grad.<name>`. In high precision the largest difference is at
//! most 1e-5 of the tensor's largest value. In FP8 the relative RMS error ‖ŷ − y‖ / ‖y‖ has an upper bound, and a
//! lower one where FP8 took part: without it a layer that never quantized would pass.

mod layer;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use fp8_nn::prelude::{Activation, Device, Norm};
use safetensors::{Dtype, SafeTensors};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::{Tally, each_tensor_file};
use crate::Result as TaskResult;

/// The largest difference in high precision, relative to the largest value of the tensor.
const HIGH_PRECISION: f64 = 1e-5;
/// Less error than this means that nothing was quantized.
const QUANTIZED: f64 = 1e-4;

type Check<T = ()> = Result<T, String>;

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    each_tensor_file("nn", folder, |name, bytes| {
        let sample = Sample::parse(bytes);
        let sample = sample.as_ref().map_err(String::clone);
        let high_precision = sample.clone().and_then(|sample| layer::check_high_precision(sample, device));
        tally.record(&format!("nn/{name} high precision"), high_precision);
        tally.record(&format!("nn/{name} FP8"), sample.and_then(|sample| layer::check_fp8(sample, device)));
    })
}

/// The layer of a file, with its options under Transformer Engine's names.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "layer", deny_unknown_fields)]
pub(super) enum Config {
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
fn by_name<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The layer alone, as the tolerances tell them apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
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
pub(super) struct Sample {
    pub(super) config: Config,
    tensors: BTreeMap<String, Array>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
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

    fn check(&self) -> Check {
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
pub(super) fn judge_high_precision(name: &str, expected: &[f32], actual: &[f32]) -> Option<String> {
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
pub(super) fn judge(
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
fn went_through_fp8(name: &str) -> bool {
    match name.strip_prefix("grad.") {
        None => matches!(name, "y" | "dx"),
        Some(parameter) => parameter.ends_with("weight") && !parameter.ends_with("norm.weight"),
    }
}

/// ‖actual − expected‖ / ‖expected‖; 0 for two tensors of zeros.
pub(super) fn relative_rms(expected: &[f32], actual: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let error: f64 = expected.iter().zip(actual).map(|(&e, &a)| square(f64::from(a) - f64::from(e))).sum();
    let norm: f64 = expected.iter().map(|&e| square(e.into())).sum();
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::tensor::TensorView;

    use super::*;

    const LINEAR: &str = r#"{"layer": "Linear", "in_features": 2, "out_features": 1}"#;

    fn file(config: &str, names: &[(&str, &[usize])]) -> Vec<u8> {
        let zeros = [0; 64];
        let view = |shape: &[usize]| {
            TensorView::new(Dtype::F32, shape.to_vec(), &zeros[..4 * shape.iter().product::<usize>()])
                .unwrap()
        };
        let tensors: Vec<_> = names.iter().map(|(name, shape)| (*name, view(shape))).collect();
        let metadata = HashMap::from([("config".to_owned(), config.to_owned())]);
        safetensors::serialize(tensors, Some(metadata)).unwrap()
    }

    const TENSORS: [(&str, &[usize]); 6] = [
        ("x", &[3, 2]),
        ("dx", &[3, 2]),
        ("y", &[3, 1]),
        ("dy", &[3, 1]),
        ("weight", &[1, 2]),
        ("grad.weight", &[1, 2]),
    ];

    #[test]
    fn a_file_brings_its_configuration_and_parameters() {
        let sample = Sample::parse(&file(LINEAR, &TENSORS)).unwrap();
        assert_eq!(sample.config, Config::Linear { in_features: 2, out_features: 1 });
        assert_eq!((sample.config.layer(), sample.config.activation()), (Kind::Linear, None));
        let parameters: Vec<_> = sample.parameters().collect();
        assert_eq!(parameters, [("weight", &Array { shape: vec![1, 2], values: vec![0.0; 2] })]);
    }

    #[test]
    fn every_activation_is_known() {
        for activation in Activation::ALL {
            let config = format!(
                r#"{{"layer": "LayerNormMlp", "hidden_size": 2, "ffn_hidden_size": 3, "normalization": "LayerNorm",
                    "zero_centered_gamma": true, "activation": "{activation}", "eps": 1e-6}}"#
            );
            let config: Config = serde_json::from_str(&config).unwrap();
            assert_eq!(config.activation(), Some(activation));
        }
    }

    #[test]
    fn a_layer_is_compared_in_both_precisions() {
        // y = x · wᵀ of [1, 2] and [3, 4], all in round numbers.
        let (config, path) = (LINEAR, tempfile::tempdir().unwrap());
        let tensors: [(&str, &[usize], &[f32]); 8] = [
            ("x", &[1, 2], &[1.0, 2.0]),
            ("dy", &[1, 1], &[1.0]),
            ("y", &[1, 1], &[11.5]),
            ("dx", &[1, 2], &[3.0, 4.0]),
            ("weight", &[1, 2], &[3.0, 4.0]),
            ("grad.weight", &[1, 2], &[1.0, 2.0]),
            ("bias", &[1], &[0.5]),
            ("grad.bias", &[1], &[1.0]),
        ];
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let write = |y: f32| {
            let data: Vec<_> = tensors
                .iter()
                .map(|(name, _, values)| bytes(if *name == "y" { std::slice::from_ref(&y) } else { values }))
                .collect();
            let views = tensors.iter().zip(&data).map(|((name, shape, _), data)| {
                (*name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap())
            });
            let metadata = HashMap::from([("config".to_owned(), config.to_owned())]);
            let file = safetensors::serialize(views, Some(metadata)).unwrap();
            std::fs::write(path.path().join("linear.safetensors"), file).unwrap();
            let mut tally = Tally::default();
            run(path.path(), &Device::cpu(), &mut tally).unwrap();
            (tally.passed, tally.failed)
        };
        // In FP8 these numbers have no error, as if nothing had been quantized; another y fails in both.
        assert_eq!(write(11.5), (1, 1));
        assert_eq!(write(13.5), (0, 2));
    }

    #[test]
    fn what_cannot_be_read_fails_with_a_sentence() {
        let error =
            |config: &str, names: &[(&str, &[usize])]| Sample::parse(&file(config, names)).unwrap_err();
        assert!(error(r#"{"layer": "Conv2d"}"#, &TENSORS).contains("unknown variant `Conv2d`"));
        assert!(error(&LINEAR.replace('}', r#", "groups": 2}"#), &TENSORS).contains("groups"));
        assert!(error(r#"{"layer": "Linear"}"#, &TENSORS).contains("in_features"));
        assert_eq!(error(LINEAR, &TENSORS[..5]), "tensor grad.weight is missing");
        assert_eq!(error(LINEAR, &TENSORS[1..]), "tensor x is missing");
        let shapes = [&TENSORS[..5], &[("grad.weight", &[2, 1][..])]].concat();
        assert_eq!(error(LINEAR, &shapes), "grad.weight has shape [2, 1], weight has [1, 2]");
        assert!(Sample::parse(b"no tensors").is_err());
    }

    #[test]
    fn all_options_of_the_largest_layer_are_read() {
        let config = r#"{"layer": "TransformerLayer", "hidden_size": 64, "ffn_hidden_size": 96,
            "num_attention_heads": 4, "num_gqa_groups": 2, "normalization": "RMSNorm", "zero_centered_gamma": false,
            "activation": "swiglu", "causal": true, "rope": true, "eps": 1e-05}"#;
        let config: Config = serde_json::from_str(config).unwrap();
        assert_eq!((config.layer(), config.activation()), (Kind::TransformerLayer, Some(Activation::Swiglu)));
        let Config::TransformerLayer { normalization, num_gqa_groups, eps, .. } = config else {
            panic!("{config:?}")
        };
        assert_eq!((normalization, num_gqa_groups, eps), (Norm::RmsNorm, 2, 1e-5));
    }

    #[test]
    fn high_precision_is_judged_by_the_largest_value() {
        assert_eq!(judge_high_precision("y", &[0.0, 100.0], &[0.0009, 100.0]), None);
        let error = judge_high_precision("y", &[0.0, 100.0, 1.0], &[0.002, 100.0, f32::NAN]).unwrap();
        assert!(error.starts_with("y[0] is 2e-3 (0x3b03126f), expected 0e0 (0x00000000)"), "{error}");
        assert!(error.ends_with("at most 1.0e-3 off; 2 of 3 differ"), "{error}");
        assert_eq!(judge_high_precision("y", &[0.0], &[]), Some("y: 0 values, expected 1".to_owned()));
    }

    #[test]
    fn upper_bounds_depend_on_layer_tensor_and_activation() {
        let relu = Some(Activation::Relu);
        let table = [
            (Kind::Linear, None, "y", 0.06),
            (Kind::LayerNormLinear, None, "y", 0.06),
            (Kind::LayerNormMlp, relu, "y", 0.06),
            (Kind::MultiheadAttention, None, "y", 0.06),
            (Kind::TransformerLayer, relu, "y", 0.03),
            (Kind::Linear, None, "dx", 0.08),
            (Kind::Linear, None, "grad.weight", 0.08),
            (Kind::LayerNormLinear, None, "grad.weight", 0.20),
            (Kind::MultiheadAttention, None, "grad.qkv.bias", 0.20),
            (Kind::LayerNormMlp, Some(Activation::Srelu), "grad.fc1.weight", 0.20),
            (Kind::LayerNormMlp, relu, "grad.fc1.weight", 0.45),
            (Kind::TransformerLayer, Some(Activation::Reglu), "dx", 0.45),
        ];
        for (layer, activation, name, most) in table {
            assert_eq!(judge(layer, activation, name, most), None, "{layer:?} {name}");
            assert!(judge(layer, activation, name, most + 1e-6).is_some(), "{layer:?} {name}");
            assert!(judge(layer, activation, name, f64::NAN).is_some(), "{layer:?} {name}");
        }
    }

    #[test]
    fn too_little_error_is_an_error_where_fp8_took_part() {
        let judge = |name| judge(Kind::TransformerLayer, None, name, 1e-6);
        for name in ["y", "dx", "grad.weight", "grad.attention.qkv.weight", "grad.mlp.fc2.weight"] {
            assert!(judge(name).unwrap().contains("above 1e-4"), "{name}");
        }
        for name in
            ["grad.bias", "grad.mlp.fc2.bias", "grad.mlp.norm.weight", "grad.norm.weight", "grad.norm.bias"]
        {
            assert_eq!(judge(name), None, "{name}");
        }
    }

    #[test]
    fn relative_rms_is_the_ratio_of_norms() {
        assert_eq!(relative_rms(&[3.0, 4.0], &[3.0, 4.5]), 0.1);
        assert_eq!(relative_rms(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative_rms(&[0.0], &[1.0]), f64::INFINITY);
        assert!(relative_rms(&[1.0], &[f32::NAN]).is_nan());
    }
}
