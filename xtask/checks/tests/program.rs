//! The program as a user starts it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::process::{Command, Output};

fn checks(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_checks")).args(arguments).output().unwrap()
}

#[test]
fn reference_data_of_the_crates_is_compared_on_the_cpu() {
    let output = checks(&["golden"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().unwrap();
    assert!(output.status.success() && last.ends_with(" passed, 0 failed"), "{text}");
    assert!(text.starts_with("device: cpu ("), "{text}");
}

#[test]
fn one_case_of_an_attack_is_repeated_and_told() {
    let output = checks(&["attack", "--only", "operations", "--device", "cpu", "--seed", "1", "--at", "7"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.starts_with("case 7: "), "{told}");
    let counts = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(counts.contains("operations on cpu") && counts.contains(": 1 cases, "), "{counts}");
}

#[test]
fn the_simulated_gpu_is_attacked_with_its_library_alone() {
    let output = checks(&["attack", "--device", "cuda-sim"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(error, "error: attack: --device cuda-sim needs --libraries: start it by cargo xtask attack\n");
    assert!(!output.status.success());
}

#[test]
fn an_unknown_folder_of_reference_data_is_an_error() {
    let output = checks(&["golden", "--dir", "/no/such/folder"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.starts_with("error: golden: no case found; looked in /no/such/folder"), "{error}");
}
