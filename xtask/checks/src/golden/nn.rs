//! Layers: every `*.safetensors` file, once in high precision and once in FP8.
//!
//! A file brings its own configuration (metadata key `config`, JSON) and f32 tensors: `x`, `dy`, `y`, `dx`, each
//! parameter under its name and its gradient as `grad.<name>`. In high precision the largest difference is at
//! most 1e-5 of the tensor's largest value. In FP8 the relative RMS error ‖ŷ − y‖ / ‖y‖ has an upper bound, and a
//! lower one where FP8 took part: without it a layer that never quantized would pass.

mod layer;
mod sample;

use std::path::Path;

use fp8_nn::prelude::Device;

use sample::Sample;

use super::tally::{Tally, each_tensor_file};
use crate::result::Result as TaskResult;

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    each_tensor_file("nn", folder, |name, bytes| {
        let sample = Sample::parse(bytes);
        let sample = sample.as_ref().map_err(String::clone);
        let high_precision = sample.clone().and_then(|sample| layer::check_high_precision(sample, device));
        tally.record(&format!("nn/{name} high precision"), high_precision);
        tally.record(&format!("nn/{name} FP8"), sample.and_then(|sample| layer::check_fp8(sample, device)));
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use fp8_nn::prelude::{Activation, Norm};
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::sample::{Array, Config, Kind, judge, judge_high_precision, relative_rms};
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
