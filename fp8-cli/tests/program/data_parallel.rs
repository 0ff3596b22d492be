//! `fp8 train --dp`: several processes train one model, and end together.
#![cfg(unix)]

use super::{command, run};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SMALL: &str = "train --layers 1 --hidden 32 --heads 2 --batch 4 --seq 16 --sample 0 --quiet";

fn trained(folder: &Path, ranks: usize, more: &str) -> (i32, String, String) {
    let line = match ranks {
        1 => format!("{SMALL} {more}"),
        _ => format!("launch -n {ranks} -- fp8 {SMALL} --dp {ranks} {more}"),
    };
    run(folder, line.split_whitespace())
}

/// Losses, norms and rates of steps.csv: all but the milliseconds.
pub(crate) fn steps(folder: &Path) -> Vec<Vec<f64>> {
    let text = fs::read_to_string(folder.join("steps.csv")).unwrap();
    let line = |line: &str| {
        let cells: Vec<f64> = line.split(',').skip(1).map(|cell| cell.parse().unwrap_or(0.0)).collect();
        cells.iter().enumerate().filter(|(column, _)| *column != 4).map(|(_, cell)| *cell).collect()
    };
    text.lines().skip(1).map(line).collect()
}

#[test]
fn processes_train_as_one() {
    let place = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 4] {
        let (code, out, error) = trained(place.path(), ranks, &format!("--steps 6 --report-dir {ranks}"));
        assert_eq!((code, &*error), (0, ""));
        // One of them reports.
        assert_eq!(out.matches("report.html").count(), 1, "{out}");
    }
    let alone = steps(&place.path().join("1"));
    assert_eq!(alone.len(), 12);
    for ranks in ["2", "4"] {
        for (line, expected) in steps(&place.path().join(ranks)).iter().zip(&alone) {
            for (found, expected) in line.iter().zip(expected) {
                assert!((found - expected).abs() <= 3e-2 * expected, "{ranks}: {line:?}, {alone:?}");
            }
        }
    }
    let report = |ranks: &str| fs::read_to_string(place.path().join(ranks).join("report.html")).unwrap();
    assert!(report("2").contains(">--dp<") && !report("1").contains(">--dp<"));
    assert!(report("4").contains("<tr><th>3</th>") && !report("1").contains("<h2>Ranks"));
    for (folder, sent_by_each) in [("1", None), ("2", Some(1.0)), ("4", Some(1.5))] {
        let summary = fs::read_to_string(place.path().join(folder).join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let ranks = summary["ranks"].as_array().unwrap();
        let Some(factor) = sent_by_each else {
            assert!(ranks.is_empty());
            continue;
        };
        assert_eq!(ranks.len().to_string(), folder);
        let gradients = 4.0 * summary["params"].as_f64().unwrap();
        for (index, rank) in ranks.iter().enumerate() {
            assert_eq!(rank["rank"], index);
            for run in ["high_precision", "fp8"] {
                assert!(rank["median_step_ms"][run].as_f64().unwrap() > 0.0, "{rank}");
                assert!(rank["peak_memory_bytes"][run].as_f64().unwrap() > 2.0 * gradients, "{rank}");
                // Gradients, and a little for the loss, amaxes and Ctrl-C.
                let sent = rank["bytes_sent_per_step"][run].as_f64().unwrap() / (factor * gradients);
                assert!((1.0..1.05).contains(&sent), "{rank}: {sent}");
            }
        }
    }
}

/// A folder with the simulated GPU under the names of NVIDIA's libraries.
pub(crate) fn simulated_gpu() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let library = fp8_cuda_sim::library_path().unwrap();
    for name in ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn processes_train_on_gpus_eagerly_and_as_a_graph() {
    let (place, gpu) = (tempfile::tempdir().unwrap(), simulated_gpu());
    let train = |line: &str| {
        let output = command(place.path())
            .args(line.split_whitespace())
            .env("FP8_CUDA_LIB_DIR", gpu.path())
            .env("FP8_SIM_NCCL_SHARED", "1") // there is one GPU
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let small = format!("{SMALL} --steps 4 --eval-every 0");
    train(&format!("{small} --report-dir cpu"));
    train(&format!("launch -n 2 -- fp8 {small} --dp 2 --device cuda:0 --report-dir eager"));
    train(&format!("launch -n 2 -- fp8 {small} --dp 2 --device cuda:0 --report-dir graph --graph"));
    let [cpu, eager, graph] = ["cpu", "eager", "graph"].map(|folder| steps(&place.path().join(folder)));
    assert_eq!(eager, graph);
    assert_eq!(eager.len(), 8);
    for (line, expected) in eager.iter().zip(&cpu) {
        for (found, expected) in line.iter().zip(expected) {
            assert!((found - expected).abs() <= 3e-2 * expected, "{line:?}, {expected}");
        }
    }
    // Replays are counted: every step sends as much.
    let sent = |folder: &str| {
        let summary = fs::read_to_string(place.path().join(folder).join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        summary["ranks"][1]["bytes_sent_per_step"]["fp8"].as_f64().unwrap()
    };
    assert_eq!(sent("eager"), sent("graph"));
}

#[test]
fn a_training_goes_on_with_another_number_of_processes() {
    let place = tempfile::tempdir().unwrap();
    let (code, ..) = trained(place.path(), 1, "--steps 6 --report-dir whole");
    assert_eq!(code, 0);
    let (code, _, error) = trained(place.path(), 2, "--steps 6 --stop-after 3 --save run --report-dir half");
    assert_eq!((code, &*error), (0, ""));
    for ranks in [1, 2] {
        let more = format!("--resume run --report-dir rest{ranks}");
        let line = match ranks {
            1 => format!("train --quiet --sample 0 {more}"),
            _ => format!("launch -n {ranks} -- fp8 train --quiet --sample 0 --dp {ranks} {more}"),
        };
        let (code, _, error) = run(place.path(), line.split_whitespace());
        assert_eq!((code, &*error), (0, ""));
        let (rest, whole) =
            (steps(&place.path().join(format!("rest{ranks}"))), steps(&place.path().join("whole")));
        assert_eq!(rest.len(), 6);
        for (found, expected) in rest.iter().zip(whole[3..6].iter().chain(&whole[9..])) {
            assert!((found[1] - expected[1]).abs() <= 1e-2 * expected[1], "{found:?}, {expected:?}");
        }
    }
}

#[test]
fn a_signal_ends_all_after_one_step_with_one_checkpoint() {
    let place = tempfile::tempdir().unwrap();
    let line = format!("launch -n 2 -- fp8 {SMALL} --dp 2 --steps 1000000 --eval-every 0 --save run");
    let child = command(place.path())
        .args(line.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    // Both trainings are saved before the first step.
    let saved = place.path().join("run/fp8/checkpoint.safetensors");
    while !saved.exists() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert_eq!(error.matches("interrupted after step").count(), 1, "{error}");
    assert!(error.contains("saved: --resume run continues from there"), "{error}");
}

#[test]
fn processes_with_different_options_are_told_so() {
    let place = tempfile::tempdir().unwrap();
    let script = format!("exec $FP8 {SMALL} --dp 2 --steps 3 --report-dir $RANK --lr 1e-$((RANK + 2))");
    let output = command(place.path())
        .args(["launch", "-n", "2", "--", "sh", "-c", &script])
        .env("FP8", env!("CARGO_BIN_EXE_fp8"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    let expected =
        "process 1 was given --lr 0.001, and process 0 --lr 0.01: give all processes the same options";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn what_does_not_fit_is_named() {
    let place = tempfile::tempdir().unwrap();
    let error = |line: &str| {
        let (code, _, error) = run(place.path(), line.split_whitespace());
        (code, error)
    };
    let lone = "error: --dp 2: this is the only process: fp8 launch -n 2 -- fp8 train --dp 2 starts 2 on this machine\n";
    assert_eq!(error("train --dp 2"), (2, lone.to_owned()));
    let (code, sentence) = error("launch -n 2 -- fp8 train");
    assert_eq!(code, 2);
    let expected = "2 processes were started: --dp 2 trains one model on them, --dp 1 one in each";
    assert!(sentence.contains(expected), "{sentence}");
    let (code, sentence) = error("launch -n 2 -- fp8 train --dp 4");
    assert_eq!(code, 2);
    assert!(sentence.contains("--dp 4: 2 processes were started: expected --dp 2"), "{sentence}");
    let (code, sentence) = error("launch -n 2 -- fp8 train --compare all");
    assert_eq!(code, 2);
    assert!(sentence.contains("--compare runs in one process: 2 were started"), "{sentence}");
    let alone = format!("launch -n 2 -- fp8 {SMALL} --dp 1 --steps 2 --report-dir alone");
    assert_eq!(error(&alone), (0, String::new()));
    for (line, sentence) in [
        ("train --dp 5 --batch 12", "--batch 12 is not divisible by --dp 5; --batch 15 would be"),
        ("train --dp 2 --compare all", "--dp cannot be used with --compare: leave it out"),
    ] {
        assert_eq!(error(line), (2, format!("error: {sentence}\n")), "{line}");
    }
}
