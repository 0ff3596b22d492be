//! Layers against PyTorch in f64: every file of `tests/golden/nn`, in high precision and in FP8.
//!
//! A file holds `x`, `dy`, `y`, `dx`, each parameter and its gradient as `grad.<name>`; its metadata says which layer it is.

use super::sample::{self, Sample};
use super::support::{assert_close, delayed, device, off, relative_rms, rng};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

impl Sample {
    fn required(&self, option: &str) -> usize {
        self.size(option).unwrap()
    }

    fn layer(&self) -> Box<dyn DynModule> {
        let (norm, eps) = (self.text("normalization").parse(), self.config["eps"].as_f64());
        let (norm, eps) = (norm.unwrap_or(Norm::LayerNorm), eps.unwrap_or(1e-5) as f32);
        let (device, mut rng) = (device(), rng(1));
        match self.text("layer") {
            "Linear" => {
                let (in_features, out_features) =
                    (self.required("in_features"), self.required("out_features"));
                let options = LinearOptions { in_features, out_features, ..Default::default() };
                Box::new(Linear::new("layer", options, &device, &mut rng).unwrap())
            }
            "LayerNormLinear" => {
                let options = LayerNormLinearOptions {
                    in_features: self.required("in_features"),
                    out_features: self.required("out_features"),
                    norm: NormOptions {
                        normalization: norm,
                        zero_centered_gamma: self.flag("zero_centered_gamma"),
                        eps,
                    },
                    ..Default::default()
                };
                Box::new(LayerNormLinear::new("layer", options, &device, &mut rng).unwrap())
            }
            "LayerNormMlp" => {
                let options = LayerNormMlpOptions {
                    hidden_size: self.required("hidden_size"),
                    ffn_hidden_size: self.required("ffn_hidden_size"),
                    norm: NormOptions {
                        normalization: norm,
                        zero_centered_gamma: self.flag("zero_centered_gamma"),
                        eps,
                    },
                    activation: self.text("activation").parse().unwrap(),
                    ..Default::default()
                };
                Box::new(LayerNormMlp::new("layer", options, &device, &mut rng).unwrap())
            }
            "MultiheadAttention" => {
                let options = MultiheadAttentionOptions {
                    hidden_size: self.required("hidden_size"),
                    attention: AttentionOptions {
                        num_attention_heads: self.required("num_attention_heads"),
                        num_gqa_groups: Some(self.required("num_gqa_groups")),
                        causal: self.flag("causal"),
                        rope: self.flag("rope"),
                        ..Default::default()
                    },
                    ..Default::default()
                };
                Box::new(MultiheadAttention::new("layer", options, &device, &mut rng).unwrap())
            }
            "TransformerLayer" => {
                let options = TransformerLayerOptions {
                    hidden_size: self.required("hidden_size"),
                    ffn_hidden_size: self.required("ffn_hidden_size"),
                    attention: AttentionOptions {
                        num_attention_heads: self.required("num_attention_heads"),
                        num_gqa_groups: Some(self.required("num_gqa_groups")),
                        causal: self.flag("causal"),
                        rope: self.flag("rope"),
                        ..Default::default()
                    },
                    norm: NormOptions {
                        normalization: norm,
                        zero_centered_gamma: self.flag("zero_centered_gamma"),
                        eps,
                    },
                    activation: self.text("activation").parse().unwrap(),
                    ..Default::default()
                };
                Box::new(TransformerLayer::new("layer", options, &device, &mut rng).unwrap())
            }
            other => panic!("layer {other}"),
        }
    }

    /// Every computed tensor under the name that it has in the file.
    fn step(&self, options: &AutocastOptions) -> BTreeMap<String, Vec<f32>> {
        let mut layer = self.layer();
        for parameter in parameters_mut(&mut layer) {
            let value = self.tensors[&parameter.name()["layer.".len()..]].clone();
            parameter.set(value).unwrap();
        }
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), options).unwrap();
        let (y, saved) = layer.forward_dyn(&mut cx, &self.tensors["x"]).unwrap();
        cx.commit().unwrap();
        let backward = scaling.in_backward(|cx| layer.backward_dyn(0, cx, saved, &self.tensors["dy"]));
        let dx = backward.unwrap();
        let mut all = BTreeMap::from([("y".to_owned(), y.to_f32_vec().unwrap())]);
        all.insert("dx".to_owned(), dx.to_f32_vec().unwrap());
        for parameter in parameters(&layer) {
            let name = format!("grad.{}", &parameter.name()["layer.".len()..]);
            all.insert(name, parameter.main_grad().to_f32_vec().unwrap());
        }
        let parameters = self.tensors.keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(all.len(), parameters + 2, "the file has parameters that the layer has not");
        all
    }
}

fn samples() -> Vec<(String, Sample)> {
    let samples = sample::samples("nn");
    assert_eq!(samples.len(), 17);
    samples
}

#[test]
fn high_precision_equals_pytorch() {
    for (file, sample) in samples() {
        for (name, actual) in sample.step(&off()) {
            assert_close(
                &format!("{file} {name}"),
                &sample.tensors[&name].to_f32_vec().unwrap(),
                &actual,
                1e-5,
            );
        }
    }
}

#[test]
fn fp8_stays_near_and_really_runs() {
    for (file, sample) in samples() {
        let (layer, activation) = (sample.text("layer"), sample.text("activation"));
        for (name, actual) in sample.step(&AutocastOptions::default()) {
            let error = relative_rms(&sample.tensors[&name].to_f32_vec().unwrap(), &actual);
            let most = match (name.as_str(), layer, activation) {
                ("y", "TransformerLayer", _) => 0.03,
                ("y", ..) => 0.06,
                (_, "Linear", _) => 0.08,
                (.., "relu" | "reglu") => 0.45,
                _ => 0.20,
            };
            assert!(error <= most, "{file} {name}: {error}");
            let gemm_weight = name.ends_with("weight") && !name.ends_with("norm.weight");
            assert!(error > 1e-4 || !(name == "y" || name == "dx" || gemm_weight), "{file} {name}: {error}");
        }
    }
}
