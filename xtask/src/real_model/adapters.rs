//! An adapter that `fp8 train` makes, beside peft and transformers.

use super::measure::{Programs, json, output, row};
use super::table::{Row, Table};
use crate::workspace::Result;
use serde::Deserialize;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The text that the adapter is trained on; what it learns does not matter.
const TEXT: &str = "Scales are kept for each tensor, and each step computes them anew. ";
/// The largest relative distance of mean losses.
const DISTANCE: f64 = 1e-5;

/// The output of the script.
#[derive(Deserialize)]
struct Loss {
    loss: f64,
    version: String,
}

impl Programs {
    /// Trains an adapter, and compares the losses with it and with the model that it was merged into.
    pub(super) fn adapters(&self, script: &Path, model: &Path, table: &mut Table) -> Result {
        let Some(python) = &self.python else { return Ok(()) };
        fs::create_dir_all(&self.work)?;
        let [text, run, merged] = ["text.txt", "lora", "merged"].map(|name| self.work.join(name));
        fs::write(&text, TEXT.repeat(200))?;
        let mut train = Command::new(&self.fp8);
        train.arg("train").arg(model).arg("--data").arg(&text).arg("--out").arg(&run);
        train.args([
            "--lora", "8", "--recipe", "none", "--lr", "1e-2", "--seq", "128", "--batch", "2", "--steps",
            "3", "--quiet",
        ]);
        output(&mut train)?;
        let adapter = run.join("final");
        output(Command::new(&self.fp8).arg("merge").arg(model).args([&adapter, &merged]))?;
        let path = adapter.display().to_string();
        for (name, model, options, folder) in [
            ("an adapter of `fp8 train`", model, &["--adapter", &path][..], Some(&adapter)),
            ("… merged", &merged, &[][..], None),
        ] {
            let found = self.eval(model, options)?;
            let mut peer = Command::new(python);
            peer.arg(script).arg(model).arg(&self.ids).arg(self.windows.to_string()).args(folder);
            let Loss { loss, version } = json(&mut peer)?;
            let distance = (found.perplexity.ln() / loss - 1.0).abs();
            let note = format!("{:.4} by {version}; losses within {distance:.1e}", loss.exp());
            table.push(Row { passed: Some(distance <= DISTANCE), ..row(name, &found, note, None) });
        }
        Ok(fs::remove_dir_all(&self.work)?)
    }
}
