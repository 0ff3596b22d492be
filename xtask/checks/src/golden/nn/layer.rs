//! Builds the layer of a file and runs it forward and backward.

use std::collections::BTreeMap;

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::rand::rngs::StdRng;

use super::sample::{Array, Config, Sample, judge, judge_high_precision, relative_rms};

type Check<T = ()> = std::result::Result<T, String>;

/// The layer's path: parameters are called `layer.<name in the file>`.
const PATH: &str = "layer";

/// Compares every tensor of a step in high precision.
pub(super) fn check_high_precision(sample: &Sample, device: &Device) -> Check {
    report(sample, device, false, judge_high_precision)
}

/// Compares every tensor of a first step under delayed scaling.
pub(super) fn check_fp8(sample: &Sample, device: &Device) -> Check {
    report(sample, device, true, |name, expected, actual| {
        if expected.len() != actual.len() {
            return Some(format!("{name}: {} values, expected {}", actual.len(), expected.len()));
        }
        // Zeros have no error to be bounded from below.
        let is_zero = expected.iter().chain(actual).all(|&value| value == 0.0);
        let (layer, activation) = (sample.config.layer(), sample.config.activation());
        (!is_zero).then(|| judge(layer, activation, name, relative_rms(expected, actual))).flatten()
    })
}

/// All that is wrong, in one line.
fn report(
    sample: &Sample,
    device: &Device,
    fp8: bool,
    judge: impl Fn(&str, &[f32], &[f32]) -> Option<String>,
) -> Check {
    let computed = step(sample, device, fp8)?;
    let mut problems = Vec::new();
    for (name, actual) in &computed {
        problems.extend(judge(name, &sample.tensor(name)?.values, actual));
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

/// `y`, `dx` and every `grad.<parameter>`.
fn step(sample: &Sample, device: &Device, fp8: bool) -> Check<BTreeMap<String, Vec<f32>>> {
    let mut layer = build(sample, device)?;
    let tensors = [tensor(sample.tensor("x")?, device)?, tensor(sample.tensor("dy")?, device)?];
    run(layer.as_mut(), &tensors, fp8).map_err(|error| error.to_string())
}

fn run(layer: &mut dyn DynModule, [x, dy]: &[Tensor; 2], fp8: bool) -> Result<BTreeMap<String, Vec<f32>>> {
    let mut scaling = Scaling::new(layer, x.device())?;
    let recipe = Recipe::from(DelayedScaling::default());
    let mut cx = scaling.scope(&recipe, &AutocastOptions { enabled: fp8, ..Default::default() })?;
    let (y, saved) = layer.forward_dyn(&mut cx, x)?;
    cx.commit()?;
    let mut cx = scaling.backward()?;
    let dx = layer.backward_dyn(0, &mut cx, saved, dy)?;
    cx.commit()?;

    let mut tensors =
        BTreeMap::from([("y".to_owned(), y.to_f32_vec()?), ("dx".to_owned(), dx.to_f32_vec()?)]);
    for parameter in parameters(layer) {
        let name = format!("grad.{}", name_in_file(parameter.name()));
        tensors.insert(name, parameter.main_grad().to_f32_vec()?);
    }
    Ok(tensors)
}

fn name_in_file(parameter: &str) -> &str {
    parameter.strip_prefix(PATH).and_then(|name| name.strip_prefix('.')).unwrap_or(parameter)
}

fn tensor(array: &Array, device: &Device) -> Check<Tensor> {
    let shape =
        Shape::from_slice(&array.shape).ok_or_else(|| format!("shape {:?} is too long", array.shape))?;
    Tensor::from_vec(array.values.clone(), shape, device).map_err(|error| error.to_string())
}

/// With the file's parameters, all of them and no others.
fn build(sample: &Sample, device: &Device) -> Check<Box<dyn DynModule>> {
    let seq = sample.tensor("x")?.shape.iter().rev().nth(1).copied().unwrap_or(1);
    let mut layer = construct(&sample.config, seq, device).map_err(|error| error.to_string())?;
    let mut values = BTreeMap::new();
    for (name, array) in sample.parameters() {
        values.insert(name, tensor(array, device)?);
    }
    for parameter in parameters_mut(&mut layer) {
        let value = values.remove(name_in_file(parameter.name()));
        let value = value.ok_or_else(|| format!("the file has no value for {}", parameter.name()))?;
        parameter.set(value).map_err(|error| error.to_string())?;
    }
    match values.keys().next() {
        Some(name) => Err(format!("{name} is no parameter of this layer")),
        None => Ok(layer),
    }
}

fn construct(config: &Config, max_seq_length: usize, device: &Device) -> Result<Box<dyn DynModule>> {
    let mut rng = StdRng::seed_from_u64(0);
    Ok(match *config {
        Config::Linear { in_features, out_features } => {
            let options = LinearOptions { in_features, out_features, ..Default::default() };
            Box::new(Linear::new(PATH, options, device, &mut rng)?)
        }
        Config::LayerNormLinear { in_features, out_features, normalization, zero_centered_gamma, eps } => {
            let options = LayerNormLinearOptions {
                in_features,
                out_features,
                norm: NormOptions { normalization, zero_centered_gamma, eps: eps as f32 },
                ..Default::default()
            };
            Box::new(LayerNormLinear::new(PATH, options, device, &mut rng)?)
        }
        Config::LayerNormMlp {
            hidden_size,
            ffn_hidden_size,
            normalization,
            zero_centered_gamma,
            activation,
            eps,
        } => {
            let options = LayerNormMlpOptions {
                hidden_size,
                ffn_hidden_size,
                norm: NormOptions { normalization, zero_centered_gamma, eps: eps as f32 },
                activation,
                ..Default::default()
            };
            Box::new(LayerNormMlp::new(PATH, options, device, &mut rng)?)
        }
        Config::MultiheadAttention { hidden_size, num_attention_heads, num_gqa_groups, causal, rope } => {
            let options = MultiheadAttentionOptions {
                hidden_size,
                attention: AttentionOptions {
                    num_attention_heads,
                    num_gqa_groups: Some(num_gqa_groups),
                    causal,
                    rope,
                    max_seq_length,
                    ..Default::default()
                },
                ..Default::default()
            };
            Box::new(MultiheadAttention::new(PATH, options, device, &mut rng)?)
        }
        Config::TransformerLayer {
            hidden_size,
            ffn_hidden_size,
            num_attention_heads,
            num_gqa_groups,
            normalization,
            zero_centered_gamma,
            activation,
            causal,
            rope,
            eps,
        } => {
            let options = TransformerLayerOptions {
                hidden_size,
                ffn_hidden_size,
                attention: AttentionOptions {
                    num_attention_heads,
                    num_gqa_groups: Some(num_gqa_groups),
                    causal,
                    rope,
                    max_seq_length,
                    ..Default::default()
                },
                norm: NormOptions { normalization, zero_centered_gamma, eps: eps as f32 },
                activation,
                ..Default::default()
            };
            Box::new(TransformerLayer::new(PATH, options, device, &mut rng)?)
        }
    })
}
