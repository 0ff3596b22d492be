//! Options of layers against PyTorch in f64: every file of `tests/golden/options`, in high precision and in FP8.
//!
//! `generate.py` in that folder made the files and says what is in them.

use super::sample::{self, Sample};
use super::support::{assert_close, delayed, device, off, relative_rms, rng};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

/// One of the layers that the files are of.
#[expect(clippy::large_enum_variant, reason = "there are few")]
enum Model {
    Block(TransformerLayer),
    Cross(CrossAttention),
    Decoder(TransformerDecoderLayer),
    Linear(LayerNormLinear),
}

impl Sample {
    fn float(&self, option: &str) -> f64 {
        self.config[option].as_f64().unwrap()
    }

    fn integers(&self, option: &str) -> Option<Vec<i32>> {
        let values = self.config.get(option)?.as_array().unwrap().iter();
        let flat = values.flat_map(|value| value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]));
        Some(flat.map(|value| value.as_i64().unwrap() as i32).collect())
    }

    fn attention(&self) -> AttentionOptions {
        let window = |side: usize| self.config["window"][side].as_u64().map(|keys| keys as usize);
        AttentionOptions {
            num_attention_heads: self.size("num_attention_heads").unwrap(),
            num_gqa_groups: self.size("num_gqa_groups"),
            kv_channels: self.size("kv_channels"),
            causal: self.flag("causal"),
            window: (window(0), window(1)),
            diagonal: match self.text("diagonal") {
                "BottomRight" => Diagonal::BottomRight,
                _ => Diagonal::TopLeft,
            },
            softmax_scale: self.config["softmax_scale"].as_f64().map(|scale| scale as f32),
            attention_dropout: self.float("attention_dropout") as f32,
            rope: self.flag("rope"),
            rope_base: self.float("rope_base"),
            ..Default::default()
        }
    }

    fn norm(&self) -> NormOptions {
        NormOptions {
            normalization: self.text("normalization").parse().unwrap(),
            eps: self.float("eps") as f32,
            zero_centered_gamma: self.flag("zero_centered_gamma"),
        }
    }

    fn model(&self) -> Model {
        let (device, mut rng) = (device(), rng(1));
        let (hidden_size, bias) = (self.size("hidden_size").unwrap(), self.flag("bias"));
        let ffn_hidden_size = self.size("ffn_hidden_size").unwrap();
        let encoder_hidden_size = self.size("encoder_hidden_size");
        let activation = self.text("activation").parse().unwrap();
        match self.text("layer") {
            "TransformerLayer" => {
                let options = TransformerLayerOptions {
                    hidden_size,
                    ffn_hidden_size,
                    attention: self.attention(),
                    activation,
                    norm: self.norm(),
                    parallel_attention_mlp: self.flag("parallel_attention_mlp"),
                    output_layernorm: self.flag("output_layernorm"),
                    apply_residual_connection_post_layernorm: self
                        .flag("apply_residual_connection_post_layernorm"),
                    hidden_dropout: self.float("hidden_dropout") as f32,
                    drop_path_rate: self.float("drop_path_rate") as f32,
                    bias,
                    ..Default::default()
                };
                Model::Block(TransformerLayer::new("layer", options, &device, &mut rng).unwrap())
            }
            "CrossAttention" => {
                let options = CrossAttentionOptions {
                    hidden_size,
                    encoder_hidden_size,
                    attention: self.attention(),
                    input_layernorm: Some(self.norm()),
                    bias,
                    ..Default::default()
                };
                Model::Cross(CrossAttention::new("layer.a", options, &device, &mut rng).unwrap())
            }
            "TransformerDecoderLayer" => {
                let options = TransformerDecoderLayerOptions {
                    hidden_size,
                    ffn_hidden_size,
                    encoder_hidden_size,
                    attention: self.attention(),
                    activation,
                    norm: self.norm(),
                    bias,
                    ..Default::default()
                };
                Model::Decoder(TransformerDecoderLayer::new("layer", options, &device, &mut rng).unwrap())
            }
            "LayerNormLinear" => {
                let out_features = self.tensors["a.weight"].shape()[0];
                let options = LayerNormLinearOptions {
                    in_features: hidden_size,
                    out_features,
                    bias,
                    norm: self.norm(),
                    ..Default::default()
                };
                Model::Linear(LayerNormLinear::new("layer.a", options, &device, &mut rng).unwrap())
            }
            other => panic!("layer {other}"),
        }
    }

    /// Returns the sequences of self-attention and those of cross attention.
    fn sequences(&self) -> (SequenceInfo, Sequences) {
        let x = self.tensors["x"].shape();
        let positions = self.integers("positions");
        let positions = positions.map(|values| Tensor::from_vec(values, [x[0], x[1]], &device()).unwrap());
        if let Some(lengths) = self.integers("packed") {
            let lengths: Vec<usize> = lengths.iter().map(|&length| length as usize).collect();
            let packing = ops::Packing::new(&lengths, &device()).unwrap();
            return (SequenceInfo::packed(packing), Sequences::Full);
        }
        let Some(lengths) = self.integers("lengths") else {
            return (SequenceInfo { positions, ..Default::default() }, Sequences::Full);
        };
        let lengths = Tensor::from_vec(lengths, [x[0]], &device()).unwrap();
        let both = Sequences::Padded { queries: Some(lengths.clone()), keys: Some(lengths.clone()) };
        (both.into(), Sequences::padded(&lengths))
    }

    /// Every computed tensor under the name that it has in the file.
    fn step_with_options(&self, options: &AutocastOptions) -> BTreeMap<String, Vec<f32>> {
        let mut model = self.model();
        let layer: &mut dyn Layer = match &mut model {
            Model::Block(layer) => layer,
            Model::Cross(layer) => layer,
            Model::Decoder(layer) => layer,
            Model::Linear(layer) => layer,
        };
        let key = |name: &str| {
            name["layer.".len()..].replacen(
                "a.norm.",
                if self.tensors.contains_key("n") { "norm." } else { "a.norm." },
                1,
            )
        };
        for parameter in parameters_mut(layer) {
            parameter.set(self.tensors[&key(parameter.name())].clone()).unwrap();
        }
        let mut scaling = Scaling::new(layer, &device()).unwrap();
        if let Some(seed) = self.size("seed") {
            scaling.set_dropout_seed(seed as u64).unwrap();
        }
        let (own, cross) = self.sequences();
        let [x, dy] = ["x", "dy"].map(|name| &self.tensors[name]);
        let e = self.tensors.get("e").unwrap_or(x);
        let mut cx = scaling.scope(&delayed(), options).unwrap();
        let mut all: Vec<(&str, Tensor)> = Vec::new();
        match &mut model {
            Model::Block(layer) => {
                let (y, saved) = layer.forward_with_info(&mut cx, x, &own).unwrap();
                cx.commit().unwrap();
                let dx = scaling.in_backward(|cx| layer.backward(cx, saved, dy)).unwrap();
                all.extend([("y", y), ("dx", dx)]);
            }
            Model::Cross(layer) => {
                let (y, saved) = layer.forward(&mut cx, x, e, &cross).unwrap();
                cx.commit().unwrap();
                let (dx, de) = scaling.in_backward(|cx| layer.backward(cx, saved, dy)).unwrap();
                all.extend([("y", y), ("dx", dx), ("de", de)]);
            }
            Model::Decoder(layer) => {
                let (y, saved) = layer.forward(&mut cx, x, e, &own, &cross).unwrap();
                cx.commit().unwrap();
                let (dx, de) = scaling.in_backward(|cx| layer.backward(cx, saved, dy)).unwrap();
                all.extend([("y", y), ("dx", dx), ("de", de)]);
            }
            Model::Linear(layer) => {
                let (y, n, saved) = layer.forward_with_layernorm_output(&mut cx, x).unwrap();
                cx.commit().unwrap();
                let dn = &self.tensors["dn"];
                let backward =
                    |cx: &mut Backward<'_>| layer.backward_with_layernorm_output(cx, saved, dy, dn);
                let dx = scaling.in_backward(backward).unwrap();
                all.extend([("y", y), ("n", n), ("dx", dx)]);
            }
        }
        let layer: &dyn Layer = match &model {
            Model::Block(layer) => layer,
            Model::Cross(layer) => layer,
            Model::Decoder(layer) => layer,
            Model::Linear(layer) => layer,
        };
        let mut all: BTreeMap<_, _> =
            all.into_iter().map(|(name, tensor)| (name.to_owned(), tensor.to_f32_vec().unwrap())).collect();
        let results = all.len();
        for parameter in parameters(layer) {
            all.insert(
                format!("grad.{}", key(parameter.name())),
                parameter.main_grad().to_f32_vec().unwrap(),
            );
        }
        let parameters = self.tensors.keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(all.len(), parameters + results, "the file has parameters that the layer has not");
        all
    }
}

fn samples() -> Vec<(String, Sample)> {
    let samples = sample::samples("options");
    assert_eq!(samples.len(), 17);
    samples
}

#[test]
fn high_precision_equals_pytorch() {
    for (file, sample) in samples() {
        for (name, actual) in sample.step_with_options(&off()) {
            let expected = sample.tensors[&name].to_f32_vec().unwrap();
            assert_close(&format!("{file} {name}"), &expected, &actual, 1e-5);
        }
    }
}

#[test]
fn fp8_stays_near_and_really_runs() {
    for (file, sample) in samples() {
        let is_block = sample.text("layer").starts_with("Transformer");
        for (name, actual) in sample.step_with_options(&AutocastOptions::default()) {
            let expected = sample.tensors[&name].to_f32_vec().unwrap();
            let error = relative_rms(&expected, &actual);
            let most = match name.as_str() {
                "n" => 1e-6,
                "y" if is_block => 0.03,
                "y" => 0.06,
                _ => 0.20,
            };
            assert!(error <= most, "{file} {name}: {error}");
            let gemm_weight = name.ends_with("weight") && !name.ends_with("norm.weight");
            assert!(error > 1e-4 || !(name == "y" || name == "dx" || gemm_weight), "{file} {name}: {error}");
        }
    }
}
