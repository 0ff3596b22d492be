//! Static scales of inputs, against those of peers.

use crate::folders::{copy, golden, quantize, read, write};
use fp8_hf::{Folder, Monitor, QuantizeOptions, Scheme, calibrate, quantize as quantize_with};
use fp8_nn::prelude::Device;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The ids that a model's expected values were computed with.
fn windows(model: &Path) -> Vec<Vec<i32>> {
    let (_, shape, bytes) = &read(&model.join("expected.safetensors"))["input_ids"];
    let ids = bytes.as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as i32);
    ids.collect::<Vec<i32>>().chunks(shape[1]).map(<[i32]>::to_vec).collect()
}

fn scales(model: &str, windows: &[Vec<i32>]) -> fp8_hf::Result<BTreeMap<String, f32>> {
    let folder = Folder::open(&golden().join(model))?;
    calibrate(&folder, windows, &Device::cpu(), &Monitor::default())
}

#[test]
fn input_scales_are_those_of_peers() {
    let text = fs::read_to_string(golden().join("export/input_scales.json")).unwrap();
    let peers: BTreeMap<String, BTreeMap<String, f64>> = serde_json::from_str(&text).unwrap();
    assert_eq!(peers.len(), 3);
    for (name, peer) in &peers {
        let model = name.split_once('-').unwrap().0;
        let ours = scales(model, &windows(&golden().join(model))).unwrap();
        assert_eq!(ours.len(), peer.len(), "{name}");
        for (tensor, expected) in peer {
            let ours = f64::from(ours[tensor.strip_suffix(".input_scale").unwrap()]);
            assert!(
                (ours - expected).abs() <= 1e-5 * expected,
                "{name} {tensor}: {ours}, expected {expected}"
            );
        }
    }
}

#[test]
fn scales_reach_the_checkpoint() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let input_scales = scales("llama_mha", &[vec![1, 2, 3]]).unwrap();
    // A layer that is not quantized needs no scale, and may have one.
    let ignore = vec!["layers.0".to_owned()];
    let options = QuantizeOptions { scheme: Scheme::Tensor, input_scales, ignore, ..Default::default() };
    quantize_with(&folder, &out, &options, &Monitor::default()).unwrap();
    let fp8 = Folder::open(&out).unwrap();
    let stored = fp8.codes("model.layers.1.mlp.up_proj.weight", 0..1).unwrap().input_scale;
    assert_eq!(stored, options.input_scales.get("model.layers.1.mlp.up_proj").copied());
    assert!(fp8.weights.info("model.layers.0.mlp.up_proj.input_scale").is_none());
}

#[test]
fn what_cannot_be_calibrated_is_refused() {
    let error = |windows: &[Vec<i32>]| scales("llama_mha", windows).unwrap_err().to_string();
    assert_eq!(
        error(&[vec![1, 65]]),
        "calibrate: token = 65: expected 0 to 64, the tokens of the vocabulary"
    );
    assert!(error(&[vec![-1]]).starts_with("calibrate: token = -1: "));
    let longest = Folder::open(&golden().join("llama_mha")).unwrap().config.max_position_embeddings;
    assert_eq!(
        error(&[vec![1], vec![2; longest + 1]]),
        format!(
            "calibrate: windows = up to {} tokens: expected 1 to {longest}, the model's longest sequence",
            longest + 1
        )
    );
    assert!(error(&[]).contains("up to 0 tokens"));

    let place = tempfile::tempdir().unwrap();
    quantize(&golden().join("llama_mha"), &place.path().join("fp8"), Scheme::Channel);
    let folder = Folder::open(&place.path().join("fp8")).unwrap();
    let error = calibrate(&folder, &[[1]], &Device::cpu(), &Monitor::default()).unwrap_err();
    assert!(error.to_string().contains("it is quantized already"), "{error}");

    let stopped = Monitor::default();
    stopped.stop();
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    assert!(calibrate(&folder, &[[1]], &Device::cpu(), &stopped).is_err());
    assert_eq!(stopped.progress(), (1, 3));
}

#[test]
fn inputs_that_are_nan_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model");
    copy(&golden().join("llama_mha"), &path);
    let mut tensors = read(&path.join("model.safetensors"));
    let norm = tensors.get_mut("model.layers.1.input_layernorm.weight").unwrap();
    norm.2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&path.join("model.safetensors"), &tensors);
    let error = calibrate(&Folder::open(&path).unwrap(), &[[1, 2]], &Device::cpu(), &Monitor::default());
    let error = error.unwrap_err().to_string();
    assert!(error.ends_with("the output of block 1 is infinite or NaN: nothing to calibrate"), "{error}");
}
