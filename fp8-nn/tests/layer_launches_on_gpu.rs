//! Records which kernels and calls of libraries a TransformerLayer launches, forward and backward, on the simulated GPU. The file
//! beside this test is what `cargo xtask sass --layer` adds up. The test is a program of its own, because the counts are those of the
//! process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod simulated;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use fp8_nn::fp8_kernels::bf16;
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const HEAD: &str = "\
# What a TransformerLayer launches, forward and backward, and how often: bf16, causal, GELU, LayerNorm, bias, delayed scaling with
# transposed copies, after an optimizer's step and zero_grad. NAME, and its launches with cuDNN 9.19, which has no backward pass of
# attention that adds in order, and with 9.28, which has one. Written by the test layer_launches_on_gpu with
# FP8_TEST_WRITE_LAUNCHES=1, read by `cargo xtask sass --layer`.
";

/// Calls that are launches, too: into libraries, and of the driver's passes over memory.
const CALLS: [&str; 5] =
    ["cublasLtMatmul", "cudnnBackendExecute", "cuMemsetD8Async", "cuMemsetD32Async", "cuMemcpyDtoDAsync_v2"];

/// Whole tiles, and heads of 128.
const HIDDEN: usize = 256;

/// The launches of a trained layer's forward and backward, by name. `weight_codes`: the optimizer writes the weights' codes.
fn launches(cudnn: &str, weight_codes: bool) -> BTreeMap<String, u64> {
    let (device, control) = simulated::open(Some(cudnn));
    let options = TransformerLayerOptions {
        hidden_size: HIDDEN,
        ffn_hidden_size: 128,
        attention: AttentionOptions { num_attention_heads: 2, max_seq_length: 128, ..Default::default() },
        activation: Activation::Gelu,
        bias: true,
        params_dtype: DType::BF16,
        ..Default::default()
    };
    let mut model =
        TransformerLayer::new("layer", options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    if weight_codes {
        optimizer.quantize_weights(&mut model, &recipe).unwrap();
    }
    // Few rows until every slot has a scale that the host knows of; then whole tiles.
    for rows in [16, 16, 128] {
        // Rows whose numbers differ: a norm makes zeros of others, which give no scale.
        let values = (0..rows * HIDDEN).map(|i| bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
        let x = Tensor::from_vec::<bf16>(values, [1, rows, HIDDEN], &device).unwrap();
        device.synchronize().unwrap();
        control.set("reset_calls", "").unwrap();
        // What the last step computes, nobody reads.
        control.set("stub", if rows == 128 { "1" } else { "0" }).unwrap();
        let mut cx = scaling.scope(&recipe, &AutocastOptions::default()).unwrap();
        let (y, saved) = model.forward(&mut cx, &x).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
        device.synchronize().unwrap();
        if rows == 16 {
            optimizer.step(&mut model, 1e-3).unwrap();
            zero_grad(&mut model).unwrap();
        }
    }
    control.set("stub", "0").unwrap();
    let mut all: BTreeMap<String, u64> = control.launches().into_iter().collect();
    let calls = control.calls();
    all.extend(CALLS.iter().filter_map(|name| Some(((*name).to_owned(), *calls.get(*name)?))));
    all.retain(|_, count| *count > 0);
    all
}

#[test]
fn a_layer_launches_what_the_file_says() {
    let [own, cudnn] = ["91900", "92801"].map(|version| launches(version, false));
    let count = |launches: &BTreeMap<String, u64>| launches.values().sum::<u64>();
    assert!(count(&own) <= 48 && count(&cudnn) <= 48, "{own:#?} {cudnn:#?}");
    for version in ["91900", "92801"] {
        let with_codes = launches(version, true);
        assert!(count(&with_codes) <= 44, "{with_codes:#?}");
    }

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layer_launches.txt");
    let mut found = HEAD.to_owned();
    let names: std::collections::BTreeSet<&String> = own.keys().chain(cudnn.keys()).collect();
    for name in names {
        let of = |launches: &BTreeMap<String, u64>| launches.get(name).copied().unwrap_or(0);
        writeln!(found, "{name} {} {}", of(&own), of(&cudnn)).unwrap();
    }
    if std::env::var_os("FP8_TEST_WRITE_LAUNCHES").is_some_and(|value| value == "1") {
        std::fs::write(&path, &found).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default().replace('\r', "");
    let remedy =
        "run the test with FP8_TEST_WRITE_LAUNCHES=1, then fp8-kernels/ptx/sass-layer.txt needs the same";
    assert_eq!(found, kept, "the layer launches something else: {remedy}");
}
