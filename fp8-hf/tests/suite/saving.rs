//! Folders that are written: what is not changed keeps its bytes.

use crate::folders::{copy, golden, quantize, shard, tensors, write};
use fp8_hf::{Folder, Scheme};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_folder_that_is_saved_again_keeps_its_bytes() {
    for (model, files) in [("llama_bf16", 1), ("llama_mha", 1), ("llama_gqa_tied", 3), ("fp8", 2)] {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        match model {
            "fp8" => quantize(&golden().join("llama_bf16"), &from, Scheme::Block128),
            model => copy(&golden().join(model), &from),
        }
        fs::write(from.join("chat_template.jinja"), "{{ messages }}").unwrap();
        fs::write(from.join("optimizer.bin"), "not carried").unwrap();
        fs::create_dir(from.join("additional_chat_templates")).unwrap();
        fs::write(from.join("additional_chat_templates/tool.jinja"), "{{ tools }}").unwrap();
        if files > 1 {
            shard(&from, files);
        }
        let folder = Folder::open(&from).unwrap();
        assert_eq!(folder.weights.num_files(), files);
        folder.save(&to, &BTreeMap::new()).unwrap();
        assert_eq!(tensors(&to), tensors(&from), "{model}");
        let mut carried = vec![
            "config.json",
            "generation_config.json",
            "chat_template.jinja",
            "additional_chat_templates/tool.jinja",
        ];
        if model == "llama_bf16" {
            carried.extend(["tokenizer.json", "tokenizer_config.json"]);
        }
        for name in carried {
            assert_eq!(text(&to.join(name)), text(&from.join(name)), "{model}: {name}");
        }
        assert!(!to.join("optimizer.bin").exists());
        assert_eq!(Folder::open(&to).unwrap().weights.num_files(), files);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "something was left");
    }
}

#[test]
fn weights_in_files_of_any_name_are_written_once() {
    let place = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| place.path().join(name));
    copy(&golden().join("llama_bf16"), &from);
    shard(&from, 1);
    fs::rename(from.join("model-00001-of-00001.safetensors"), from.join("weights.st")).unwrap();
    let index = from.join("model.safetensors.index.json");
    fs::write(&index, text(&index).replace("model-00001-of-00001.safetensors", "weights.st")).unwrap();
    quantize(&from, &to, Scheme::Channel);
    let found = Folder::open(&to).unwrap();
    assert!(found.is_quantized("model.layers.0.mlp.up_proj.weight"));
}

#[test]
fn folders_that_contradict_themselves_are_not_written() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let (norm, table, head) = ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight");
    let ids = Tensor::zeros([32], DType::I32, &Device::cpu()).unwrap();
    let folder = Folder::open(&golden().join("llama_gqa_tied")).unwrap();
    let error = folder.save(&out, &[(norm.to_owned(), ids.clone())].into()).unwrap_err().to_string();
    assert!(error.ends_with(&format!("`{norm}` is i32: expected f32, bf16 or f16")), "{error}");

    let values = |spec: fp8_hf::TensorSpec| {
        (spec.name, Tensor::zeros(spec.shape, DType::F32, &Device::cpu()).unwrap())
    };
    let mut all: BTreeMap<String, Tensor> = folder.config.tensors().into_iter().map(values).collect();
    all.insert(norm.into(), ids);
    let error = fp8_hf::save(&out, &folder.config, &all).unwrap_err().to_string();
    assert!(error.ends_with(&format!("`{norm}` is i32: expected f32, bf16 or f16")), "{error}");

    // Values under a configuration that says FP8 and another dtype.
    let fp8 = place.path().join("fp8");
    quantize(&golden().join("llama_bf16"), &fp8, Scheme::Tensor);
    let fp8 = Folder::open(&fp8).unwrap();
    fp8_hf::save(&out, &fp8.config, &fp8.config.tensors().into_iter().map(values).collect()).unwrap();
    let written = Folder::open(&out).unwrap().config;
    assert!(written.quantization.is_none() && written.json().contains("\"float32\""), "{}", written.json());

    // Both spellings of the dtype, of which readers prefer one or the other.
    let text = folder.config.json().replacen('{', r#"{"dtype": "float16", "torch_dtype": "bfloat16","#, 1);
    let text = text
        .replace("\"dtype\": \"float32\"", "\"own\": 1")
        .replace("\"torch_dtype\": \"float32\"", "\"own\": 1");
    let both = fp8_hf::Config::from_json(&text).unwrap();
    let named = place.path().join("named");
    fp8_hf::save(&named, &both, &both.tensors().into_iter().map(values).collect()).unwrap();
    let json: serde_json::Value = serde_json::from_str(Folder::open(&named).unwrap().config.json()).unwrap();
    assert!(json["dtype"] == "float32" && json["torch_dtype"] == "float32", "{json}");

    // The embedding alone, where the files have it twice.
    let (tied, twice) = (place.path().join("tied"), place.path().join("twice"));
    copy(&golden().join("llama_gqa_tied"), &tied);
    let mut raw = tensors(&tied);
    raw.insert(head.into(), raw[table].clone());
    write(&tied.join("model.safetensors"), &raw);
    let folder = Folder::open(&tied).unwrap();
    let new = Tensor::zeros([96, 32], DType::F32, &Device::cpu()).unwrap();
    let error = folder.save(&twice, &[(table.to_owned(), new.clone())].into()).unwrap_err().to_string();
    assert!(
        error.ends_with("are one matrix (tie_word_embeddings): replace both, by equal values, or none"),
        "{error}"
    );
    let ones = Tensor::full(1.0, [96, 32], DType::F32, &Device::cpu()).unwrap();
    let both = [(table.to_owned(), new.clone()), (head.to_owned(), ones)];
    assert_eq!(folder.save(&twice, &both.into()).unwrap_err().to_string(), error);
    folder.save(&twice, &[(table.to_owned(), new.clone()), (head.to_owned(), new)].into()).unwrap();
}

#[test]
fn replaced_tensors_are_new_and_others_are_not() {
    let place = tempfile::tempdir().unwrap();
    let from = golden().join("llama_gqa_tied");
    let folder = Folder::open(&from).unwrap();
    let norm =
        Tensor::from_vec((0..32).map(|i| bf16::from_f32(i as f32)).collect(), [32], &Device::cpu()).unwrap();
    let to = place.path().join("to");
    folder.save(&to, &[("model.norm.weight".to_owned(), norm)].into()).unwrap();
    let (mut before, mut after) = (tensors(&from), tensors(&to));
    before.remove("model.norm.weight");
    let written = after.remove("model.norm.weight").unwrap();
    assert_eq!((written.0.as_str(), written.1), ("BF16", vec![32]));
    assert_eq!(Folder::open(&to).unwrap().values("model.norm.weight").unwrap()[31], 31.0);
    assert_eq!(before, after);
    for (name, shape, problem) in [
        ("model.norm.weight", [16, 2], "`model.norm.weight` has shape [16, 2]: expected [32]"),
        ("model.nrom.weight", [16, 2], "there is no tensor `model.nrom.weight`"),
    ] {
        let tensor = Tensor::zeros(shape, DType::F32, &Device::cpu()).unwrap();
        let error =
            folder.save(&place.path().join("other"), &[(name.to_owned(), tensor)].into()).unwrap_err();
        assert!(error.to_string().ends_with(problem), "{error}");
    }
    let fp8 = Folder::open(&golden().join("export/llama_gqa_tied-deepseek_block")).unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    let tensor = Tensor::zeros([32, 32], DType::F32, &Device::cpu()).unwrap();
    let error =
        fp8.save(&place.path().join("other"), &[(name.to_owned(), tensor)].into()).unwrap_err().to_string();
    assert!(error.ends_with("is FP8: load the values, and quantize the model anew"), "{error}");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
}

#[test]
fn a_new_folder_needs_every_tensor_and_no_other() {
    let place = tempfile::tempdir().unwrap();
    let config = Folder::open(&golden().join("llama_gqa_tied")).unwrap().config;
    let zeros = |spec: fp8_hf::TensorSpec| {
        (spec.name, Tensor::zeros(spec.shape, DType::F32, &Device::cpu()).unwrap())
    };
    let all: BTreeMap<String, Tensor> = config.tensors().into_iter().map(zeros).collect();
    let save = |tensors: &BTreeMap<String, Tensor>| {
        fp8_hf::save(&place.path().join("out"), &config, tensors).unwrap_err().to_string()
    };
    let mut some = all.clone();
    let norm = some.remove("model.norm.weight").unwrap();
    assert!(save(&some).ends_with("tensor `model.norm.weight` is missing"));
    let mut more = all.clone();
    more.insert("lm_head.weight".into(), norm.clone());
    assert!(save(&more).ends_with("tensor `lm_head.weight` has no place in a llama model"));
    let mut other = all.clone();
    other.insert("model.embed_tokens.weight".into(), norm);
    assert!(save(&other).ends_with("`model.embed_tokens.weight` has shape [32]: expected [96, 32]"));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    fp8_hf::save(&place.path().join("out"), &config, &all).unwrap();
    let error = fp8_hf::save(&place.path().join("out"), &config, &all).unwrap_err().to_string();
    assert!(error.ends_with("it exists already: name a new folder, or remove this one"), "{error}");
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_files_without_write_permission_are_carried() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let place = tempfile::tempdir().unwrap();
    let (blobs, links) = (place.path().join("blobs"), place.path().join("links"));
    copy(&golden().join("llama_bf16"), &blobs);
    fs::create_dir(&links).unwrap();
    for entry in fs::read_dir(&blobs).unwrap() {
        let path = entry.unwrap().path();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
        symlink(&path, links.join(path.file_name().unwrap())).unwrap();
    }
    quantize(&links, &place.path().join("out"), Scheme::Channel);
    let tokenizer = place.path().join("out/tokenizer.json");
    assert_eq!(text(&tokenizer), text(&blobs.join("tokenizer.json")));
    assert!(!tokenizer.symlink_metadata().unwrap().is_symlink());
}
