//! Adapters that peft has written: logits and sums as peft and transformers compute them, and 29 folders that are refused.

use crate::decoder::{close, floats, load, logits};
use crate::folders::{read, tensors};
use fp8_hf::{
    Adapter, Config, Dtype, Error, Folder, Monitor, QuantizeOptions, Scheme, quantize, save_adapter,
};
use fp8_nn::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn lora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/train/lora")
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The probe's ids.
fn probe(case: &Path) -> Tensor {
    let (dtype, shape, bytes) = &read(&case.join("expected.safetensors"))["probe_ids"];
    assert_eq!(dtype, "I64");
    let ids = bytes.as_chunks::<8>().0.iter().map(|&id| i64::from_le_bytes(id) as i32).collect();
    Tensor::from_vec::<i32>(ids, Shape::from_slice(shape).unwrap(), &Device::cpu()).unwrap()
}

#[test]
fn logits_are_those_of_peft() {
    for case in ["llama_patterns", "qwen2_qv_bf16"] {
        let case = lora().join(case);
        let run = json(&case.join("run.json"));
        let base = lora().join(run["base"].as_str().unwrap());
        let folder = Folder::open(&base).unwrap();
        let expected = read(&case.join("expected.safetensors"));
        let ids = probe(&case);
        let mut model = load(&base, false);
        let name = |what: &str| format!("{} {what}", case.display());
        close(&name("base"), &floats(&expected["logits.base"]), &logits(&model, &ids), 1e-5);
        for (kind, dtype) in [("adapter", DType::F32), ("adapter_bf16", DType::BF16)] {
            model = load(&base, false);
            let adapter = Adapter::open(&case.join(kind), &folder.config).unwrap();
            adapter.add_to(&mut model, &folder.config, dtype).unwrap();
            let scaling = run["scaling"].as_object().unwrap();
            assert_eq!(adapter.modules().count(), scaling.len());
            assert!(adapter.modules().all(|module| scaling.contains_key(module)));
            let values: usize = parameters(&model)
                .iter()
                .filter(|p| p.name().contains(".lora."))
                .map(|p| {
                    assert_eq!(p.dtype(), dtype);
                    p.shape().numel()
                })
                .sum();
            assert_eq!(values, adapter.num_parameters());
            let wanted = floats(&expected[&format!("logits.{kind}")]);
            close(&name(kind), &wanted, &logits(&model, &ids), 1e-5);
        }
        // Twice would be another model.
        let adapter = Adapter::open(&case.join("adapter"), &folder.config).unwrap();
        let error = adapter.add_to(&mut model, &folder.config, DType::F32).unwrap_err().to_string();
        assert!(
            error.contains(
                "the model has an adapter of `model.layers.0.self_attn.q_proj`: expected one without"
            ),
            "{error}"
        );
    }
}

#[test]
fn an_adapter_that_is_loaded_and_saved_is_the_same() {
    for (case, kind) in [("llama_patterns", "adapter"), ("qwen2_qv_bf16", "adapter_bf16")] {
        let from = lora().join(case).join(kind);
        let base = lora().join(json(&lora().join(case).join("run.json"))["base"].as_str().unwrap());
        let folder = Folder::open(&base).unwrap();
        let dtype = if kind == "adapter" { DType::F32 } else { DType::BF16 };
        let mut model = load(&base, false);
        let place = tempfile::tempdir().unwrap();
        let to = place.path().join("adapter");
        let error = save_adapter(&to, &model, &folder.config, "base").unwrap_err().to_string();
        assert!(error.contains("the model has no adapter"), "{error}");
        let adapter = Adapter::open(&from, &folder.config).unwrap();
        adapter.add_to(&mut model, &folder.config, dtype).unwrap();
        save_adapter(&to, &model, &folder.config, "base").unwrap();
        let file = "adapter_model.safetensors";
        assert!(read(&to.join(file)) == read(&from.join(file)), "{case}");
        let [found, expected] = [&to, &from].map(|folder| json(&folder.join("adapter_config.json")));
        for key in ["r", "lora_alpha", "peft_type", "task_type", "bias"] {
            assert_eq!(found[key], expected[key], "{case}: {key}");
        }
        let again = Adapter::open(&to, &folder.config).unwrap();
        let mut other = load(&base, false);
        again.add_to(&mut other, &folder.config, dtype).unwrap();
        let ids = probe(&lora().join(case));
        assert_eq!(logits(&other, &ids), logits(&model, &ids));
        let error = save_adapter(&to, &model, &folder.config, "base").unwrap_err().to_string();
        assert!(error.contains("exists"), "{error}");
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    for (case, kind, dtype) in [
        ("llama_patterns", "f32", None),
        ("qwen2_qv_bf16", "bf16", None),
        ("qwen2_qv_bf16", "bf16", Some(DType::BF16)),
        ("qwen2_qv_bf16", "f32", Some(DType::F32)),
    ] {
        let case = lora().join(case);
        let base = lora().join(json(&case.join("run.json"))["base"].as_str().unwrap());
        let folder = Folder::open(&base).unwrap();
        let adapter = Adapter::open(&case.join("adapter"), &folder.config).unwrap();
        let place = tempfile::tempdir().unwrap();
        let out = place.path().join("merged");
        adapter.merge(&folder, &out, dtype).unwrap();
        let written = Folder::open(&out).unwrap();
        let (found, before) = (tensors(&out), tensors(&base));
        let expected = read(&case.join("expected.safetensors"));
        let prefix = format!("merged.{kind}.");
        let mut merged = 0;
        for (name, before) in &before {
            let Some((dtype, shape, bytes)) = expected.get(&format!("{prefix}{name}")) else {
                assert!(found[name].0.eq_ignore_ascii_case(kind), "{name} is {:?}", found[name].0);
                assert!(written.values(name).unwrap() == folder.values(name).unwrap(), "{name} has changed");
                assert!(dtype.is_some() || found[name] == *before, "{name} has changed");
                continue;
            };
            merged += 1;
            let found = &found[name];
            assert_eq!((&found.0, &found.1), (dtype, shape), "{name}");
            if kind == "bf16" {
                let differ = found.2.chunks(2).zip(bytes.chunks(2)).filter(|(a, b)| a != b).count();
                assert!(differ * 1000 <= bytes.len() / 2, "{name}: {differ} bf16 values differ");
            } else {
                close(name, &floats(&(dtype.clone(), shape.clone(), bytes.clone())), &floats(found), 1e-6);
            }
        }
        assert_eq!(merged, adapter.modules().count(), "{}", case.display());
        let error = adapter.merge(&folder, &out, dtype).unwrap_err().to_string();
        assert!(error.contains("exists"), "{error}");
    }
}

/// The sums of an FP8 model are those of its dequantized weights, rounded once.
#[test]
fn an_fp8_model_is_merged_into_its_dequantized_weights() {
    let place = tempfile::tempdir().unwrap();
    for (case, base, scheme) in [
        ("llama_patterns", "base_llama", Scheme::Channel),
        ("llama_patterns", "base_llama", Scheme::Tensor),
        ("qwen2_qv_bf16", "base_qwen2_bf16", Scheme::Channel),
    ] {
        let original = Folder::open(&lora().join(base)).unwrap();
        let name = |what: &str| place.path().join(format!("{case} {scheme:?} {what}"));
        let options = QuantizeOptions { scheme, ..Default::default() };
        quantize(&original, &name("fp8"), &options, &Monitor::default()).unwrap();
        let fp8 = Folder::open(&name("fp8")).unwrap();
        let adapter = Adapter::open(&lora().join(case).join("adapter"), &fp8.config).unwrap();
        adapter.merge(&fp8, &name("merged"), None).unwrap();
        let merged = Folder::open(&name("merged")).unwrap();
        assert!(merged.config.quantization.is_none());
        assert_eq!(merged.weights.names().collect::<Vec<_>>(), original.weights.names().collect::<Vec<_>>());
        // The update alone, from a base of zeros.
        let zeros = original.config.tensors().into_iter().map(|spec| {
            let zeros = Tensor::zeros(spec.shape, DType::F32, &Device::cpu()).unwrap();
            (spec.name, zeros)
        });
        fp8_hf::save(&name("zeros"), &original.config, &zeros.collect()).unwrap();
        adapter.merge(&Folder::open(&name("zeros")).unwrap(), &name("update"), None).unwrap();
        let update = Folder::open(&name("update")).unwrap();
        for tensor in original.weights.names() {
            let dtype = original.weights.info(tensor).unwrap().dtype;
            assert_eq!(merged.weights.info(tensor).unwrap().dtype, dtype, "{tensor}");
            let [weight, update] = [&fp8, &update].map(|folder| folder.values(tensor).unwrap());
            let sum: Vec<f32> = weight.iter().zip(&update).map(|(weight, update)| weight + update).collect();
            let found = merged.values(tensor).unwrap();
            if dtype == Dtype::F32 {
                close(tensor, &sum, &found, 1e-6);
                continue;
            }
            let rounded = |x: &f32| bf16::from_f32(*x).to_f32();
            let differ = sum.iter().zip(&found).filter(|(sum, found)| rounded(sum) != **found).count();
            assert!(differ * 1000 <= found.len(), "{tensor}: {differ} of {} differ", found.len());
        }
    }
}

/// A value that the dtype does not hold is refused, with an adapter or without, and nothing is left.
#[test]
fn a_merged_weight_that_its_dtype_does_not_hold_is_refused() {
    let folder = Folder::open(&lora().join("base_llama")).unwrap();
    let adapter = Adapter::open(&lora().join("llama_patterns/adapter"), &folder.config).unwrap();
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("merged");
    for (tensor, what) in [("model.norm.weight", "value"), ("model.layers.0.self_attn.q_proj.weight", "sum")]
    {
        let shape = folder.weights.info(tensor).unwrap().shape.clone();
        let mut values = folder.values(tensor).unwrap();
        values[5] = 70_000.0;
        let shape = Shape::from_slice(&shape).unwrap();
        let values = Tensor::from_vec(values, shape, &Device::cpu()).unwrap();
        let large = place.path().join(what);
        folder.save(&large, &[(tensor.to_owned(), values)].into()).unwrap();
        let large = Folder::open(&large).unwrap();
        let error = adapter.merge(&large, &out, Some(DType::F16)).unwrap_err().to_string();
        let column = if what == "sum" { "row 0, column 5" } else { "column 5" };
        assert!(error.contains(&format!("`{tensor}` would be inf at ")), "{error}");
        assert!(error.contains(&format!("{column}: f16 does not hold the {what}")), "{error}");
        assert!(!out.exists());
    }
    let error = adapter.merge(&folder, &out, Some(DType::I32)).unwrap_err().to_string();
    assert!(error.contains("dtype") && error.contains("expected f32, bf16 or f16"), "{error}");
    assert!(!out.exists());
}

#[test]
fn folders_that_are_no_adapter_of_linears_are_refused_by_name() {
    let folder = lora().join("refuse");
    let cases = json(&folder.join("cases.json"));
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 29);
    for case in cases {
        let base = lora().join(case["base"].as_str().unwrap());
        let config = Config::read(&base.join("config.json")).unwrap();
        let name = case["folder"].as_str().unwrap();
        let error = Adapter::open(&folder.join(name), &config).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::File { .. } | Error::NotFound { .. }), "{name}");
        let error = error.to_string();
        for part in case["names"].as_array().unwrap() {
            assert!(error.contains(part.as_str().unwrap()), "{name}: {error}");
        }
        assert!(!error.contains('\n'), "{name}: {error}");
    }
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let [llama, qwen3] = ["base_llama", "base_qwen3"].map(|name| Folder::open(&lora().join(name)).unwrap());
    let adapter = Adapter::open(&lora().join("llama_patterns/adapter"), &llama.config).unwrap();
    assert!(Adapter::open(&lora().join("llama_patterns/adapter"), &qwen3.config).is_err());
    let mut other = load(&lora().join("base_qwen3"), false);
    let error = adapter.add_to(&mut other, &qwen3.config, DType::F32).unwrap_err().to_string();
    assert!(error.contains("expected"), "{error}");
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("merged");
    assert!(adapter.merge(&qwen3, &out, None).is_err() && !out.exists());
    assert_eq!(adapter.base(), Some("base_llama"));
}
