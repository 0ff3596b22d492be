//! Options of a transformer block in random combinations against the oracle: output, and gradients along random directions.
//!
//! `FP8_TEST_COMBINATIONS` is the number of combinations (default: 150), `FP8_TEST_SEED` the first seed (default: 0).

use crate::every_device::support::{device, rng, with_noise};
use crate::options::{check, plain_model};
use crate::oracle::Model;
use fp8_nn::prelude::*;
use fp8_nn::rand::Rng;
use rand_chacha::ChaCha8Rng;

const HIDDEN: usize = 24;
const SEQ: usize = 5;

pub(crate) fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

fn pick<T: Clone>(rng: &mut ChaCha8Rng, values: &[T]) -> T {
    values[rng.random_range(0..values.len())].clone()
}

fn draw(rng: &mut ChaCha8Rng) -> TransformerLayerOptions {
    // Slopes across the kink of ReLU are not its gradients. It has tests of its own.
    let kinked = [Activation::Relu, Activation::Reglu];
    let activations: Vec<_> =
        Activation::ALL.into_iter().filter(|activation| !kinked.contains(activation)).collect();
    let window = [None, Some(0), Some(1), Some(3)];
    let mut options = TransformerLayerOptions {
        hidden_size: HIDDEN,
        ffn_hidden_size: pick(rng, &[20, 24, 33]),
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: pick(rng, &[None, Some(1), Some(2)]),
            kv_channels: pick(rng, &[None, Some(4), Some(10)]),
            causal: rng.random(),
            window: (pick(rng, &window), pick(rng, &window)),
            diagonal: pick(rng, &[Diagonal::TopLeft, Diagonal::BottomRight]),
            softmax_scale: pick(rng, &[None, Some(0.3), Some(-0.7)]),
            rope: rng.random(),
            rope_base: pick(rng, &[10_000.0, 50.0]),
            max_seq_length: 8,
            ..Default::default()
        },
        activation: pick(rng, &activations),
        norm: NormOptions {
            normalization: pick(rng, &[Norm::LayerNorm, Norm::RmsNorm]),
            eps: pick(rng, &[1e-5, 0.3]),
            zero_centered_gamma: rng.random(),
        },
        fp32_residual_connection: rng.random(),
        recompute: pick(
            rng,
            &[
                RecomputeLevel::None,
                RecomputeLevel::Norm,
                RecomputeLevel::Activation,
                RecomputeLevel::Attention,
                RecomputeLevel::Mlp,
                RecomputeLevel::Block,
            ],
        ),
        bias: rng.random(),
        init: InitOptions { init_std: 0.3, output_layer_init_std: 0.3 },
        ..Default::default()
    };
    match rng.random_range(0..4) {
        0 => options.parallel_attention_mlp = true,
        1 => options.output_layernorm = true,
        2 => options.apply_residual_connection_post_layernorm = true,
        _ => {}
    }
    options
}

#[test]
fn of_options_at_random() {
    let first = number("FP8_TEST_SEED", 0);
    for seed in first..first + number("FP8_TEST_COMBINATIONS", 150) {
        let o = draw(&mut rng(1_000_000 + seed));
        let heads = o.attention.num_attention_heads;
        let oracle = Model {
            heads,
            groups: o.attention.num_gqa_groups.unwrap_or(heads),
            head_dim: o.attention.kv_channels.unwrap_or(HIDDEN / heads),
            causal: o.attention.causal,
            window: o.attention.window,
            softmax_scale: o.attention.softmax_scale.map(f64::from),
            rope_base: o.attention.rope.then_some(o.attention.rope_base),
            activation: o.activation.name(),
            rms_norm: o.norm.normalization == Norm::RmsNorm,
            eps: o.norm.eps.into(),
            zero_centered_gamma: o.norm.zero_centered_gamma,
            is_parallel: o.parallel_attention_mlp,
            adds_normed: o.apply_residual_connection_post_layernorm,
            ..plain_model()
        };
        let what = format!("seed {seed}, {o:?}");
        let model = with_noise(TransformerLayer::new("a", o, &device(), &mut rng(seed)).unwrap(), seed);
        check(&what, model, &[2, SEQ, HIDDEN], |p, x| oracle.block(p, "a", x, [SEQ, HIDDEN]));
    }
}
