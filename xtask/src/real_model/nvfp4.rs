//! Weights in NVFP4, beside what torch computes of folders that compressed-tensors reads and writes.

use super::measure::{Evaluation, Programs, json, output, row};
use super::table::{Row, Table};
use crate::workspace::Result;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The text that finds the largest inputs.
const TEXT: &str = "fp8-cli/data/shakespeare.txt";
/// The perplexity of the weights that `fp8 quantize` writes, computed with torch from what compressed-tensors reads.
const WEIGHTS: f64 = 21.639;
/// The largest allowed increase of the perplexity with inputs in NVFP4 over that of f32, as a fraction.
const WITH_INPUTS: f64 = 0.6;
/// The bytes of quantized weights, and of the whole model with the rest in bf16, as fractions of those in f32.
const LINEARS: f64 = 0.142;
const WHOLE: f64 = 0.22;

/// The output of the script.
#[derive(Deserialize)]
struct Loss {
    loss: f64,
    version: String,
}

/// The part of the output of `fp8 generate --json` that counts.
#[derive(Deserialize)]
struct Weights {
    weight_bytes: f64,
}

impl Programs {
    /// Quantizes `model` (f32) with inputs in high precision and in NVFP4, and compares.
    pub(super) fn nvfp4(
        &self,
        root: &Path,
        script: &Path,
        model: &Path,
        base: f64,
        table: &mut Table,
    ) -> Result {
        fs::create_dir_all(&self.work)?;
        let [a16, both, theirs] =
            ["nvfp4a16", "nvfp4", "compressed-tensors"].map(|name| self.work.join(name));
        output(Command::new(&self.fp8).arg("quantize").arg(model).arg(&a16).args(["--scheme", "nvfp4a16"]))?;
        let mut quantize = Command::new(&self.fp8);
        quantize.arg("quantize").arg(model).arg(&both).args(["--scheme", "nvfp4", "--calibrate"]);
        output(quantize.arg(root.join(TEXT)))?;

        let found = self.eval(&a16, &[])?;
        let bar = self.judged((found.perplexity / WEIGHTS - 1.0).abs() <= 1e-4);
        table.push(row("NVFP4 weights, `--scheme nvfp4a16`", &found, format!("{WEIGHTS:.3}"), bar));
        let inputs = self.eval(&both, &[])?;
        let above = inputs.perplexity / base - 1.0;
        let note = format!("{:+.1} % of f32 (at most {:.0} %)", above * 100.0, WITH_INPUTS * 100.0);
        table.push(row(
            "… and NVFP4 inputs, `--scheme nvfp4`",
            &inputs,
            note,
            self.judged(above <= WITH_INPUTS),
        ));

        let bytes = |model: &Path, dtype: &str| -> Result<f64> {
            let mut generate = Command::new(&self.fp8);
            generate.arg("generate").arg(model).args(["--prompt", "The", "--max-new-tokens", "1", "--json"]);
            Ok(json::<Weights>(generate.args(["--dtype", dtype]))?.weight_bytes)
        };
        let (whole, small) = (bytes(model, "f32")?, bytes(&a16, "bf16")?);
        let share = small / whole;
        table.push(Row {
            name: "NVFP4 weights, all else in bf16: bytes in memory".into(),
            note: format!("{share:.3} of f32 (at most {WHOLE})"),
            passed: Some(share <= WHOLE),
            ..Row::default()
        });
        let linears = linear_bytes(&a16)?;
        let share = 1.0 - (whole - bytes(&a16, "f32")?) / linears;
        table.push(Row {
            name: "quantized weights alone: bytes in memory".into(),
            note: format!("{share:.4} of f32 (at most {LINEARS})"),
            passed: Some(share <= LINEARS),
            ..Row::default()
        });
        self.compressed_tensors(script, model, [&a16, &theirs], &found, table)?;
        Ok(fs::remove_dir_all(&self.work)?)
    }

    /// Compares the perplexities of our folder and of one that compressed-tensors writes with those of torch.
    fn compressed_tensors(
        &self,
        script: &Path,
        model: &Path,
        [ours, theirs]: [&PathBuf; 2],
        found: &Evaluation,
        table: &mut Table,
    ) -> Result {
        let Some(python) = &self.python else { return Ok(()) };
        output(Command::new(python).arg(script).arg("write").arg(model).args([ours, theirs]))?;
        let of_theirs = self.eval(theirs, &[])?;
        for (name, folder, found) in [
            ("… read by compressed-tensors", ours, found),
            ("… written by compressed-tensors", theirs, &of_theirs),
        ] {
            let mut peer = Command::new(python);
            peer.arg(script).arg("loss").arg(model).arg(folder).arg(&self.ids).arg(self.windows.to_string());
            let Loss { loss, version } = json(&mut peer)?;
            let [ours, torch] = [found.perplexity, loss.exp()].map(|perplexity| format!("{perplexity:.2}"));
            let note = format!("{:.4} by {version}", loss.exp());
            table.push(row(name, found, note, Some(ours == torch)));
        }
        Ok(())
    }
}

/// The bytes that the quantized weights of a folder would take in f32.
fn linear_bytes(folder: &Path) -> Result<f64> {
    let bytes = fs::read(folder.join("model.safetensors"))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)?;
    let packed = file.tensors().into_iter().filter(|(name, _)| name.ends_with(".weight_packed"));
    Ok(packed.map(|(_, codes)| 2.0 * 4.0 * codes.data().len() as f64).sum())
}
