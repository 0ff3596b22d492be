//! Programs that are killed, and disks that are full: the output is whole or absent.
#![cfg(unix)]

use super::{command, listing, run};
use crate::folders::shard;
use crate::folders::{Sizes, llama, tensors, write_model};
use fp8_hf::Folder;
use fp8_nn::prelude::DType;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const KILLS: u32 = 12;
const LINE: [&str; 5] = ["quantize", "model", "out", "--scheme", "channel"];

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A model of 24 MiB in three files.
fn model(folder: &Path) {
    let config = llama(&Sizes { hidden: 512, intermediate: 2048, layers: 3, head_dim: 128 });
    write_model(&folder.join("model"), &config, DType::BF16);
    shard(&folder.join("model"), 3);
}

#[test]
fn a_killed_program_leaves_the_output_whole_or_absent() {
    let place = tempfile::tempdir().unwrap();
    model(place.path());
    let start = Instant::now();
    assert_eq!(run(place.path(), LINE).0, 0);
    let whole = start.elapsed();
    let expected = tensors(&place.path().join("out"));
    fs::remove_dir_all(place.path().join("out")).unwrap();
    let (mut left, mut finished) = (0, 0);
    for kill in 0..KILLS {
        let mut child = command(place.path()).args(LINE).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole * (kill * 7 % KILLS) / KILLS);
        child.kill().unwrap();
        child.wait().unwrap();
        left += usize::from(names(place.path()).iter().any(|name| name.starts_with(".fp8-partial-")));
        let out = place.path().join("out");
        if out.exists() {
            Folder::open(&out).unwrap();
            assert!(tensors(&out) == expected, "kill {kill}: half written");
            fs::remove_dir_all(&out).unwrap();
            finished += 1;
        }
    }
    assert!(left > 0, "no kill fell into a run");
    assert!(finished < KILLS, "every run ended before its kill");
    assert_eq!(run(place.path(), LINE).0, 0);
    assert_eq!(names(place.path()), ["model", "out"], "folders of killed programs are left");
    assert!(tensors(&place.path().join("out")) == expected);
}

/// Two words and a third for all others.
const TOKENIZER: &str = r#"{"model": {"type": "WordLevel", "vocab": {"the": 0, "sea": 1, "?": 2}, "unk_token": "?"},
    "pre_tokenizer": {"type": "Whitespace"}}"#;

#[test]
fn ctrl_c_leaves_nothing() {
    interrupt(&LINE, "-INT");
    // Behind another work, the calibration.
    let line = ["quantize", "model", "out", "--scheme", "tensor", "--calibrate", "model/tokenizer.json"];
    interrupt(&line, "-INT");
}

#[test]
fn other_signals_that_end_a_program_leave_nothing() {
    interrupt(&LINE, "-TERM");
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Below nohup, the program goes on.
    if ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 0) {
        interrupt(&LINE, "-HUP");
    }
}

#[test]
fn a_second_signal_does_not_wait_and_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    model(place.path());
    let mut interrupted = 0;
    for kill in 0..KILLS {
        let child =
            command(place.path()).args(LINE).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let send = |signal: &str| {
            // The program may have ended before the signal.
            let _ =
                Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status();
        };
        std::thread::sleep(Duration::from_millis(10 + u64::from(kill) * 3));
        send("-TERM");
        send("-INT");
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        match output.status.code() {
            Some(0) => Folder::open(&place.path().join("out")).map(drop).unwrap(),
            Some(130) => {
                interrupted += 1;
                assert!(error.starts_with("error: interrupted") && error.lines().count() == 1, "{error}");
                let is_whole = error.ends_with(", but out is complete\n");
                assert_eq!(names(place.path()).len(), 1 + usize::from(is_whole), "{error}");
            }
            // Before the program had installed its handler.
            code => assert_eq!((code, names(place.path()).len()), (None, 1)),
        }
        let _ = fs::remove_dir_all(place.path().join("out"));
    }
    assert!(interrupted > 0, "no signal fell into a run");
}

#[test]
fn ctrl_c_ends_a_generation_with_its_text_and_speed() {
    use std::io::Read as _;
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    crate::folders::copy(&crate::folders::golden().join("llama_bf16"), &model);
    fs::remove_file(model.join("generation_config.json")).unwrap();
    let changes = serde_json::json!({"max_position_embeddings": 50_000, "eos_token_id": null});
    crate::folders::change(&model.join("config.json"), &changes);
    let mut child = command(place.path())
        .args(["generate", "model", "--prompt", "The sea", "--max-new-tokens", "40000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 40]).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert!(error.contains(", interrupted: ") && error.contains(" tokens/s"), "{error}");
    assert!(rest.ends_with(b"\n") && !error.contains("nothing was written"), "{error}");
}

/// Sends the signal while the folder is written.
fn interrupt(line: &[&str], signal: &str) {
    let place = tempfile::tempdir().unwrap();
    model(place.path());
    fs::write(place.path().join("model/tokenizer.json"), TOKENIZER).unwrap();
    let is_writing = || {
        let partial = fs::read_dir(place.path()).unwrap().flatten().map(|entry| entry.path());
        partial
            .filter(|path| !path.ends_with("model"))
            .any(|path| fs::read_dir(path).is_ok_and(|mut files| files.next().is_some()))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    // A run may end before the signal; another one will not.
    loop {
        let child =
            command(place.path()).args(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while !is_writing() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            fs::remove_dir_all(place.path().join("out")).unwrap();
            assert!(Instant::now() < deadline, "no signal fell into a run");
            continue;
        }
        assert_eq!(output.status.code(), Some(130));
        let error = String::from_utf8(output.stderr).unwrap();
        if error == "error: interrupted, but out is complete\n" {
            Folder::open(&place.path().join("out")).unwrap();
            fs::remove_dir_all(place.path().join("out")).unwrap();
            assert!(Instant::now() < deadline, "no signal fell into a run");
            continue;
        }
        assert_eq!(error, "error: interrupted; nothing was written\n");
        break;
    }
    assert_eq!(names(place.path()), ["model"]);
}

/// Runs the program where files cannot become larger than this, and checks that nothing but a sentence is left.
#[test]
fn a_file_that_cannot_grow_is_a_sentence() {
    let place = tempfile::tempdir().unwrap();
    model(place.path());
    let before = listing(place.path());
    let script =
        format!("trap '' XFSZ; ulimit -f 1000; exec {} {}", env!("CARGO_BIN_EXE_fp8"), LINE.join(" "));
    let output = Command::new("sh").args(["-c", &script]).current_dir(place.path()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: out/model-0000") && error.lines().count() == 1, "{error}");
    assert_eq!(listing(place.path()), before);
}

#[test]
fn a_disk_that_fills_up_is_a_sentence() {
    let place = tempfile::tempdir().unwrap();
    model(place.path());
    let small = place.path().join("small");
    fs::create_dir(&small).unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(&small).stderr(Stdio::null());
    if !mount.status().is_ok_and(|status| status.success()) {
        let text = "skipped: a tmpfs cannot be mounted here; a_file_that_cannot_grow_is_a_sentence ran in its place\n";
        std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes()).unwrap();
        return;
    }
    let (code, _, error) = run(place.path(), ["quantize", "model", "small/out", "--scheme", "tensor"]);
    let left = names(&small);
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    assert_eq!((code, left), (1, Vec::<String>::new()), "{error}");
    assert!(error.starts_with("error: small/out") && error.lines().count() == 1, "{error}");
}
