//! `cargo xtask golden`: reference data made elsewhere, compared case by case.
//!
//! | folder | one case is | compared |
//! |---|---|---|
//! | `blocks/` | one quantization, product or conversion with scales for rows or blocks | bit for bit; products within bounds |
//! | `codec/` | one conversion of one file | bit for bit |
//! | `nvfp4/` | one conversion, copy, transform or product of NVFP4 | bit for bit; products within bounds |
//! | `recipe/` | one trace of the scale update | bit for bit |
//! | `nn/` | one layer in high precision or in FP8 | within tolerances |
//! | `hf/` | logits, gradients or greedy tokens of one Hugging Face model | within tolerances, tokens equal |
//! | `train/` | one run of fine-tuning, or one thing that an adapter is used for | within tolerances |

mod blocks;
mod codec;
mod hf;
mod nn;
mod nvfp4;
mod recipe;
mod tally;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use fp8_nn::prelude::Device;

use crate::result::Result;
use crate::root::root;
use tally::Tally;

#[derive(clap::Args)]
pub(crate) struct Golden {
    /// Folder with some of blocks/, codec/, nvfp4/, recipe/, nn/, hf/ and train/, or one of these [default: the data in the
    /// crates' tests]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Device for blocks, NVFP4, recipes and layers, cpu or cuda:N; the codec always runs on the CPU
    #[arg(long, default_value = "cpu")]
    device: String,
}

pub(crate) fn run(options: &Golden) -> Result<ExitCode> {
    let folder = |owner: &str, name: &str| match &options.dir {
        // One of the folders itself.
        Some(dir) if dir.file_name().is_some_and(|last| last == name) => dir.clone(),
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
    let mut nvfp4 = vec![folder("fp8-format", "nvfp4"), folder("fp8-kernels", "nvfp4")];
    nvfp4.dedup();
    for folder in nvfp4.iter().filter(|folder| folder.is_dir()) {
        nvfp4::run(folder, &device, &mut tally)?;
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
    let train = folder("fp8-hf", "train");
    if train.is_dir() {
        train::run(&train, &device, &mut tally)?;
    }
    if tally.passed + tally.failed == 0 {
        let all = blocks
            .iter()
            .chain(&nvfp4)
            .chain([&codec, &recipe, &nn, &hf, &train])
            .map(|folder| folder.display().to_string());
        let looked = all.collect::<Vec<_>>().join(", ");
        return Err(format!("golden: no case found; looked in {looked}").into());
    }
    for (kind, count) in &tally.left_out {
        println!("not compared: {kind} ({count})");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_folders_may_be_named_itself() {
        let dir = root().join("fp8-format/tests/golden/nvfp4");
        let options = Golden { dir: Some(dir), device: "cpu".to_owned() };
        assert_eq!(run(&options).unwrap(), ExitCode::SUCCESS);
    }

    #[test]
    fn a_folder_without_a_case_is_an_error() {
        let empty = tempfile::tempdir().unwrap();
        let options = Golden { dir: Some(empty.path().to_path_buf()), device: "cpu".to_owned() };
        assert!(run(&options).unwrap_err().to_string().contains("no case found"));
    }
}
