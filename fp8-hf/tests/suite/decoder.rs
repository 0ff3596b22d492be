//! Folders as models: what transformers computed with them in float64, and options of the decoder against each other.

use crate::folders::{copy, full, golden, read};
use crate::trained::ids;
use fp8_hf::{Folder, LoadOptions};
use fp8_nn::prelude::*;
use std::path::Path;

pub(crate) fn floats((dtype, _, bytes): &(String, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    assert_eq!(dtype, "F32");
    bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

pub(crate) fn close(what: &str, expected: &[f32], found: &[f32], tolerance: f32) {
    assert_eq!(expected.len(), found.len(), "{what}");
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (i, (&e, &f)) in expected.iter().zip(found).enumerate() {
        assert!((e - f).abs() <= tolerance * largest, "{what}[{i}] is {f}, expected {e}");
    }
}

pub(crate) fn load(path: &Path, trainable: bool) -> Gpt {
    let options = LoadOptions { trainable, ..Default::default() };
    Folder::open(path).unwrap().load(&options, &Device::cpu()).unwrap()
}

pub(crate) fn logits(model: &Gpt, ids: &Tensor) -> Vec<f32> {
    let mut scaling = Scaling::new(model, &Device::cpu()).unwrap();
    let mut cx = scaling.eval(&Recipe::off()).unwrap();
    model.forward(&mut cx, ids).unwrap().0.to_f32_vec().unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    let mut models = 0;
    for parent in [Some(golden()), full()].into_iter().flatten() {
        for entry in std::fs::read_dir(&parent).unwrap() {
            let path = entry.unwrap().path();
            if !path.join("expected.safetensors").is_file() {
                continue;
            }
            let expected = floats(&read(&path.join("expected.safetensors"))["logits"]);
            close(&path.display().to_string(), &expected, &logits(&load(&path, false), &ids(&path)), 1e-5);
            models += 1;
        }
    }
    assert!(models >= 5);
}

#[test]
fn a_model_is_frozen_unless_it_is_to_be_trained() {
    let path = golden().join("qwen3");
    let (frozen, trainable) = (load(&path, false), load(&path, true));
    assert!(parameters(&frozen).iter().all(|p| !p.is_trainable() && p.main_grad().shape().numel() == 0));
    assert!(parameters(&trainable).iter().all(|p| p.is_trainable() && p.main_grad().shape() == p.shape()));
    // Names are below the path, and a tied model has no head of its own.
    let names: Vec<&str> = parameters(&frozen).iter().map(|p| &**p.name()).collect();
    assert_eq!(names[0], "model.embedding.weight");
    assert!(names.contains(&"model.blocks.1.attention.k_norm.weight"));
}

#[test]
fn a_model_runs_under_fp8_recipes_and_with_fp8_weights() {
    let path = golden().join("llama_bf16");
    let (ids, mut model) = (ids(&path), load(&path, false));
    let high = logits(&model, &ids);
    let relative = |found: &[f32]| {
        let sum = |f: &dyn Fn(f32, f32) -> f32| high.iter().zip(found).map(|(&h, &f_)| f(h, f_)).sum::<f32>();
        (sum(&|h, f| (h - f).powi(2)) / sum(&|h, _| h * h)).sqrt()
    };
    let recipe = Recipe::from(CurrentScaling::default());
    let run = |model: &Gpt, recipe: &Recipe| {
        let mut scaling = Scaling::new(model, &Device::cpu()).unwrap();
        let mut cx = scaling.eval(recipe).unwrap();
        model.forward(&mut cx, &ids).unwrap().0.to_f32_vec().unwrap()
    };
    let fp8 = run(&model, &recipe);
    assert!((1e-4..0.3).contains(&relative(&fp8)), "{}", relative(&fp8));
    assert_eq!(quantize_weights(&mut model, &recipe).unwrap(), 2 * 4);
    assert_eq!(run(&model, &recipe), fp8);
    assert!(relative(&run(&model, &Recipe::off())) < relative(&fp8) + 0.1);
}

#[test]
fn learned_positions_end_with_their_table() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model");
    let config = fp8_hf::Config::read(&golden().join("configs/gpt2/config.json")).unwrap();
    crate::folders::write_model(&path, &config, DType::F32);
    let folder = Folder::open(&path).unwrap();
    let load = |length| {
        let options = LoadOptions { max_seq_length: Some(length), ..Default::default() };
        folder.load(&options, &Device::cpu()).map(drop)
    };
    let longest = config.max_position_embeddings;
    assert_eq!(config.longest_sequence(), longest);
    load(1).unwrap();
    load(longest).unwrap();
    assert_eq!(
        load(longest + 1).unwrap_err().to_string(),
        format!(
            "model: max_seq_length = {}: expected at most {longest}, the number of the model's learned positions",
            longest + 1
        )
    );
}

/// RoPE scaling extends a model beyond its `max_position_embeddings`, which are the original length in some files.
#[test]
fn rotary_positions_go_on_as_far_as_asked_for() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_mha"), place.path());
    let config = place.path().join("config.json");
    let ids = Tensor::from_vec((0..60).collect::<Vec<i32>>(), [1, 60], &Device::cpu()).unwrap();
    let rope = serde_json::json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0});
    let mut expected = None;
    for (positions, longest) in [(64, 192), (8, 24)] {
        let changes = serde_json::json!({"rope_parameters": rope, "max_position_embeddings": positions});
        crate::folders::change(&config, &changes);
        let folder = Folder::open(place.path()).unwrap();
        assert_eq!(folder.config.longest_sequence(), longest);
        let options = LoadOptions { max_seq_length: Some(60), ..Default::default() };
        let model = folder.load(&options, &Device::cpu()).unwrap();
        assert_eq!((model.max_seq_length(), load(place.path(), false).max_seq_length()), (60, positions));
        let found = logits(&model, &ids);
        assert!(*expected.get_or_insert(found.clone()) == found);
    }
    // The window of a calibration may be as long.
    let folder = Folder::open(place.path()).unwrap();
    let calibrate = |length: i32| {
        let window: Vec<i32> = (0..length).collect();
        fp8_hf::calibrate(&folder, &[window], &Device::cpu(), &Default::default())
    };
    calibrate(24).unwrap();
    assert!(calibrate(25).unwrap_err().to_string().contains("expected 1 to 24"));
}

#[test]
fn a_dtype_for_parameters_rounds_them_once() {
    let path = golden().join("llama_mha");
    let folder = Folder::open(&path).unwrap();
    let options = LoadOptions { params_dtype: DType::BF16, ..Default::default() };
    let model = folder.load(&options, &Device::cpu()).unwrap();
    for (half, full) in parameters(&model).into_iter().zip(parameters(&load(&path, false))) {
        assert_eq!(half.dtype(), DType::BF16);
        let rounded = full.values(DType::BF16).unwrap().to_f32_vec().unwrap();
        assert_eq!(half.tensor().to_f32_vec().unwrap(), rounded);
    }
}

#[test]
fn a_file_that_is_cut_off_while_it_is_loaded_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_mha"), dir.path());
    let folder = Folder::open(dir.path()).unwrap();
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let error = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}
