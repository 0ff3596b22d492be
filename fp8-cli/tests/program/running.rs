//! `fp8 eval`, `fp8 generate` and `fp8 quantize --calibrate`: models that run.

use super::{place, run};
use crate::folders::{copy, golden, read};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn done(folder: &Path, line: &str) -> (String, String) {
    let (code, out, error) = run(folder, line.split_whitespace());
    assert_eq!(code, 0, "{line}: {error}");
    (out, error)
}

fn json(folder: &Path, line: &str) -> Value {
    let (out, error) = done(folder, line);
    assert_eq!(error, "", "{line}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn the_loss_of_given_tokens_is_that_of_transformers() {
    for model in ["llama_gqa_tied", "qwen3"] {
        let place = tempfile::tempdir().unwrap();
        copy(&golden().join(model), &place.path().join("model"));
        let expected = &read(&place.path().join("model/expected.safetensors"))["loss"].2;
        let expected = f64::from(f32::from_le_bytes(expected[..].try_into().unwrap()));
        let value = json(place.path(), "eval model --ids model/expected.safetensors --json --losses out.csv");
        let loss = value["loss"].as_f64().unwrap();
        assert!((loss - expected).abs() <= 1e-6 * expected, "{model}: {loss}, expected {expected}");
        assert!((value["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9 * loss.exp());
        let losses = fs::read_to_string(place.path().join("out.csv")).unwrap();
        let rows: Vec<Vec<f64>> = losses
            .lines()
            .skip(1)
            .map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect())
            .collect();
        assert_eq!(value["predicted"].as_u64(), Some(rows.len() as u64));
        assert!(rows[0][..2] == [0.0, 1.0] && losses.starts_with("window,position,token,loss\n"));
        let mean = rows.iter().map(|row| row[3]).sum::<f64>() / rows.len() as f64;
        assert!((mean - loss).abs() < 1e-6);
    }
}

#[test]
fn a_text_is_evaluated_in_windows() {
    let place = place();
    let (out, _) = done(place.path(), "eval model --text text.txt --seq-length 100");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].starts_with("model: perplexity ") && lines[0].ends_with("(f32, recipe off, cpu)"),
        "{out}"
    );
    assert!(
        lines[1].contains(" tokens predicted in ") && lines[1].contains("of up to 100 tokens, "),
        "{out}"
    );

    // A folder with the text in two files, cut within a character.
    fs::create_dir(place.path().join("texts")).unwrap();
    let text = fs::read(place.path().join("text.txt")).unwrap();
    let cut = text.iter().position(|byte| !byte.is_ascii()).unwrap() + 1;
    fs::write(place.path().join("texts/a"), &text[..cut]).unwrap();
    fs::write(place.path().join("texts/b"), &text[cut..]).unwrap();
    let whole = json(place.path(), "eval model --text text.txt --seq-length 100 --json");
    let parts = json(place.path(), "eval model --text texts --seq-length 100 --json --threads 1");
    assert_eq!((&whole["loss"], &whole["tokens"]), (&parts["loss"], &parts["tokens"]));
    let (windows, tokens) = (whole["windows"].as_u64().unwrap(), whole["tokens"].as_u64().unwrap());
    assert_eq!((windows, whole["predicted"].as_u64().unwrap()), (tokens.div_ceil(100), tokens - windows));

    let two = json(place.path(), "eval model --text text.txt --windows 2 --json");
    assert_eq!((two["windows"].as_u64(), two["seq_length"].as_u64()), (Some(2), Some(256)));
    let losses: Vec<f64> = ["off", "current", "rowwise", "deepseek"]
        .map(|recipe| format!("eval model --text text.txt --windows 2 --json --recipe {recipe}"))
        .iter()
        .map(|line| json(place.path(), line)["loss"].as_f64().unwrap())
        .collect();
    for fp8 in &losses[1..] {
        assert!(*fp8 != losses[0] && (fp8 - losses[0]).abs() < 0.05 * losses[0], "{losses:?}");
    }
    let half = json(place.path(), "eval model --text text.txt --windows 2 --json --dtype bf16");
    assert!((half["loss"].as_f64().unwrap() - losses[0]).abs() < 0.02 * losses[0]);
}

#[test]
fn text_is_generated_and_streamed() {
    let place = place();
    let line = "generate model --prompt The --max-new-tokens 12";
    let value = json(place.path(), &format!("{line} --json"));
    let tokens: Vec<i64> =
        value["tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    assert!(tokens.len() == 12 || value["ended"] == true, "{value}");
    let (out, error) = done(place.path(), line);
    assert_eq!(
        out.trim_end_matches('\n'),
        format!("The{}", value["text"].as_str().unwrap()).trim_end_matches('\n')
    );
    assert!(error.contains(" after a prompt of ") && error.contains("tokens/s"), "{error}");

    let drawn = |seed: u32| {
        let options = "--temperature 1.5 --top-k 50 --top-p 0.95 --json";
        json(place.path(), &format!("{line} {options} --seed {seed}"))["tokens"].clone()
    };
    assert!(drawn(1) == drawn(1) && drawn(1) != drawn(2));
    // Without the option, the text may fill the model's longest sequence, 256 tokens.
    let prompt = "The sea is wide. ".repeat(12);
    let (code, out, error) = run(place.path(), ["generate", "model", "--json", "--prompt", &prompt]);
    assert_eq!(code, 0, "{error}");
    let value: Value = serde_json::from_str(&out).unwrap();
    let (read, added) =
        (value["prompt_tokens"].as_u64().unwrap(), value["tokens"].as_array().unwrap().len() as u64);
    assert!(read + added == 257 || added == 128 || value["ended"] == true, "{read} + {added}");
}

#[test]
fn static_inputs_are_calibrated() {
    let place = place();
    let line = "quantize model fp8 --scheme tensor --calibrate text.txt --calibration-tokens 64 --json";
    assert_eq!(json(place.path(), line)["static_inputs"], true);
    let file = read(&place.path().join("fp8/model.safetensors"));
    let scales = file.keys().filter(|name| name.ends_with(".input_scale"));
    assert_eq!(scales.count(), 14);
    let (out, _) = done(place.path(), "inspect fp8 --against model");
    assert!(out.lines().next().unwrap().contains("compressed-tensors, inputs static"), "{out}");
    let value = json(place.path(), "eval fp8 --text text.txt --windows 1 --json");
    assert!(value["loss"].as_f64().unwrap().is_finite());
}

#[test]
fn a_model_in_4_bits_is_written_inspected_evaluated_and_generates() {
    let place = place();
    let line = "quantize model fp4 --scheme nvfp4 --calibrate text.txt --calibration-tokens 64 --json";
    assert_eq!(json(place.path(), line)["scheme"], "nvfp4");
    let file = read(&place.path().join("fp4/model.safetensors"));
    for end in [".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"] {
        assert_eq!(file.keys().filter(|name| name.ends_with(end)).count(), 14, "{end}");
    }
    let (out, _) = done(place.path(), "quantize model a16 --scheme nvfp4a16");
    assert!(out.starts_with("a16: 14 matrices in NVFP4 (nvfp4a16), "), "{out}");
    let (out, _) = done(place.path(), "inspect fp4 --against model");
    assert!(out.lines().next().unwrap().contains("compressed-tensors, inputs in NVFP4"), "{out}");
    assert!(out.contains("F4") && out.contains("16 columns, "), "{out}");
    let found = json(place.path(), "inspect a16 --against model --json");
    let sqnr = found["sqnr_db"].as_f64().unwrap();
    assert!((17.0..24.0).contains(&sqnr), "{sqnr}");
    assert!(found["tensors"].as_array().unwrap().iter().any(|tensor| tensor["lost_blocks"] == 0));
    let loss = |model: &str, recipe: &str| {
        let line = format!("eval {model} --text text.txt --windows 2 --json{recipe}");
        json(place.path(), &line)["loss"].as_f64().unwrap()
    };
    let (high, a16, both) = (loss("model", ""), loss("a16", ""), loss("fp4", ""));
    assert_eq!(a16, loss("fp4", " --recipe off"), "the same weights");
    assert!(a16 != high && both != a16 && (both - high).abs() < 0.5, "{high} {a16} {both}");
    let text = |options: &str| json(place.path(), &format!("generate a16 --prompt The --json{options}"));
    assert_eq!(text("")["tokens"], text("")["tokens"]);
    // Codes and scales are what is in memory.
    let weights = |model: &str, options: &str| {
        json(place.path(), &format!("generate {model} --prompt The --json{options}"))["weight_bytes"]
            .as_u64()
            .unwrap()
    };
    let linears = file.iter().filter(|(name, _)| name.ends_with(".weight_packed"));
    let values: usize = linears.map(|(_, tensor)| 2 * tensor.2.len()).sum();
    let (f32s, fp4) = (weights("model", " --dtype f32"), weights("a16", " --dtype f32"));
    let saved = (f32s - fp4) as f64 / (4 * values) as f64;
    assert!((1.0 - 0.142..1.0 - 0.14).contains(&saved), "{saved} of {values} values");
    assert_eq!(weights("fp4", " --dtype f32"), fp4);
}

#[test]
fn a_prompt_that_is_too_long_is_refused() {
    let place = place();
    let prompt = "The sea is wide. ".repeat(100);
    let (code, out, error) = run(place.path(), ["generate", "model", "--prompt", &prompt]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(error.starts_with("error: --prompt: it has "), "{error}");
    assert!(error.ends_with(" tokens, and the model reads at most 256: shorten it\n"), "{error}");
}

#[test]
fn a_model_that_computes_nan_has_no_perplexity() {
    let place = place();
    let file = place.path().join("model/model.safetensors");
    let mut all = read(&file);
    all.get_mut("model.norm.weight").unwrap().2[..2].copy_from_slice(&[0xC0, 0x7F]);
    crate::folders::write(&file, &all);
    let (code, out, error) = run(place.path(), ["eval", "model", "--text", "text.txt"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(error.contains("look for non-finite weights with fp8 inspect model"), "{error}");
    for temperature in ["0", "1"] {
        let line = ["generate", "model", "--prompt", "The sea", "--temperature", temperature];
        let (code, out, error) = run(place.path(), line);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(
            error.starts_with("error: model: logits = NaN or -inf for every token of text 0: "),
            "{error}"
        );
    }
}

#[test]
fn a_model_with_scaled_positions_reads_its_extended_length() {
    let place = place();
    let path = place.path().join("model/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = 32.into();
    fs::write(&path, config.to_string()).unwrap();
    let line = ["eval", "model", "--text", "text.txt", "--seq-length", "128"];
    let (code, _, error) = run(place.path(), line);
    assert_eq!(code, 2);
    assert!(error.starts_with("error: --seq-length 128: expected 2 to 32, the longest sequence"), "{error}");
    config["rope_parameters"] = serde_json::json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0
    });
    fs::write(&path, config.to_string()).unwrap();
    let value = json(place.path(), "eval model --text text.txt --seq-length 128 --json");
    assert_eq!(value["seq_length"].as_u64(), Some(128));
}

#[test]
fn a_text_can_come_from_standard_input() {
    use std::process::Stdio;
    let place = place();
    let line = "eval model --text text.txt --json";
    let expected = json(place.path(), line)["loss"].clone();
    for (name, mark) in [("-", ""), ("/dev/stdin", ""), ("-", "\u{FEFF}")] {
        let text = fs::read_to_string(place.path().join("text.txt")).unwrap();
        fs::write(place.path().join("input.txt"), format!("{mark}{text}")).unwrap();
        let output = super::command(place.path())
            .args(["eval", "model", "--text", name, "--json"])
            .stdin(Stdio::from(fs::File::open(place.path().join("input.txt")).unwrap()))
            .output()
            .unwrap();
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["loss"], expected, "{name}");
    }
}

#[test]
fn a_byte_that_is_no_text_is_found_behind_a_byte_order_mark() {
    let place = place();
    fs::create_dir(place.path().join("texts")).unwrap();
    fs::write(place.path().join("texts/a.txt"), "\u{FEFF}fine").unwrap();
    fs::write(place.path().join("texts/b.txt"), b"\xEF\xBB\xBFab\xFFcd").unwrap();
    let (code, _, error) = run(place.path(), ["eval", "model", "--text", "texts"]);
    assert_eq!(code, 2);
    assert!(error.contains("texts/b.txt: not valid UTF-8 at byte 5: "), "{error}");
}

#[test]
fn the_arithmetic_is_described_in_few_words() {
    let place = place();
    done(place.path(), "quantize model fp8 --scheme channel --ignore layers.0");
    for (line, expected) in [
        ("eval model", "f32, recipe off, cpu"),
        ("eval model --recipe current", "f32, recipe current, cpu"),
        (
            "eval model --recipe delayed",
            "f32, recipe delayed without history (each tensor takes its own scale), cpu",
        ),
        (
            "eval model --recipe te-v0",
            "f32, recipe te-v0 without history (scale 1: it does not calibrate the first step), cpu",
        ),
        (
            "eval fp8",
            "f32, FP8 weights as stored, one scale per channel; inputs dynamic, by token; 7 projections not quantized, cpu",
        ),
        ("eval fp8 --recipe off", "f32, recipe off, weights dequantized, cpu"),
        ("eval fp8 --recipe deepseek", "f32, recipe deepseek, weights dequantized first, cpu"),
    ] {
        let value = json(place.path(), &format!("{line} --text text.txt --windows 1 --json"));
        assert_eq!(value["arithmetic"].as_str(), Some(expected), "{line}");
    }
}

/// Scale 1 and the scale of each tensor give different losses. The words follow what is computed, not the name of the recipe.
#[test]
fn a_recipe_that_does_not_calibrate_its_first_step_says_that_it_computes_with_scale_1() {
    let place = place();
    let files = [
        ("own.toml", "recipe = \"delayed\"\ncalibrate_first_step = false\n"),
        ("mixed.toml", "recipe = \"delayed\"\n[[slots]]\npattern = \"*.weight\"\nrecipe = \"te-v0\"\n"),
        ("calibrated.toml", "recipe = \"te-v0\"\ncalibrate_first_step = true\n"),
    ];
    for (name, text) in files {
        fs::write(place.path().join(name), text).unwrap();
    }
    let eval = |recipe: &str| {
        let value =
            json(place.path(), &format!("eval model --text text.txt --windows 1 --json --recipe {recipe}"));
        (value["loss"].as_f64().unwrap(), value["arithmetic"].as_str().unwrap().to_owned())
    };
    let [current, delayed, calibrated] = ["current", "delayed", "calibrated.toml"].map(eval);
    assert_eq!(current.0, delayed.0);
    assert!(delayed.1.contains("(each tensor takes its own scale)"), "{delayed:?}");
    assert!(
        calibrated.1.contains("calibrated.toml without history (each tensor takes its own scale)"),
        "{calibrated:?}"
    );
    let [one, own, mixed] = ["te-v0", "own.toml", "mixed.toml"].map(eval);
    // In forward, both have E4M3.
    assert_eq!(own.0, one.0);
    assert!([current.0, calibrated.0, mixed.0].iter().all(|&loss| loss != one.0) && mixed.0 != current.0);
    assert!(
        own.1.contains("own.toml without history (scale 1: it does not calibrate the first step)"),
        "{own:?}"
    );
    let both = "without history (scale 1 where the first step is not calibrated, else each tensor takes its own scale)";
    assert!(mixed.1.contains(both), "{mixed:?}");

    let line = "generate model --prompt The --max-new-tokens 2 --recipe te-v0";
    let (_, error) = done(place.path(), line);
    assert!(error.contains("without history (scale 1: it does not calibrate the first step)"), "{error}");
}
