//! Fine-tuning as PyTorch, transformers and peft do it.
//!
//! | folder | one case is | at most, relative to the largest expected magnitude |
//! |---|---|---|
//! | `full/MODEL` | a run of some steps: losses, gradient norms, parameters at the end | 1e-5, 3e-5, 1e-4 (keys' biases 3e-4) |
//! | `lora/CASE` | the same of an adapter beside a frozen base | 1e-5, 3e-5, 1e-4 |
//! | `lora/CASE` | logits with `adapter` and `adapter_bf16` | 1e-5 |
//! | `lora/CASE` | gradients at the final adapter | 2e-5 |
//! | `lora/CASE` | each kind of merged weights that the dtype of the base's files gives | 1e-6; bf16: 1 in 1,000 values |
//! | `data/shards.json` | a file of tokens: ids; losses of windows with `data/model`, if it is there | equal; 1e-5 |
//! | `data/expected.json` | a line or document: text, ids, learned tokens; sum of the losses with `data/model` | equal; 1e-5 |
//! | `data/packing.json` | a packed sequence, crossing documents and not; sum of the losses with `data/model` | equal; 1e-5 |
//! | `data/mistakes/cases.json` | a file with a mistake | the names in the error |
//! | `lora/refuse/FOLDER` | a folder that is refused | the names in the error |
//!
//! Models run in high precision.

mod adapter;
mod data;
mod shards;
mod steps;
mod values;

use super::hf::check::name;
use super::tally::Tally;
use crate::result::Result as TaskResult;
use fp8_nn::prelude::Device;
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    for case in folders(&folder.join("full"), "run.json")? {
        tally.record(&format!("train/full/{}", name(&case)), steps::full(&case, device));
    }
    let data = folder.join("data");
    if data.join("shards.json").is_file() {
        shards::compare(&data, device, tally)?;
    }
    data::run(&data, device, tally)?;
    let lora = folder.join("lora");
    for case in folders(&lora, "run.json")? {
        adapter::compare(&lora, &case, device, tally);
    }
    let refuse = lora.join("refuse");
    if refuse.join("cases.json").is_file() {
        adapter::refused(&lora, &refuse, tally)?;
    }
    Ok(())
}

/// Returns the folders in `parent` that have this file, sorted; none if it does not exist.
fn folders(parent: &Path, file: &str) -> TaskResult<Vec<PathBuf>> {
    if !parent.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(parent)?.map(|entry| Ok(entry?.path()));
    let mut found = entries.collect::<std::io::Result<Vec<_>>>()?;
    found.retain(|path| path.join(file).is_file());
    found.sort();
    Ok(found)
}
