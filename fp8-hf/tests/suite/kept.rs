//! FP8 weights that a model keeps as codes, against what peers' checkpoints must compute.

use crate::decoder::{close, floats, logits};
use crate::folders::{copy, full, golden, quantize, read};
use crate::trained::ids;
use fp8_hf::{Config, Folder, Fp8Weights, InputScales, LoadOptions, Scheme};
use fp8_nn::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn keep(folder: &Folder) -> Gpt {
    folder.load(&LoadOptions { fp8: Fp8Weights::Keep, ..Default::default() }, &Device::cpu()).unwrap()
}

/// The exports with expected logits: those of this repository, made by `quantize` where only the expectation is stored, and
/// all others if there are some.
fn exports(place: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for (name, scheme) in [
        ("llama_gqa_tied-ct_tensor_static", None),
        ("llama_gqa_tied-deepseek_block", None),
        ("llama_mha-ct_channel_dynamic", Some(Scheme::Channel)),
        ("llama_bf16-deepseek_block", Some(Scheme::Block128)),
    ] {
        let (from, to) = (golden().join("export").join(name), place.join(name));
        match scheme {
            None => copy(&from, &to),
            Some(scheme) => {
                quantize(&golden().join(name.split('-').next().unwrap()), &to, scheme);
                fs::copy(from.join("expected.safetensors"), to.join("expected.safetensors")).unwrap();
            }
        }
        all.push(to);
    }
    if let Some(full) = full() {
        let paths = fs::read_dir(full.join("export")).unwrap().map(|entry| entry.unwrap().path());
        all.extend(paths.filter(|path| path.join("expected.safetensors").is_file()));
    }
    all
}

#[test]
fn codes_give_the_logits_of_their_values_in_a_quarter_of_the_memory() {
    let place = tempfile::tempdir().unwrap();
    for path in exports(place.path()) {
        let folder = Folder::open(&path).unwrap();
        let model = keep(&folder);
        let expected = floats(&read(&path.join("expected.safetensors"))["logits"]);
        close(&path.display().to_string(), &expected, &logits(&model, &ids(&path)), 1e-5);
        let (mut kept, mut bytes, mut values) = (0, 0, 0);
        for parameter in parameters(&model) {
            let Some(codes) = parameter.fp8() else { continue };
            assert!(codes.columnwise().is_none() && !parameter.is_trainable());
            bytes += codes.rowwise().unwrap().numel() + 4 * codes.scale_inv().numel();
            values += parameter.shape().numel();
            kept += 1;
        }
        assert_eq!(kept, 4 * folder.config.num_hidden_layers, "{}", path.display());
        assert!(bytes as f64 <= 0.3 * 4.0 * values as f64, "{}: {bytes} bytes for {values}", path.display());
    }
}

#[test]
fn inputs_are_quantized_as_the_checkpoint_says() {
    let place = tempfile::tempdir().unwrap();
    for path in exports(place.path()) {
        let (folder, what) = (Folder::open(&path).unwrap(), path.display().to_string());
        let (model, ids, raw) = (keep(&folder), ids(&path), read(&path.join("expected.safetensors")));
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let scales = folder.load_input_scales(&model, &mut scaling).unwrap();
        let is_static = folder.config.quantization.as_ref().unwrap().inputs == InputScales::Static;
        assert_eq!(scales, if is_static { 4 * folder.config.num_hidden_layers } else { 0 });
        let recipe = folder.recipe().unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let found = model.forward(&mut cx, &ids).unwrap().0.to_f32_vec().unwrap();
        // One input on the neighbouring code would move the logits by percents.
        close(&format!("{what} under {recipe}"), &floats(&raw["logits.activations"]), &found, 1e-5);
    }
}

#[test]
fn scopes_that_quantize_weights_in_another_way_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    quantize(&golden().join("llama_mha"), &out, Scheme::Channel);
    let model = keep(&Folder::open(&out).unwrap());
    let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
    let mut cx = scaling.eval(&CurrentScaling::default().into()).unwrap();
    let error = model.forward(&mut cx, &ids(&golden().join("llama_mha"))).unwrap_err().to_string();
    assert!(
        error.contains("model.blocks.0.attention.qkv.weight") && error.contains("a scale for each row"),
        "{error}"
    );
}

#[test]
fn a_model_with_codes_is_not_trained() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    quantize(&golden().join("llama_mha"), &out, Scheme::Tensor);
    let options = LoadOptions { fp8: Fp8Weights::Keep, trainable: true, ..Default::default() };
    let error = Folder::open(&out).unwrap().load(&options, &Device::cpu()).unwrap_err().to_string();
    assert_eq!(
        error,
        "model: fp8 = Keep with trainable: an optimizer needs values that are finer than codes: use Fp8Weights::Dequantize, \
         and AdamW::quantize_weights to store weights in FP8 while they are trained"
    );
    // Without FP8 weights there is nothing to keep.
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let model = folder.load(&options, &Device::cpu()).unwrap();
    assert!(parameters(&model).iter().all(|parameter| parameter.is_trainable() && parameter.fp8().is_none()));
    assert_eq!(folder.recipe().unwrap().to_string(), Recipe::off().to_string());
}

#[test]
fn layers_that_are_not_quantized_stay_in_high_precision() {
    let place = tempfile::tempdir().unwrap();
    let folder = Folder::open(&golden().join("llama_mha")).unwrap();
    let options = fp8_hf::QuantizeOptions {
        scheme: Scheme::Channel,
        ignore: vec!["k_proj".into(), "layers.1.mlp.down_proj".into()],
        ..Default::default()
    };
    let out = place.path().join("out");
    fp8_hf::quantize(&folder, &out, &options, &Default::default()).unwrap();
    let folder = Folder::open(&out).unwrap();
    let model = keep(&folder);
    let kept: Vec<&str> = parameters(&model)
        .into_iter()
        .filter(|parameter| parameter.fp8().is_some())
        .map(|own| &**own.name())
        .collect();
    assert_eq!(kept.len(), 3 * 3 - 1, "{kept:?}");
    assert!(kept.iter().all(|name| !name.contains("qkv")));
    let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
    let explained = scaling.explain(&folder.recipe().unwrap()).unwrap();
    let runs = |path: &str| {
        explained.layers.iter().find(|layer| &*layer.path == path).map(|layer| layer.gemms.fprop)
    };
    assert_eq!(runs("model.blocks.0.attention.qkv"), Some(false));
    assert_eq!(runs("model.blocks.1.mlp.fc2"), Some(false));
    assert_eq!(runs("model.blocks.0.mlp.fc2"), Some(true));
    let mut cx = scaling.eval(&folder.recipe().unwrap()).unwrap();
    model.forward(&mut cx, &ids(&golden().join("llama_mha"))).unwrap();
}

#[test]
fn weights_that_are_stored_transposed_are_dequantized() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model");
    let config = Config::read(&golden().join("configs/gpt2/config.json")).unwrap();
    crate::folders::write_model(&path, &config, DType::F32);
    let (file, mut raw) = (path.join("model.safetensors"), read(&path.join("model.safetensors")));
    for spec in config.tensors().iter().filter(|spec| spec.kind.is_linear()) {
        let (dtype, _, bytes) = raw.get_mut(&spec.name).unwrap();
        let codes = floats(&("F32".into(), vec![], bytes.clone()));
        *bytes = codes.iter().map(|x| E4M3::from_f32_saturating(x * 64.0).to_bits()).collect();
        *dtype = "F8_E4M3".into();
        let scale = ("F32".into(), vec![], (1.0f32 / 64.0).to_le_bytes().to_vec());
        raw.insert(spec.name.replace(".weight", ".weight_scale"), scale);
    }
    crate::folders::write(&file, &raw);
    let fp8 =
        serde_json::json!({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}});
    crate::folders::change(&path.join("config.json"), &fp8);
    let folder = Folder::open(&path).unwrap();
    let ids = Tensor::from_vec(vec![1i32, 2, 3, 4], [1, 4], &Device::cpu()).unwrap();
    let dequantized = folder.load(&LoadOptions::default(), &Device::cpu()).unwrap();
    assert!(logits(&keep(&folder), &ids) == logits(&dequantized, &ids));
}

/// A checkpoint whose layer 0 has a down projection in E5M2, which no model keeps as codes.
#[test]
fn layers_in_e5m2_are_not_quantized_again() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("export/llama_gqa_tied-ct_tensor_static"), place.path());
    let file = place.path().join("model.safetensors");
    let mut raw = read(&file);
    raw.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().0 = "F8_E5M2".into();
    crate::folders::write(&file, &raw);
    let folder = Folder::open(place.path()).unwrap();
    let model = keep(&folder);
    let kept = |layer: usize| {
        let parameters = parameters(&model).into_iter();
        let mut named = parameters.filter(|own| own.name().ends_with(&format!("{layer}.mlp.fc2.weight")));
        named.next().unwrap().fp8().is_some()
    };
    assert!(!kept(0) && kept(1));
    let (mut scaling, recipe) = (Scaling::new(&model, &Device::cpu()).unwrap(), folder.recipe().unwrap());
    let explained = scaling.explain(&recipe).unwrap();
    let runs = |path: &str| explained.layers.iter().find(|layer| &*layer.path == path).unwrap().gemms.fprop;
    assert!(!runs("model.blocks.0.mlp.fc2") && runs("model.blocks.1.mlp.fc2"));
    assert_eq!(folder.load_input_scales(&model, &mut scaling).unwrap(), 7);
    let ids = ids(&golden().join("export/llama_gqa_tied-ct_tensor_static"));
    model.forward(&mut scaling.eval(&recipe).unwrap(), &ids).unwrap();
}

#[test]
fn scales_of_inputs_are_powers_of_two_where_the_checkpoint_says_so() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("export/llama_gqa_tied-deepseek_block"), place.path());
    let config = place.path().join("config.json");
    let mut quantization =
        serde_json::from_str::<serde_json::Value>(&fs::read_to_string(&config).unwrap()).unwrap();
    quantization["quantization_config"]["scale_fmt"] = "ue8m0".into();
    crate::folders::change(&config, &quantization);
    let folder = Folder::open(place.path()).unwrap();
    let recipe = folder.recipe().unwrap();
    let quant = fp8_nn::fp8_recipe::QParamsByRole { input: QParams::POWER_2, ..Default::default() };
    // Their blocks do not fit together in q, k and v, so that weights have factors for parts of rows.
    let expected = BlockScaling { quant, w_block_scaling_dim: 1, ..Default::default() };
    assert_eq!(format!("{recipe:?}"), format!("{:?}", Recipe::from(expected)));
    let model = keep(&folder);
    let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
    model.forward(&mut scaling.eval(&recipe).unwrap(), &ids(place.path())).unwrap();
}
