//! summary.json, steps.csv, the table on stdout, and the report folder.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use fp8_nn::fp8_kernels::{AtomicFile, MemoryUse};
use serde::Serialize;

use crate::failure::Failure;
use crate::page::signed;
use crate::train::both::Both;
use crate::train::config::Config;
use crate::train::machine::Origin;
use crate::train::nvfp4::{self, Nvfp4Tensor};
use crate::train::options::RecipeName;
use crate::train::shares::Share;
use crate::train::trainer::{Run, Trainer};
use crate::train::training::Outcome;
use crate::train::verdict::Verdict;

/// The names of the files in the report folder.
pub(crate) const FILES: [&str; 3] = ["report.html", "steps.csv", "summary.json"];

/// A report folder that exists and can be written to.
#[derive(Debug)]
pub(crate) struct ReportDir(PathBuf);

impl ReportDir {
    /// Creates the folder if it is missing, and checks that it can be written to.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let refuse = |reason: &dyn std::fmt::Display| {
            Failure::input(format!(
                "--report-dir {}: {reason}; give a folder that can be written",
                path.display()
            ))
        };
        if path.exists() && !path.is_dir() {
            return Err(refuse(&"it is not a folder"));
        }
        // Nothing is committed: the file that is started is removed again.
        AtomicFile::create(&path.join(FILES[0])).map_err(|error| refuse(&error))?;
        match FILES.iter().find(|name| path.join(name).is_dir()) {
            Some(name) => Err(refuse(&format!("{name} in it is a folder"))),
            None => Ok(Self(path.to_path_buf())),
        }
    }

    /// Writes a file atomically: readers see the old file or the whole new one.
    pub(crate) fn write(&self, name: &str, contents: &str) -> Result<(), Failure> {
        let write = || -> std::io::Result<()> {
            let mut file = AtomicFile::create(&self.0.join(name))?;
            file.write_all(contents.as_bytes())?;
            file.commit()
        };
        write().map_err(|error| Failure::work(format!("writing {}: {error}", self.0.join(name).display())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

/// The contents of summary.json. With `--recipe none`, everything about FP8 is null.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Summary {
    #[serde(flatten)]
    pub(crate) origin: Origin,
    /// The outcome of the comparison.
    #[serde(skip)]
    pub(crate) verdict: Verdict,
    /// The same in a few words.
    pub(crate) result: String,
    /// The percentage by which FP8's held-out loss is higher than high precision's. Null if a training did not complete.
    pub(crate) fp8_heldout_loss_percent: Option<f64>,
    pub(crate) params: usize,
    /// The last step that was done.
    pub(crate) steps: usize,
    /// Number of steps in the schedule.
    pub(crate) total_steps: usize,
    /// Number of bytes that each model was trained on until then.
    pub(crate) tokens: u64,
    pub(crate) seed: u64,
    pub(crate) device: String,
    pub(crate) threads: usize,
    pub(crate) dtype: String,
    pub(crate) recipe: String,
    /// The text of the recipe's file, if it came from one.
    pub(crate) recipe_toml: Option<String>,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) seq: usize,
    pub(crate) batch: usize,
    pub(crate) lr: f32,
    pub(crate) schedule: String,
    pub(crate) dropout: f32,
    pub(crate) text: String,
    pub(crate) text_bytes: usize,
    pub(crate) fp8_format: Option<String>,
    pub(crate) fp8_history_len: Option<usize>,
    pub(crate) fp8_margin: Option<i32>,
    /// Whether attention runs in FP8, too. Null if nothing does.
    pub(crate) fp8_attention: Option<bool>,
    /// Whether projections also write FP8 for it. Null if nothing runs in FP8.
    pub(crate) fp8_mha: Option<bool>,
    /// Whether weights are stored in FP8. Null if nothing runs in it.
    pub(crate) fp8_weights: Option<bool>,
    pub(crate) fp8_gemms_per_step: Option<usize>,
    /// The emulations of FP8 products that the device does not have, each with its number of products in a step.
    pub(crate) emulated_gemms_per_step: Vec<(String, usize)>,
    /// In nats per byte, like every loss.
    pub(crate) bigram_loss: f64,
    pub(crate) heldout_loss: Both,
    /// The loss of the last step's batch. Null if it is not finite.
    pub(crate) final_loss: Both,
    /// Steps of this process that changed no weight, because a gradient was not finite.
    pub(crate) skipped_steps: Both,
    /// The loss scale of the last step. Null unless the dtype is f16.
    pub(crate) loss_scale: Both,
    pub(crate) median_step_ms: Both,
    /// At the median step.
    pub(crate) tokens_per_s: Both,
    /// Bytes when they were most, in all and by what they were used for. Null if a training did not complete.
    pub(crate) peak_memory_bytes: Both,
    pub(crate) peak_memory_of: Vec<(&'static str, Both)>,
    /// The arrangement of the ranks. Null for a process that trained alone.
    pub(crate) layout: Option<String>,
    /// The tensors that ranks have gathered in high precision, although the recipe quantizes them.
    pub(crate) gathered_in_high_precision: Vec<String>,
    /// The tensors in NVFP4. Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) nvfp4_tensors: Vec<Nvfp4Tensor>,
    /// The share of each rank; empty for a process that trained alone.
    pub(crate) ranks: Vec<Share>,
}

/// Bytes of one kind.
type BytesOf = fn(&MemoryUse) -> usize;

/// The uses of memory: the name of each, and the function that returns its bytes.
const MEMORY: [(&str, BytesOf); 5] = [
    ("parameters", |bytes| bytes.parameters),
    ("gradients", |bytes| bytes.gradients),
    ("optimizer", |bytes| bytes.optimizer),
    ("saved for backward", |bytes| bytes.saved),
    ("temporary", |bytes| bytes.temporary),
];

impl Summary {
    pub(crate) fn new(
        config: &Config,
        outcomes: &[Outcome],
        trainer: &impl Trainer,
        ranks: Vec<Share>,
    ) -> Self {
        let settings = &config.settings;
        let tokens_per_step = settings.batch * settings.seq;
        let fp8 = settings.recipe != RecipeName::None;
        let delayed = settings.recipe == RecipeName::Delayed;
        let verdict = Verdict::new(outcomes);
        let last = outcomes.iter().rev().find_map(|outcome| outcome.records.last());
        let steps = last.map_or(config.stop_at, |record| record.step);
        Self {
            origin: Origin::here(),
            result: verdict.headline(),
            fp8_heldout_loss_percent: verdict.percent(),
            verdict,
            params: trainer.parameters(),
            steps,
            total_steps: settings.steps,
            tokens: steps as u64 * tokens_per_step as u64,
            seed: settings.seed,
            device: trainer.device(),
            threads: rayon::current_num_threads(),
            dtype: settings.dtype.to_string(),
            recipe: settings.recipe.to_string(),
            recipe_toml: Some(settings.recipe_toml.clone()).filter(|text| !text.is_empty()),
            layers: settings.layers,
            hidden: settings.hidden,
            heads: settings.heads,
            seq: settings.seq,
            batch: settings.batch,
            lr: settings.lr,
            schedule: settings.schedule.to_string(),
            dropout: settings.dropout,
            text: config.corpus.source().to_owned(),
            text_bytes: config.corpus.bytes().len(),
            fp8_format: (fp8 && settings.recipe_toml.is_empty()).then(|| settings.format.to_string()),
            fp8_history_len: delayed.then_some(settings.history_len),
            fp8_margin: delayed.then_some(settings.margin),
            fp8_attention: fp8.then_some(trainer.attention().in_fp8),
            fp8_mha: fp8.then_some(trainer.attention().exchanges_fp8),
            fp8_weights: fp8.then_some(settings.fp8_weights),
            fp8_gemms_per_step: fp8.then(|| trainer.fp8_gemms_per_step()),
            emulated_gemms_per_step: if fp8 { trainer.emulated_gemms_per_step() } else { Vec::new() },
            bigram_loss: config.corpus.bigram_loss(),
            heldout_loss: Both::new(outcomes, |outcome| outcome.held_out_loss),
            final_loss: Both::new(outcomes, |outcome| {
                outcome.records.last().map(|last| f64::from(last.loss))
            }),
            skipped_steps: Both::new(outcomes, |outcome| Some(outcome.skipped_steps() as f64)),
            loss_scale: Both::new(outcomes, |outcome| outcome.records.last()?.loss_scale.map(f64::from)),
            median_step_ms: Both::new(outcomes, Outcome::median_step_ms),
            tokens_per_s: Both::new(outcomes, |outcome| {
                Some(tokens_per_step as f64 * 1e3 / outcome.median_step_ms()?)
            }),
            peak_memory_bytes: Both::new(outcomes, |outcome| Some(outcome.memory?.total() as f64)),
            peak_memory_of: MEMORY
                .map(|(kind, bytes)| {
                    (kind, Both::new(outcomes, |outcome| Some(bytes(&outcome.memory?) as f64)))
                })
                .to_vec(),
            layout: config.ranks.layout(),
            gathered_in_high_precision: if fp8 { trainer.gathered_in_high_precision() } else { Vec::new() },
            nvfp4_tensors: outcomes.iter().flat_map(|outcome| outcome.telemetry.nvfp4()).cloned().collect(),
            ranks,
        }
    }

    pub(crate) fn json(&self) -> Result<String, Failure> {
        let json = serde_json::to_string_pretty(self);
        json.map(|json| json + "\n").map_err(|error| Failure::work(format!("summary.json: {error}")))
    }

    /// Returns the rows of the comparison: what, high precision, FP8.
    pub(crate) fn rows(&self) -> Vec<[String; 3]> {
        let row = |what: &str, both: Both, digits: usize| {
            let number = |value: Option<f64>| match value {
                None => "–".to_owned(),
                Some(value) if value.abs() >= 1e7 => format!("{value:.3e}"),
                Some(value) => format!("{value:.digits$}"),
            };
            [what.to_owned(), number(both.high_precision), number(both.fp8)]
        };
        let mut rows = vec![
            row("held-out loss, nats per byte", self.heldout_loss, 4),
            row("loss of the last step", self.final_loss, 4),
            row("median step, ms", self.median_step_ms, 2),
            row("tokens per second", self.tokens_per_s, 0),
        ];
        let skipped = [self.skipped_steps.high_precision, self.skipped_steps.fp8];
        if skipped.into_iter().flatten().any(|count| count > 0.0) {
            rows.push(row("steps skipped", self.skipped_steps, 0));
        }
        let scales = [self.loss_scale.high_precision, self.loss_scale.fp8];
        if scales.iter().any(Option::is_some) {
            rows.push(row("loss scale of the last step", self.loss_scale, 0));
        }
        if self.peak_memory_bytes.high_precision.or(self.peak_memory_bytes.fp8).is_some() {
            let mib = |bytes: f64| bytes / f64::from(1 << 20);
            let mut memory = |what: &str, bytes: Both| {
                let both = Both { high_precision: bytes.high_precision.map(mib), fp8: bytes.fp8.map(mib) };
                rows.push(row(what, both, 1));
            };
            memory("memory at the peak, MiB", self.peak_memory_bytes);
            for (kind, bytes) in &self.peak_memory_of {
                memory(&format!("  {kind}"), *bytes);
            }
        }
        rows
    }

    /// Returns the comparison for a terminal.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{:<30}{:>16}{:>16}\n", "", Run::HighPrecision.title(), Run::Fp8.title());
        for [what, high_precision, fp8] in self.rows() {
            text += &format!("{what:<30}{high_precision:>16}{fp8:>16}\n");
        }
        let _ = writeln!(text, "{:<30}{:>16.4}", "bigrams, for comparison", self.bigram_loss);
        if let Some(percent) = self.verdict.percent() {
            let _ = writeln!(
                text,
                "\nIn FP8, the held-out loss is {} % from that of high precision.",
                signed(percent)
            );
        }
        if !self.nvfp4_tensors.is_empty() {
            let _ = writeln!(text, "\n{}", nvfp4::sentence(&self.nvfp4_tensors));
        }
        text
    }
}

/// Returns steps.csv: every step of this process, with all digits of the losses. The last field is empty where the
/// validation loss was not evaluated. Trainings in f16 have two more: the loss scale, and whether the step was skipped.
pub(crate) fn steps_csv(outcomes: &[Outcome]) -> String {
    let has_scale =
        outcomes.iter().flat_map(|outcome| &outcome.records).any(|record| record.loss_scale.is_some());
    let mut csv = "run,step,loss,grad_norm,lr,ms,validation_loss".to_owned();
    csv += if has_scale { ",loss_scale,skipped\n" } else { "\n" };
    for outcome in outcomes {
        for record in &outcome.records {
            let run = outcome.run.name();
            // `{}` prints as many digits of an f32 as are needed to read the same f32 back.
            let _ = write!(
                csv,
                "{run},{},{},{},{},{:.3},{}",
                record.step,
                record.loss,
                record.grad_norm,
                record.lr,
                record.ms,
                record.validation_loss.map(|loss| loss.to_string()).unwrap_or_default()
            );
            if let Some(scale) = record.loss_scale.filter(|_| has_scale) {
                let _ = write!(csv, ",{scale},{}", record.skipped);
            }
            csv.push('\n');
        }
    }
    csv
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::Telemetry;
    use crate::train::training::{End, Record};
    use std::fs;

    #[test]
    fn losses_keep_all_their_digits() {
        let loss = f32::from_bits(0x4033_3334);
        let outcome = Outcome {
            run: Run::Fp8,
            records: vec![
                Record { step: 3, loss, grad_norm: 0.1, lr: 2e-3, ms: 1.23456, ..Default::default() },
                Record {
                    step: 4,
                    loss: f32::NAN,
                    grad_norm: 0.1,
                    lr: 2e-3,
                    ms: 1.0,
                    validation_loss: Some(2.5),
                    ..Default::default()
                },
            ],
            telemetry: Telemetry::new(0),
            advice: Vec::new(),
            end: End::Complete,
            held_out_loss: Some(1.0),
            memory: None,
            bytes_sent: 0,
        };
        let csv = steps_csv(&[outcome]);
        assert_eq!(csv.lines().nth(2), Some("fp8,4,NaN,0.1,0.002,1.000,2.5"));
        let line = csv.lines().nth(1).unwrap();
        assert_eq!(line, "fp8,3,2.8000002,0.1,0.002,1.235,");
        assert_eq!(line.split(',').nth(2).unwrap().parse::<f32>().unwrap().to_bits(), loss.to_bits());
    }

    #[test]
    fn unusable_report_folders_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let failure = ReportDir::open(&path).unwrap_err();
            assert_eq!(failure.code(), 2);
            assert!(failure.to_string().contains("--report-dir"), "{failure}");
        }
        fs::create_dir(folder.path().join("steps.csv")).unwrap();
        assert!(ReportDir::open(folder.path()).unwrap_err().to_string().contains("steps.csv"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left behind");
    }

    #[test]
    fn files_are_replaced_whole() {
        let folder = tempfile::tempdir().unwrap();
        let report = ReportDir::open(&folder.path().join("a/b")).unwrap();
        report.write("steps.csv", "one").unwrap();
        report.write("steps.csv", "two").unwrap();
        assert_eq!(fs::read_to_string(report.path().join("steps.csv")).unwrap(), "two");
        assert_eq!(fs::read_dir(report.path()).unwrap().count(), 1);
    }
}
