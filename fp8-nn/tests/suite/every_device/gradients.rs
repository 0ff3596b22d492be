//! Gradients against finite differences, in high precision: along a random direction for the input and for each
//! parameter. The loss is `Σ y · dy`.

use super::support::{
    block, delayed, device, first_step, gpt, ids, linear, mlp, noise, off, rng, values, with_noise,
};
use fp8_nn::prelude::*;
use fp8_nn::{MultiheadAttentionSaved, composite};

/// The step of a central difference in f32.
const STEP: f32 = 2e-3;
const TOLERANCE: f64 = 3e-3;

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn norm(a: &[f32]) -> f64 {
    dot(a, a).sqrt()
}

fn moved(t: &Tensor, direction: &Tensor, by: f32) -> Tensor {
    ops::add(t, &ops::scale(direction, by).unwrap()).unwrap()
}

/// `slope` measured along `direction` against `grad · direction`.
fn compare(what: &str, slope: f64, grad: &[f32], direction: &[f32]) {
    let expected = dot(grad, direction);
    let size = norm(grad) * norm(direction) / (grad.len() as f64).sqrt();
    assert!(
        (slope - expected).abs() <= TOLERANCE * size,
        "{what}: slope {slope}, gradient {expected} ± {size}"
    );
}

/// Every parameter of a model whose gradients are there, for a loss as a function of the model.
fn check_parameters<M: Layer>(model: &mut M, loss: impl Fn(&M) -> f64) {
    let mut all = Vec::new();
    for p in parameters(model) {
        all.push((p.name().clone(), p.tensor().clone(), values(p.main_grad())));
    }
    for (i, (name, value, grad)) in all.into_iter().enumerate() {
        let direction = noise(*value.shape(), 77 + i as u64);
        let mut at = |by: f32| {
            let mut parameters = parameters_mut(model);
            parameters
                .iter_mut()
                .find(|p| *p.name() == name)
                .unwrap()
                .set(moved(&value, &direction, by))
                .unwrap();
            loss(model)
        };
        let slope = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
        at(0.0);
        compare(&name, slope, &grad, &values(&direction));
    }
}

fn check<M: Module>(mut model: M, x: &Tensor) {
    let forward = |model: &M, x: &Tensor| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (y, _) = model.forward(&mut cx, x).unwrap();
        cx.commit().unwrap();
        y
    };
    let dy = noise(*forward(&model, x).shape(), 3);
    let weights = values(&dy);
    let loss = |model: &M, x: &Tensor| dot(&values(&forward(model, x)), &weights);

    let (_, dx) = first_step(&delayed(), &off(), &mut model, x, &dy).unwrap();
    assert_eq!(dx.shape(), x.shape());
    let direction = noise(*x.shape(), 4);
    let ends = [STEP, -STEP].map(|by| loss(&model, &moved(x, &direction, by)));
    compare("dx", (ends[0] - ends[1]) / f64::from(2.0 * STEP), &values(&dx), &values(&direction));
    check_parameters(&mut model, |model| loss(model, x));
}

#[test]
fn of_linear() {
    check(linear("fc", 7, 5, 1), &noise([3, 7], 2));
    check(linear("fc", 16, 16, 1), &noise([2, 3, 16], 2));
    let options = LinearOptions { in_features: 4, out_features: 6, bias: false, ..Default::default() };
    check(Linear::new("fc", options, &device(), &mut rng(1)).unwrap(), &noise([5, 4], 2));
}

#[test]
fn of_norms() {
    for zero_centered_gamma in [false, true] {
        let options = NormLayerOptions { hidden_size: 12, zero_centered_gamma, ..Default::default() };
        check(with_noise(LayerNorm::new("norm", &options, &device()).unwrap(), 1), &noise([2, 3, 12], 2));
        check(with_noise(RmsNorm::new("norm", &options, &device()).unwrap(), 1), &noise([5, 12], 2));
    }
}

#[test]
fn of_norm_and_linear() {
    for normalization in [Norm::LayerNorm, Norm::RmsNorm] {
        let sizes = LayerNormLinearOptions { in_features: 12, out_features: 9, ..Default::default() };
        let options = LayerNormLinearOptions {
            norm: NormOptions { normalization, ..sizes.norm },
            init_std: 0.2,
            ..sizes
        };
        let layer = LayerNormLinear::new("layer", options, &device(), &mut rng(1)).unwrap();
        check(with_noise(layer, 1), &noise([2, 3, 12], 2));
    }
}

#[test]
fn of_mlp_under_every_smooth_activation() {
    for activation in Activation::ALL {
        // At the kink of these the slope is not the gradient.
        if matches!(activation, Activation::Relu | Activation::Reglu) {
            continue;
        }
        check(mlp("mlp", activation, Norm::RmsNorm, 1), &noise([2, 3, 24], 2));
    }
}

fn attention(causal: bool, rope: bool, groups: usize) -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 20,
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(groups),
            kv_channels: Some(6),
            causal,
            rope,
            max_seq_length: 8,
            ..Default::default()
        },
        input_layernorm: (groups == 2).then(NormOptions::default),
        init: InitOptions { init_std: 0.3, output_layer_init_std: 0.3 },
        ..Default::default()
    };
    with_noise(MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap(), 1)
}

#[test]
fn of_attention() {
    for (causal, rope, groups) in [(true, true, 4), (false, true, 2), (true, false, 1), (false, false, 4)] {
        check(attention(causal, rope, groups), &noise([2, 5, 20], 2));
    }
}

/// Attention of which some positions are padding.
#[derive(Debug)]
struct Padded {
    attention: MultiheadAttention,
    key_lengths: Tensor,
}

composite!(Padded { attention; skip key_lengths });

impl Module for Padded {
    type Saved = MultiheadAttentionSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, MultiheadAttentionSaved)> {
        self.attention.forward_with_info(cx, x, &SequenceInfo::padded(&self.key_lengths))
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: MultiheadAttentionSaved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        self.attention.backward(cx, saved, dy)
    }
}

#[test]
fn of_attention_with_padding() {
    let key_lengths = Tensor::from_vec(vec![5i32, 2, 0], [3], &device()).unwrap();
    check(
        Padded { attention: attention(false, true, 2), key_lengths: key_lengths.clone() },
        &noise([3, 5, 20], 2),
    );
    check(Padded { attention: attention(true, false, 4), key_lengths }, &noise([3, 5, 20], 2));
}

#[test]
fn padding_is_seen_by_none() {
    let model = attention(false, true, 2);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let key_lengths = Tensor::from_vec(vec![3i32], [1], &device()).unwrap();
    let x = values(&noise([1, 5, 20], 2));
    let mut run = |x: &[f32], seq: usize, lengths: Option<&Tensor>| {
        let x = Tensor::from_vec(x.to_vec(), [1, seq, 20], &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        values(
            &model
                .forward_with_info(
                    &mut cx,
                    &x,
                    &lengths.map_or_else(SequenceInfo::default, SequenceInfo::padded),
                )
                .unwrap()
                .0,
        )
    };
    let short = run(&x[..60], 3, None);
    let padded = run(&x, 5, Some(&key_lengths));
    super::support::assert_close("padded", &short, &padded[..60], 1e-6);
}

#[test]
fn of_transformer_layer() {
    check(block("block", 1), &noise([2, 5, 32], 2));
}

#[test]
fn of_the_loss_of_a_language_model() {
    let value = check_loss_gradients(with_noise(gpt(1), 1));
    assert!((value - 20f32.ln()).abs() < 0.5);
}

/// Checks the gradients of a model's loss and returns the loss.
fn check_loss_gradients(mut model: Gpt) -> f32 {
    let (tokens, targets) = (ids([2, 6], 20, 2), ids([2, 6], 20, 3));
    let loss = |model: &Gpt| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        f64::from(model.loss(&mut cx, &tokens, &targets).unwrap().0.item().unwrap())
    };
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let (value, saved) = model.loss(&mut cx, &tokens, &targets).unwrap();
    cx.commit().unwrap();
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    // The loss is one f32 near 3: its slopes are coarse, and so is what they can prove.
    assert!(parameters(&model).iter().all(|p| norm(&values(p.main_grad())) > 0.0));
    check_loss(&mut model, loss);
    value.item().unwrap()
}

/// The forms of the decoder that Llama-like models and GPT-2 have.
#[test]
fn of_the_loss_of_other_decoders() {
    let plain = GptOptions {
        vocab_size: 20,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() },
            init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
            ..Default::default()
        },
        ..Default::default()
    };
    let qwen = GptOptions {
        tie_word_embeddings: true,
        sliding_windows: vec![None, Some(3)],
        layer: TransformerLayerOptions {
            attention: AttentionOptions {
                qk_norm: Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() }),
                kv_channels: Some(6),
                num_gqa_groups: Some(2),
                rope_scaling: ops::RopeScaling::Linear { factor: 4.0 },
                ..plain.layer.attention
            },
            qkv_bias: Some(true),
            bias: false,
            activation: Activation::Swiglu,
            norm: NormOptions { normalization: Norm::RmsNorm, ..plain.layer.norm },
            ..plain.layer.clone()
        },
        ..plain
    };
    let gpt2 = GptOptions { learned_positions: true, tie_word_embeddings: true, ..plain };
    for (options, parameters_of_blocks) in [(qwen, 9), (gpt2, 12)] {
        let model = with_noise(Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap(), 1);
        let of_blocks = |p: &&&Parameter| p.name().starts_with("gpt.blocks.0.");
        let mut all = parameters(&model);
        all.sort_by(|a, b| a.name().cmp(b.name()));
        assert_eq!(all.iter().filter(of_blocks).count(), parameters_of_blocks);
        assert!(!all.iter().any(|p| p.name().starts_with("gpt.head")));
        check_loss_gradients(model);
    }
}

#[test]
fn of_attention_with_norms_of_heads() {
    // Without RoPE a bias of all keys changes nothing, and its gradient is mere rounding.
    for (normalization, rope) in [(Norm::RmsNorm, false), (Norm::RmsNorm, true), (Norm::LayerNorm, true)] {
        let options = MultiheadAttentionOptions {
            hidden_size: 20,
            attention: AttentionOptions {
                num_attention_heads: 4,
                num_gqa_groups: Some(2),
                kv_channels: Some(6),
                rope,
                max_seq_length: 8,
                qk_norm: Some(NormOptions { normalization, ..Default::default() }),
                ..Default::default()
            },
            qkv_bias: Some(false),
            init: InitOptions { init_std: 0.3, output_layer_init_std: 0.3 },
            ..Default::default()
        };
        let layer = MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap();
        check(with_noise(layer, 1), &noise([2, 5, 20], 2));
    }
}

/// Along the gradient itself, where the slope is largest.
fn check_loss(model: &mut Gpt, loss: impl Fn(&Gpt) -> f64) {
    let mut all = Vec::new();
    for p in parameters(model) {
        all.push((p.name().clone(), p.tensor().clone(), p.main_grad().clone()));
    }
    for (name, value, grad) in all {
        let length = norm(&values(&grad));
        let by = (0.02 / length) as f32;
        let mut at = |by: f32| {
            let mut parameters = parameters_mut(model);
            parameters.iter_mut().find(|p| *p.name() == name).unwrap().set(moved(&value, &grad, by)).unwrap();
            loss(model)
        };
        let slope = (at(by) - at(-by)) / (2.0 * f64::from(by));
        at(0.0);
        let expected = length * length;
        // Attention ignores a key bias that all keys share: such gradients are mere rounding.
        let coarse = 2e-6 / f64::from(by);
        assert!((slope - expected).abs() <= 0.02 * expected + coarse, "{name}: {slope}, expected {expected}");
    }
}
