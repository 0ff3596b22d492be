//! Layers against PyTorch in f64: every file of `tests/golden/nn`, in high precision and in FP8.
//!
//! A file holds `x`, `dy`, `y`, `dx`, each parameter and its gradient as `grad.<name>`; its metadata says which layer it is.

use crate::support::{assert_close, delayed, device, off, relative_rms, rng};
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

struct Sample {
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

impl Sample {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            let shape = Shape::from_slice(view.shape()).unwrap();
            (name.to_owned(), Tensor::from_vec(values.collect(), shape, &device()).unwrap())
        });
        Self { config, tensors: tensors.collect() }
    }

    fn size(&self, option: &str) -> usize {
        self.config[option].as_u64().unwrap() as usize
    }

    fn flag(&self, option: &str) -> bool {
        self.config[option].as_bool().unwrap()
    }

    fn text(&self, option: &str) -> &str {
        self.config[option].as_str().unwrap_or_default()
    }

    fn layer(&self) -> Box<dyn DynModule> {
        let (norm, eps) = (self.text("normalization").parse(), self.config["eps"].as_f64());
        let (norm, eps) = (norm.unwrap_or(Norm::LayerNorm), eps.unwrap_or(1e-5) as f32);
        let (device, mut rng) = (device(), rng(1));
        match self.text("layer") {
            "Linear" => {
                let (in_features, out_features) = (self.size("in_features"), self.size("out_features"));
                let options = LinearOptions { in_features, out_features, ..Default::default() };
                Box::new(Linear::new("layer", options, &device, &mut rng).unwrap())
            }
            "LayerNormLinear" => {
                let options = LayerNormLinearOptions {
                    in_features: self.size("in_features"),
                    out_features: self.size("out_features"),
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
                    hidden_size: self.size("hidden_size"),
                    ffn_hidden_size: self.size("ffn_hidden_size"),
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
                    hidden_size: self.size("hidden_size"),
                    attention: AttentionOptions {
                        num_attention_heads: self.size("num_attention_heads"),
                        num_gqa_groups: Some(self.size("num_gqa_groups")),
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
                    hidden_size: self.size("hidden_size"),
                    ffn_hidden_size: self.size("ffn_hidden_size"),
                    attention: AttentionOptions {
                        num_attention_heads: self.size("num_attention_heads"),
                        num_gqa_groups: Some(self.size("num_gqa_groups")),
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
    fn run(&self, options: &AutocastOptions) -> BTreeMap<String, Vec<f32>> {
        let mut layer = self.layer();
        for parameter in parameters_mut(&mut layer) {
            let value = self.tensors[&parameter.name()["layer.".len()..]].clone();
            parameter.set(value).unwrap();
        }
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), options).unwrap();
        let (y, saved) = layer.forward_dyn(&mut cx, &self.tensors["x"]).unwrap();
        cx.commit().unwrap();
        let backward = scaling.backward_with(|cx| layer.backward_dyn(0, cx, saved, &self.tensors["dy"]));
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
    // At run time first: the program may run on another machine than the one that built it.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let folder = Path::new(&package).join("tests/golden/nn");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let samples: Vec<_> =
        files.map(|path| (path.file_stem().unwrap().to_string_lossy().into(), Sample::read(&path))).collect();
    assert_eq!(samples.len(), 17);
    samples
}

#[test]
fn high_precision_equals_pytorch() {
    for (file, sample) in samples() {
        for (name, actual) in sample.run(&off()) {
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
        for (name, actual) in sample.run(&AutocastOptions::default()) {
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
