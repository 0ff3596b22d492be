//! `fp8 train --tp`: processes that share the layers of a model.

use super::data_parallel::steps;
use super::fine_tuning::{losses, place as of_three_heads};
use super::run;
use fp8_hf::{Config, save_model};
use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use std::fs;
use std::path::Path;

const SMALL: &str = "train --layers 1 --hidden 32 --heads 4 --batch 4 --seq 16 --quiet";
/// Numbers of processes, and their layouts.
const LAYOUTS: [(usize, &str, &str); 4] = [
    (2, "--tp 2", "dp 1, tp 2"),
    (2, "--tp 2 --sequence-parallel", "dp 1, tp 2, sequence parallel"),
    (4, "--dp 2 --tp 2 --sequence-parallel", "dp 2, tp 2, sequence parallel"),
    (4, "--tp 2", "dp 2, tp 2"),
];

/// A folder with `chat.jsonl`, a `model` whose layers two and four processes can share, and `odd`, whose layers they cannot.
fn place() -> tempfile::TempDir {
    let place = of_three_heads();
    let [model, odd] = ["model", "odd"].map(|name| place.path().join(name));
    fs::rename(&model, &odd).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(odd.join("config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", 64),
        ("intermediate_size", 128),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 8),
    ] {
        config[key] = value.into();
    }
    let config = Config::from_json(&config.to_string()).unwrap();
    let mut rng = StdRng::seed_from_u64(1);
    let gpt = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut rng).unwrap();
    save_model(&model, &config, &gpt, None).unwrap();
    for entry in fs::read_dir(&odd).unwrap() {
        let path = entry.unwrap().path();
        let copy = model.join(path.file_name().unwrap());
        if !copy.exists() {
            fs::copy(&path, &copy).unwrap();
        }
    }
    place
}

fn succeeds(folder: &Path, line: &str) -> String {
    let (code, out, error) = run(folder, line.split_whitespace());
    assert_eq!((code, &*error), (0, ""), "{line}");
    out
}

#[test]
fn processes_that_share_layers_train_as_one() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    for (model, dropout) in [("gpt", "0"), ("llama", "0.1")] {
        let small = format!("{SMALL} --steps 4 --model {model} --dropout {dropout}");
        succeeds(folder, &format!("{small} --report-dir {model}"));
        let alone = steps(&folder.join(model));
        // With dropout, one layout whose processes draw the same masks, and one whose replicas do not.
        let layouts = if dropout == "0" { &LAYOUTS[..] } else { &LAYOUTS[1..3] };
        for (index, &(processes, layout, name)) in layouts.iter().enumerate() {
            let report = format!("{model}-{index}");
            let out = succeeds(
                folder,
                &format!("launch -n {processes} -- fp8 {small} {layout} --report-dir {report}"),
            );
            assert_eq!(out.matches("report.html").count(), 1, "{out}");
            assert!(out.contains("No sample: processes that share the layers"), "{out}");
            let found = steps(&folder.join(&report));
            assert_eq!(found.len(), 8);
            // Replicas draw masks of their own.
            let is_alike = dropout == "0" || !name.starts_with("dp 2");
            for (number, (line, expected)) in found.iter().zip(&alone).enumerate().filter(|_| is_alike) {
                let tolerance = if number < 4 { 1e-4 } else { 3e-2 };
                for (found, expected) in line.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() <= tolerance * expected,
                        "{report}: {line:?}, {alone:?}"
                    );
                }
            }
            let summary = fs::read_to_string(folder.join(&report).join("summary.json")).unwrap();
            let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
            assert_eq!(summary["layout"], name);
            assert_eq!(summary["ranks"].as_array().unwrap().len(), processes);
            let html = fs::read_to_string(folder.join(&report).join("report.html")).unwrap();
            assert!(html.contains(&format!("<td>{name}</td>")) && html.contains(">--tp<"));
        }
    }
}

/// The report says where values are gathered in place of codes.
#[test]
fn reports_name_what_is_gathered_in_high_precision() {
    let place = tempfile::tempdir().unwrap();
    let gathered = |recipe: &str| {
        let layout = "--tp 2 --sequence-parallel";
        let line = format!("{SMALL} --steps 2 --recipe {recipe} {layout} --report-dir {recipe}");
        succeeds(place.path(), &format!("launch -n 2 -- fp8 {line}"));
        let summary = fs::read_to_string(place.path().join(recipe).join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let html = fs::read_to_string(place.path().join(recipe).join("report.html")).unwrap();
        (summary["gathered_in_high_precision"].clone(), html)
    };
    let (tensors, html) = gathered("rowwise");
    let again = "gpt.blocks.0.attention.qkv.input (for its weight gradient)";
    assert!(tensors.as_array().unwrap().contains(&again.into()), "{tensors}");
    assert!(html.contains("<th>gathered in high precision</th><td>4 tensors, such as "), "{html}");
    let (tensors, html) = gathered("delayed");
    assert!(tensors == serde_json::json!([]) && !html.contains("gathered in high precision"), "{tensors}");
}

#[test]
fn a_small_training_goes_on_in_another_layout() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    succeeds(folder, &format!("{SMALL} --steps 6 --recipe none --report-dir whole"));
    let whole = steps(&folder.join("whole"));
    let half = format!("{SMALL} --steps 6 --recipe none --stop-after 3");
    succeeds(
        folder,
        &format!("launch -n 2 -- fp8 {half} --tp 2 --sequence-parallel --save two --report-dir a"),
    );
    succeeds(folder, &format!("{half} --save one --report-dir b"));
    for (saved, line) in [
        ("two", "train"),
        ("two", "launch -n 4 -- fp8 train --tp 4"),
        ("one", "launch -n 4 -- fp8 train --dp 2 --tp 2 --sequence-parallel"),
    ] {
        succeeds(folder, &format!("{line} --quiet --resume {saved} --report-dir rest"));
        for (found, expected) in steps(&folder.join("rest")).iter().zip(&whole[3..]) {
            assert!((found[1] - expected[1]).abs() <= 1e-5 * expected[1], "{line}: {found:?}, {expected:?}");
        }
    }
}

#[test]
fn fine_tunings_share_layers_whole_and_by_adapters() {
    let place = place();
    let folder = place.path();
    let options = "model --data chat.jsonl --validation 0.2 --epochs 4 --no-pack --batch 4 --lr 1e-3 --quiet";
    for (kind, more) in [("whole", "--recipe none"), ("lora", "--recipe none --lora 4"), ("fp8", "--lora 4")]
    {
        let options = format!("{options} {more}");
        succeeds(folder, &format!("train {options} --out {kind}"));
        let alone = losses(&folder.join(kind));
        let layouts = if kind == "whole" { &LAYOUTS[1..] } else { &LAYOUTS[2..3] };
        for (index, &(processes, layout, name)) in layouts.iter().enumerate() {
            let out = format!("{kind}-{index}");
            let printed = succeeds(
                folder,
                &format!("launch -n {processes} -- fp8 train {options} {layout} --out {out}"),
            );
            assert_eq!(printed.matches("report.html").count(), 1, "{printed}");
            let found = losses(&folder.join(&out));
            assert_eq!(found.len(), alone.len());
            let tolerance = if kind == "fp8" { 1e-2 } else { 1e-5 };
            for (found, expected) in found.iter().zip(&alone) {
                assert!((found / expected - 1.0).abs() < tolerance, "{out}: {found} {expected}");
            }
            let log = fs::read_to_string(folder.join(&out).join("log.jsonl")).unwrap();
            assert_eq!(log.matches(&format!("\"layout\":\"{name}\"")).count(), alone.len());
            let html = fs::read_to_string(folder.join(&out).join("report.html")).unwrap();
            assert!(html.contains(&format!("ranks: {name}")), "{out}");
            let result = folder.join(&out).join("final");
            let file = if kind == "whole" { "model.safetensors" } else { "adapter_model.safetensors" };
            assert_eq!(
                fs::metadata(result.join(file)).unwrap().len(),
                fs::metadata(folder.join(kind).join("final").join(file)).unwrap().len()
            );
        }
    }
    // The model in FP8, which one process quantizes.
    let line = format!("launch -n 2 -- fp8 train {options} --tp 2 --export channel --out exported");
    succeeds(folder, &line);
    let printed = succeeds(folder, "inspect exported/final --json");
    assert!(printed.contains("F8_E4M3"), "{printed}");
}

#[test]
fn a_run_goes_on_in_the_layout_that_is_given() {
    let place = place();
    let folder = place.path();
    let options = "model --data chat.jsonl --epochs 4 --no-pack --batch 4 --lr 1e-3 --recipe none --quiet";
    succeeds(folder, &format!("train {options} --out whole"));
    succeeds(
        folder,
        &format!(
            "launch -n 2 -- fp8 train {options} --tp 2 --sequence-parallel --checkpoint-every 3 --out run"
        ),
    );
    // As if it had been killed behind its third step.
    fs::remove_dir_all(folder.join("run/checkpoints/step-00000008")).unwrap();
    fs::remove_dir_all(folder.join("run/checkpoints/step-00000006")).unwrap_or_default();
    fs::remove_dir_all(folder.join("run/final")).unwrap();
    let config = fs::read_to_string(folder.join("run/config.toml")).unwrap();
    assert!(config.contains("tp = 2\n") && config.contains("sequence-parallel = true\n"), "{config}");
    let whole = losses(&folder.join("whole"));
    for line in ["train --resume run --tp 1 --quiet", "launch -n 4 -- fp8 train --resume run --tp 4 --quiet"]
    {
        succeeds(folder, line);
        let found = losses(&folder.join("run"));
        assert_eq!(found.len(), whole.len());
        for (found, expected) in found.iter().zip(&whole) {
            assert!((found / expected - 1.0).abs() < 1e-5, "{line}: {found} {expected}");
        }
    }
    // It knows its own layout.
    let (code, _, error) = run(folder, ["train", "--resume", "run", "--quiet"]);
    assert_eq!(code, 2);
    let expected =
        "--tp 2: this is the only process: fp8 launch -n 2 -- fp8 train --tp 2 starts 2 on this machine";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn plans_say_the_layout_and_the_memory_of_a_rank() {
    let place = place();
    let memory = |line: &str| {
        let out = succeeds(place.path(), line);
        let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
        (plan["memory_bytes"].as_u64().unwrap(), plan["trained"].clone(), plan["layout"].clone())
    };
    let options = "train model --data chat.jsonl --dry-run --json";
    let (one, trained, layout) = memory(options);
    assert!(layout.is_null());
    // Each process has its output behind its rank.
    let out = succeeds(place.path(), &format!("launch -n 2 -- fp8 {options} --tp 2 --sequence-parallel"));
    let plan: serde_json::Value = serde_json::from_str(out.strip_prefix("[0] ").unwrap()).unwrap();
    assert_eq!((&plan["trained"], &plan["layout"]), (&trained, &"dp 1, tp 2, sequence parallel".into()));
    let share = plan["memory_bytes"].as_u64().unwrap() as f64 / one as f64;
    assert!((0.45..0.6).contains(&share), "{share}");
}

#[test]
fn mistakes_with_layouts_are_named() {
    let place = place();
    for (line, sentence) in [
        (
            "train --tp 2",
            "--tp 2: this is the only process: fp8 launch -n 2 -- fp8 train --tp 2 starts 2 on this machine",
        ),
        (
            "train --sequence-parallel",
            "--sequence-parallel shares tokens among the processes that --tp N divides layers among",
        ),
        (
            "train --tp 2 --fp8-weights",
            "--fp8-weights stores whole weights in FP8, and --tp gives each process a part",
        ),
        (
            "train model --data chat.jsonl --out run --tp 2 --fp8-weights",
            "--fp8-weights stores whole weights in FP8",
        ),
        ("train --tp 2 --compare all", "--tp cannot be used with --compare: leave it out"),
        ("launch -n 3 -- fp8 train --tp 2", "--tp 2: 3 processes were started: expected a multiple of 2"),
        ("launch -n 3 -- fp8 train --dp 2 --tp 2", "--dp 2 --tp 2: 3 processes were started: expected 4"),
        (
            "launch -n 4 -- fp8 train --tp 2 --batch 5",
            "--batch 5 is not divisible by --dp 2; --batch 6 would be",
        ),
        (
            "launch -n 2 -- fp8 train --tp 2 --sequence-parallel --seq 15",
            "--seq 15 is not divisible by --tp 2, among which --sequence-parallel shares the tokens; --seq 16 would be",
        ),
        (
            "launch -n 3 -- fp8 train --tp 3",
            "num_attention_heads = 4: 3 ranks of tensor parallelism cannot share it evenly: expected a multiple of 3, or 1, 2, 4 ranks",
        ),
        (
            "launch -n 2 -- fp8 train odd --data chat.jsonl --out run --tp 2",
            "2 ranks of tensor parallelism cannot share it evenly",
        ),
    ] {
        let (code, _, error) = run(place.path(), line.split_whitespace());
        assert_eq!(code, 2, "{line}: {error}");
        assert!(error.contains(sentence), "{line}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn processes_share_layers_on_the_simulated_gpu() {
    let (place, gpu) = (place(), super::data_parallel::simulated_gpu());
    let train = |line: &str| {
        let output = super::command(place.path())
            .args(line.split_whitespace())
            .env("FP8_CUDA_LIB_DIR", gpu.path())
            .env("FP8_SIM_NCCL_SHARED", "1") // there is one GPU
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let options = "model --data chat.jsonl --epochs 1 --no-pack --batch 4 --lr 1e-3 --recipe none --quiet";
    train(&format!("train {options} --out cpu"));
    let layout = "--tp 2 --sequence-parallel --device cuda:0";
    train(&format!("launch -n 2 -- fp8 train {options} {layout} --out gpu"));
    let (cpu, gpu) = (losses(&place.path().join("cpu")), losses(&place.path().join("gpu")));
    assert_eq!(cpu.len(), gpu.len());
    for (found, expected) in gpu.iter().zip(&cpu) {
        assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
    }
    let [cpu, gpu] = ["cpu", "gpu"].map(|run| place.path().join(run).join("final/model.safetensors"));
    assert_eq!(fs::metadata(cpu).unwrap().len(), fs::metadata(gpu).unwrap().len());
}
