//! The examples: all are built, the numbered ones (`01_codec`, …) are run.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::report::Report;
use crate::workspace::Result;

/// An example that needs more than this is no longer something to try out.
const LIMIT: Duration = Duration::from_secs(60);

/// Adds one step for the build and one for each numbered example.
pub(crate) fn run(sh: &Shell, report: &mut Report) {
    let mut built = Vec::new();
    report.step("examples", || {
        built = build(sh)?;
        Ok(format!("{} built", built.len()))
    });
    for (name, program) in built.iter().filter(|(name, _)| is_numbered(name)) {
        report.step(&format!("example {name}"), || start(sh, program));
    }
}

/// Returns names and programs, sorted by name. Cargo itself says where it put them.
fn build(sh: &Shell) -> Result<Vec<(String, PathBuf)>> {
    let format = "json-render-diagnostics";
    let messages =
        cmd!(sh, "cargo build --workspace --all-features --examples --message-format {format}").read()?;
    let mut programs: Vec<_> = messages.lines().filter_map(program).collect();
    programs.sort();
    Ok(programs)
}

fn program(message: &str) -> Option<(String, PathBuf)> {
    #[derive(Deserialize)]
    struct Artifact {
        target: Target,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    let artifact: Artifact = serde_json::from_str(message).ok()?;
    let is_example = artifact.target.kind.iter().any(|kind| kind == "example");
    artifact.executable.filter(|_| is_example).map(|executable| (artifact.target.name, executable))
}

fn is_numbered(name: &str) -> bool {
    matches!(name.as_bytes(), [b'0'..=b'9', b'0'..=b'9', b'_', ..])
}

fn start(sh: &Shell, program: &PathBuf) -> Result<String> {
    let start = Instant::now();
    let output = cmd!(sh, "{program}").ignore_status().output()?;
    if !output.status.success() {
        print!("{}", String::from_utf8_lossy(&output.stdout));
        print!("{}", String::from_utf8_lossy(&output.stderr));
        return Err(format!("{}: {}", program.display(), output.status).into());
    }
    let lines = output.stdout.iter().filter(|&&byte| byte == b'\n').count();
    let remark = if start.elapsed() > LIMIT { ", but over a minute: make it smaller" } else { "" };
    Ok(format!("{lines} lines{remark}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_digits_and_an_underscore_number_an_example() {
        assert!(is_numbered("01_codec") && is_numbered("12_train"));
        assert!(!is_numbered("train") && !is_numbered("1_codec") && !is_numbered("01"));
    }

    #[test]
    fn programs_are_read_from_cargo_messages_and_other_messages_are_passed_over() {
        let example = r#"{"reason":"compiler-artifact","target":{"name":"01_codec","kind":["example"]},"executable":"/t/01_codec"}"#;
        assert_eq!(program(example), Some(("01_codec".to_owned(), PathBuf::from("/t/01_codec"))));
        let library =
            r#"{"reason":"compiler-artifact","target":{"name":"fp8","kind":["lib"]},"executable":null}"#;
        assert_eq!(program(library), None);
        assert_eq!(program(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
