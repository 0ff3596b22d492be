//! The initial state of layers: the distribution of every parameter, the order in which weights are drawn, and seeds.

use crate::every_device::support::{device, parameter_bits, rng, values};
use fp8_nn::prelude::*;
use fp8_nn::rand::Rng;

const DEFAULT_STD: f64 = 0.023;

/// Judges values against a normal distribution with mean 0, with room for five standard errors each: mean, deviation, and
/// how many values are within one and two deviations.
fn assert_normal(what: &str, values: &[f32], std: f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
    assert!(mean.abs() < 5.0 * std / count.sqrt(), "{what}: mean {mean}");
    let found = (values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / count).sqrt();
    assert!((found / std - 1.0).abs() < 5.0 / (2.0 * count).sqrt(), "{what}: std {found}, expected {std}");
    for (deviations, share) in [(1.0, 0.682_689), (2.0, 0.954_500)] {
        let within = values.iter().filter(|&&v| f64::from(v).abs() < deviations * std).count() as f64 / count;
        let room = 5.0 * (share * (1.0 - share) / count).sqrt();
        assert!((within - share).abs() < room, "{what}: {within} within {deviations} deviations");
    }
    let largest = values.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    assert!((3.0..7.0).contains(&(f64::from(largest) / std)), "{what}: largest {largest}");
}

/// `std` gives the deviation of a weight from its name. Biases are 0; γ is 1, or stored as 0.
fn assert_initialized(model: &impl Layer, gamma: f32, std: impl Fn(&str) -> f64) {
    let mut matrices = 0;
    for parameter in parameters(model) {
        let (name, value) = (parameter.name(), parameter.tensor());
        let numbers = values(value);
        if value.shape().len() == 2 {
            assert_normal(name, &numbers, std(name));
            matrices += 1;
        } else if name.ends_with("norm.weight") {
            assert!(numbers.iter().all(|&v| v == gamma), "{name}");
        } else {
            assert!(name.ends_with(".bias") && numbers.iter().all(|&v| v == 0.0), "{name}");
        }
    }
    assert!(matrices > 0);
    let gradients = parameter_bits(model).into_iter().all(|(.., gradient)| gradient.iter().all(|&g| g == 0));
    assert!(gradients, "no parameter has a gradient yet");
}

fn gpt_options() -> GptOptions {
    GptOptions {
        vocab_size: 300,
        num_layers: 3,
        layer: TransformerLayerOptions {
            hidden_size: 64,
            ffn_hidden_size: 256,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    }
}

fn gpt(options: &GptOptions, seed: u64) -> Gpt {
    Gpt::new("gpt", options, &device(), &mut rng(seed)).unwrap()
}

#[test]
fn default_weights_are_normal_with_deviation_0_023_biases_0_and_gammas_1() {
    let (device, mut rng) = (device(), rng(1));
    let options = LinearOptions { in_features: 96, out_features: 128, ..Default::default() };
    assert_initialized(&Linear::new("a", options, &device, &mut rng).unwrap(), 1.0, |_| DEFAULT_STD);

    let options = LayerNormLinearOptions { in_features: 96, out_features: 128, ..Default::default() };
    assert_initialized(&LayerNormLinear::new("a", options, &device, &mut rng).unwrap(), 1.0, |_| DEFAULT_STD);

    let options = LayerNormMlpOptions { hidden_size: 64, ffn_hidden_size: 128, ..Default::default() };
    assert_initialized(&LayerNormMlp::new("a", options, &device, &mut rng).unwrap(), 1.0, |_| DEFAULT_STD);

    let options = MultiheadAttentionOptions {
        hidden_size: 96,
        attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
        input_layernorm: Some(NormOptions::default()),
        ..Default::default()
    };
    assert_initialized(&MultiheadAttention::new("a", options, &device, &mut rng).unwrap(), 1.0, |_| {
        DEFAULT_STD
    });

    let options = TransformerLayerOptions {
        hidden_size: 96,
        ffn_hidden_size: 128,
        attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
        ..Default::default()
    };
    assert_initialized(&TransformerLayer::new("a", options, &device, &mut rng).unwrap(), 1.0, |_| {
        DEFAULT_STD
    });

    let options = EmbeddingOptions { num_embeddings: 100, hidden_size: 96, ..Default::default() };
    assert_initialized(&Embedding::new("a", &options, &device, &mut rng).unwrap(), 1.0, |_| DEFAULT_STD);
}

#[test]
fn norms_start_as_the_identity_also_with_a_zero_centered_gamma() {
    for (zero_centered_gamma, gamma) in [(false, 1.0), (true, 0.0)] {
        let options = NormLayerOptions { hidden_size: 8, zero_centered_gamma, ..Default::default() };
        let layer_norm = LayerNorm::new("a", &options, &device()).unwrap();
        let rms_norm = RmsNorm::new("a", &options, &device()).unwrap();
        let named = |layer: &dyn Layer| -> Vec<(String, Vec<f32>)> {
            parameters(layer).iter().map(|p| (p.name().to_string(), values(p.tensor()))).collect()
        };
        let weight = ("a.weight".to_owned(), vec![gamma; 8]);
        assert_eq!(named(&layer_norm), [weight.clone(), ("a.bias".to_owned(), vec![0.0; 8])]);
        assert_eq!(named(&rms_norm), [weight]);

        let options = TransformerLayerOptions {
            hidden_size: 96,
            ffn_hidden_size: 128,
            attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
            norm: NormOptions { zero_centered_gamma, ..Default::default() },
            ..Default::default()
        };
        let layer = TransformerLayer::new("a", options, &device(), &mut rng(1)).unwrap();
        assert_initialized(&layer, gamma, |_| DEFAULT_STD);
    }
}

#[test]
fn a_language_model_divides_the_deviation_at_the_ends_of_its_residual_branches() {
    let ends = |name: &str| name.ends_with("proj.weight") || name.ends_with("fc2.weight");
    for params_dtype in [DType::F32, DType::BF16] {
        // √(2 · 3 layers)
        let model = gpt(
            &GptOptions {
                layer: TransformerLayerOptions { params_dtype, ..gpt_options().layer },
                ..gpt_options()
            },
            1,
        );
        assert_initialized(&model, 1.0, |name| DEFAULT_STD / if ends(name) { 6f64.sqrt() } else { 1.0 });
    }
    let model = gpt(
        &GptOptions {
            layer: TransformerLayerOptions {
                init: InitOptions { init_std: 0.5, output_layer_init_std: 0.5 },
                ..gpt_options().layer
            },
            ..gpt_options()
        },
        1,
    );
    assert_initialized(&model, 1.0, |name| 0.5 / if ends(name) { 6f64.sqrt() } else { 1.0 });
}

#[test]
fn init_std_and_output_layer_init_std_are_deviations_of_their_weights() {
    let options = TransformerLayerOptions {
        hidden_size: 96,
        ffn_hidden_size: 128,
        attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
        init: InitOptions { init_std: 0.1, output_layer_init_std: 0.01 },
        ..Default::default()
    };
    let layer = TransformerLayer::new("a", options, &device(), &mut rng(1)).unwrap();
    let is_output = |name: &str| name.contains(".proj.") || name.contains(".fc2.");
    assert_initialized(&layer, 1.0, |name| if is_output(name) { 0.01 } else { 0.1 });
}

#[test]
fn a_seed_decides_every_weight() {
    let [one, again, other] = [1, 1, 2].map(|seed| parameter_bits(&gpt(&gpt_options(), seed)));
    assert!(one == again);
    for ((name, one, _), (_, other, _)) in one.iter().zip(&other) {
        let drawn = name.ends_with(".weight") && !name.ends_with("norm.weight");
        assert_eq!(one != other, drawn, "{name}");
    }
}

#[test]
fn weights_are_drawn_one_after_the_other_by_the_transform_of_box_and_muller() {
    for num_layers in [1, 2] {
        // An odd number of values wastes the second of its last pair.
        let options = GptOptions {
            vocab_size: 5,
            layer: TransformerLayerOptions {
                hidden_size: 6,
                ffn_hidden_size: 24,
                attention: AttentionOptions { num_attention_heads: 1, ..gpt_options().layer.attention },
                ..gpt_options().layer
            },
            ..gpt_options()
        };
        let model = gpt(
            &GptOptions {
                num_layers,
                layer: TransformerLayerOptions { ffn_hidden_size: 3, ..options.layer },
                ..options
            },
            7,
        );
        let mut rng = rng(7);
        for parameter in parameters(&model) {
            let (name, value) = (parameter.name(), parameter.tensor());
            if value.shape().len() != 2 {
                continue;
            }
            let ends = name.ends_with("proj.weight") || name.ends_with("fc2.weight");
            let std = f64::from(0.023f32 / if ends { (2.0 * num_layers as f32).sqrt() } else { 1.0 });
            for pair in values(value).chunks(2) {
                let (u, v) = (rng.random::<f64>(), rng.random::<f64>());
                let (radius, angle) = ((-2.0 * (1.0 - u).ln()).sqrt(), std::f64::consts::TAU * v);
                for (found, expected) in pair.iter().zip([radius * angle.cos(), radius * angle.sin()]) {
                    let difference = (f64::from(*found) - std * expected).abs();
                    assert!(difference < 1e-6 * std, "{name}: {found}, expected {}", std * expected);
                }
            }
        }
    }
}
