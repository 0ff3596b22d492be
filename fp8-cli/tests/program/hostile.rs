//! Files that are made to break the program, and folders whose model it does not know.

use super::{printed, run};
use crate::folders::{change, copy, golden, read, write, write_raw};
use serde_json::{Value, json};
use std::fs;

#[test]
fn long_names_and_shapes_are_shortened() {
    let place = tempfile::tempdir().unwrap();
    let ones = vec!["1"; 22_000].join(", ");
    let header = format!(
        r#"{{"{}": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
            "b": {{"dtype": "F32", "shape": [{ones}], "data_offsets": [4, 8]}}}}"#,
        "a".repeat(65_536)
    );
    write_raw(&place.path().join("x.safetensors"), &header, &[0; 8]);
    let out = printed(place.path(), "inspect x.safetensors --report r.html");
    assert!(out.lines().all(|line| line.chars().count() < 400) && out.contains("aaa…aaa"), "{out}");
    assert!(fs::metadata(place.path().join("r.html")).unwrap().len() < 100_000);
    let value: Value = serde_json::from_str(&printed(place.path(), "inspect x.safetensors --json")).unwrap();
    let lengths: Vec<usize> = value["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tensor| tensor["name"].as_str().unwrap().len())
        .collect();
    assert!(lengths.contains(&65_536), "{lengths:?}");
}

#[test]
fn only_the_windows_that_are_needed_are_read() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_gqa_tied"), &place.path().join("model"));
    let path = place.path().join("ids.safetensors");
    let header =
        r#"{"input_ids": {"dtype": "I64", "shape": [8589934592, 16], "data_offsets": [0, 1099511627776]}}"#;
    write_raw(&path, header, &[]);
    let len = 8 + header.len() as u64 + (1 << 40);
    if fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).is_err() {
        std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no sparse file of 1 TiB here\n")
            .unwrap();
        return;
    }
    let out = printed(place.path(), "eval model --ids ids.safetensors --windows 2 --json");
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((value["windows"].as_u64(), value["predicted"].as_u64()), (Some(2), Some(30)));
}

#[test]
fn a_folder_whose_model_is_not_known_is_listed() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_gqa_tied"), &place.path().join("model"));
    crate::folders::shard(&place.path().join("model"), 3);
    let config = place.path().join("model/config.json");
    let count = printed(place.path(), "inspect model --json");
    let count = serde_json::from_str::<Value>(&count).unwrap()["tensors"].as_array().unwrap().len();
    for changes in [json!({"model_type": "mamba"}), json!({"quantization_config": {"quant_method": "gptq"}})]
    {
        let before = fs::read(&config).unwrap();
        change(&config, &changes);
        let out = printed(place.path(), "inspect model --report r.html");
        assert!(out.lines().next().unwrap().starts_with(&format!("model: {count} tensors, ")), "{out}");
        let note = out.lines().nth(1).unwrap();
        assert!(note.starts_with("this model is not supported, so its tensors are listed as stored: "));
        assert!(note.contains("config.json: `"), "{note}");
        assert!(fs::read_to_string(place.path().join("r.html")).unwrap().contains("is not supported"));
        let value: Value = serde_json::from_str(&printed(place.path(), "inspect model --json")).unwrap();
        assert!(value["note"].is_string() && value["family"].is_null());
        // A comparison needs both models.
        assert_eq!(run(place.path(), ["inspect", "model", "--against", "model"]).0, 2);
        fs::write(&config, before).unwrap();
    }
}

#[test]
fn an_original_without_fp8_is_named_and_nan_has_a_colour() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_gqa_tied"), &place.path().join("model"));
    let out = printed(place.path(), "inspect model --against model --report r.html");
    assert!(
        out.lines().nth(1).unwrap().starts_with("compared with model: there are no FP8 weights"),
        "{out}"
    );
    let page = fs::read_to_string(place.path().join("r.html")).unwrap();
    assert!(page.contains("compared with model") && !page.contains("with --against"));

    assert_eq!(run(place.path(), ["quantize", "model", "fp8", "--scheme", "tensor"]).0, 0);
    let file = place.path().join("fp8/model.safetensors");
    let mut all = read(&file);
    all.get_mut("model.layers.0.mlp.up_proj.weight").unwrap().2[0] = 0x7F;
    write(&file, &all);
    printed(place.path(), "inspect fp8 --against model --report r.html");
    let page = fs::read_to_string(place.path().join("r.html")).unwrap();
    assert!(page.contains("<b class=\"nan\" title=\"layer 0: NaN dB\">") && page.contains(".nan {"));
    assert!(!page.contains("sNaN"));
}

#[test]
fn values_of_scales_are_shown() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_bf16"), &place.path().join("model"));
    fs::write(place.path().join("text.txt"), "The sea is wide. ".repeat(20)).unwrap();
    let line = "quantize model fp8 --scheme tensor --calibrate text.txt";
    assert!(printed(place.path(), line).contains(" s of calibration\n"));
    let value: Value = serde_json::from_str(&printed(place.path(), "inspect fp8 --json")).unwrap();
    let first = &value["tensors"][0];
    let [scale, input] = ["scale_min", "input_scale"].map(|name| first[name].as_f64().unwrap());
    let line = printed(place.path(), "inspect fp8");
    let line = line.lines().find(|line| line.starts_with(first["name"].as_str().unwrap())).unwrap();
    let shown = line.split("tensor: ").nth(1).unwrap();
    let (shown_scale, rest) = shown.split_once("; input ").unwrap();
    let shown_input = rest.split_whitespace().next().unwrap();
    let is_near = |text: &str, value: f64| (text.parse::<f64>().unwrap() / value - 1.0).abs() < 1e-3;
    assert!(is_near(shown_scale, scale) && is_near(shown_input, input), "{line}");
}
