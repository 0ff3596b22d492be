//! The output of the program when it succeeds: what it prints and what it writes.

use super::{listing, printed};
use crate::folders::{copy, golden, tensors};
use serde_json::Value;
use std::fs;

#[test]
fn a_model_is_quantized_and_inspected() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_bf16"), &place.path().join("model"));
    let out = printed(place.path(), "quantize model fp8 --scheme channel --ignore layers.0.mlp");
    assert!(out.starts_with("fp8: 11 matrices in FP8 (channel), "), "{out}");
    assert!(out.contains("4 layers stay as they are: model.layers.0.mlp.gate_proj, "), "{out}");
    assert!(out.ends_with("what it lost: fp8 inspect fp8 --against model\n"), "{out}");
    assert!(place.path().join("fp8/tokenizer.json").exists());

    let out = printed(place.path(), "inspect fp8 --against model --report report.html");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].starts_with("fp8: 20 tensors, plus 11 with scales, ")
            && lines[0].contains("llama; compressed-tensors, inputs dynamic, by token")
    );
    assert!(lines[1].starts_with("SQNR of the FP8 weights against model: 3"), "{out}");
    assert!(lines[3].starts_with("tensor ") && lines[3].ends_with("SQNR dB"), "{out}");
    assert!(lines[4].contains("F8_E4M3") && lines.last().unwrap().ends_with("exact"), "{out}");
    let one = printed(place.path(), "inspect fp8 --against model --threads 1");
    assert_eq!(one, out, "the result depends on the threads");
    let page = fs::read_to_string(place.path().join("report.html")).unwrap();
    assert!(page.contains("model.layers.1.mlp.down_proj") && page.contains("SQNR by layer"));
    let names: Vec<String> = fs::read_dir(place.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn json_has_the_numbers() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_mha"), &place.path().join("model"));
    let line = "quantize model fp8 --scheme block128 --allow-ragged --threads 1 --json";
    let value: Value = serde_json::from_str(&printed(place.path(), line)).unwrap();
    assert_eq!((value["matrices"].as_u64(), value["scheme"].as_str()), (Some(21), Some("block128")));
    assert_eq!(value["ragged"].as_array().map(Vec::len), Some(21));
    let bytes: usize = tensors(&place.path().join("fp8")).values().map(|tensor| tensor.2.len()).sum();
    assert_eq!(value["bytes_after"].as_u64(), Some(bytes as u64));

    let value: Value =
        serde_json::from_str(&printed(place.path(), "inspect fp8 --against model --json")).unwrap();
    let worst = &value["tensors"][0];
    assert_eq!(
        (worst["dtype"].as_str(), worst["granularity"].as_str()),
        (Some("F8_E4M3"), Some("block 128×128"))
    );
    assert!(worst["sqnr_db"].as_f64().is_some_and(|sqnr| (20.0..40.0).contains(&sqnr)), "{worst}");
    assert_eq!(value["bytes"].as_u64(), Some(bytes as u64));
    assert_eq!(value["missing"].as_array().map(Vec::len), Some(0));
    let last = value["tensors"].as_array().unwrap().last().unwrap();
    assert_eq!((last["exact"].as_bool(), last["sqnr_db"].as_f64()), (Some(true), None));

    let value: Value =
        serde_json::from_str(&printed(place.path(), "inspect model/model.safetensors --json")).unwrap();
    assert_eq!((value["tensors"].as_array().map(Vec::len), value["family"].as_str()), (Some(30), None));
}

#[test]
fn groups_that_vllm_wants_whole_are_named() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_mha"), &place.path().join("model"));
    let line = "quantize model fp8 --scheme channel --ignore layers.1.self_attn.k_proj";
    let out = printed(place.path(), line);
    let names = ["q", "k", "v"].map(|name| format!("model.layers.1.self_attn.{name}_proj")).join(", ");
    let sentence = format!("vLLM will not load this folder: only some of {names} are quantized\n");
    assert!(out.contains(&sentence), "{out}");
    fs::remove_dir_all(place.path().join("fp8")).unwrap();
    let value: Value = serde_json::from_str(&printed(place.path(), &format!("{line} --json"))).unwrap();
    assert_eq!(value["split_groups"][0].as_array().map(Vec::len), Some(3));
}

#[test]
fn a_checkpoint_is_exported_and_inspected() {
    use crate::trained::{Trained, config_of};
    use fp8_nn::prelude::{DType, DelayedScaling};
    let place = tempfile::tempdir().unwrap();
    let mut trained = Trained::new(&golden().join("llama_bf16"), DType::BF16);
    let ids = crate::trained::ids(&golden().join("llama_bf16"));
    trained.train(&DelayedScaling::default().into(), &ids);
    trained.save(&place.path().join("run"), &[config_of("llama_bf16").metadata()].into());
    let out = printed(place.path(), "export run model");
    assert!(out.starts_with("model: llama, 2 layers, ") && out.ends_with("fp8 inspect model\n"), "{out}");
    let out = printed(place.path(), "inspect model");
    assert!(out.starts_with("model: 20 tensors, ") && !out.contains("F8_E4M3"), "{out}");

    copy(&golden().join("llama_bf16"), &place.path().join("source"));
    let line = "export run fp8 --config source --scheme vllm --static-inputs --dtype f32";
    let out = printed(place.path(), line);
    assert!(out.starts_with("fp8: llama, 2 layers, 14 matrices in FP8 (vllm, inputs static), "), "{out}");
    assert!(place.path().join("fp8/tokenizer.json").is_file());
    let out = printed(place.path(), "inspect fp8 --against model");
    assert!(out.contains("llama; fp8, inputs static") && out.contains("F8_E4M3"), "{out}");

    let line =
        "export run json --config source/config.json --scheme channel --ignore down_proj --threads 1 --json";
    let value: Value = serde_json::from_str(&printed(place.path(), line)).unwrap();
    assert_eq!((value["matrices"].as_u64(), value["family"].as_str()), (Some(12), Some("llama")));
    assert!(!place.path().join("json/tokenizer.json").exists());
}

#[test]
fn help_is_printed_and_a_closed_pipe_is_no_error() {
    let place = tempfile::tempdir().unwrap();
    for command in ["inspect", "quantize", "eval", "generate", "export", "merge"] {
        let out = printed(place.path(), &format!("{command} --help"));
        assert!(out.contains(&format!("Usage: fp8 {command}")), "{out}");
    }
    for line in ["--help", "--version"] {
        let out = printed(place.path(), line);
        assert!(out.starts_with("fp8 ") || out.contains("Usage: fp8"), "{out}");
    }
    let model = golden().join("llama_mha");
    let mut child = super::command(place.path())
        .arg("inspect")
        .arg(model)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert!(listing(place.path()).is_empty());
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    use std::process::Stdio;
    let place = tempfile::tempdir().unwrap();
    let Ok(full) = fs::File::create("/dev/full") else { return };
    let model = golden().join("llama_bf16");
    let run = |args: &[&str], out: Stdio| {
        let mut command = super::command(place.path());
        command.arg(args[0]).arg(&model).args(&args[1..]).stdout(out).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for args in [&["inspect", "--json"][..], &["generate", "--prompt", "- the sea", "--max-new-tokens", "1"]]
    {
        let (code, error) = run(args, full.try_clone().unwrap().into());
        assert!(code == Some(1) && error.starts_with("error: stdout: "), "{args:?}: {error}");
    }
    // A reader that has enough ends the generation, which is no error.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (code, error) = run(&["generate", "--prompt", "the sea", "--max-new-tokens", "200"], writer.into());
    assert!(code == Some(0) && !error.contains("200 tokens"), "{error}");
}
