//! Hugging Face models: every folder with `config.json`, weights and `expected.safetensors`, also those in `export/`, which have FP8
//! weights.
//!
//! | compared | at most, relative to the largest expected magnitude |
//! |---|---|
//! | logits of the whole sequence, and in chunks through a cache | 1e-5 |
//! | loss | 1e-6 |
//! | gradients | 2e-5 |
//! | greedy continuations: logits, tokens | 1e-5, equal |
//! | the model of `config.v4.json` | equal |
//! | FP8 weights that are kept as codes; FP8 inputs, too | 1e-5 |
//! | tensors of the model, saved again | equal bytes |
//! | `export/MODEL-*`: the same model quantized by this library | equal codes and weight scales; input scales 1e-5 |
//! | `expected_tokens.json` beside a `tokenizer.json` | equal ids, with what the tokenizer adds, and texts |
//!
//! Models are loaded in f32 and run in high precision, unless the row says FP8. A comparison counts only if the files have
//! something to compare with.

pub(super) mod check;
mod export;
mod model;

use super::tally::Tally;
use crate::result::Result as TaskResult;
use check::{Check, Outcome, name, text};
use fp8_hf::{Folder, Tokenizer};
use fp8_nn::prelude::Device;
use model::Case;
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder has one of them.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    for path in folders(folder)?.iter().filter(|path| path.join("expected_tokens.json").is_file()) {
        tally.record(&format!("hf/{} tokens", name(path)), strings(path));
    }
    for (group, parent) in [("hf", folder.to_owned()), ("hf/export", folder.join("export"))] {
        for path in folders(&parent)? {
            if path.join("config.json").is_file() && path.join("expected.safetensors").is_file() {
                if WEIGHTS.iter().any(|name| path.join(name).is_file()) {
                    compare(group, &path, device, tally)?;
                } else {
                    // This repository has only the expectations of some exports; the tests of fp8-nn make their weights.
                    tally.leave_out("folders without weights", 1);
                }
            }
        }
    }
    Ok(())
}

/// Makes all comparisons of one folder and prints how many there were.
fn compare(group: &str, path: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    let (passed, failed) = (tally.passed, tally.failed);
    let bytes = fs::read(path.join("expected.safetensors"))?;
    let expected = SafeTensors::deserialize(&bytes).map_err(text);
    let mut record = |what: &str, check: &dyn Fn(&Case<'_>) -> Check<Outcome>| {
        let expected = expected.as_ref().map_err(Clone::clone);
        let case = format!("{group}/{} {what}", name(path));
        match expected.and_then(|expected| check(&Case { path, expected, device })) {
            Ok(Outcome::Nothing) => {}
            Ok(Outcome::LeftOut(reason)) => tally.leave_out(reason, 1),
            Ok(Outcome::Compared) => tally.record(&case, Ok(())),
            Err(difference) => tally.record(&case, Err(difference)),
        }
    };
    match Folder::open(path) {
        Err(error) => record("opens", &|_| Err(error.to_string())),
        Ok(_) => {
            for (what, check) in model::CHECKS {
                record(what, &check);
            }
            record("codes and scales", &export::check);
        }
    }
    let (passed, failed) = (tally.passed - passed, tally.failed - failed);
    println!("{group}/{}: {passed} passed, {failed} failed", name(path));
    Ok(())
}

/// Returns the folders in `parent`, sorted; none if it does not exist.
fn folders(parent: &Path) -> TaskResult<Vec<PathBuf>> {
    if !parent.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(parent)?.map(|entry| Ok(entry?.path()));
    let mut found = entries.collect::<std::io::Result<Vec<_>>>()?;
    found.retain(|path| path.is_dir());
    found.sort();
    Ok(found)
}

/// Compares what a tokenizer makes of each string of `expected_tokens.json`.
fn strings(folder: &Path) -> Check {
    #[derive(serde::Deserialize)]
    struct Case {
        text: String,
        ids: Vec<i32>,
        decoded: String,
        decoded_without_special: String,
    }
    let tokenizer = Tokenizer::open(folder, i32::MAX as usize).map_err(text)?;
    let cases = fs::read(folder.join("expected_tokens.json")).map_err(text)?;
    let cases: Vec<Case> = serde_json::from_slice(&cases).map_err(text)?;
    for case in &cases {
        let ids = tokenizer.encode(&case.text, true).map_err(text)?;
        let all = tokenizer.decode_all(&case.ids).map_err(text)?;
        let without = tokenizer.decode(&case.ids).map_err(text)?;
        if ids != case.ids || all != case.decoded || without != case.decoded_without_special {
            return Err(format!(
                "{:?}: {ids:?}, {all:?} and {without:?}: expected {:?}, {:?} and {:?}",
                case.text, case.ids, case.decoded, case.decoded_without_special
            ));
        }
    }
    if cases.is_empty() { Err("no strings to compare".into()) } else { Ok(()) }
}
