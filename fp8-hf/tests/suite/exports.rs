//! FP8 checkpoints, byte for byte against those of peers.

use crate::folders::{Raw, full, golden, quantize, read, tensors};
use fp8_hf::{Folder, InputScales, QuantMethod, Scheme, WeightScales};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The tensors that a peer wrote, by name: dtype, shape and digest of each.
type Digests = BTreeMap<String, (String, Vec<usize>, String)>;

fn digest((dtype, shape, bytes): &Raw) -> (String, Vec<usize>, String) {
    let hex = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    (dtype.clone(), shape.clone(), hex)
}

fn scheme(export: &str) -> Option<Scheme> {
    Some(match export {
        "ct_tensor_static" => Scheme::Tensor,
        "ct_channel_dynamic" => Scheme::Channel,
        "deepseek_block" => Scheme::Block128,
        "fp8_scalar" => Scheme::Vllm,
        _ => return None,
    })
}

/// Quantizes a model as a peer did, and compares codes, weight scales and what stays as it is.
fn compare(model: &Path, export: &str, peer: &Digests) -> usize {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    quantize(model, &out, scheme(export).unwrap());
    let ours = tensors(&out);
    let before = tensors(model);
    for (name, tensor) in &ours {
        // This peer widened the whole model to f32 before quantizing.
        let is_widened = before.get(name).is_some_and(|before| before == tensor && peer[name].0 != before.0);
        assert!(is_widened || digest(tensor) == peer[name], "{export}: {name} differs");
    }
    for name in peer.keys().filter(|name| !name.ends_with("input_scale")) {
        assert!(ours.contains_key(name), "{export}: {name} is missing");
    }
    ours.iter().filter(|(_, tensor)| tensor.0 == "F8_E4M3").count()
}

#[test]
fn codes_and_scales_are_those_of_peers() {
    let text = fs::read_to_string(golden().join("export/digests.json")).unwrap();
    let digests: BTreeMap<String, Digests> = serde_json::from_str(&text).unwrap();
    let (mut exports, mut matrices) = (0, 0);
    for (name, peer) in &digests {
        let (model, export) = name.split_once('-').unwrap();
        if scheme(export).is_some() {
            matrices += compare(&golden().join(model), export, peer);
            exports += 1;
        }
    }
    // 3 models of 7 matrices in 2 or 3 layers.
    assert_eq!((exports, matrices), (8, 21 * 4 + 14 * 4));
    if let Some(full) = full() {
        for entry in fs::read_dir(full.join("export")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if let Some((model, export)) = name.split_once('-').filter(|(_, export)| scheme(export).is_some())
            {
                let peer =
                    tensors(&path).iter().map(|(name, tensor)| (name.clone(), digest(tensor))).collect();
                compare(&full.join(model), export, &peer);
            }
        }
    }
}

#[test]
fn the_configuration_is_the_peers() {
    for name in ["llama_mha-ct_channel_dynamic", "llama_mha-deepseek_block", "llama_bf16-deepseek_block"] {
        let (model, export) = name.split_once('-').unwrap();
        let place = tempfile::tempdir().unwrap();
        quantize(&golden().join(model), &place.path().join("out"), scheme(export).unwrap());
        let read = |path: &Path| serde_json::from_str::<Value>(&fs::read_to_string(path).unwrap()).unwrap();
        let ours = read(&place.path().join("out/config.json"));
        assert_eq!(ours, read(&golden().join("export").join(name).join("config.json")), "{name}");
    }
}

#[test]
fn every_layout_of_peers_is_recognized() {
    use InputScales::{Group, Static, Token};
    use QuantMethod::{CompressedTensors, Fp8};
    let block = WeightScales::Block([128, 128]);
    for (name, method, weights, inputs) in [
        ("llama_bf16-ct_block", CompressedTensors, block, Group(128)),
        ("llama_bf16-ct_channel_dynamic", CompressedTensors, WeightScales::Channel, Token),
        ("llama_bf16-ct_channel_dynamic_bf16", CompressedTensors, WeightScales::Channel, Token),
        ("llama_bf16-deepseek_block", Fp8, block, Group(128)),
        ("llama_gqa_tied-ct_tensor_static", CompressedTensors, WeightScales::Tensor, Static),
        ("llama_mha-fp8_scalar", Fp8, WeightScales::Tensor, Static),
    ] {
        let config = fp8_hf::Config::read(&golden().join("export").join(name).join("config.json")).unwrap();
        let found = config.quantization.unwrap();
        assert_eq!((found.method, found.weights, found.inputs), (method, weights, inputs), "{name}");
        assert_eq!(found.ignored, ["lm_head"], "{name}");
    }
}

/// The values of an FP8 tensor, with code of its own: a table of all codes, and the scale of each element.
fn expected(tensors: &BTreeMap<String, Raw>, name: &str, block: Option<usize>) -> Vec<f32> {
    let value = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = if exponent == 0 {
            mantissa * 2f32.powi(-9)
        } else {
            (8.0 + mantissa) * 2f32.powi(exponent - 10)
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    };
    let (_, shape, codes) = &tensors[name];
    let module = name.strip_suffix(".weight").unwrap();
    let scales = ["weight_scale", "weight_scale_inv"].map(|end| tensors.get(&format!("{module}.{end}")));
    let (dtype, _, bytes) = scales.into_iter().flatten().next().unwrap();
    let scales: Vec<f32> = match dtype.as_str() {
        "F32" => bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect(),
        _ => bytes
            .chunks(2)
            .map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().unwrap())) << 16))
            .collect(),
    };
    let scale = |index: usize| match (block, scales.len()) {
        (_, 1) => scales[0],
        (Some(side), _) => {
            scales[index / shape[1] / side * shape[1].div_ceil(side) + index % shape[1] / side]
        }
        (None, _) => scales[index / shape[1]],
    };
    codes.iter().enumerate().map(|(index, &code)| value(code) * scale(index)).collect()
}

#[test]
fn peers_checkpoints_are_dequantized_and_handed_out_as_codes() {
    let mut folders: Vec<_> = ["llama_gqa_tied-ct_tensor_static", "llama_gqa_tied-deepseek_block"]
        .map(|name| golden().join("export").join(name))
        .into();
    if let Some(full) = full() {
        folders.extend(
            fs::read_dir(full.join("export"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_dir()),
        );
    }
    for path in folders {
        let raw = tensors(&path);
        let folder = Folder::open(&path).unwrap();
        let block = path.to_str().unwrap().contains("block").then_some(128);
        let mut matrices = 0;
        for (name, (_, shape, codes)) in raw.iter().filter(|(_, tensor)| tensor.0 == "F8_E4M3") {
            let expected = expected(&raw, name, block);
            assert!(folder.is_quantized(name));
            assert_eq!(folder.values(name).unwrap(), expected, "{name}");
            let some = folder.rows(name, 3..5).unwrap();
            assert_eq!(some, expected[3 * shape[1]..5 * shape[1]], "{name}");
            let weight = folder.codes(name, 0..shape[0]).unwrap();
            assert_eq!(&weight.codes, codes);
            let is_static = folder.config.quantization.as_ref().unwrap().inputs == InputScales::Static;
            assert_eq!(weight.input_scale.is_some(), is_static, "{name}");
            matrices += 1;
        }
        assert_eq!(matrices, 7 * folder.config.num_hidden_layers);
    }
}

#[test]
fn names_of_mistral_and_scales_in_one_byte_are_read() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    quantize(&golden().join("llama_gqa_tied"), &out, Scheme::Vllm);
    let file = out.join("model.safetensors");
    let name = "model.layers.0.mlp.down_proj.weight";
    // weight_scale_inv and activation_scale, scalars, in E8M0: code 126 is 0.5.
    let mut raw = read(&file);
    let codes = raw[name].clone();
    raw = raw
        .into_iter()
        .flat_map(|(name, tensor)| match name.strip_suffix("weight_scale") {
            None => vec![(name, tensor)],
            Some(module) => vec![
                (format!("{module}weight_scale_inv"), ("F8_E8M0".to_owned(), Vec::new(), vec![126])),
                (
                    format!("{module}activation_scale"),
                    ("F32".to_owned(), Vec::new(), 0.25f32.to_le_bytes().to_vec()),
                ),
            ],
        })
        .collect();
    crate::folders::write(&file, &raw);
    let folder = Folder::open(&out).unwrap();
    let weight = folder.codes(name, 0..32).unwrap();
    assert_eq!((weight.scales, weight.input_scale), (vec![0.5], Some(0.25)));
    let mut expected = codes.clone();
    expected.2.truncate(64);
    let values = folder.rows(name, 0..1).unwrap();
    assert!(
        values
            .iter()
            .zip(&codes.2)
            .all(|(value, &code)| *value == fp8_nn::fp8_format::E4M3::from_bits(code).to_f32() * 0.5)
    );
}

#[test]
fn a_layer_of_a_fused_group_is_not_ignored_alone() {
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut options = fp8_hf::QuantizeOptions {
        scheme: Scheme::Vllm,
        ignore: vec!["layers.1.*k_proj".into()],
        ..Default::default()
    };
    let run = |options: &fp8_hf::QuantizeOptions| {
        fp8_hf::quantize(&folder, &place.path().join("out"), options, &Default::default())
    };
    options.ignore = vec!["*layers.1.*k_proj".into()];
    let error = run(&options).unwrap_err().to_string();
    assert_eq!(
        error,
        "quantize: ignore = model.layers.1.self_attn.k_proj: vLLM computes it together with model.layers.1.self_attn.q_proj: ignore both or none"
    );
    options.ignore = vec!["*layers.1.self_attn.*".into(), "lm_head".into()];
    let done = run(&options).unwrap();
    assert_eq!((done.matrices, done.ignored.len()), (17, 5));
    let written = Folder::open(&place.path().join("out")).unwrap();
    assert!(!written.is_quantized("model.layers.1.self_attn.k_proj.weight"));
    let quantization = written.config.quantization.unwrap();
    assert_eq!(quantization.ignored, done.ignored);
    assert_eq!(done.split_groups, [[""; 0]; 0]);
}

#[test]
fn groups_that_are_quantized_in_part_are_listed() {
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let ignore = ["k_proj", "layers.1.mlp", "layers.2.mlp.up_proj", "layers.0.self_attn.o_proj"];
    for scheme in [Scheme::Tensor, Scheme::Channel, Scheme::Block128] {
        let options = fp8_hf::QuantizeOptions {
            scheme,
            ignore: ignore.map(str::to_owned).into(),
            allow_ragged: true,
            ..Default::default()
        };
        let out = place.path().join(scheme.name());
        let done = fp8_hf::quantize(&folder, &out, &options, &Default::default()).unwrap();
        let qkv = |layer: usize| ["q", "k", "v"].map(|x| format!("model.layers.{layer}.self_attn.{x}_proj"));
        let gate_up = ["gate", "up"].map(|x| format!("model.layers.2.mlp.{x}_proj"));
        let expected = [qkv(0).to_vec(), qkv(1).to_vec(), qkv(2).to_vec(), gate_up.to_vec()];
        assert_eq!(done.split_groups, expected, "{scheme}");
    }
}

#[test]
fn static_scales_of_inputs_are_written_as_by_peers() {
    use fp8_hf::QuantizeOptions;
    let peer = golden().join("export/llama_gqa_tied-ct_tensor_static");
    let expected = tensors(&peer);
    let scale = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let input_scales: BTreeMap<String, f32> = expected
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_suffix(".input_scale")?.to_owned(), scale(&tensor.2))))
        .collect();
    assert_eq!(input_scales.len(), 14);
    let folder = Folder::open(&golden().join("llama_gqa_tied")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let run = |options: &QuantizeOptions, out: &str| {
        fp8_hf::quantize(&folder, &place.path().join(out), options, &Default::default())
    };
    let options = QuantizeOptions { scheme: Scheme::Tensor, input_scales, ..Default::default() };
    run(&options, "tensor").unwrap();
    assert_eq!(tensors(&place.path().join("tensor")), expected);
    let json = |path: &Path| {
        serde_json::from_str::<Value>(&fs::read_to_string(path.join("config.json")).unwrap()).unwrap()
    };
    let mut config = json(&peer);
    let inputs = &mut config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
    // What the peer found the scales with.
    inputs.as_object_mut().unwrap().remove("observer");
    assert_eq!(json(&place.path().join("tensor")), config);

    run(&QuantizeOptions { scheme: Scheme::Vllm, ..options.clone() }, "vllm").unwrap();
    let written = Folder::open(&place.path().join("vllm")).unwrap();
    assert_eq!(written.config.quantization.as_ref().unwrap().inputs, InputScales::Static);
    let weight = written.codes("model.layers.1.mlp.up_proj.weight", 0..1).unwrap();
    assert_eq!(weight.input_scale, Some(options.input_scales["model.layers.1.mlp.up_proj"]));
    let scalar = &tensors(&place.path().join("vllm"))["model.layers.1.mlp.up_proj.input_scale"];
    assert_eq!((scalar.0.as_str(), scalar.1.len()), ("F32", 0));

    let refused = |scheme: Scheme, change: &dyn Fn(&mut BTreeMap<String, f32>)| {
        let mut options = QuantizeOptions { scheme, ..options.clone() };
        change(&mut options.input_scales);
        run(&options, "refused").unwrap_err().to_string()
    };
    let up = "model.layers.1.mlp.up_proj";
    assert_eq!(
        refused(Scheme::Channel, &|_| {}),
        "quantize: input_scales = 14 scales: inputs are dynamic with scheme channel: use tensor, vllm or nvfp4"
    );
    assert_eq!(
        refused(Scheme::Tensor, &|scales| {
            scales.remove(up);
        }),
        format!(
            "quantize: input_scales = 13 scales: {up} has none: give one for each layer that is quantized"
        )
    );
    assert_eq!(
        refused(Scheme::Tensor, &|scales| {
            scales.insert(up.into(), 0.0);
        }),
        format!("quantize: input_scales = 0 for {up}: expected a finite, positive scale")
    );
    assert_eq!(
        refused(Scheme::Tensor, &|scales| {
            scales.insert("up".into(), 1.0);
        }),
        "quantize: input_scales = up: the model has no such layer: leave it out"
    );
}

#[test]
fn matrices_of_several_parts_have_the_codes_of_plain_loops() {
    use crate::folders::{Sizes, llama, write_model};
    use fp8_nn::prelude::{DType, E4M3};
    let place = tempfile::tempdir().unwrap();
    // 3 MiB for a matrix; the program reads 1 MiB at a time.
    let config = llama(&Sizes { hidden: 1024, intermediate: 1536, layers: 1, head_dim: 128 });
    write_model(&place.path().join("model"), &config, DType::BF16);
    let folder = Folder::open(&place.path().join("model")).unwrap();
    let mlp = |name: &str| format!("model.layers.0.mlp.{name}_proj");
    for scheme in Scheme::ALL.into_iter().filter(|scheme| !scheme.is_nvfp4()) {
        let out = place.path().join(scheme.name());
        let options = fp8_hf::QuantizeOptions { scheme, ..Default::default() };
        fp8_hf::quantize(&folder, &out, &options, &Default::default()).unwrap();
        let ours = tensors(&out);
        for name in ["gate", "up", "down"] {
            let [rows, cols] = if name == "down" { [1024, 1536] } else { [1536, 1024] };
            let x = folder.values(&format!("{}.weight", mlp(name))).unwrap();
            // The elements that share a scale with others have the same key.
            let key = |index: usize| match scheme {
                Scheme::Channel => index / cols,
                Scheme::Block128 => index / cols / 128 * (cols / 128) + index % cols / 128,
                _ => 0,
            };
            let mut amax = vec![0f32; key(rows * cols - 1) + 1];
            x.iter().enumerate().for_each(|(index, x)| amax[key(index)] = amax[key(index)].max(x.abs()));
            if scheme == Scheme::Vllm && name != "down" {
                let both =
                    ["gate", "up"].map(|name| folder.values(&format!("{}.weight", mlp(name))).unwrap());
                amax[0] = both.iter().flatten().fold(0f32, |amax, x| amax.max(x.abs()));
            }
            let scales: Vec<f32> = amax.iter().map(|amax| amax / 448.0).collect();
            let codes: Vec<u8> = x
                .iter()
                .enumerate()
                .map(|(index, x)| E4M3::from_f32_saturating(x / scales[key(index)]).to_bits())
                // The values have no −0; compressed-tensors would make it 0x00.
                .collect();
            assert!(ours[&format!("{}.weight", mlp(name))].2 == codes, "{scheme}, {name}: codes");
            let end = if scheme == Scheme::Block128 { "weight_scale_inv" } else { "weight_scale" };
            let written = &ours[&format!("{}.{end}", mlp(name))].2;
            let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            assert!(*written == scales, "{scheme}, {name}: scales");
        }
    }
}
