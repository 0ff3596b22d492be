//! Counts the kernels that the layers launch on a simulated GPU: options that are off cost nothing. The test is a program
//! of its own, because the counts are those of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::CudaOptions;
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Launches of kernels, which products by cuBLASLt are not, in forward, backward and both commits of a step.
fn launches(options: TransformerLayerOptions, scope: &AutocastOptions) -> u64 {
    let library = library_path().unwrap();
    let cuda = CudaOptions {
        library: Some(library.clone()),
        cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
        ..CudaOptions::default()
    };
    let (device, control) = (Device::cuda_with_options(&cuda).unwrap(), Control::open(&library).unwrap());
    let mut model =
        TransformerLayer::new("block", options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let x = Tensor::full(0.5, [1, 8, 32], DType::F32, &device).unwrap();
    let mut count = 0;
    // The first step also calibrates.
    for _ in 0..2 {
        device.synchronize().unwrap();
        control.set("reset_calls", "").unwrap();
        let mut cx = scaling.scope(&recipe, scope).unwrap();
        let (y, saved) = model.forward(&mut cx, &x).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
        device.synchronize().unwrap();
        count = control.calls().get("cuLaunchKernel").copied().unwrap_or(0);
    }
    count
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
    assert_eq!([plain, launches(options(), &off)], [78, 41]);
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
}
