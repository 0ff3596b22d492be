//! Models that are written as folders: what is not changed keeps its bytes, and what is trained can be loaded again.

use crate::decoder::{load, logits};
use crate::folders::{Sizes, copy, full, golden, llama, quantize, shard, tensors, write_model};
use crate::trained::ids;
use fp8_hf::{self as hf, Config, Folder, Fp8Weights, LoadOptions, Scheme};
use fp8_nn::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn config_text(folder: &Path) -> String {
    fs::read_to_string(folder.join("config.json")).unwrap()
}

/// Loads the folder with these options, writes the model, and checks that nothing changed.
fn saves_its_bytes(from: &Path, options: &LoadOptions) {
    let place = tempfile::tempdir().unwrap();
    let to = place.path().join("to");
    let folder = Folder::open(from).unwrap();
    let model = folder.load(options, &Device::cpu()).unwrap();
    folder.save_model(&to, &model, None).unwrap();
    assert!(tensors(&to) == tensors(from), "{}, {options:?}: other tensors", from.display());
    assert_eq!(config_text(&to), config_text(from));
    assert_eq!(Folder::open(&to).unwrap().weights.num_files(), folder.weights.num_files());
}

#[test]
fn a_model_that_is_loaded_and_saved_keeps_every_byte() {
    let mut models = 0;
    for entry in fs::read_dir(golden().join("configs")).unwrap() {
        let family = entry.unwrap().path();
        for (spelling, dtype) in [("config.json", DType::BF16), ("config.v4.json", DType::F32)] {
            let place = tempfile::tempdir().unwrap();
            let from = place.path().join("from");
            write_model(&from, &Config::read(&family.join(spelling)).unwrap(), dtype);
            if models % 2 == 0 {
                shard(&from, 3);
            }
            for params_dtype in [DType::F32, DType::BF16, DType::F16] {
                saves_its_bytes(&from, &LoadOptions { params_dtype, ..Default::default() });
            }
            models += 1;
        }
    }
    assert_eq!(models, 22);
    for parent in [Some(golden()), full()].into_iter().flatten() {
        for path in fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap().path()) {
            if path.join("model.safetensors").is_file() || path.join("model.safetensors.index.json").is_file()
            {
                saves_its_bytes(&path, &LoadOptions::default());
            }
        }
    }
}

/// Trains a model for a step in high precision.
fn train(model: &mut Gpt, ids: &Tensor) {
    let mut scaling = Scaling::new(model, &Device::cpu()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let (_, saved) = scaling.in_autocast(&Recipe::off(), |cx| model.loss(cx, ids, ids)).unwrap();
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    optimizer.step(model, 1e-2).unwrap();
}

#[test]
fn a_trained_model_is_saved_and_loaded_again() {
    for name in ["llama_gqa_tied", "llama_bf16", "qwen3"] {
        let place = tempfile::tempdir().unwrap();
        let path = golden().join(name);
        let ids = ids(&path);
        let folder = Folder::open(&path).unwrap();
        let mut model = load(&path, true);
        train(&mut model, &ids);
        let expected = logits(&model, &ids);
        assert_ne!(expected, logits(&load(&path, false), &ids));
        // In f32, nothing is rounded.
        let (copied, new) = (place.path().join("copied"), place.path().join("new"));
        folder.save_model(&copied, &model, Some(DType::F32)).unwrap();
        hf::save_model(&new, &folder.config, &model, None).unwrap();
        for out in [&copied, &new] {
            assert!(logits(&load(out, false), &ids) == expected, "{name}: other logits");
        }
        assert_eq!(tensors(&copied), tensors(&new));
        assert_eq!(copied.join("tokenizer.json").exists(), path.join("tokenizer.json").exists());
        // In the dtype of the files.
        let own = place.path().join("own");
        folder.save_model(&own, &model, None).unwrap();
        let (before, after) = (tensors(&path), tensors(&own));
        assert!(before.keys().eq(after.keys()));
        for (name, (dtype, shape, bytes)) in &before {
            let (after_dtype, after_shape, after_bytes) = &after[name];
            assert_eq!((dtype, shape), (after_dtype, after_shape));
            assert_ne!(bytes, after_bytes, "{name} was not trained");
        }
        let half = place.path().join("half");
        hf::save_model(&half, &folder.config, &model, Some(DType::BF16)).unwrap();
        let written = Folder::open(&half).unwrap();
        assert!(written.config.json().contains("bfloat16"), "{}", written.config.json());
        for (parameter, half) in parameters(&model).into_iter().zip(parameters(&load(&half, false))) {
            assert_eq!(
                parameter.values(DType::BF16).unwrap().to_f32_vec().unwrap(),
                half.tensor().to_f32_vec().unwrap()
            );
        }
    }
}

#[test]
fn only_the_tensors_that_changed_have_other_bytes() {
    let place = tempfile::tempdir().unwrap();
    let from = golden().join("llama_mha");
    let folder = Folder::open(&from).unwrap();
    // The parameters are coarser than the files.
    let options = LoadOptions { params_dtype: DType::BF16, ..Default::default() };
    let mut model = folder.load(&options, &Device::cpu()).unwrap();
    for parameter in parameters_mut(&mut model) {
        if &**parameter.name() == "model.blocks.1.attention.qkv.weight" {
            let mut values = parameter.tensor().to_vec::<bf16>().unwrap();
            values[40 * 32] = bf16::from_f32(7.0); // row 8 of k
            parameter.set(Tensor::from_vec(values, [96, 32], &Device::cpu()).unwrap()).unwrap();
        }
    }
    let to = place.path().join("to");
    folder.save_model(&to, &model, None).unwrap();
    let (before, after) = (tensors(&from), tensors(&to));
    let changed: Vec<&String> = before.keys().filter(|&name| before[name] != after[name]).collect();
    assert_eq!(changed, ["model.layers.1.self_attn.k_proj.weight"]);
    assert_eq!(Folder::open(&to).unwrap().rows(changed[0], 8..9).unwrap()[0], 7.0);
}

fn fp8_folders(place: &Path) -> Vec<PathBuf> {
    Scheme::ALL
        .map(|scheme| {
            let out = place.join(scheme.name());
            quantize(&golden().join("llama_mha"), &out, scheme);
            out
        })
        .into()
}

#[test]
fn fp8_weights_that_did_not_change_keep_their_codes() {
    let place = tempfile::tempdir().unwrap();
    for from in fp8_folders(place.path()) {
        for params_dtype in [DType::F32, DType::BF16] {
            for fp8 in [Fp8Weights::Dequantize, Fp8Weights::Keep] {
                saves_its_bytes(&from, &LoadOptions { params_dtype, fp8, ..Default::default() });
            }
        }
    }
}

#[test]
fn a_changed_fp8_weight_makes_the_folder_high_precision() {
    let place = tempfile::tempdir().unwrap();
    let ids = ids(&golden().join("llama_mha"));
    for from in fp8_folders(place.path()) {
        let folder = Folder::open(&from).unwrap();
        let mut model = load(&from, true);
        train(&mut model, &ids);
        let to = place.path().join("to");
        folder.save_model(&to, &model, None).unwrap();
        let written = Folder::open(&to).unwrap();
        assert!(written.config.quantization.is_none());
        assert!(written.weights.names().all(|name| !name.contains("scale")));
        assert!(logits(&load(&to, false), &ids) == logits(&model, &ids), "{}", from.display());
        fs::remove_dir_all(to).unwrap();
    }
}

#[test]
fn a_head_that_a_tied_model_does_not_need_is_written_as_the_table() {
    let place = tempfile::tempdir().unwrap();
    let from = place.path().join("from");
    copy(&golden().join("llama_gqa_tied"), &from);
    let mut all = tensors(&from);
    all.insert("lm_head.weight".into(), all["model.embed_tokens.weight"].clone());
    crate::folders::write(&from.join("model.safetensors"), &all);
    saves_its_bytes(&from, &LoadOptions::default());
    let folder = Folder::open(&from).unwrap();
    let mut model = load(&from, true);
    train(&mut model, &ids(&from));
    folder.save_model(&place.path().join("to"), &model, None).unwrap();
    let after = tensors(&place.path().join("to"));
    assert_eq!(after["lm_head.weight"], after["model.embed_tokens.weight"]);
    assert_ne!(after["lm_head.weight"], all["lm_head.weight"]);
}

#[test]
fn models_that_do_not_fit_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let (out, model) = (place.path().join("out"), load(&golden().join("llama_mha"), false));
    let refused = |name: &str| {
        let folder = Folder::open(&golden().join(name)).unwrap();
        let [one, other] = [
            hf::save_model(&out, &folder.config, &model, None).unwrap_err().to_string(),
            folder.save_model(&out, &model, None).unwrap_err().to_string(),
        ];
        let problem = one.strip_prefix(&format!("{}: ", out.display())).unwrap().to_owned();
        assert!(other.ends_with(&problem), "{other}");
        problem
    };
    assert_eq!(
        refused("llama_yarn"),
        "parameter `embedding.weight` has shape [65, 32]: a llama model of this configuration has [64, 32]"
    );
    assert_eq!(
        refused("qwen3"),
        "parameter `embedding.weight` has shape [65, 32]: a qwen3 model of this configuration has [66, 32]"
    );
    let config = Folder::open(&golden().join("llama_mha")).unwrap().config;
    let text = config.json().replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    let error =
        hf::save_model(&out, &Config::from_json(&text).unwrap(), &model, None).unwrap_err().to_string();
    let place_of = "has no place in a llama model of this configuration: expected one of its options";
    assert!(error.ends_with(&format!("parameter `blocks.2.attention.norm.weight` {place_of}")), "{error}");
    let text = config.json().replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4");
    let error =
        hf::save_model(&out, &Config::from_json(&text).unwrap(), &model, None).unwrap_err().to_string();
    let lacks = "the model has no parameter `blocks.3.attention.norm.weight`, which a llama model of this configuration has";
    assert!(error.ends_with(lacks), "{error}");
    let error = hf::save_model(&out, &config, &model, Some(DType::I32)).unwrap_err().to_string();
    assert_eq!(error, "save_model: dtype = i32: expected f32, bf16 or f16");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "something was left");
}

/// Matrices of more than 2 MiB are read in parts, by several threads.
#[test]
fn large_matrices_are_read_as_a_whole() {
    let config = llama(&Sizes { hidden: 520, intermediate: 1300, layers: 1, head_dim: 520 });
    for stored in [DType::F32, DType::BF16, DType::F16] {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model");
        write_model(&path, &config, stored);
        let folder = Folder::open(&path).unwrap();
        for params_dtype in [DType::F32, DType::BF16] {
            let options = LoadOptions { params_dtype, ..Default::default() };
            let model = folder.load(&options, &Device::cpu()).unwrap();
            for source in config.parameters() {
                let all = source.tensors.iter().flat_map(|tensor| folder.values(tensor).unwrap());
                let rounded: Vec<f32> = match params_dtype {
                    DType::F32 => all.collect(),
                    _ => all.map(|value| bf16::from_f32(value).to_f32()).collect(),
                };
                let name = format!("model.{}", source.parameter);
                let parameter = parameters(&model).into_iter().find(|parameter| **parameter.name() == *name);
                let found = parameter.unwrap().tensor().to_f32_vec().unwrap();
                assert!(found == rounded, "{stored} as {params_dtype}: {name}");
            }
        }
        // A file that is cut off while the folder is open.
        let file = path.join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
        let error = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap_err().to_string();
        assert!(error.contains("it became shorter while"), "{error}");
    }
}
