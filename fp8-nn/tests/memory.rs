//! Bytes that training keeps, counted: in FP8 and in high precision, at each level of recomputation.
//!
//! One test, because all tensors on the CPU share one count. `FP8_TEST_HIDDEN` is the width of the model (default: 128).
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and shows what it measured"
)]

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const LAYERS: usize = 8;

#[derive(Debug, Clone, Copy)]
struct Bytes {
    /// The bytes that the blocks and the loss keep for backward.
    saved: usize,
    /// The most that is in use in backward, without parameters, gradients and moments.
    peak: usize,
}

/// A model whose parameters are bf16.
fn options(hidden_size: usize) -> GptOptions {
    GptOptions {
        vocab_size: 64,
        num_layers: LAYERS,
        layer: TransformerLayerOptions {
            hidden_size,
            ffn_hidden_size: 4 * hidden_size,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 64, ..Default::default() },
            params_dtype: DType::BF16,
            ..Default::default()
        },
        ..Default::default()
    }
}

fn measure(hidden: usize, enabled: bool, recompute: RecomputeLevel) -> Bytes {
    let device = Device::cpu();
    let options = GptOptions {
        layer: TransformerLayerOptions { recompute, ..options(hidden).layer },
        ..options(hidden)
    };
    let mut model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let ids = Tensor::from_vec((0..128).map(|i| i * 7 % 64).collect::<Vec<i32>>(), [2, 64], &device).unwrap();
    let scope = AutocastOptions { enabled, ..Default::default() };
    let mut bytes = None;
    // In the second step the optimizer and the scales have all their memory.
    for _ in 0..2 {
        let before = device.memory_report().now;
        let mut cx = scaling.scope(&recipe, &scope).unwrap();
        let (loss, saved) = model.loss(&mut cx, &ids, &ids).unwrap();
        cx.commit().unwrap();
        drop(loss);
        let kept = device.memory_report().now.saved - before.saved;
        device.reset_peak_memory();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        let report = device.memory_report();
        assert_eq!(report.now.saved, before.saved, "what backward needed is freed");
        bytes = Some(Bytes {
            saved: kept,
            peak: report.peak.saved + report.peak.temporary - before.saved - before.temporary,
        });
        optimizer.step(&mut model, 1e-3).unwrap();
        zero_grad(&mut model).unwrap();
    }
    let (report, count) = (device.memory_report().now, num_parameters(&model));
    assert_eq!((report.gradients, report.optimizer), (4 * count, 12 * count));
    // bf16, and in FP8 the codes of the blocks' weights, which their factors and biases hardly exceed.
    let weights = if enabled { 12 * hidden * hidden * LAYERS } else { 0 };
    let expected = 2 * count + weights;
    assert!((expected..expected + expected / 50).contains(&report.parameters), "{report:?}, {expected}");
    bytes.unwrap()
}

/// The bytes of parameters and gradients of a model in f32: as it is made, with its weights stored in FP8 for training, and for
/// inference.
fn stored_in_fp8(hidden: usize) -> [[usize; 2]; 3] {
    let device = Device::cpu();
    let options = GptOptions {
        vocab_size: 64,
        num_layers: LAYERS,
        layer: TransformerLayerOptions {
            hidden_size: hidden,
            ffn_hidden_size: 4 * hidden,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 64, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let recipe = Recipe::from(DelayedScaling::default());
    let before = device.memory_report().now;
    let mut model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let bytes = || {
        let now = device.memory_report().now;
        [now.parameters - before.parameters, now.gradients - before.gradients]
    };
    let made = bytes();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    optimizer.quantize_weights(&mut model, &recipe).unwrap();
    let training = bytes();
    drop(optimizer);
    for parameter in parameters_mut(&mut model) {
        parameter.set_trainable(false).unwrap();
    }
    [made, training, bytes()]
}

/// The most bytes that are in use while a model of so many layers computes logits, beyond those of its weights: as an evaluation
/// does, and with what backward needs.
fn evaluation(layers: usize, enabled: bool) -> [usize; 2] {
    let device = Device::cpu();
    let options = GptOptions {
        vocab_size: 64,
        num_layers: layers,
        layer: TransformerLayerOptions {
            hidden_size: 64,
            ffn_hidden_size: 256,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 64, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let scope = AutocastOptions { enabled, ..Default::default() };
    let ids = Tensor::from_vec((0..128).map(|i| i * 7 % 64).collect::<Vec<i32>>(), [2, 64], &device).unwrap();
    let mut cx = scaling.eval_with_options(&DelayedScaling::default().into(), &scope).unwrap();
    let mut peak = |run: &dyn Fn(&mut Forward<'_>)| {
        // In the second run the weights are quantized.
        [(); 2].map(|()| {
            let before = device.memory_report().now.total();
            device.reset_peak_memory();
            run(&mut cx);
            device.memory_report().peak.total() - before
        })[1]
    };
    let info = SequenceInfo::default();
    [
        peak(&|cx| drop(model.evaluate(cx, &ids, &ids, Default::default(), &info).unwrap())),
        peak(&|cx| drop(model.loss(cx, &ids, &ids).unwrap())),
    ]
}

/// The most bytes that are in use while a model reads a prompt and three tokens behind it, beyond those of its weights and of a cache
/// with this capacity.
fn generation(capacity: usize, dtype: DType) -> usize {
    let device = Device::cpu();
    let options = GptOptions {
        num_layers: 2,
        layer: TransformerLayerOptions {
            attention: AttentionOptions { max_seq_length: 4096, ..options(64).layer.attention },
            params_dtype: dtype,
            ..options(64).layer
        },
        ..options(64)
    };
    let model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let mut cx = scaling.eval(&Recipe::off()).unwrap();
    let mut cache = model.kv_cache(1, capacity, dtype).unwrap();
    let before = device.memory_report().now.total();
    device.reset_peak_memory();
    for count in [20, 1, 1, 1] {
        let ids = Tensor::from_vec(vec![1i32; count], [1, count], &device).unwrap();
        model.extend(&mut cx, &ids, &[count], &mut cache).unwrap();
    }
    device.memory_report().peak.total() - before
}

/// The bytes that a forward pass keeps for backward, with the matrices of the blocks trainable and frozen.
fn where_frozen(hidden: usize, enabled: bool) -> [usize; 2] {
    let device = Device::cpu();
    let options = options(hidden);
    let mut model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let ids = Tensor::from_vec((0..128).map(|i| i * 7 % 64).collect::<Vec<i32>>(), [2, 64], &device).unwrap();
    let scope = AutocastOptions { enabled, ..Default::default() };
    [true, false].map(|is_trainable| {
        for parameter in parameters_mut(&mut model) {
            if parameter.name().contains(".blocks.") && parameter.shape().len() == 2 {
                parameter.set_trainable(is_trainable).unwrap();
            }
        }
        let mut scaling = Scaling::new(&model, &device).unwrap();
        let before = device.memory_report().now;
        let mut cx = scaling.scope(&recipe, &scope).unwrap();
        let (loss, saved) = model.loss(&mut cx, &ids, &ids).unwrap();
        cx.commit().unwrap();
        drop(loss);
        let kept = device.memory_report().now.saved - before.saved;
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        kept
    })
}

/// The bytes of the optimizer's state for a model in bf16, a parameter, after a step with these options.
fn optimizer_state(hidden: usize, adamw: AdamWOptions) -> f64 {
    let device = Device::cpu();
    let mut model = Gpt::new("gpt", &options(hidden), &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let before = device.memory_report().now;
    let mut optimizer = AdamW::new(adamw).unwrap();
    optimizer.step(&mut model, 1e-3).unwrap();
    let bytes = device.memory_report().now.optimizer - before.optimizer;
    bytes as f64 / num_parameters(&model) as f64
}

/// The bytes of the tables of rotary positions in a model of so many layers.
fn positions(layers: usize) -> usize {
    let device = Device::cpu();
    let options = |max_seq_length| GptOptions {
        num_layers: layers,
        layer: TransformerLayerOptions {
            attention: AttentionOptions { max_seq_length, ..options(32).layer.attention },
            ..options(32).layer
        },
        ..options(32)
    };
    let bytes = |max_seq_length| {
        let before = device.memory_report().now.total();
        let model = Gpt::new("gpt", &options(max_seq_length), &device, &mut ChaCha8Rng::seed_from_u64(1));
        let model = model.unwrap();
        let bytes = device.memory_report().now.total() - before;
        drop(model);
        bytes
    };
    bytes(4096 + 64) - bytes(64)
}

#[test]
fn fp8_and_recomputation_need_less_memory() {
    // Cosines and sines of a head of 8, in f32, once for the whole model.
    assert_eq!([positions(1), positions(8)], [4096 * 4 * 2 * 4; 2]);
    let moments = |moments| {
        let options = AdamWOptions { moments, main_params: false, ..Default::default() };
        optimizer_state(128, options)
    };
    let [f32, bf16, fp8] = [MomentDtype::F32, MomentDtype::BF16, MomentDtype::Fp8].map(moments);
    println!("moments in f32, bf16 and FP8: {f32}, {bf16} and {fp8:.3} bytes a parameter");
    assert_eq!([f32, bf16], [8.0, 4.0]);
    assert!((2.0625..=0.27 * 8.0).contains(&fp8), "{fp8}");
    let hidden = std::env::var("FP8_TEST_HIDDEN").map_or(128, |text| text.parse().unwrap());
    let high = measure(hidden, false, RecomputeLevel::None);
    let levels = [
        RecomputeLevel::None,
        RecomputeLevel::Norm,
        RecomputeLevel::Activation,
        RecomputeLevel::Attention,
        RecomputeLevel::Mlp,
        RecomputeLevel::Block,
    ];
    let fp8 = levels.map(|level| measure(hidden, true, level));
    println!(
        "hidden size {hidden}, {LAYERS} layers, 128 tokens, bf16, bytes kept for backward, and backward's peak"
    );
    println!("{:<24} {:>12} {:>12}", "high precision", high.saved, high.peak);
    for (level, bytes) in levels.iter().zip(fp8) {
        println!("{:<24} {:>12} {:>12}", format!("FP8, {level:?}"), bytes.saved, bytes.peak);
    }
    let [made, training, inference] = stored_in_fp8(hidden);
    println!(
        "f32 parameters and gradients: {made:?}; weights in FP8: {training:?}; for inference: {inference:?}"
    );
    // What is no weight of a block: embedding, head, norms and biases.
    let weights = 12 * hidden * hidden * LAYERS;
    let rest = made[0] - 4 * weights;
    let factors = 4 * 4 * LAYERS;
    assert_eq!(training, [rest + weights + factors, made[1]]);
    assert_eq!(inference, [training[0], 0]);
    assert!((weights + factors) as f64 <= 0.27 * (4 * weights) as f64);
    assert!(fp8[0].saved as f64 <= 0.86 * high.saved as f64);
    for pair in fp8.windows(2) {
        assert!(pair[1].saved < pair[0].saved, "{pair:?}");
    }
    for enabled in [false, true] {
        let [[two, _], [eight, kept]] = [2, 8].map(|layers| evaluation(layers, enabled));
        println!(
            "the peak of an evaluation: {two} with two layers, {eight} with eight, {kept} with what backward needs"
        );
        // What threads hold at the same moment differs from run to run; what is kept would be four times as much.
        assert!(eight <= two + two / 2 && eight as f64 <= 0.3 * kept as f64);
    }
    for dtype in [DType::F32, DType::BF16] {
        let [small, large] = [32, 4096].map(|capacity| generation(capacity, dtype));
        println!("the peak of a generation: {small}, with room for 4096 tokens {large}");
        assert!(large <= small + small / 2, "{dtype}: {small}, {large}");
    }
    for (enabled, bytes) in [(true, 1), (false, 2)] {
        let [all, frozen] = where_frozen(hidden, enabled);
        println!("kept for backward: {all}, with frozen weights: {frozen}");
        // The inputs of `qkv`, `fc1` and `fc2`, one byte or two an element, are no longer kept. The attention keeps `proj`'s, too.
        assert!(all >= frozen + bytes * LAYERS * 128 * (hidden + hidden + 4 * hidden), "{all}, {frozen}");
    }
    assert!(fp8[5].peak as f64 <= 0.35 * fp8[0].peak as f64);
}
