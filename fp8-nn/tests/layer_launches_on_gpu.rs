//! Records which kernels and products a TransformerLayer launches, forward and backward, on the simulated GPU. The file beside this
//! test is what `cargo xtask sass --layer` adds up. The test is a program of its own, because the counts are those of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write;
use std::path::Path;

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::{CudaOptions, bf16};
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const HEAD: &str = "\
# What a TransformerLayer launches, forward and backward, and how often: bf16, causal, GELU, LayerNorm, bias, delayed scaling with
# transposed copies. Written by the test layer_launches_on_gpu with FP8_TEST_WRITE_LAUNCHES=1, read by `cargo xtask sass --layer`.
";

/// Calls into libraries that are launches, too.
const LIBRARIES: [&str; 2] = ["cublasLtMatmul", "cudnnBackendExecute"];

/// One name a line, with the number of launches in the third step of the layer; those before it calibrate.
fn launches() -> String {
    let library = library_path().unwrap();
    let cuda = CudaOptions {
        library: Some(library.clone()),
        cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
        ..CudaOptions::default()
    };
    let (device, control) = (Device::cuda_with_options(&cuda).unwrap(), Control::open(&library).unwrap());
    // As wide as it takes for the kernels of wide rows, of whole tiles, with heads of 128.
    let options = TransformerLayerOptions {
        hidden_size: 1152,
        ffn_hidden_size: 128,
        attention: AttentionOptions { num_attention_heads: 9, max_seq_length: 128, ..Default::default() },
        activation: Activation::Gelu,
        bias: true,
        params_dtype: DType::BF16,
        ..Default::default()
    };
    let mut model =
        TransformerLayer::new("layer", options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let mut text = HEAD.to_owned();
    // Few rows until every slot has a scale that the host knows of; then whole tiles, and weights that have changed.
    for rows in [16, 16, 128] {
        // Rows whose numbers differ: a norm makes zeros of others, which give no scale.
        let values = (0..rows * 1152).map(|i| bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
        let x = Tensor::from_vec::<bf16>(values, [1, rows, 1152], &device).unwrap();
        if rows == 128 {
            for parameter in parameters_mut(&mut model) {
                parameter.update(|_, _| Ok(())).unwrap();
            }
        }
        device.synchronize().unwrap();
        control.set("reset_calls", "").unwrap();
        let mut cx = scaling.scope(&recipe, &AutocastOptions::default()).unwrap();
        let (y, saved) = model.forward(&mut cx, &x).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
        device.synchronize().unwrap();
    }
    let mut all = control.launches();
    let calls = control.calls();
    all.extend(LIBRARIES.iter().filter_map(|name| Some(((*name).to_owned(), *calls.get(*name)?))));
    for (name, count) in all.iter().filter(|(_, count)| **count > 0) {
        writeln!(text, "{name} {count}").unwrap();
    }
    text
}

#[test]
fn a_layer_launches_what_the_file_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layer_launches.txt");
    let found = launches();
    if std::env::var_os("FP8_TEST_WRITE_LAUNCHES").is_some_and(|value| value == "1") {
        std::fs::write(&path, &found).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default().replace('\r', "");
    let remedy =
        "run the test with FP8_TEST_WRITE_LAUNCHES=1, then fp8-kernels/ptx/sass-layer.txt needs the same";
    assert_eq!(found, kept, "the layer launches something else: {remedy}");
}
