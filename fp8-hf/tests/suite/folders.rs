//! Folders that tests read, change and write.

use fp8_hf::{Config, Folder, Monitor, QuantizeOptions, Scheme};
use fp8_nn::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder with the models of this repository.
pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fp8-hf/tests/golden/hf")
}

/// The folder with more models, if there is one.
pub(crate) fn full() -> Option<PathBuf> {
    std::env::var_os("FP8_TEST_GOLDEN_HF").map(PathBuf::from)
}

/// Copies the files of a folder.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::write(to.join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
        }
    }
}

/// Changes the fields of a JSON file; `null` removes one.
pub(crate) fn change(path: &Path, changes: &Value) {
    let mut value: Map<String, Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for (key, change) in changes.as_object().unwrap() {
        match change {
            Value::Null => drop(value.remove(key)),
            change => drop(value.insert(key.clone(), change.clone())),
        }
    }
    fs::write(path, Value::from(value).to_string()).unwrap();
}

/// A tensor of a safetensors file: dtype, shape, bytes.
pub(crate) type Raw = (String, Vec<usize>, Vec<u8>);

/// Reads a safetensors file with code of its own.
pub(crate) fn read(path: &Path) -> BTreeMap<String, Raw> {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let data = &bytes[8 + len..];
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, info)| {
        let at = |index: usize| info["data_offsets"][index].as_u64().unwrap() as usize;
        let shape = info["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        (name, (info["dtype"].as_str().unwrap().to_owned(), shape, data[at(0)..at(1)].to_vec()))
    });
    tensors.collect()
}

/// Writes a safetensors file with code of its own.
pub(crate) fn write(path: &Path, tensors: &BTreeMap<String, Raw>) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    write_raw(path, &Value::from(header).to_string(), &data);
}

/// Writes a file with this header, valid or not.
pub(crate) fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let len = (header.len() as u64).to_le_bytes();
    fs::write(path, [&len[..], header.as_bytes(), data].concat()).unwrap();
}

/// All tensors of a folder, of one file or several.
pub(crate) fn tensors(folder: &Path) -> BTreeMap<String, Raw> {
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            tensors.append(&mut read(&path));
        }
    }
    tensors
}

/// The widths of a model that tests make.
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) head_dim: usize,
}

/// A Llama with one head and a vocabulary of 3.
pub(crate) fn llama(sizes: &Sizes) -> Config {
    let text = json!({
        "model_type": "llama", "vocab_size": 3, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers, "num_attention_heads": 1, "head_dim": sizes.head_dim,
        "tie_word_embeddings": true,
    });
    Config::from_json(&text.to_string()).unwrap()
}

/// Writes a model with weights that depend on their place.
pub(crate) fn write_model(out: &Path, config: &Config, dtype: DType) {
    let tensor = |spec: &fp8_hf::TensorSpec| {
        let count: usize = spec.shape.iter().product();
        let value = |i: usize| ((i * 7919 + spec.name.len() * 31) % 1009) as f32 / 504.5 - 1.0;
        let values = (0..count).map(value);
        let device = Device::cpu();
        let tensor = match dtype {
            DType::F32 => Tensor::from_vec(values.collect::<Vec<f32>>(), spec.shape, &device),
            DType::F16 => {
                Tensor::from_vec(values.map(f16::from_f32).collect::<Vec<_>>(), spec.shape, &device)
            }
            _ => Tensor::from_vec(values.map(bf16::from_f32).collect::<Vec<_>>(), spec.shape, &device),
        };
        (spec.name.clone(), tensor.unwrap())
    };
    fp8_hf::save(out, config, &config.tensors().iter().map(tensor).collect()).unwrap();
}

/// Quantizes a folder, ragged blocks included.
pub(crate) fn quantize(from: &Path, out: &Path, scheme: Scheme) {
    let folder = Folder::open(from).unwrap();
    let mut options = QuantizeOptions { scheme, allow_ragged: true, threads: Some(3), ..Default::default() };
    if scheme == Scheme::Nvfp4 {
        let linears = folder.config.tensors().into_iter().filter(|spec| spec.kind.is_linear());
        let module = |spec: fp8_hf::TensorSpec| spec.name.strip_suffix(".weight").unwrap().to_owned();
        options.input_scales = linears.map(|spec| (module(spec), 1.0)).collect();
    }
    fp8_hf::quantize(&folder, out, &options, &Monitor::default()).unwrap();
}

/// Splits a model into files, with an index.
pub(crate) fn shard(folder: &Path, files: usize) {
    let all = read(&folder.join("model.safetensors"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let mut parts = vec![BTreeMap::new(); files];
    let mut map = serde_json::Map::new();
    for (index, (name, tensor)) in all.into_iter().enumerate() {
        let file = format!("model-{:05}-of-{files:05}.safetensors", index % files + 1);
        map.insert(name.clone(), file.into());
        parts[index % files].insert(name, tensor);
    }
    for (index, part) in parts.iter().enumerate() {
        write(&folder.join(format!("model-{:05}-of-{files:05}.safetensors", index + 1)), part);
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
