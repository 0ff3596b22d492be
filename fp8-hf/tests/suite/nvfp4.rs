//! Folders in NVFP4: bytes and values against those of compressed-tensors, models that keep the codes, and files that are refused.

use crate::folders::{Raw, Sizes, change, copy, llama, quantize, read, tensors, write, write_model};
use fp8_hf::{
    Dtype, Folder, Fp8Weights, InputScales, LoadOptions, Monitor, QuantMethod, QuantizeOptions, Scheme,
};
use fp8_hf::{WeightScales, inspect};
use fp8_nn::fp8_kernels::fp8_format::E4M3;
use fp8_nn::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The layer whose weight is the one of the reference data.
const LAYER: &str = "model.layers.0.mlp.down_proj";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nvfp4")
}

fn sizes() -> Sizes {
    Sizes { hidden: 48, intermediate: 64, layers: 1, head_dim: 16 }
}

fn f32s(raw: &Raw) -> Vec<f32> {
    raw.2.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Writes a model of f32 with the weight of the reference data.
fn original(out: &Path) -> PathBuf {
    let folder = out.join("model");
    write_model(&folder, &llama(&sizes()), DType::F32);
    let mut all = tensors(&folder);
    let weight = read(&golden().join("expected.safetensors")).remove("weight").unwrap();
    all.insert(format!("{LAYER}.weight"), weight);
    write(&folder.join("model.safetensors"), &all);
    folder
}

fn a16(from: &Path, out: &Path) {
    quantize(from, out, Scheme::Nvfp4a16);
}

#[test]
fn the_reference_weight_has_the_bytes_and_values_of_the_peers() {
    let place = tempfile::tempdir().unwrap();
    let ours = place.path().join("ours");
    quantize(&original(place.path()), &ours, Scheme::Nvfp4);
    let written = tensors(&ours);
    let stored = read(&golden().join("ours/model.safetensors"));
    for end in ["weight_packed", "weight_scale", "weight_global_scale"] {
        assert_eq!(written[&format!("{LAYER}.{end}")], stored[&format!("fc.{end}")], "{end}");
    }
    assert_eq!(f32s(&written[&format!("{LAYER}.input_global_scale")]), [2688.0 / 448.0]);
    assert!(!written.contains_key(&format!("{LAYER}.weight")));

    // The configuration has all that compressed-tensors writes in its own.
    let parse = |path: &Path| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path.join("config.json")).unwrap()).unwrap()
    };
    let (own, peer) = (parse(&ours), parse(&golden().join("compressed_tensors")));
    let of =
        |config: &Value, end: &str| config["quantization_config"]["config_groups"]["group_0"][end].clone();
    assert_eq!(of(&own, "weights"), of(&peer, "weights"));
    for (key, value) in of(&own, "input_activations").as_object().unwrap() {
        assert_eq!(*value, of(&peer, "input_activations")[key], "{key}");
    }
    for key in ["quant_method", "format", "quantization_status"] {
        assert_eq!(own["quantization_config"][key], peer["quantization_config"][key], "{key}");
    }

    let values = |path: &Path| Folder::open(path).unwrap().values(&format!("{LAYER}.weight")).unwrap();
    let expected = read(&golden().join("expected.safetensors"));
    assert_eq!(bits(&values(&ours)), bits(&f32s(&expected["ours"])));

    // The same folder with the tensors that compressed-tensors wrote.
    let peers = place.path().join("peers");
    copy(&ours, &peers);
    let mut all = tensors(&peers);
    for (name, tensor) in read(&golden().join("compressed_tensors/model.safetensors")) {
        all.insert(name.replace("fc", LAYER), tensor);
    }
    write(&peers.join("model.safetensors"), &all);
    assert_eq!(bits(&values(&peers)), bits(&f32s(&expected["compressed_tensors"])));
    // Where their bytes differ, our scale is 0.
    let [ours_raw, theirs] = [&written, &all].map(|all| all[&format!("{LAYER}.weight_scale")].2.clone());
    let differ: Vec<_> = ours_raw.iter().zip(&theirs).filter(|(ours, theirs)| ours != theirs).collect();
    assert!(
        !differ.is_empty() && differ.iter().all(|(ours, theirs)| (**ours, **theirs) == (0, 0x20)),
        "{differ:?}"
    );
}

/// Gives a folder the names of ModelOpt.
fn as_modelopt(from: &Path, to: &Path) {
    copy(from, to);
    let mut all = BTreeMap::new();
    for (name, mut tensor) in tensors(from) {
        let inverse = |tensor: &mut Raw| {
            let value = 1.0 / f32s(tensor)[0];
            *tensor = ("F32".to_owned(), Vec::new(), value.to_le_bytes().to_vec());
        };
        let name = match name.rsplit_once('.') {
            Some((layer, "weight_packed")) => format!("{layer}.weight"),
            Some((layer, "weight_global_scale")) => {
                inverse(&mut tensor);
                format!("{layer}.weight_scale_2")
            }
            Some((layer, "input_global_scale")) => {
                inverse(&mut tensor);
                format!("{layer}.input_scale")
            }
            _ => name,
        };
        all.insert(name, tensor);
    }
    write(&to.join("model.safetensors"), &all);
    let config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]});
    change(&to.join("config.json"), &json!({ "quantization_config": config }));
}

#[test]
fn names_of_modelopt_are_read() {
    let place = tempfile::tempdir().unwrap();
    let (ours, theirs) = (place.path().join("ours"), place.path().join("theirs"));
    quantize(&original(place.path()), &ours, Scheme::Nvfp4);
    as_modelopt(&ours, &theirs);
    let stored = read(&golden().join("modelopt/model.safetensors"));
    let written = tensors(&theirs);
    for end in ["weight", "weight_scale", "weight_scale_2"] {
        assert_eq!(written[&format!("{LAYER}.{end}")], stored[&format!("fc.{end}")], "{end}");
    }
    let [ours, theirs] = [&ours, &theirs].map(|path| Folder::open(path).unwrap());
    let quantization = theirs.config.quantization.as_ref().unwrap();
    assert_eq!((quantization.method, quantization.method.name()), (QuantMethod::ModelOpt, "modelopt"));
    assert_eq!(
        (quantization.weights, quantization.inputs),
        (WeightScales::TensorGroup, InputScales::TensorGroup)
    );
    assert_eq!(quantization.ignored, ["lm_head"]);
    for spec in ours.config.tensors() {
        let [ours, theirs] = [&ours, &theirs].map(|folder| folder.values(&spec.name).unwrap());
        // 1 / (1 / x) may be an ulp beside x.
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-7 * a.abs();
        assert!(ours.iter().zip(&theirs).all(near), "{}", spec.name);
    }
    let weight = theirs.codes(&format!("{LAYER}.weight"), 3..5).unwrap();
    assert_eq!((weight.codes.len(), weight.dtype, weight.scales.len()), (64, Dtype::F4, 48 * 4));
    let dec = f32s(&stored["fc.weight_scale_2"])[0];
    assert_eq!(weight.tensor_scale.unwrap().decode(), dec);
}

#[test]
fn the_file_of_older_modelopt_describes_a_folder_whose_configuration_does_not() {
    let place = tempfile::tempdir().unwrap();
    let [ours, theirs, saved] = ["ours", "theirs", "saved"].map(|name| place.path().join(name));
    quantize(&original(place.path()), &ours, Scheme::Nvfp4);
    as_modelopt(&ours, &theirs);
    change(&theirs.join("config.json"), &json!({ "quantization_config": null }));
    let file = theirs.join("hf_quant_config.json");
    let describe = |quantization: Value| {
        let all =
            json!({"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization});
        std::fs::write(&file, all.to_string()).unwrap();
        Folder::open(&theirs)
    };
    let good = json!({"quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16, "exclude_modules": ["lm_head"]});
    let folder = describe(good).unwrap();
    assert_eq!(folder.config.quantization.as_ref().unwrap().method, QuantMethod::ModelOpt);
    let name = format!("{LAYER}.weight");
    let values = folder.values(&name).unwrap();
    // A folder that is written has one description of its tensors.
    let model = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap();
    folder.save_model(&saved, &model, None).unwrap();
    assert!(!saved.join("hf_quant_config.json").exists());
    assert_eq!(bits(&Folder::open(&saved).unwrap().values(&name).unwrap()), bits(&values));
    let text = describe(json!({"quant_algo": "W4A8_AWQ"})).unwrap_err().to_string();
    assert!(text.contains("`quantization_config.quant_algo` is \"W4A8_AWQ\": expected \"NVFP4\""), "{text}");
    std::fs::write(&file, "{}").unwrap();
    let text = Folder::open(&theirs).unwrap_err().to_string();
    assert!(
        text.ends_with("hf_quant_config.json: `quantization` is missing: expected what ModelOpt writes"),
        "{text}"
    );
}

/// The codes, scales and factor of matrices that share an amax, by the formula and nothing else.
fn by_hand(matrices: &[&[f32]], cols: usize) -> (Vec<Vec<u8>>, Vec<Vec<u8>>, f32) {
    let amax = matrices.iter().flat_map(|matrix| matrix.iter()).fold(0f32, |amax, x| amax.max(x.abs()));
    let enc = 2688.0 / amax;
    let dec = 1.0 / enc;
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for matrix in matrices {
        let (mut own, mut bytes) = (Vec::new(), Vec::new());
        for row in matrix.chunks(cols) {
            let mut nibbles = Vec::new();
            for block in row.chunks(16) {
                let most = block.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                let scale = E4M3::from_f32_saturating(most * (enc * (1.0 / 6.0)));
                let factor = (1.0 / (scale.to_f32() * dec)).min(f32::MAX);
                bytes.push(scale.to_bits());
                nibbles.extend(block.iter().map(|x| {
                    let y = (x * factor).abs();
                    // Ties go to the even code.
                    let bounds = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
                    let code = bounds
                        .iter()
                        .enumerate()
                        .filter(|&(i, &bound)| if i % 2 == 0 { y > bound } else { y >= bound })
                        .count() as u8;
                    code | u8::from(x.is_sign_negative()) << 3
                }));
            }
            own.extend(nibbles.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4));
        }
        codes.push(own);
        scales.push(bytes);
    }
    (codes, scales, enc)
}

#[test]
fn matrices_of_several_parts_and_ragged_ones_have_the_codes_of_plain_loops() {
    let place = tempfile::tempdir().unwrap();
    for (hidden, intermediate, dtype) in
        [(1024, 1536, DType::BF16), (40, 33, DType::F16), (24, 66, DType::F32)]
    {
        let config = llama(&Sizes { hidden, intermediate, layers: 1, head_dim: hidden });
        let from = place.path().join(format!("from{hidden}"));
        write_model(&from, &config, dtype);
        let folder = Folder::open(&from).unwrap();
        let name = |part: &str| format!("model.layers.0.{part}_proj");
        for scheme in [Scheme::Nvfp4, Scheme::Nvfp4a16] {
            let out = place.path().join(format!("{scheme}{hidden}"));
            quantize(&from, &out, scheme);
            let written = tensors(&out);
            for group in [
                vec!["self_attn.q", "self_attn.k", "self_attn.v"],
                vec!["self_attn.o"],
                vec!["mlp.gate", "mlp.up"],
                vec!["mlp.down"],
            ] {
                let values: Vec<Vec<f32>> = group
                    .iter()
                    .map(|part| folder.values(&format!("{}.weight", name(part))).unwrap())
                    .collect();
                let cols = if group == ["mlp.down"] { intermediate } else { hidden };
                let matrices: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                let (codes, scales, enc) = by_hand(&matrices, cols);
                for (index, part) in group.iter().enumerate() {
                    let of = |end: &str| &written[&format!("{}.{end}", name(part))].2;
                    assert!(*of("weight_packed") == codes[index], "{scheme} {hidden} {part}: codes");
                    assert!(*of("weight_scale") == scales[index], "{scheme} {hidden} {part}: scales");
                    assert_eq!(*of("weight_global_scale"), enc.to_le_bytes(), "{scheme} {hidden} {part}");
                }
            }
            // What is read again is what was written, also by row.
            let again = Folder::open(&out).unwrap();
            let down = format!("{}.weight", name("mlp.down"));
            let all = again.values(&down).unwrap();
            let row = again.rows(&down, 5..6).unwrap();
            assert_eq!(bits(&row), bits(&all[5 * intermediate..6 * intermediate]));
        }
    }
}

#[test]
fn a_model_keeps_the_codes_at_four_and_a_half_bits_a_value() {
    let place = tempfile::tempdir().unwrap();
    let config = llama(&Sizes { hidden: 64, intermediate: 96, layers: 2, head_dim: 64 });
    let from = place.path().join("from");
    write_model(&from, &config, DType::BF16);
    let device = Device::cpu();
    let ids = Tensor::from_vec(vec![1i32, 2, 0, 1], [1, 4], &device).unwrap();
    for scheme in [Scheme::Nvfp4, Scheme::Nvfp4a16] {
        let out = place.path().join(scheme.name());
        quantize(&from, &out, scheme);
        let folder = Folder::open(&out).unwrap();
        let load = |fp8| folder.load(&LoadOptions { fp8, ..Default::default() }, &device).unwrap();
        let (kept, plain) = (load(Fp8Weights::Keep), load(Fp8Weights::Dequantize));
        let (mut bytes, mut f32_bytes, mut count) = (0, 0, 0);
        for (parameter, values) in parameters(&kept).into_iter().zip(parameters(&plain)) {
            assert_eq!(parameter.shape(), values.shape());
            let Some(codes) = parameter.fp8() else { continue };
            count += 1;
            let parts = [codes.stored_codes(), codes.scale_inv(), codes.tensor_scale().unwrap()];
            bytes += parts.iter().map(|part| part.numel() * part.dtype().size()).sum::<usize>();
            f32_bytes += 4 * parameter.shape().numel();
            let own = parameter.values(DType::F32).unwrap().to_f32_vec().unwrap();
            assert_eq!(bits(&own), bits(&values.tensor().to_f32_vec().unwrap()), "{}", parameter.name());
        }
        assert_eq!(count, 8, "{scheme}");
        assert!(bytes as f64 <= 0.142 * f32_bytes as f64, "{bytes} of {f32_bytes}");

        let recipe = folder.recipe().unwrap();
        let logits = |model: &Gpt, recipe: &Recipe| {
            let mut scaling = Scaling::new(model, &device).unwrap();
            let mut cx = scaling.eval(recipe).unwrap();
            model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap().to_f32_vec().unwrap()
        };
        let high = logits(&plain, &Recipe::off());
        assert_eq!(bits(&high), bits(&logits(&kept, &Recipe::off())), "{scheme}");
        if scheme == Scheme::Nvfp4a16 {
            assert!(recipe.is_off());
            continue;
        }
        // Inputs in 4 bits, too: the codes of the weights are read as they are.
        assert_eq!(recipe.to_string(), "nvfp4 (disable_2d_quantization=true)");
        let own = logits(&kept, &recipe);
        let error: f64 = own.iter().zip(&high).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let power: f64 = high.iter().map(|b| f64::from(*b).powi(2)).sum();
        let relative = (error / power).sqrt();
        assert!(relative > 0.0 && relative < 0.5, "{relative}");
    }
}

#[test]
fn tensors_with_different_factors_in_one_parameter_are_dequantized() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    a16(&original(place.path()), &out);
    let mut all = tensors(&out);
    let key = "model.layers.0.self_attn.k_proj.weight_global_scale";
    let scale = f32s(&all[key])[0] * 2.0;
    all.get_mut(key).unwrap().2 = scale.to_le_bytes().to_vec();
    write(&out.join("model.safetensors"), &all);
    let folder = Folder::open(&out).unwrap();
    let load = |fp8| folder.load(&LoadOptions { fp8, ..Default::default() }, &Device::cpu()).unwrap();
    let (kept, plain) = (load(Fp8Weights::Keep), load(Fp8Weights::Dequantize));
    let stored = parameters(&kept).into_iter().filter(|parameter| parameter.fp8().is_some()).count();
    assert_eq!(stored, 3, "all but qkv");
    for (kept, plain) in parameters(&kept).into_iter().zip(parameters(&plain)) {
        let values = kept.values(DType::F32).unwrap().to_f32_vec().unwrap();
        assert_eq!(bits(&values), bits(&plain.tensor().to_f32_vec().unwrap()), "{}", kept.name());
    }
}

#[test]
fn inspection_counts_lost_blocks_and_compares_with_the_original() {
    let place = tempfile::tempdir().unwrap();
    let from = original(place.path());
    let out = place.path().join("out");
    a16(&from, &out);
    let (folder, before) = (Folder::open(&out).unwrap(), Folder::open(&from).unwrap());
    let found = inspect(&folder, Some(&before), &Monitor::default()).unwrap();
    assert!(found.missing.is_empty(), "{:?}", found.missing);
    assert_eq!(found.tensors.len(), folder.config.tensors().len());
    let down = found.tensors.iter().find(|tensor| tensor.name == format!("{LAYER}.weight")).unwrap();
    let scales = &tensors(&out)[&format!("{LAYER}.weight_scale")].2;
    let lost = scales.iter().filter(|&&scale| scale == 0).count() as u64;
    assert!(lost > 0 && down.lost_blocks == Some(lost), "{lost} {down:?}");
    assert_eq!((down.dtype, &down.shape[..], down.bytes), (Dtype::F4, &[48, 64][..], 48 * 32));
    assert_eq!((down.granularity, down.scales.unwrap().0), (Some(WeightScales::TensorGroup), 48 * 4));
    let others =
        found.tensors.iter().filter(|tensor| tensor.granularity.is_some() && tensor.name != down.name);
    for tensor in others {
        assert!(tensor.sqnr.is_some_and(|sqnr| (15.0..30.0).contains(&sqnr)), "{tensor:?}");
    }
    let plain = found.tensors.iter().filter(|tensor| tensor.granularity.is_none());
    assert!(plain.clone().count() > 0 && plain.into_iter().all(|tensor| tensor.lost_blocks.is_none()));
    // The files alone have bytes.
    let raw = fp8_hf::inspect_weights(&folder.weights, &Monitor::default()).unwrap();
    assert!(
        raw.tensors.iter().any(|tensor| tensor.name.ends_with("weight_packed") && tensor.dtype == Dtype::U8)
    );
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let good = place.path().join("good");
    quantize(&original(place.path()), &good, Scheme::Nvfp4);
    let name = |end: &str| format!("{LAYER}.{end}");
    let refused = |edit: &dyn Fn(&mut BTreeMap<String, Raw>)| {
        let bad = place.path().join("bad");
        copy(&good, &bad);
        let mut all = tensors(&bad);
        edit(&mut all);
        write(&bad.join("model.safetensors"), &all);
        let values = |folder: &Folder| folder.values(&name("weight")).map(drop);
        let text = Folder::open(&bad).and_then(|folder| values(&folder)).unwrap_err().to_string();
        text.split_once(": ").map(|(_, text)| text.to_owned()).unwrap()
    };
    for end in ["weight_scale", "weight_global_scale", "input_global_scale"] {
        let text = refused(&|all| drop(all.remove(&name(end))));
        assert_eq!(
            text,
            format!("`{}` is missing: `{}` has codes of 4 bits", name(end), name("weight_packed"))
        );
    }
    let text = refused(&|all| drop(all.remove(&name("weight_packed"))));
    assert!(text.starts_with(&format!("tensor `{}` is missing", name("weight"))), "{text}");
    let text = refused(&|all| all.get_mut(&name("weight_packed")).unwrap().1 = vec![24, 64]);
    assert_eq!(
        text,
        format!(
            "`{}` is U8 [24, 64]: expected U8 [48, 32] for a weight in NVFP4 of 48 × 64",
            name("weight_packed")
        )
    );
    let text = refused(&|all| all.get_mut(&name("weight_scale")).unwrap().0 = "U8".into());
    assert!(text.contains("expected F8_E4M3 [48, 4] for a weight in NVFP4"), "{text}");
    let text = refused(&|all| all.get_mut(&name("weight_scale")).unwrap().2[7] = 0x7F);
    assert_eq!(
        text,
        format!("`{}` is NaN at element 7: expected scales that are 0 or positive", name("weight_scale"))
    );
    let text = refused(&|all| all.get_mut(&name("weight_scale")).unwrap().2[9] = 0xB8);
    assert_eq!(
        text,
        format!("`{}` is -1 at element 9: expected scales that are 0 or positive", name("weight_scale"))
    );
    for value in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let text = refused(&|all| {
            all.get_mut(&name("weight_global_scale")).unwrap().2 = value.to_le_bytes().to_vec();
        });
        assert!(text.contains("expected a finite, positive scale"), "{value}: {text}");
    }
    let text = refused(&|all| {
        let table = all.remove("model.embed_tokens.weight").unwrap();
        all.insert("model.embed_tokens.weight_packed".into(), ("U8".into(), vec![3, 24], vec![0; 72]));
        drop(table);
    });
    assert_eq!(
        text,
        "`model.embed_tokens.weight_packed` has codes of 4 bits: only the projections of the layers can be quantized"
    );
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let good = place.path().join("good");
    quantize(&original(place.path()), &good, Scheme::Nvfp4);
    let refused = |pointer: &str, value: Value| {
        let bad = place.path().join("bad");
        copy(&good, &bad);
        let path = bad.join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        *config.pointer_mut(pointer).unwrap() = value;
        std::fs::write(&path, config.to_string()).unwrap();
        Folder::open(&bad).unwrap_err().to_string()
    };
    let group = "/quantization_config/config_groups/group_0";
    for (end, value, expected) in [
        ("weights/group_size", json!(32), "expected 16"),
        ("weights/strategy", json!("group"), "expected \"tensor_group\""),
        ("weights/num_bits", json!(8), "expected 4"),
        ("weights/dynamic", json!(true), "expected false"),
        ("input_activations/group_size", json!(32), "expected 16"),
        ("input_activations/num_bits", json!(8), "expected 4"),
    ] {
        let text = refused(&format!("{group}/{end}"), value);
        assert!(text.contains(expected) && text.contains(end.rsplit_once('/').unwrap().1), "{end}: {text}");
    }
    let text = refused("/quantization_config/format", json!("mxfp4-pack-quantized"));
    assert!(text.contains("\"naive-quantized\" or \"nvfp4-pack-quantized\""), "{text}");
    for (config, expected) in [
        (json!({"quant_method": "modelopt", "quant_algo": "FP8"}), "expected \"NVFP4\""),
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}), "expected 16"),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}),
            "expected null, which keeps the KV cache in high precision",
        ),
    ] {
        let text = refused("/quantization_config", config);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let folder = Folder::open(&original(place.path())).unwrap();
    let refused = |options: &QuantizeOptions| {
        let out = place.path().join("out");
        let text = fp8_hf::quantize(&folder, &out, options, &Monitor::default()).unwrap_err().to_string();
        assert!(!out.exists());
        text
    };
    let nvfp4 = QuantizeOptions { scheme: Scheme::Nvfp4, ..Default::default() };
    assert_eq!(
        refused(&nvfp4),
        "quantize: input_scales = none: nvfp4 needs the scale of each layer's input, as calibrate returns them: or use nvfp4a16, \
         which leaves inputs in high precision"
    );
    let scales = BTreeMap::from([("model.layers.0.mlp.down_proj".to_owned(), 1.0)]);
    let a16 = QuantizeOptions { scheme: Scheme::Nvfp4a16, ..Default::default() };
    assert_eq!(
        refused(&QuantizeOptions { input_scales: scales, ..a16.clone() }),
        "quantize: input_scales = 1 scales: inputs are in high precision with scheme nvfp4a16: use tensor, vllm or nvfp4"
    );
    let text = refused(&QuantizeOptions { ignore: vec!["k_proj".into()], ..a16.clone() });
    assert!(text.ends_with("ignore both or none"), "{text}");
    let ragged = place.path().join("ragged");
    write_model(
        &ragged,
        &llama(&Sizes { hidden: 48, intermediate: 40, layers: 1, head_dim: 16 }),
        DType::F32,
    );
    let folder = Folder::open(&ragged).unwrap();
    let out = place.path().join("out");
    let text = fp8_hf::quantize(&folder, &out, &a16, &Monitor::default()).unwrap_err().to_string();
    assert!(text.contains("down_proj.weight` is 48 × 40, no multiple of 16 (1 such matrices)"), "{text}");
}

#[test]
fn a_training_checkpoint_with_codes_is_exported() {
    let place = tempfile::tempdir().unwrap();
    let config = llama(&Sizes { hidden: 64, intermediate: 96, layers: 1, head_dim: 64 });
    let device = Device::cpu();
    for two_dimensional in [true, false] {
        let recipe: Recipe =
            fp8_nn::fp8_recipe::Nvfp4 { disable_2d_quantization: !two_dimensional, ..Default::default() }
                .into();
        let mut model = Gpt::new("model", &config.gpt_options(), &device, &mut fp8_nn::rand::rng()).unwrap();
        assert_eq!(quantize_weights(&mut model, &recipe).unwrap(), 4);
        let file = place.path().join(format!("{two_dimensional}.safetensors"));
        checkpoint::save_parameters(&file, &model).unwrap();
        let out = place.path().join(format!("out{two_dimensional}"));
        let options = fp8_hf::ExportOptions { config: Some(config.clone()), ..Default::default() };
        fp8_hf::export(&file, &out, &options, &Monitor::default()).unwrap();
        let folder = Folder::open(&out).unwrap();
        let loaded = folder.load(&LoadOptions::default(), &device).unwrap();
        for (ours, theirs) in parameters(&loaded).into_iter().zip(parameters(&model)) {
            let [ours, theirs] = [ours, theirs].map(|p| p.values(DType::F32).unwrap().to_f32_vec().unwrap());
            assert_eq!(bits(&ours), bits(&theirs));
        }
    }
}
