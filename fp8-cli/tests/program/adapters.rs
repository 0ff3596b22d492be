//! Adapters: a model with one beside its weights, merged, and 29 folders that are refused.

use super::{listing, printed, run};
use crate::folders::{copy, golden, write_raw};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn lora() -> PathBuf {
    golden().join("../train/lora")
}

/// A folder with `base`, `adapter` and `ids.safetensors`.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    copy(&lora().join("base_llama"), &place.path().join("base"));
    copy(&lora().join("llama_patterns/adapter"), &place.path().join("adapter"));
    let ids: Vec<u8> = (0..2 * 12).flat_map(|id: i64| (id * 7 % 90).to_le_bytes()).collect();
    let header = format!(
        r#"{{"input_ids": {{"dtype": "I64", "shape": [2, 12], "data_offsets": [0, {}]}}}}"#,
        ids.len()
    );
    write_raw(&place.path().join("ids.safetensors"), &header, &ids);
    place
}

fn loss(folder: &Path, line: &str) -> f64 {
    let out = printed(folder, &format!("eval {line} --ids ids.safetensors --json"));
    let value: Value = serde_json::from_str(&out).unwrap();
    value["loss"].as_f64().unwrap()
}

#[test]
fn a_merged_model_is_the_model_with_the_adapter() {
    let place = place();
    let place = place.path();
    let [base, adapted] = ["base", "base --adapter adapter"].map(|line| loss(place, line));
    assert!((base - adapted).abs() > 1e-3, "{base} and {adapted}");
    let out = printed(place, "merge base adapter merged");
    assert!(out.starts_with("merged: 8 projections with an adapter of "), "{out}");
    assert!(out.ends_with("what changed: fp8 inspect merged --against base\n"), "{out}");
    let merged = loss(place, "merged");
    assert!((merged - adapted).abs() < 1e-6 * adapted, "{merged} and {adapted}");
    let value: Value =
        serde_json::from_str(&printed(place, "merge base adapter json --json --threads 1")).unwrap();
    assert_eq!((value["modules"].as_u64(), value["output"].as_str()), (Some(8), Some("json")));
    assert_eq!(
        fs::read(place.join("merged/model.safetensors")).unwrap(),
        fs::read(place.join("json/model.safetensors")).unwrap()
    );
    // An FP8 model with the adapter beside its codes.
    printed(place, "quantize base fp8 --scheme channel");
    let [codes, with_adapter] = ["fp8", "fp8 --adapter adapter"].map(|line| loss(place, line));
    assert!((with_adapter - adapted).abs() < (codes - adapted).abs(), "{codes}, {with_adapter}, {adapted}");
    // The sums in FP8, and what that left of the adapter.
    for (base, scheme) in [("base", "channel"), ("fp8", "tensor")] {
        let line = format!("merge {base} adapter {base}-merged-fp8 --scheme {scheme}");
        let out = printed(place, &line);
        assert!(out.contains(" % of the update survives in FP8, beside rounding of "), "{out}");
        let line = format!("merge {base} adapter {base}-json --scheme {scheme} --json");
        let value: Value = serde_json::from_str(&printed(place, &line)).unwrap();
        let kept = value["update_kept"].as_f64().unwrap();
        assert!((kept - 1.0).abs() < 0.2 && value["update_noise"].as_f64().unwrap() > 0.0, "{value}");
        let merged = loss(place, &format!("{base}-merged-fp8"));
        assert!((merged - adapted).abs() < 0.02 * adapted, "{merged} and {adapted}");
    }
    // Merged, it is no longer FP8, and the same model.
    printed(place, "merge fp8 adapter merged-fp8");
    let merged = loss(place, "merged-fp8");
    printed(place, "merge base adapter merged-bf16 --dtype bf16");
    let bf16 = loss(place, "merged-bf16");
    assert!((merged - adapted).abs() < 0.01 * adapted && merged != adapted, "{merged} and {adapted}");
    assert!((bf16 - adapted).abs() < 0.01 * adapted && bf16 != adapted, "{bf16} and {adapted}");
    let out = printed(place, "eval fp8 --adapter adapter --ids ids.safetensors");
    assert!(out.contains(", adapter adapter, cpu"), "{out}");
}

/// Windows of a file of tokens are those of a safetensors file.
#[test]
fn a_file_of_tokens_is_evaluated() {
    let place = place();
    let place = place.path();
    let bytes: Vec<u8> = (0..2 * 12).flat_map(|id: u16| (id * 7 % 90).to_le_bytes()).collect();
    fs::write(place.join("tokens.bin"), &bytes).unwrap();
    // A token that is left over is no window.
    fs::write(place.join("more.bin"), [&bytes[..], &[1, 0]].concat()).unwrap();
    let expected = loss(place, "base");
    for line in [
        "--ids tokens.bin --seq-length 12",
        "--ids more.bin --seq-length 12",
        "--ids more.bin --seq-length 12 --windows 2",
    ] {
        let value: Value =
            serde_json::from_str(&printed(place, &format!("eval base {line} --json"))).unwrap();
        assert_eq!((value["loss"].as_f64(), value["windows"].as_u64()), (Some(expected), Some(2)), "{line}");
    }
}

#[test]
fn mistakes_get_a_sentence_and_nothing_is_written() {
    let place = place();
    let place = place.path();
    printed(place, "quantize base fp8 --scheme channel");
    let before = listing(place);
    for (line, sentence) in [
        ("merge base", "<ADAPTER>, <OUTPUT> are missing"),
        ("merge base nothing out", "nothing: expected the folder of a LoRA adapter"),
        ("merge base base out", "adapter_config.json: not found: expected a folder with an adapter"),
        ("merge adapter base out", "adapter/config.json"),
        ("merge base adapter base", "exists"),
        ("merge base adapter out --dtype f64", "--dtype"),
        ("merge base adapter missing/out", "does not exist"),
        (
            "eval base --adapter nothing --ids ids.safetensors",
            "--adapter nothing: expected the folder of a LoRA adapter",
        ),
    ] {
        let (code, out, error) = run(place, line.split_whitespace());
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {error}");
        assert!(error.contains(sentence) && error.trim_end().lines().count() == 1, "{line}: {error}");
    }
    assert!(listing(place) == before);
}

#[test]
fn folders_that_are_no_adapter_of_linears_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path();
    let refuse = lora().join("refuse");
    let cases: Value = serde_json::from_str(&fs::read_to_string(refuse.join("cases.json")).unwrap()).unwrap();
    for base in ["base_llama", "base_qwen3", "base_qwen2_bf16"] {
        copy(&lora().join(base), &place.join(base));
    }
    for case in cases.as_array().unwrap() {
        let folder = case["folder"].as_str().unwrap();
        copy(&refuse.join(folder), &place.join(folder));
    }
    let before = listing(place);
    for case in cases.as_array().unwrap() {
        let [folder, base] = ["folder", "base"].map(|key| case[key].as_str().unwrap());
        let line = format!("merge {base} {folder} out");
        let (code, out, error) = run(place, line.split_whitespace());
        assert_eq!((code, out.as_str()), (2, ""), "{folder}: {error}");
        assert!(error.trim_end().lines().count() == 1, "{folder}: {error}");
        for name in case["names"].as_array().unwrap() {
            assert!(error.contains(name.as_str().unwrap()), "{folder}: {error}");
        }
    }
    assert!(listing(place) == before);
}
