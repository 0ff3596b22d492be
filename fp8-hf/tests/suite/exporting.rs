//! Training checkpoints as Hugging Face folders.

use crate::decoder::{load, logits};
use crate::folders::{golden, tensors};
use crate::trained::{Trained, config_of, ids};
use fp8_hf::{self as hf, Config, ExportOptions, Folder, LoadOptions, Monitor, QuantizeOptions, Scheme};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub(crate) fn export(from: &Path, out: &Path, options: &ExportOptions) -> hf::Exported {
    hf::export(from, out, options, &Monitor::default()).unwrap()
}

pub(crate) fn refused(from: &Path, out: &Path, options: &ExportOptions) -> String {
    let error = hf::export(from, out, options, &Monitor::default()).unwrap_err().to_string();
    assert!(!out.exists());
    error
}

#[test]
fn a_trained_checkpoint_becomes_a_folder_with_the_same_logits() {
    for (name, params_dtype) in
        [("llama_gqa_tied", DType::F32), ("llama_bf16", DType::BF16), ("qwen3", DType::F32)]
    {
        let place = tempfile::tempdir().unwrap();
        let (dir, out) = (place.path().join("checkpoint"), place.path().join("out"));
        let ids = ids(&golden().join(name));
        let mut trained = Trained::new(&golden().join(name), params_dtype);
        trained.train(&DelayedScaling::default().into(), &ids);
        trained.save(&dir, &[config_of(name).metadata()].into());
        let done = export(&dir, &out, &ExportOptions::default());
        let bytes: usize = tensors(&out).values().map(|tensor| tensor.2.len()).sum();
        assert_eq!((done.bytes, done.quantized), (bytes as u64, None));
        let again = Folder::open(&out).unwrap();
        assert!(
            tensors(&out)
                .values()
                .all(|tensor| tensor.0 == if name == "llama_bf16" { "BF16" } else { "F32" })
        );
        let options = LoadOptions { params_dtype, ..Default::default() };
        let again = again.load(&options, &Device::cpu()).unwrap();
        assert!(logits(&again, &ids) == logits(&trained.model, &ids), "{name}: other logits");

        // The optimizer's f32 copies are finer than parameters in bf16.
        let fine = place.path().join("fine");
        export(&dir, &fine, &ExportOptions { dtype: Some(DType::F32), ..Default::default() });
        let fine = load(&fine, false);
        let mut differ = 0;
        for (fine, own) in parameters(&fine).into_iter().zip(parameters(&trained.model)) {
            let rounded = fine.values(params_dtype).unwrap().to_f32_vec().unwrap();
            assert_eq!(rounded, own.tensor().to_f32_vec().unwrap());
            differ += usize::from(fine.tensor().to_f32_vec().unwrap() != rounded);
        }
        assert_eq!(differ > 0, params_dtype == DType::BF16);

        // A file of parameters does not say which model it is.
        let file = place.path().join("parameters.safetensors");
        checkpoint::save_parameters(&file, &trained.model).unwrap();
        let other = place.path().join("other");
        let options = ExportOptions {
            config: Some(config_of(name)),
            files_of: Some(golden().join(name)),
            ..Default::default()
        };
        export(&file, &other, &options);
        assert_eq!(tensors(&other), tensors(&out));
        assert!(
            other.join("generation_config.json").is_file() && !out.join("generation_config.json").exists()
        );
    }
}

#[test]
fn gpt2_is_exported_transposed() {
    let place = tempfile::tempdir().unwrap();
    let (from, dir, out) =
        (place.path().join("from"), place.path().join("checkpoint"), place.path().join("out"));
    let config = Config::read(&golden().join("configs/gpt2/config.json")).unwrap();
    crate::folders::write_model(&from, &config, DType::F32);
    Trained::new(&from, DType::F32).save(&dir, &[config.metadata()].into());
    export(&dir, &out, &ExportOptions::default());
    assert_eq!(tensors(&out), tensors(&from));
}

/// Errors that can be found before the model is written are returned before it is written.
#[test]
fn a_scheme_that_does_not_fit_is_refused_and_wrong_values_are_in_the_checkpoint() {
    let place = tempfile::tempdir().unwrap();
    let [from, dir, out] = ["from", "checkpoint", "out"].map(|name| place.path().join(name));
    let fp8 = |scheme| QuantizeOptions { scheme, ..Default::default() };
    let with = |fp8| ExportOptions { fp8: Some(fp8), ..Default::default() };

    let mut trained = Trained::new(&golden().join("llama_mha"), DType::F32);
    let nan = Tensor::full(
        f32::NAN,
        *trained.model.block::<TransformerLayer>(1).unwrap().mlp().fc2().weight().shape(),
        DType::F32,
        &Device::cpu(),
    )
    .unwrap();
    for parameter in parameters_mut(&mut trained.model)
        .into_iter()
        .filter(|p| p.name().contains("blocks.1.mlp.fc2.weight"))
    {
        parameter.set(nan.clone()).unwrap();
    }
    trained.save(&dir, &[config_of("llama_mha").metadata()].into());
    let error = refused(&dir, &out, &with(fp8(Scheme::Block128)));
    assert!(error.contains("no multiple of 128"), "{error}");
    let error =
        refused(&dir, &out, &with(QuantizeOptions { ignore: vec!["donw".into()], ..fp8(Scheme::Tensor) }));
    assert!(error.contains("\"donw\": it matches no layer"), "{error}");
    let error = refused(&dir, &out, &with(fp8(Scheme::Tensor)));
    assert!(error.contains("checkpoint.safetensors: `model.layers.1.mlp.down_proj.weight`"), "{error}");
    assert!(!error.contains(".fp8-partial-"), "{error}");

    let config = Config::read(&golden().join("configs/gpt2/config.json")).unwrap();
    crate::folders::write_model(&from, &config, DType::F32);
    let gpt2 = place.path().join("gpt2");
    Trained::new(&from, DType::F32).save(&gpt2, &[config.metadata()].into());
    let error = refused(&gpt2, &out, &with(fp8(Scheme::Tensor)));
    assert!(error.contains("gpt2 stores its weights as in × out"), "{error}");
}

#[test]
fn weights_in_codes_are_written_from_the_finer_copies_or_dequantized() {
    let folder = golden().join("llama_mha");
    for recipe in [
        Recipe::from(CurrentScaling::default()),
        CurrentScaling::rowwise().into(),
        BlockScaling::default().into(),
        BlockScaling { w_block_scaling_dim: 1, ..Default::default() }.into(),
        Mxfp8::default().into(),
    ] {
        let place = tempfile::tempdir().unwrap();
        let (dir, out) = (place.path().join("checkpoint"), place.path().join("out"));
        let metadata = [config_of("llama_mha").metadata()].into();
        let mut trained = Trained::new(&folder, DType::F32);
        trained.optimizer.quantize_weights(&mut trained.model, &recipe).unwrap();
        trained.save(&dir, &metadata);
        export(&dir, &out, &ExportOptions::default());
        assert!(tensors(&out) == tensors(&folder), "{recipe}: the copies have the values of before");

        let (dir, out) = (place.path().join("frozen"), place.path().join("codes"));
        let mut trained = Trained::new(&folder, DType::F32);
        assert_eq!(quantize_weights(&mut trained.model, &recipe).unwrap(), 12);
        trained.save(&dir, &metadata);
        export(&dir, &out, &ExportOptions::default());
        for (written, own) in parameters(&load(&out, false)).into_iter().zip(parameters(&trained.model)) {
            let values = own.values(DType::F32).unwrap().to_f32_vec().unwrap();
            assert!(written.tensor().to_f32_vec().unwrap() == values, "{recipe}: {own:?}");
        }
    }
}

#[test]
fn static_scales_of_inputs_are_the_windows_largest_amax() {
    let place = tempfile::tempdir().unwrap();
    let (dir, name) = (place.path().join("checkpoint"), "llama_gqa_tied");
    let ids = ids(&golden().join(name));
    let mut trained = Trained::new(&golden().join(name), DType::F32);
    // Another recipe that was used before has older amaxes.
    trained.train(&DelayedScaling { margin: 1, ..Default::default() }.into(), &ids);
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 3, ..Default::default() });
    for _ in 0..4 {
        trained.train(&recipe, &ids);
    }
    trained.save(&dir, &[config_of(name).metadata()].into());
    let fp8 =
        |scheme| Some(QuantizeOptions { scheme, ignore: vec!["layers.0.mlp".into()], ..Default::default() });
    let options = ExportOptions { fp8: fp8(Scheme::Tensor), static_inputs: true, ..Default::default() };
    let out = place.path().join("out");
    let done = export(&dir, &out, &options);
    assert_eq!(done.quantized.unwrap().matrices, 14 - 3);
    let folder = Folder::open(&out).unwrap();
    let state = trained.scaling.state().unwrap();
    let arena =
        state.arenas.iter().rfind(|arena| arena.slots.iter().any(|slot| slot.ends_with(".input"))).unwrap();
    assert_eq!(arena.amax_history.len(), 2);
    for (module, slot) in [
        ("layers.0.self_attn.q_proj", "gpt.blocks.0.attention.qkv.input"),
        ("layers.0.self_attn.v_proj", "gpt.blocks.0.attention.qkv.input"),
        ("layers.1.self_attn.o_proj", "gpt.blocks.1.attention.proj.input"),
        ("layers.1.mlp.up_proj", "gpt.blocks.1.mlp.fc1.input"),
        ("layers.1.mlp.down_proj", "gpt.blocks.1.mlp.fc2.input"),
    ] {
        let index = arena.slots.iter().position(|own| &**own == slot).unwrap();
        let amax = arena.amax_history.iter().map(|row| row[index]).fold(0f32, f32::max);
        let weight = folder.codes(&format!("model.{module}.weight"), 0..1).unwrap();
        assert_eq!(weight.input_scale, Some(amax / 448.0), "{module}");
    }
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "something was left");

    let refused =
        |from: &Path, options: &ExportOptions| refused(from, &place.path().join("refused"), options);
    let channel = ExportOptions { fp8: fp8(Scheme::Channel), ..options.clone() };
    assert!(
        refused(&dir, &channel).contains("inputs are dynamic with scheme channel: use tensor, vllm or nvfp4")
    );
    let none = ExportOptions { fp8: None, ..options.clone() };
    assert_eq!(
        refused(&dir, &none),
        "export: static_inputs = true: expected a scheme, tensor or vllm, with it"
    );
    let mut current = Trained::new(&golden().join(name), DType::F32);
    current.train(&CurrentScaling::default().into(), &ids);
    let other = place.path().join("current");
    current.save(&other, &[config_of(name).metadata()].into());
    assert_eq!(
        refused(&other, &options),
        "export: static_inputs = true: the checkpoint has no amaxes of `gpt.blocks.0.attention.qkv.input`, which training \
         under delayed scaling records: leave inputs dynamic, or quantize with scales from a calibration"
    );
    // The scheme is what is wrong first.
    assert_eq!(
        refused(&other, &channel),
        "export: static_inputs = true: inputs are dynamic with scheme channel: use tensor, vllm or nvfp4"
    );
    // A history of one row is not saved; its scale is.
    let mut short = Trained::new(&golden().join(name), DType::F32);
    short.train(&DelayedScaling { amax_history_len: 1, margin: 3, ..Default::default() }.into(), &ids);
    let (dir, out) = (place.path().join("short"), place.path().join("of-short"));
    short.save(&dir, &[config_of(name).metadata()].into());
    export(&dir, &out, &options);
    let amax = 448.0
        * Folder::open(&out)
            .unwrap()
            .codes("model.layers.1.mlp.up_proj.weight", 0..1)
            .unwrap()
            .input_scale
            .unwrap();
    let mut long = Trained::new(&golden().join(name), DType::F32);
    long.train(&DelayedScaling { margin: 3, ..Default::default() }.into(), &ids);
    let state = long.scaling.state().unwrap();
    let index = state.arenas[0].slots.iter().position(|slot| slot.ends_with("1.mlp.fc1.input")).unwrap();
    let expected = state.arenas[0].amax_history.last().unwrap()[index];
    assert!((amax / expected - 1.0).abs() < 1e-6, "{amax} is not {expected}");
}

#[test]
fn what_is_no_checkpoint_of_the_model_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let (dir, out) = (place.path().join("run/fp8"), place.path().join("out"));
    fs::create_dir(place.path().join("run")).unwrap();
    let trained = Trained::new(&golden().join("llama_mha"), DType::F32);
    trained.save(&dir, &BTreeMap::new());
    let default = ExportOptions::default();
    let expected = "expected a folder that checkpoint::save wrote, or a file of checkpoint::save_parameters";
    let at = |path: &Path, text: &str| format!("{}: {text}", path.display());
    let run = place.path().join("run");
    let text = "it has no checkpoint.safetensors, but its folders fp8 do: name one of them";
    assert_eq!(refused(&run, &out, &default), at(&run, text));
    let no = place.path().join("no");
    assert_eq!(refused(&no, &out, &default), at(&no, &format!("no such file or folder: {expected}")));
    fs::create_dir(&no).unwrap();
    assert_eq!(
        refused(&no, &out, &default),
        at(&no, &format!("it has no checkpoint.safetensors: {expected}"))
    );
    let file = checkpoint::path(&dir);
    let text = "it does not say which model it is: give a config.json (--config), or save it with `hf.config` in its metadata \
                (hf::Config::metadata)";
    assert_eq!(refused(&dir, &out, &default), at(&file, text));
    let with = |model: &str| ExportOptions { config: Some(config_of(model)), ..Default::default() };
    let text =
        "parameter `embedding.weight` has shape [65, 32]: a qwen3 model of this configuration has [66, 32]";
    assert_eq!(refused(&dir, &out, &with("qwen3")), at(&file, text));
    trained.save(&dir, &[("hf.config".to_owned(), "{}".to_owned())].into());
    let error = refused(&dir, &out, &default);
    assert!(error.starts_with(&at(&file, "its metadata `hf.config`: config.json: `model_type`")), "{error}");
    let model = golden().join("llama_mha/model.safetensors");
    let text = "it has no tensor `….embedding.weight`: expected the parameters of a Gpt";
    assert_eq!(refused(&model, &out, &with("llama_mha")), at(&model, text));
    fs::write(&file, "no safetensors").unwrap();
    assert!(refused(&dir, &out, &default).contains("not a readable safetensors file"));
    // What fails after the model was written leaves nothing either.
    let parameters = place.path().join("parameters.safetensors");
    checkpoint::save_parameters(&parameters, &trained.model).unwrap();
    let fp8 = Some(QuantizeOptions { scheme: Scheme::Block128, ..Default::default() });
    let error = refused(&parameters, &out, &ExportOptions { fp8, ..with("llama_mha") });
    assert!(error.contains("no multiple of 128"), "{error}");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3, "something was left");
    let monitor = Monitor::default();
    monitor.stop();
    let error = hf::export(&parameters, &out, &with("llama_mha"), &monitor).unwrap_err().to_string();
    assert!(error.contains("the operation was stopped before its end"), "{error}");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine"), "x").unwrap();
    let error =
        hf::export(&parameters, &out, &with("llama_mha"), &Monitor::default()).unwrap_err().to_string();
    assert!(error.contains("it exists already"), "{error}");
}

#[test]
fn options_of_every_family_become_its_configuration() {
    for entry in fs::read_dir(golden().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        let config = Config::read(&path.join("config.json")).unwrap();
        let made = Config::from_gpt_options(&config.gpt_options()).unwrap();
        assert_eq!(made.family, config.family, "{}", path.display());
        assert_eq!(format!("{:?}", made.gpt_options()), format!("{:?}", config.gpt_options()));
        assert_eq!(made.tensors(), config.tensors());
    }
    let llama = Config::read(&golden().join("configs/llama_mha/config.json")).unwrap().gpt_options();
    let gpt2 = Config::read(&golden().join("configs/gpt2/config.json")).unwrap().gpt_options();
    let windows =
        |windows: [Option<usize>; 3]| GptOptions { sliding_windows: windows.to_vec(), ..llama.clone() };
    let norm = NormOptions { zero_centered_gamma: true, ..llama.layer.norm };
    for (options, problem) in [
        (
            GptOptions::default(),
            "norm = LayerNorm: expected RmsNorm: a Llama of Hugging Face has RmsNorm, Swiglu, RoPE and no bias",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions { activation: Activation::Gelu, ..llama.layer.clone() },
                ..llama.clone()
            },
            "activation = Gelu: expected Swiglu",
        ),
        (
            GptOptions { layer: TransformerLayerOptions { norm, ..llama.layer.clone() }, ..llama.clone() },
            "zero_centered_gamma = true: expected false",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions { qk_norm: Some(llama.layer.norm), ..llama.layer.attention },
                    qkv_bias: Some(true),
                    ..llama.layer.clone()
                },
                ..llama.clone()
            },
            "qk_norm = true with qkv_bias: expected one of the two",
        ),
        (
            windows([Some(3), Some(4), None]),
            "sliding_windows = [Some(3), Some(4), None]: expected one length",
        ),
        (
            windows([Some(3), Some(3), None]),
            "sliding_windows = [Some(3), Some(3), None]: expected one in all layers",
        ),
        (
            GptOptions { learned_positions: true, ..llama.clone() },
            "norm = RmsNorm: expected LayerNorm: a GPT-2 of",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions { num_gqa_groups: Some(2), ..gpt2.layer.attention },
                    ..gpt2.layer.clone()
                },
                ..gpt2.clone()
            },
            "num_gqa_groups = 2: expected 4",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions { kv_channels: Some(16), ..gpt2.layer.attention },
                    ..gpt2.layer.clone()
                },
                ..gpt2.clone()
            },
            "kv_channels = 16: expected 8",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions { qkv_bias: Some(false), ..gpt2.layer.clone() },
                ..gpt2.clone()
            },
            "qkv_bias = false: expected true",
        ),
        (
            GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions {
                        qk_norm: Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() }),
                        ..gpt2.layer.attention
                    },
                    ..gpt2.layer.clone()
                },
                ..gpt2
            },
            "qk_norm = true: expected false",
        ),
    ] {
        let error = Config::from_gpt_options(&options).unwrap_err().to_string();
        assert!(error.starts_with(&format!("hf::Config: {problem}")), "{error}");
    }
    let layer = llama.layer.clone();
    let of_heads = NormOptions { eps: 0.25, ..layer.norm };
    let attention = |attention: AttentionOptions| TransformerLayerOptions { attention, ..layer.clone() };
    for (layer, problem) in [
        (
            TransformerLayerOptions { parallel_attention_mlp: true, ..layer.clone() },
            "parallel_attention_mlp = true: expected false",
        ),
        (
            TransformerLayerOptions { output_layernorm: true, ..layer.clone() },
            "output_layernorm = true: expected false",
        ),
        (
            TransformerLayerOptions { apply_residual_connection_post_layernorm: true, ..layer.clone() },
            "apply_residual_connection_post_layernorm = true: expected false",
        ),
        (
            attention(AttentionOptions { softmax_scale: Some(0.5), ..layer.attention }),
            "softmax_scale = 0.5: expected none",
        ),
        (
            attention(AttentionOptions { window: (Some(3), None), ..layer.attention }),
            "window = (Some(3), None): expected none, and sliding_windows in its place",
        ),
        (
            attention(AttentionOptions { qk_norm: Some(of_heads), ..layer.attention }),
            "qk_norm = NormOptions { normalization: RmsNorm, eps: 0.25, zero_centered_gamma: false }: expected NormOptions",
        ),
    ] {
        let error = Config::from_gpt_options(&GptOptions { layer, ..llama.clone() }).unwrap_err().to_string();
        assert!(error.starts_with(&format!("hf::Config: {problem}")), "{error}");
    }
    let error = Config::from_gpt_options(&GptOptions {
        layer: TransformerLayerOptions {
            attention: AttentionOptions { num_attention_heads: 0, ..llama.layer.attention },
            ..llama.layer.clone()
        },
        ..llama
    })
    .unwrap_err();
    assert!(error.to_string().contains("num_attention_heads"), "{error}");
}
