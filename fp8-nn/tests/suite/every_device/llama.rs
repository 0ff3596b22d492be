//! The decoder in its form without biases, as Llama has it: RMSNorm, swiglu, grouped queries, RoPE. It trains, in high
//! precision and in FP8.

use super::support::{current, delayed, device, off, rng, unless_simulated};
use fp8_nn::prelude::*;

fn llama() -> Gpt {
    let options = GptOptions {
        vocab_size: 17,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 48,
            attention: AttentionOptions {
                num_attention_heads: 4,
                num_gqa_groups: Some(2),
                max_seq_length: 16,
                rope_base: 500_000.0,
                ..Default::default()
            },
            activation: Activation::Swiglu,
            norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
            bias: false,
            init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
            ..Default::default()
        },
        ..Default::default()
    };
    Gpt::new("llama", &options, &device(), &mut rng(1)).unwrap()
}

/// Sequences of x → 3x + 1 modulo 17 from several starts, and their successors.
fn batch(step: i32) -> (Tensor, Tensor) {
    let next = |x: i32| (3 * x + 1) % 17;
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for start in 0..4 {
        let mut x = (5 * start + step) % 17;
        for _ in 0..16 {
            tokens.push(x);
            x = next(x);
            targets.push(x);
        }
    }
    let on_device = |ids| Tensor::from_vec::<i32>(ids, [4, 16], &device()).unwrap();
    (on_device(tokens), on_device(targets))
}

/// The losses of a training.
fn train(recipe: &Recipe, options: &AutocastOptions, steps: i32) -> Vec<f32> {
    let mut model = llama();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut losses = Vec::new();
    for step in 0..steps {
        let (tokens, targets) = batch(step);
        let mut cx = scaling.scope(recipe, options).unwrap();
        let (loss, saved) = model.loss(&mut cx, &tokens, &targets).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        losses.push(loss.item().unwrap());
        optimizer.step(&mut model, 1e-2).unwrap();
        zero_grad(&mut model).unwrap();
    }
    losses
}

#[test]
fn the_form_without_biases_has_none() {
    let names: Vec<_> = parameters(&llama()).iter().map(|p| p.name().to_string()).collect();
    let block = |i: usize| {
        ["attention.norm", "attention.qkv", "attention.proj", "mlp.norm", "mlp.fc1", "mlp.fc2"]
            .map(|layer| format!("llama.blocks.{i}.{layer}.weight"))
    };
    let expected: Vec<_> = [vec!["llama.embedding.weight".to_owned()], block(0).into(), block(1).into()]
        .concat()
        .into_iter()
        .chain(["llama.norm.weight".to_owned(), "llama.head.weight".to_owned()])
        .collect();
    assert_eq!(names, expected);
}

#[test]
fn the_form_without_biases_trains_in_high_precision_and_in_fp8() {
    let steps = unless_simulated(80, 3);
    let high = train(&delayed(), &off(), steps);
    assert!((high[0] - 17f32.ln()).abs() < 0.3, "{}", high[0]);
    for recipe in [delayed(), current()] {
        let fp8 = train(&recipe, &AutocastOptions::default(), steps);
        assert_ne!(high, fp8, "FP8 really runs");
        for (step, (high, fp8)) in high.iter().zip(&fp8).enumerate().take(10) {
            // On an H100, whose tensor cores add FP8 products with fewer bits, 3.2 % were seen.
            assert!((high - fp8).abs() < 0.06 * high, "{recipe:?}, step {step}: {high} and {fp8}");
        }
        let last = |losses: &[f32]| losses[losses.len() - 1];
        let most = unless_simulated(0.05, 0.99) * high[0];
        assert!(last(&high) < most && last(&fp8) < most, "{recipe:?}: {} and {}", last(&high), last(&fp8));
    }
}
