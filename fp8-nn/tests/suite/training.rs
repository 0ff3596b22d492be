//! A training on the GPU against the same on the CPU.

use crate::every_device::support::*;
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;

struct Step {
    loss: f32,
    /// After it.
    state: ScalingState,
    /// Codes and factor of each block's weights, as the step quantizes them.
    codes: Vec<(Vec<u8>, f32)>,
}

fn train(device: &Device, steps: u64) -> Vec<Step> {
    let options = GptOptions {
        vocab_size: 32,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions { num_attention_heads: 2, max_seq_length: 16, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, device, &mut rng(5)).unwrap();
    let mut scaling = Scaling::new(&model, device).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let recipe = delayed();
    let on_device = |t: Tensor| t.to_device(device).unwrap();
    let mut all = Vec::new();
    for step in 0..steps {
        let (x, y) = (on_device(ids([2, 16], 32, step)), on_device(ids([2, 16], 32, 50 + step)));
        let mut cx = scaling.autocast(&recipe).unwrap();
        let mut codes = Vec::new();
        for parameter in parameters(&model) {
            if let Some(path) = parameter.name().strip_suffix(".weight")
                && ["qkv", "proj", "fc1", "fc2"].iter().any(|linear| path.ends_with(linear))
            {
                let slot = SlotName::new(path, SlotRole::Weight);
                let operand = cx.quantize_weight(&slot, parameter.version(), parameter.tensor()).unwrap();
                let fp8 = operand.as_fp8().unwrap();
                codes.push((fp8.codes().unwrap(), fp8.scale_inv().item().unwrap()));
            }
        }
        let (loss, saved) = model.loss(&mut cx, &x, &y).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        model.loss_backward(&mut cx, saved).unwrap();
        cx.commit().unwrap();
        clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step(&mut model, 1e-3).unwrap();
        zero_grad(&mut model).unwrap();
        all.push(Step { loss: loss.item().unwrap(), state: scaling.state().unwrap(), codes });
    }
    all
}

#[test]
fn a_training_follows_that_of_the_cpu() {
    let (gpu, cpu) = (train(&device(), 6), train(&Device::cpu(), 6));
    assert!(!gpu[0].codes.is_empty());
    assert!(gpu[0].codes == cpu[0].codes, "weights of the first step have the same codes and scales");
    for (step, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
        let most = of_fp8_sums(1e-2, 1e-3);
        assert!((gpu.loss - cpu.loss).abs() < most, "step {step}: {} and {}", gpu.loss, cpu.loss);
    }
    for (ours, theirs) in gpu[0].state.arenas.iter().zip(&cpu[0].state.arenas) {
        let rows = ours.amax_history.iter().flatten().zip(theirs.amax_history.iter().flatten());
        for (gpu, cpu) in rows {
            // Sums in another order, of the first step's activations and gradients: nothing is amplified yet. Tensor
            // cores add FP8 products with fewer bits, which the next layer's codes may show.
            let most = of_fp8_sums(2e-2, 1e-5);
            assert!((gpu - cpu).abs() <= most * cpu.abs(), "{gpu} and {cpu}");
        }
    }
}
