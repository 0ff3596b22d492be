//! Files that are damaged, inconsistent or hostile: an error that names what is wrong, before any tensor is read.

use crate::folders::{Raw, change, copy, golden, read, write, write_raw};
use fp8_hf::{Folder, LoadOptions, Monitor, Weights, inspect, inspect_weights};
use fp8_nn::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Returns the error of `open` for a folder, with `DIR` in place of its path.
fn refused(folder: &Path) -> String {
    let error = Folder::open(folder).unwrap_err().to_string();
    error.replace(folder.to_str().unwrap(), "DIR")
}

pub(crate) fn damaged(damage: impl Fn(&Path)) -> String {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_gqa_tied"), place.path());
    damage(place.path());
    refused(place.path())
}

fn in_tensors(change: impl Fn(&mut BTreeMap<String, Raw>)) -> String {
    damaged(|folder| {
        let file = folder.join("model.safetensors");
        let mut tensors = read(&file);
        change(&mut tensors);
        write(&file, &tensors);
    })
}

#[test]
fn headers_that_lie_are_refused() {
    let file = |header: &str, bytes: usize| {
        damaged(|folder| write_raw(&folder.join("model.safetensors"), header, &vec![0; bytes]))
    };
    let f32s = |name: &str, shape: &str, begin: u64, end: u64| {
        format!("\"{name}\": {{\"dtype\": \"F32\", \"shape\": {shape}, \"data_offsets\": [{begin}, {end}]}}")
    };
    let unreadable = "DIR/model.safetensors: not a readable safetensors file: ";
    for (header, bytes, what) in [
        (format!("{{{}, {}}}", f32s("a", "[1]", 0, 4), f32s("b", "[1]", 2, 6)), 6, "overlap"),
        (format!("{{{}, {}}}", f32s("a", "[1]", 0, 4), f32s("b", "[1]", 0, 4)), 4, "the same place"),
        (format!("{{{}, {}}}", f32s("a", "[1]", 0, 4), f32s("b", "[1]", 8, 12)), 12, "a gap"),
        (format!("{{{}}}", f32s("a", "[1]", 0, 4)), 3, "behind the end"),
        (format!("{{{}}}", f32s("a", "[1]", 0, 4)), 5, "bytes that belong to no tensor"),
        (format!("{{{}}}", f32s("a", "[2]", 0, 4)), 4, "a size that is not that of the shape"),
        (format!("{{{}}}", f32s("a", "[4294967296, 4294967296, 4294967296]", 0, 4)), 4, "an overflow"),
        (format!("{{{}}}", f32s("a", "[1]", 4, 0)), 4, "an end in front of the beginning"),
        (
            format!("{{{}, {}}}", f32s("a", "[1]", 0, 4), f32s("a", "[1]", 4, 8)),
            8,
            "a name that occurs twice",
        ),
        (
            "{\"a\": {\"dtype\": \"F9\", \"shape\": [1], \"data_offsets\": [0, 4]}}".into(),
            4,
            "an unknown dtype",
        ),
        (
            "{\"a\": {\"dtype\": \"F32\", \"shape\": [-1], \"data_offsets\": [0, 4]}}".into(),
            4,
            "a negative shape",
        ),
        ("{\"a\": 1}".into(), 4, "no tensor"),
        ("{".into(), 4, "no JSON"),
    ] {
        let error = file(&header, bytes);
        assert!(error.starts_with(unreadable), "{what}: {error}");
    }
    for (bytes, text) in [
        (vec![], "0 bytes: a header has at least 8"),
        (vec![1; 7], "7 bytes: a header has at least 8"),
        (vec![0xFF; 64], "a header of 18446744073709551615 bytes: at most 56 fit"),
        ([&1000u64.to_le_bytes()[..], b"{}"].concat(), "a header of 1000 bytes: at most 2 fit"),
    ] {
        let error = damaged(|folder| fs::write(folder.join("model.safetensors"), &bytes).unwrap());
        assert_eq!(error, format!("{unreadable}{text}"));
    }
    let truncated = damaged(|folder| {
        let file = folder.join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    });
    assert!(
        truncated.starts_with(unreadable)
            && truncated.ends_with(
                "follow the header: the file is incomplete or damaged, so copy or download it again"
            ),
        "{truncated}"
    );
    for (content, text) in [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
            "it is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder",
        ),
        (
            "\n<!DOCTYPE html><html><body>Access denied</body></html>",
            "it is an HTML or XML page, as a server sends when it refuses a download: download the file again",
        ),
    ] {
        let error = damaged(|folder| fs::write(folder.join("model.safetensors"), content).unwrap());
        assert_eq!(error, format!("{unreadable}{text}"));
    }
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_named() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let error = in_tensors(|tensors| drop(tensors.remove(name)));
    assert_eq!(error, format!("DIR: tensor `{name}` is missing: config.json describes a model with it"));
    let error = in_tensors(|tensors| tensors.get_mut(name).unwrap().1 = vec![32, 64]);
    assert_eq!(
        error,
        format!(
            "DIR: `{name}` has shape [32, 64]: config.json asks for [64, 32], so it belongs to another model"
        )
    );
    let error = in_tensors(|tensors| {
        let tensor = tensors[name].clone();
        tensors.insert("model.layers.2.mlp.up_proj.weight".into(), tensor);
    });
    assert_eq!(
        error,
        "DIR: tensor `model.layers.2.mlp.up_proj.weight` has no place in a llama model with this config.json: remove it, or use \
         the config.json that belongs to these files"
    );
    let error = in_tensors(|tensors| tensors.get_mut(name).unwrap().0 = "I32".into());
    assert_eq!(error, format!("DIR: `{name}` is I32: expected F32, BF16, F16 or FP8"));
    let of_another = damaged(|folder| change(&folder.join("config.json"), &json!({"hidden_size": 64})));
    assert_eq!(
        of_another,
        "DIR: `model.embed_tokens.weight` has shape [96, 32]: config.json asks for [96, 64], so it belongs to another model"
    );
    let untied =
        damaged(|folder| change(&folder.join("config.json"), &json!({"tie_word_embeddings": false})));
    assert_eq!(
        untied,
        "DIR: tensor `lm_head.weight` is missing: config.json describes a model with it; set tie_word_embeddings to true if \
         the embedding serves"
    );
    let bias = "model.layers.0.self_attn.q_proj.bias";
    let error =
        in_tensors(|tensors| drop(tensors.insert(bias.into(), ("F32".into(), vec![32], vec![0; 128]))));
    assert!(
        error.ends_with("with this config.json: a llama model with this bias is not supported"),
        "{error}"
    );
    let gpt2 = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(golden().join("configs/gpt2/config.json")).unwrap();
    let config = fp8_hf::Config::from_json(&text).unwrap();
    let folder = gpt2.path().join("model");
    crate::folders::write_model(&folder, &config, DType::F32);
    let layers = config.num_hidden_layers;
    change(&folder.join("config.json"), &json!({"n_layer": layers - 1}));
    let error = refused(&folder);
    let name = format!("transformer.h.{}.attn.c_attn.bias", layers - 1);
    assert!(
        error.contains(&name) && error.ends_with("the config.json that belongs to these files"),
        "{error}"
    );
}

#[test]
fn the_head_of_a_tied_model_must_be_its_embedding() {
    let (head, table) = ("lm_head.weight", "model.embed_tokens.weight");
    let untie = "set tie_word_embeddings to false, or remove the tensor";
    let error = in_tensors(|all| drop(all.insert(head.into(), ("F32".into(), vec![2, 2], vec![0; 16]))));
    assert_eq!(
        error,
        format!("DIR: `{head}` is F32 [2, 2], but config.json ties it to the embedding: {untie}")
    );

    let place = tempfile::tempdir().unwrap();
    let [from, out] = ["from", "out"].map(|name| place.path().join(name));
    copy(&golden().join("llama_gqa_tied"), &from);
    let untrained = crate::decoder::load(&from, false);
    let mut all = read(&from.join("model.safetensors"));
    let mut own = all[table].clone();
    own.2[7] ^= 1;
    all.insert(head.into(), own);
    write(&from.join("model.safetensors"), &all);
    let folder = Folder::open(&from).unwrap();
    let expected = format!("`{head}` differs from the embedding, but config.json ties them: {untie}");
    for error in [
        folder.load(&LoadOptions::default(), &Device::cpu()).unwrap_err(),
        folder.save_model(&out, &untrained, None).unwrap_err(),
        fp8_hf::quantize(&folder, &out, &Default::default(), &Monitor::default()).unwrap_err(),
    ] {
        assert!(error.to_string().ends_with(&expected), "{error}");
    }
    change(&from.join("config.json"), &json!({"tie_word_embeddings": false}));
    let model = crate::decoder::load(&from, false);
    assert!(model.head().is_some());
}

#[test]
fn scales_of_a_cache_in_fp8_are_not_needed() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("export/llama_gqa_tied-ct_tensor_static"), place.path());
    let file = place.path().join("model.safetensors");
    let mut all = read(&file);
    for name in ["k_scale", "v_scale", "k_proj.output_scale"] {
        let scale = ("F32".into(), vec![1], 0.5f32.to_le_bytes().to_vec());
        all.insert(format!("model.layers.0.self_attn.{name}"), scale);
    }
    write(&file, &all);
    let folder = Folder::open(place.path()).unwrap();
    let out = place.path().join("out");
    folder.save(&out, &BTreeMap::new()).unwrap();
    assert!(read(&out.join("model.safetensors")) == all);
    // Without FP8 weights they belong to nothing.
    let mut model =
        folder.load(&LoadOptions { trainable: true, ..Default::default() }, &Device::cpu()).unwrap();
    for parameter in parameters_mut(&mut model).into_iter().filter(|p| p.shape().len() == 2) {
        let doubled = ops::scale(parameter.tensor(), 2.0).unwrap();
        parameter.set(doubled).unwrap();
    }
    folder.save_model(&place.path().join("tuned"), &model, None).unwrap();
    let tuned = Folder::open(&place.path().join("tuned")).unwrap();
    assert!(
        tuned.config.quantization.is_none() && !tuned.weights.names().any(|name| name.contains("_scale"))
    );
    // Nor do they hide what has no place.
    all.insert("model.layers.0.mlp.k_scale".into(), ("F32".into(), vec![1], vec![0; 4]));
    write(&file, &all);
    assert!(refused(place.path()).contains("`model.layers.0.mlp.k_scale` has no place"));
}

#[test]
fn very_old_gpt2_files_lack_a_prefix_and_have_masks() {
    use fp8_hf::Config;
    use fp8_nn::prelude::*;
    let place = tempfile::tempdir().unwrap();
    let text = r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 4}"#;
    let config = Config::from_json(text).unwrap();
    let zeros = |spec: fp8_hf::TensorSpec| {
        (spec.name, Tensor::zeros(spec.shape, DType::F32, &Device::cpu()).unwrap())
    };
    let folder = place.path().join("model");
    fp8_hf::save(&folder, &config, &config.tensors().into_iter().map(zeros).collect()).unwrap();
    let file = folder.join("model.safetensors");
    let mut old: BTreeMap<String, Raw> = read(&file)
        .into_iter()
        .map(|(name, tensor)| (name.trim_start_matches("transformer.").to_owned(), tensor))
        .collect();
    old.insert("h.0.attn.bias".into(), ("F32".into(), vec![1, 1, 4, 4], vec![0; 64]));
    write(&file, &old);
    let folder = Folder::open(&folder).unwrap();
    assert_eq!(folder.stored("transformer.wte.weight"), "wte.weight");
}

#[test]
fn scales_that_do_not_fit_are_named() {
    let fp8 = |export: &str, change: &dyn Fn(&mut BTreeMap<String, Raw>)| {
        let place = tempfile::tempdir().unwrap();
        copy(&golden().join("export").join(export), place.path());
        let file = place.path().join("model.safetensors");
        let mut tensors = read(&file);
        change(&mut tensors);
        write(&file, &tensors);
        match Folder::open(place.path()) {
            Ok(folder) => folder.values("model.layers.0.mlp.up_proj.weight").unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
        .replace(place.path().to_str().unwrap(), "DIR")
    };
    let (tensor, block) = ("llama_gqa_tied-ct_tensor_static", "llama_gqa_tied-deepseek_block");
    let module = "model.layers.0.mlp.up_proj";
    let error = fp8(tensor, &|all| drop(all.remove(&format!("{module}.weight_scale"))));
    assert_eq!(
        error,
        format!("DIR: `{module}.weight` is FP8 without a scale: `{module}.weight_scale` is missing")
    );
    let error = fp8(tensor, &|all| all.get_mut(&format!("{module}.weight")).unwrap().0 = "F8_E8M0".into());
    assert_eq!(
        error,
        format!("DIR: `{module}.weight` is F8_E8M0, which is a dtype of scales: expected F8_E4M3")
    );
    let error = fp8(tensor, &|all| {
        let scale = all[&format!("{module}.weight_scale")].clone();
        all.insert(format!("{module}.weight_scale_inv"), scale);
    });
    assert!(error.contains("has two scales"), "{error}");
    let error = fp8(tensor, &|all| {
        let scale = all.remove(&format!("{module}.weight_scale")).unwrap();
        all.insert(format!("{module}.weight_scale_inv"), scale);
    });
    assert_eq!(error, format!("DIR: `{module}.weight_scale_inv` has no place in this layout"));
    let error = fp8(block, &|all| {
        all.insert(format!("{module}.weight_scale_inv"), ("F32".into(), vec![2, 1], vec![0; 8]));
    });
    assert_eq!(
        error,
        format!("DIR: `{module}.weight_scale_inv` has shape [2, 1]: `quantization_config` asks for [1, 1]")
    );
    let error =
        fp8(block, &|all| all.get_mut(&format!("{module}.weight_scale_inv")).unwrap().0 = "I32".into());
    assert_eq!(error, format!("DIR: `{module}.weight_scale_inv` is I32: expected F32, BF16, F16 or F8_E8M0"));
    for value in [0f32, -1.0, f32::NAN, f32::INFINITY] {
        let error = fp8(block, &|all| {
            all.get_mut(&format!("{module}.weight_scale_inv")).unwrap().2 = value.to_le_bytes().to_vec();
        });
        assert_eq!(
            error,
            format!(
                "DIR: `{module}.weight_scale_inv` is {value} at element 0: expected a finite, positive scale"
            )
        );
    }
    let error = fp8(tensor, &|all| all.get_mut(&format!("{module}.input_scale")).unwrap().0 = "I32".into());
    assert!(error.contains("is no number: expected one scale"), "{error}");
    let error = fp8(tensor, &|all| drop(all.remove(&format!("{module}.input_scale"))));
    assert_eq!(
        error,
        format!(
            "DIR: `{module}.input_scale` (or `{module}.activation_scale`) is missing: `quantization_config` says that inputs \
             have static scales, so every FP8 weight needs one"
        )
    );
    let error = in_tensors(|all| {
        drop(all.insert(format!("{module}.weight_scale"), ("F32".into(), vec![1], vec![0; 4])))
    });
    assert_eq!(
        error,
        format!("DIR: `{module}.weight_scale` is the scale of `{module}.weight`, which is F32")
    );
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("export").join(block), place.path());
    change(&place.path().join("config.json"), &json!({"quantization_config": null}));
    let error = refused(place.path());
    assert!(error.ends_with("is F8_E4M3, but config.json has no `quantization_config`"), "{error}");
}

#[test]
fn ranges_outside_of_a_tensor_are_refused() {
    let folder = golden().join("llama_gqa_tied");
    let weights = Weights::open(&folder).unwrap();
    let name = "model.norm.weight";
    let mut bytes = [0; 8];
    for offset in [121, 128, u64::MAX] {
        let error = weights.read(name, offset, &mut bytes).unwrap_err().to_string();
        assert!(
            error.ends_with(&format!("`{name}` has 128 bytes: 8 from {offset} on are not there")),
            "{error}"
        );
    }
    assert!(
        weights
            .read("nothing", 0, &mut bytes)
            .unwrap_err()
            .to_string()
            .ends_with("there is no tensor `nothing`")
    );
    let folder = Folder::open(&folder).unwrap();
    let error = folder.rows(name, 30..33).unwrap_err().to_string();
    assert!(error.ends_with(&format!("`{name}` has 32 rows: 30 to 33 are not there")), "{error}");
    let error = folder.codes(name, 0..1).unwrap_err().to_string();
    assert!(error.ends_with(&format!("`{name}` is F32, not FP8")), "{error}");
}

#[test]
fn empty_tensors_with_huge_extents_are_no_panic() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("x.safetensors");
    let huge = 1u64 << 63;
    let header = format!(
        "{{\"a\": {{\"dtype\": \"F32\", \"shape\": [0, {huge}, {huge}], \"data_offsets\": [0, 0]}}}}"
    );
    write_raw(&file, &header, &[]);
    let found = inspect_weights(&Weights::open(&file).unwrap(), &Monitor::default()).unwrap();
    assert_eq!((found.tensors.len(), found.bytes, found.tensors[0].amax), (1, 0, Some(0.0)));
}

#[test]
fn damaged_bytes_give_an_error_or_a_model_and_never_a_panic() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("export/llama_gqa_tied-ct_tensor_static"), place.path());
    let files = ["model.safetensors", "config.json"].map(|name| place.path().join(name));
    let whole = files.clone().map(|file| fs::read(file).unwrap());
    let header = 8 + u64::from_le_bytes(whole[0][..8].try_into().unwrap()) as usize;
    let mut rng = ChaCha8Rng::seed_from_u64(22);
    let (mut refused, mut opened) = (0, 0);
    for round in 0..1500 {
        let at = round % 2;
        let mut bytes = whole[at].clone();
        let end = if at == 0 { header } else { bytes.len() };
        for _ in 0..1 + rng.next_u32() % 3 {
            let place = rng.next_u64() as usize % end;
            bytes[place] = match rng.next_u32() % 3 {
                0 => rng.next_u32() as u8,
                // What JSON is made of, so that more files can be parsed.
                1 => b"0123456789{}[],:\" \\"[rng.next_u32() as usize % 19],
                _ => bytes[rng.next_u64() as usize % end],
            };
        }
        fs::write(&files[at], &bytes).unwrap();
        match Folder::open(place.path()) {
            Ok(folder) => {
                opened += 1;
                let _ = inspect(&folder, None, &Monitor::default());
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
        }
        fs::write(&files[at], &whole[at]).unwrap();
    }
    assert!(refused > 500 && opened > 50, "{refused} refused, {opened} opened");
}
