//! Counts the kernels that the layers launch on a simulated GPU: options that are off cost nothing. The test is a program
//! of its own, because the counts are those of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod simulated;

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn rng() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(1)
}

/// Launches of kernels, which products by cuBLASLt are not, in forward, backward and both commits of a step; and the kernels.
fn launches_of<M: Module>(
    make: impl FnOnce(&Device) -> M,
    recipe: &Recipe,
    scope: &AutocastOptions,
) -> (u64, Vec<String>) {
    let (device, control) = simulated::open(None);
    let mut model = make(&device);
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let x = Tensor::full(0.5, [1, 8, 32], DType::F32, &device).unwrap();
    let mut result = (0, Vec::new());
    // The first step also calibrates.
    for _ in 0..2 {
        device.synchronize().unwrap();
        control.set("reset_calls", "").unwrap();
        let mut cx = scaling.scope(recipe, scope).unwrap();
        let (y, saved) = model.forward(&mut cx, &x).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
        device.synchronize().unwrap();
        let count = control.calls().get("cuLaunchKernel").copied().unwrap_or(0);
        result = (count, control.kernels());
    }
    result
}

fn delayed() -> Recipe {
    Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() })
}

fn launches(options: TransformerLayerOptions, scope: &AutocastOptions) -> u64 {
    let make = |device: &Device| TransformerLayer::new("block", options, device, &mut rng()).unwrap();
    launches_of(make, &delayed(), scope).0
}

fn options() -> TransformerLayerOptions {
    TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 48,
        attention: AttentionOptions {
            num_attention_heads: 2,
            rope: true,
            max_seq_length: 16,
            ..Default::default()
        },
        ..Default::default()
    }
}

#[test]
fn a_step_of_a_plain_layer() {
    let (fp8, off) = (AutocastOptions::default(), AutocastOptions { enabled: false, ..Default::default() });
    let plain = launches(options(), &fp8);
    assert_eq!([plain, launches(options(), &off)], [58, 21]);
    // What is computed again costs launches; the levels differ.
    for apply_residual_connection_post_layernorm in [false, true] {
        let options = || TransformerLayerOptions { apply_residual_connection_post_layernorm, ..options() };
        let mut last = launches(options(), &fp8);
        for recompute in [RecomputeLevel::Norm, RecomputeLevel::Activation, RecomputeLevel::Attention] {
            let count = launches(TransformerLayerOptions { recompute, ..options() }, &fp8);
            assert!(count > last, "{recompute}: {count}, before {last}");
            last = count;
        }
    }
    attention_reads_and_writes_where_projections_do();
    generation_reads_and_appends_where_projections_write();
}

/// Queries, keys and values are parts of one tensor, and so are their gradients: nothing copies them.
fn attention_reads_and_writes_where_projections_do() {
    let scope = AutocastOptions::default();
    let options = |attention| MultiheadAttentionOptions { hidden_size: 32, attention, ..Default::default() };
    let attention = AttentionOptions {
        num_attention_heads: 4,
        num_gqa_groups: Some(2),
        max_seq_length: 16,
        ..Default::default()
    };
    let run = |attention, recipe: &Recipe| {
        let make = |device: &Device| {
            MultiheadAttention::new("attention", options(attention), device, &mut rng()).unwrap()
        };
        launches_of(make, recipe, &scope)
    };
    let copies = |kernels: &[String]| kernels.iter().any(|kernel| kernel == "split_copy");
    let [plain, rope] = [false, true].map(|rope| run(AttentionOptions { rope, ..attention }, &delayed()));
    assert!(!copies(&plain.1) && !copies(&rope.1), "{:?}", rope.1);
    assert_eq!(rope.0, plain.0 + 2, "queries and keys are rotated together, and their gradients are");
    let fp8 = |fp8_mha| AttentionOptions { fp8_dpa: Some(true), fp8_mha: Some(fp8_mha), ..attention };
    let (_, kernels) = run(fp8(true), &delayed());
    assert!(
        !copies(&kernels) && kernels.iter().any(|kernel| kernel.starts_with("attention_")),
        "{kernels:?}"
    );
    // Each of three scales quantizes a tensor of its own.
    assert!(copies(&run(fp8(false), &delayed()).1));
}

/// New keys and values go to the cache from the projection's output.
fn generation_reads_and_appends_where_projections_write() {
    let (device, control) = simulated::open(None);
    let options = GptOptions {
        vocab_size: 16,
        num_layers: 1,
        layer: TransformerLayerOptions { ffn_hidden_size: 48, ..options() },
        ..Default::default()
    };
    let model = Gpt::new("gpt", &options, &device, &mut rng()).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let mut cache = model.kv_cache(1, 8, DType::F32).unwrap();
    let mut cx = scaling.eval(&Recipe::off()).unwrap();
    for _ in 0..2 {
        control.set("reset_calls", "").unwrap();
        let ids = Tensor::from_vec(vec![3], [1, 1], &device).unwrap();
        model.extend(&mut cx, &ids, &[1], &mut cache).unwrap();
        device.synchronize().unwrap();
        let kernels = control.kernels();
        assert!(!kernels.iter().any(|kernel| kernel == "split_copy"), "{kernels:?}");
        assert!(kernels.iter().any(|kernel| kernel == "kv_cache_append"), "{kernels:?}");
    }
}
