//! `cargo xtask golden`: reference data made elsewhere, compared case by case.
//!
//! | folder | one case is | compared |
//! |---|---|---|
//! | `blocks/` | one quantization, product or conversion with scales for rows or blocks | bit for bit; products within bounds |
//! | `codec/` | one conversion of one file | bit for bit |
//! | `recipe/` | one trace of the scale update | bit for bit |
//! | `nn/` | one layer in high precision or in FP8 | within tolerances |
//! | `hf/` | logits, gradients or greedy tokens of one Hugging Face model | within tolerances, tokens equal |

mod blocks;
mod codec;
mod hf;
mod nn;
mod recipe;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fp8_nn::prelude::Device;

use crate::{Result, root};

#[derive(clap::Args)]
pub(crate) struct Golden {
    /// Folder with some of blocks/, codec/, recipe/, nn/ and hf/ [default: the data in the crates' tests]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Device for blocks, recipes and layers, cpu or cuda:N; the codec always runs on the CPU
    #[arg(long, default_value = "cpu")]
    device: String,
}

pub(crate) fn run(options: &Golden) -> Result<ExitCode> {
    let folder = |owner: &str, name: &str| match &options.dir {
        Some(dir) => dir.join(name),
        None => root().join(owner).join("tests/golden").join(name),
    };
    let mut tally = Tally::default();
    let device = Device::from_name(&options.device)?;
    println!("device: {device} ({})", device.description());
    let mut blocks = vec![folder("fp8-format", "blocks"), folder("fp8-kernels", "blocks")];
    blocks.dedup();
    for folder in blocks.iter().filter(|folder| folder.is_dir()) {
        blocks::run(folder, &device, &mut tally)?;
    }
    let codec = folder("fp8-format", "codec");
    if codec.is_dir() {
        codec::run(&codec, &mut tally)?;
    }
    let recipe = folder("fp8-recipe", "recipe");
    if recipe.is_dir() {
        recipe::run(&recipe, &device, &mut tally)?;
    }
    let nn = folder("fp8-nn", "nn");
    if nn.is_dir() {
        nn::run(&nn, &device, &mut tally)?;
    }
    let hf = folder("fp8-nn", "hf");
    if hf.is_dir() {
        hf::run(&hf, &device, &mut tally)?;
    }
    if tally.passed + tally.failed == 0 {
        let all = blocks.iter().chain([&codec, &recipe, &nn, &hf]).map(|folder| folder.display().to_string());
        let looked = all.collect::<Vec<_>>().join(", ");
        return Err(format!("golden: no case found; looked in {looked}").into());
    }
    for (kind, count) in &tally.left_out {
        println!("not compared: {kind} ({count})");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The counts of the cases by outcome. Failures are printed as they occur.
#[derive(Debug, Default)]
struct Tally {
    passed: usize,
    failed: usize,
    /// Cases that were not compared, by their kind.
    left_out: BTreeMap<String, usize>,
}

impl Tally {
    /// Counts cases of a kind that cannot be compared.
    fn leave_out(&mut self, kind: &str, count: usize) {
        *self.left_out.entry(kind.to_owned()).or_default() += count;
    }

    fn record(&mut self, case: &str, result: std::result::Result<(), String>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(difference) => {
                self.failed += 1;
                println!("FAILED {case}: {difference}");
            }
        }
    }
}

/// Counts differing values of one case and describes the first of them.
#[derive(Debug, Default)]
struct Mismatches {
    first: Option<String>,
    count: usize,
    compared: usize,
}

impl Mismatches {
    /// `describe` tells where, both values and both bit patterns.
    fn compare(&mut self, equal: bool, describe: impl FnOnce() -> String) {
        self.compared += 1;
        if !equal {
            self.count += 1;
            self.first.get_or_insert_with(describe);
        }
    }

    fn finish(self) -> std::result::Result<(), String> {
        match self.first {
            None => Ok(()),
            Some(first) => Err(format!("{first}; {} of {} differ", self.count, self.compared)),
        }
    }
}

/// Names and paths of the files in `folder`, sorted.
fn listing(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let entry = entry?;
        if entry.path().is_file() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the folder's files of tensors one after the other, and says which files are none.
fn each_tensor_file(name: &str, folder: &Path, mut check: impl FnMut(&str, &[u8])) -> Result {
    let mut ignored = Vec::new();
    for (file, path) in listing(folder)? {
        if file.ends_with(".safetensors") {
            let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            check(&file, &bytes);
        } else {
            ignored.push(file);
        }
    }
    say_ignored(name, &ignored);
    Ok(())
}

/// One line on the files that are no reference data, if there are any.
fn say_ignored(folder: &str, names: &[String]) {
    if !names.is_empty() {
        println!("{folder}/: ignored {}", names.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mismatch_is_told_and_all_are_counted() {
        let mut mismatches = Mismatches::default();
        for (index, equal) in [true, false, true, false].into_iter().enumerate() {
            mismatches.compare(equal, || format!("entry {index}"));
        }
        assert_eq!(mismatches.finish(), Err("entry 1; 2 of 4 differ".to_owned()));
        assert_eq!(Mismatches::default().finish(), Ok(()));
    }

    #[test]
    fn a_folder_without_a_case_is_an_error() {
        let empty = tempfile::tempdir().unwrap();
        let options = Golden { dir: Some(empty.path().to_path_buf()), device: "cpu".to_owned() };
        assert!(run(&options).unwrap_err().to_string().contains("no case found"));
    }
}
