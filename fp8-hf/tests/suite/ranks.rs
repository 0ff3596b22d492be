//! Ranks that read a model together.

use crate::folders::{copy, golden, quantize, write};
use fp8_hf::{Config, Folder, Fp8Weights, LoadOptions, Scheme};
use fp8_nn::prelude::*;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Loads on this many ranks, each from its folder.
fn on_ranks(folders: &[&Path], options: &[LoadOptions]) -> Vec<fp8_hf::Result<(Gpt, u64)>> {
    let run = |group: Arc<dyn ProcessGroup>| {
        let rank = group.rank();
        let folder = Folder::open(folders[rank % folders.len()]).unwrap();
        let options = &options[rank % options.len()];
        let model = folder.load_on_ranks(options, &Device::cpu(), &*group)?;
        Ok((model, folder.weights.bytes_read()))
    };
    thread::scope(|scope| {
        let groups = local("dp", 3, Duration::from_secs(20)).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_has_the_model_and_reads_its_part() {
    let place = tempfile::tempdir().unwrap();
    let folder = |name: &str| place.path().join(name);
    quantize(&golden().join("llama_mha"), &folder("tensor"), Scheme::Tensor);
    quantize(&golden().join("llama_bf16"), &folder("block"), Scheme::Block128);
    let gpt2 = Config::read(&golden().join("configs/gpt2/config.json")).unwrap();
    crate::folders::write_model(&folder("gpt2"), &gpt2, DType::BF16);
    copy(&golden().join("qwen3"), &folder("qwen3"));
    for (name, fp8) in [
        ("qwen3", Fp8Weights::Dequantize),
        ("gpt2", Fp8Weights::Keep),
        ("tensor", Fp8Weights::Dequantize),
        ("tensor", Fp8Weights::Keep),
        ("block", Fp8Weights::Keep),
    ] {
        let options = LoadOptions { path: "gpt".into(), fp8, ..Default::default() };
        let alone = Folder::open(&folder(name)).unwrap();
        let expected = alone.load(&options, &Device::cpu()).unwrap();
        let all = alone.weights.bytes_read();
        let mut read = 0;
        for found in on_ranks(&[&folder(name)], &[options]) {
            let (model, bytes) = found.unwrap();
            for (own, expected) in parameters(&model).into_iter().zip(parameters(&expected)) {
                assert_eq!(own.name(), expected.name());
                assert_eq!(own.fp8().map(Fp8Tensor::blocks), expected.fp8().map(Fp8Tensor::blocks));
                let values = |own: &Parameter| own.values(DType::F32).unwrap().to_f32_vec().unwrap();
                assert!(values(own) == values(expected), "{name}: {own:?}");
                assert_eq!(own.is_trainable(), expected.is_trainable());
            }
            assert!(bytes > 0 && bytes < all * 6 / 10, "{name}: {bytes} of {all} bytes");
            read += bytes;
        }
        // Every rank looks at the scales of q, k and v, which differ: all weights have factors for rows.
        let scales = if name == "tensor" && fp8 == Fp8Weights::Keep { 2 * 3 * 4 } else { 0 };
        assert_eq!(read, all + scales, "{name}: a byte was read twice");
    }
}

#[test]
fn folders_and_options_that_differ_are_errors_of_all_ranks() {
    let (one, other) = (golden().join("llama_mha"), golden().join("llama_yarn"));
    let default = LoadOptions::default();
    let half = LoadOptions { params_dtype: DType::BF16, ..Default::default() };
    for (folders, options) in
        [(vec![&*one, &*one, &*other], vec![default.clone()]), (vec![&*one], vec![default.clone(), half])]
    {
        for found in on_ranks(&folders, &options) {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("load_on_ranks"), "{error}");
        }
    }
    // A rank that cannot read its part tells the others.
    let place = tempfile::tempdir().unwrap();
    quantize(&one, &place.path().join("fp8"), Scheme::Channel);
    let broken = place.path().join("broken");
    copy(&place.path().join("fp8"), &broken);
    let mut all = crate::folders::tensors(&broken);
    for (name, tensor) in &mut all {
        if name.ends_with("weight_scale") {
            tensor.2.fill(0xFF);
        }
    }
    write(&broken.join("model.safetensors"), &all);
    let fp8 = place.path().join("fp8");
    let errors: Vec<String> = on_ranks(&[&fp8, &broken, &fp8], &[default])
        .into_iter()
        .map(|found| found.unwrap_err().to_string())
        .collect();
    assert!(errors.iter().all(|error| error.contains("expected a finite, positive scale")), "{errors:?}");
}
