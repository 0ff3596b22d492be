//! The values and the metadata of checkpoints that are exported: what is damaged, what a dtype cannot hold.

use crate::exporting::{export, refused};
use crate::folders::{golden, tensors};
use crate::trained::{Trained, config_of};
use fp8_hf::{self as hf, ExportOptions, Folder, Monitor, QuantizeOptions};
use fp8_nn::prelude::*;
use std::fs;

/// Replaces the first values of a parameter.
fn poke(model: &mut Gpt, end: &str, values: &[f32]) {
    let mut all = parameters_mut(model).into_iter();
    let parameter = all.find(|parameter| parameter.name().ends_with(end)).unwrap();
    let mut own = parameter.tensor().to_f32_vec().unwrap();
    own[..values.len()].copy_from_slice(values);
    let value = Tensor::from_vec(own, *parameter.shape(), &Device::cpu()).unwrap();
    parameter.set(value).unwrap();
}

#[test]
fn values_that_a_dtype_cannot_hold_are_named() {
    let place = tempfile::tempdir().unwrap();
    let [dir, out] = ["checkpoint", "out"].map(|name| place.path().join(name));
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let mut trained = Trained::new(&golden().join("llama_mha"), DType::F32);
    poke(&mut trained.model, "blocks.1.mlp.fc2.weight", &[1.0, 65519.0, -65520.0]);
    trained.save(&dir, &[folder.config.metadata()].into());
    let file = checkpoint::path(&dir);
    let half = ExportOptions { dtype: Some(DType::F16), ..Default::default() };
    let text = "`model.layers.1.mlp.down_proj.weight` is -65520 in row 0, column 2, which f16 cannot hold: its largest value is \
                65504: write it in another dtype";
    assert_eq!(refused(&dir, &out, &half), format!("{}: {text}", file.display()));
    for error in [
        hf::save_model(&out, &folder.config, &trained.model, half.dtype),
        folder.save_model(&out, &trained.model, half.dtype),
    ] {
        assert_eq!(error.unwrap_err().to_string(), format!("{}: {text}", out.display()));
    }
    folder.save_model(&out, &trained.model, None).unwrap();
    fs::remove_dir_all(&out).unwrap();

    // A checkpoint that went wrong is no model to publish; a model in memory is written as it is.
    poke(&mut trained.model, "blocks.1.mlp.fc2.weight", &[f32::INFINITY, 1.0, f32::NAN]);
    trained.save(&dir, &[folder.config.metadata()].into());
    let text = "`model.layers.1.mlp.down_proj.weight` is infinite or NaN in row 0, column 0: expected finite weights";
    assert_eq!(refused(&dir, &out, &ExportOptions::default()), format!("{}: {text}", file.display()));
    folder.save_model(&out, &trained.model, half.dtype).unwrap();
    let written = Folder::open(&out).unwrap().rows("model.layers.1.mlp.down_proj.weight", 0..1).unwrap();
    assert!(written[0] == f32::INFINITY && written[2].is_nan());
}

#[test]
fn a_file_of_parameters_may_say_which_model_it_is() {
    let place = tempfile::tempdir().unwrap();
    let [file, out] = ["parameters.safetensors", "out"].map(|name| place.path().join(name));
    let trained = Trained::new(&golden().join("llama_mha"), DType::F32);
    checkpoint::save_parameters(&file, &trained.model).unwrap();
    let bytes = fs::read(&file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let (key, text) = config_of("llama_mha").metadata();
    header["__metadata__"][key] = text.into();
    crate::folders::write_raw(&file, &header.to_string(), &bytes[8 + len..]);
    export(&file, &out, &ExportOptions::default());
    assert_eq!(tensors(&out), tensors(&golden().join("llama_mha")));
}

#[test]
fn factors_of_a_checkpoint_are_checked() {
    let place = tempfile::tempdir().unwrap();
    let [dir, out] = ["checkpoint", "out"].map(|name| place.path().join(name));
    let mut trained = Trained::new(&golden().join("llama_mha"), DType::F32);
    quantize_weights(&mut trained.model, &CurrentScaling::default().into()).unwrap();
    trained.save(&dir, &[config_of("llama_mha").metadata()].into());
    let file = checkpoint::path(&dir);
    let bytes = fs::read(&file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let name = "model.gpt.blocks.1.mlp.fc2.weight_scale_inv";
    let begin = 8 + len + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    for value in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
        let mut damaged = bytes.clone();
        damaged[begin..begin + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(&file, damaged).unwrap();
        let text = format!("`{name}` is {value} at element 0: expected a finite, positive factor");
        let error = refused(&dir, &out, &ExportOptions::default());
        assert_eq!(error, format!("{}: {text}", file.display()));
    }
}

#[test]
fn damaged_checkpoints_give_an_error_or_a_folder_and_never_a_panic() {
    use fp8_nn::rand::{Rng as _, SeedableRng, rngs::StdRng};
    let place = tempfile::tempdir().unwrap();
    let (dir, out) = (place.path().join("checkpoint"), place.path().join("out"));
    let recipe = Recipe::from(CurrentScaling::rowwise());
    let mut trained = Trained::new(&golden().join("llama_gqa_tied"), DType::F32);
    quantize_weights(&mut trained.model, &recipe).unwrap();
    trained.save(&dir, &[config_of("llama_gqa_tied").metadata()].into());
    let file = checkpoint::path(&dir);
    let bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let fp8 = Some(QuantizeOptions { threads: Some(1), ..Default::default() });
    let options = ExportOptions { fp8, dtype: Some(DType::F32), ..Default::default() };
    let (mut rng, mut refused) = (StdRng::seed_from_u64(7), 0);
    for _ in 0..100 {
        let mut damaged = bytes.clone();
        for _ in 0..rng.random_range(1..4) {
            damaged[8 + rng.random_range(0..header)] = rng.random_range(0x20..0x7F);
        }
        fs::write(&file, damaged).unwrap();
        match hf::export(&dir, &out, &options, &Monitor::default()) {
            Ok(_) => fs::remove_dir_all(&out).unwrap(),
            Err(_) => refused += 1,
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "something was left");
    }
    assert!(refused > 50, "{refused}");
}
