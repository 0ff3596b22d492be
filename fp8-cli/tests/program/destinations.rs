//! Files that `--report` and `--losses` name: open before the work, and nothing is lost if they cannot be written.

use super::{listing, place, run};
use std::fs;
use std::path::Path;

#[test]
fn the_longest_name_is_written_and_a_longer_one_is_refused_before_the_work() {
    let place = place();
    for (length, code) in [(240, 0), (251, 0), (252, 2)] {
        let name = format!("{}.csv", "n".repeat(length));
        let (found, out, error) =
            run(place.path(), ["eval", "model", "--text", "text.txt", "--losses", &name]);
        assert_eq!(found, code, "{length}: {error}");
        assert_eq!(place.path().join(&name).exists(), code == 0);
        assert_eq!(out.is_empty(), code == 2, "{out}");
    }
}

#[test]
fn an_older_result_is_replaced() {
    let place = place();
    for windows in ["2", "1"] {
        let line = ["eval", "model", "--text", "text.txt", "--losses", "out.csv", "--windows", windows];
        assert_eq!(run(place.path(), line).0, 0);
    }
    let losses = fs::read_to_string(place.path().join("out.csv")).unwrap();
    assert_eq!(losses.lines().last().unwrap().split(',').next(), Some("0"));
    // Beside the model, too.
    for report in ["r.html", "model/r.html"] {
        assert_eq!(run(place.path(), ["inspect", "model", "--report", report]).0, 0);
        assert_eq!(run(place.path(), ["inspect", "model", "--report", report]).0, 0);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_place_that_cannot_be_written_is_refused_before_the_work() {
    let place = place();
    let before = listing(place.path());
    for line in ["inspect model --report /proc/r.html", "eval model --text text.txt --losses /proc/out.csv"] {
        let (code, out, error) = run(place.path(), line.split_whitespace());
        assert_eq!((code, out.as_str()), (2, ""), "{error}");
        assert!(error.contains("a file cannot be created there"), "{error}");
    }
    assert_eq!(listing(place.path()), before);
}

/// The page is larger than a file may become; the table is printed all the same.
#[cfg(unix)]
#[test]
fn a_result_is_printed_even_if_its_file_fails() {
    let place = place();
    let program = env!("CARGO_BIN_EXE_fp8");
    for line in ["inspect model --report r.html", "eval model --text text.txt --losses out.csv"] {
        let script = format!("trap '' XFSZ; ulimit -f 1; exec {program} {line}");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .current_dir(place.path())
            .output()
            .unwrap();
        let [out, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(out.starts_with("model: "), "{out}");
        assert!(error.lines().count() == 1 && error.contains("File too large"), "{error}");
        assert!(!names(place.path()).iter().any(|name| name.contains("partial") || name.contains("out.csv")));
    }
}

#[cfg(unix)]
fn names(folder: &Path) -> Vec<String> {
    listing(folder).into_iter().map(|(name, _)| name).collect()
}
