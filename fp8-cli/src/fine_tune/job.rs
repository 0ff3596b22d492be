//! The training itself: steps, progress, report and result.

use crate::failure::Failure;
use crate::fine_tune::line::CONFIG;
use crate::fine_tune::live::Live;
use crate::fine_tune::setup::{Opened, RECIPE};
use crate::fine_tune::{plan, report};
use crate::table::quoted;
use crate::train::options::RecipeName;
use crate::train::ranks::Ranks;
use crate::train::telemetry::{SlotState, Telemetry, slot_states};
use crate::{in_fp8, output};
use fp8_hf::{TrainPlan, TrainRanks, TrainRecord, TrainRun, Trainer};
use fp8_nn::fp8_kernels::AtomicFile;
use fp8_nn::fp8_recipe::SlotTrace;
use serde_json::json;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Advice is about this many of the last observed steps.
const TRACED: usize = 100;

/// This process among the trainer's.
pub(super) fn ranks(ranks: &Ranks) -> Option<TrainRanks> {
    let (group, control) = ranks.group().zip(ranks.control())?;
    Some(TrainRanks { group: group.clone(), control: control.clone() })
}

/// What is seen of a run, for its report.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) plan: TrainPlan,
    pub(super) first_validation: Option<f64>,
    pub(super) telemetry: Telemetry,
    pub(super) advice: Vec<String>,
    pub(super) config: String,
    pub(super) summary: String,
    pub(super) device: String,
}

/// Trains to the end, or until a signal. Returns why it was stopped, if all ranks have stopped it.
pub(super) fn run(opened: Opened, stop: &AtomicBool) -> Result<Option<Failure>, Failure> {
    let plan = opened.plan;
    let steps = opened.run.total_steps(opened.data.train.len())?;
    let as_json = opened.options.json;
    let is_first = opened.ranks.is_first();
    let live = |done| Live::new(opened.options.quiet || as_json, done, steps);
    let summary = plan::sentences(&opened, &plan, steps);
    live(0).say(&summary);
    if as_json && is_first {
        output::print(&format!("{}\n", plan::json(&opened, &plan, steps)))?;
    }
    let device = opened.options.device.to_string();
    let live_from = |done| Live::new(opened.options.quiet || as_json, done, steps);
    let trainer =
        Trainer::new(opened.folder, opened.adapter, &opened.trainer, &opened.device, ranks(&opened.ranks))?;
    let (data, validation) = (Box::new(opened.data.train), opened.data.validation);
    let validation = validation.map(|part| Box::new(part) as Box<dyn fp8_hf::SequenceSource>);
    let is_resumed = opened.options.resume.is_some();
    let mut run = match is_resumed {
        true => TrainRun::resume(&opened.out, trainer, data, validation, &opened.run)?,
        false => TrainRun::start(&opened.out, trainer, data, validation, &opened.run)?,
    };
    if is_first && !is_resumed {
        write_options(&opened.out, &opened.config, opened.options.recipe.as_ref())?;
    }
    let mut live = live_from(run.done());
    if let Some(note) = run.resume_note() {
        live.say(&format!("{}: {note}\n", opened.out.display()));
    }
    let first_validation =
        if run.done() == 0 { run.evaluate()?.map(|evaluation| evaluation.loss) } else { None };
    if let Some(loss) = first_validation {
        live.say(&format!("validation loss before the first step: {loss:.4}\n"));
    }
    let mut seen = Seen {
        plan,
        first_validation,
        telemetry: Telemetry::new(usize::try_from(steps).unwrap_or(usize::MAX)),
        advice: Vec::new(),
        config: opened.config,
        summary,
        device,
    };
    let trained = train(&mut run, &mut live, &mut seen, as_json && is_first, stop);
    live.finish();
    let write_report = |seen: &Seen| match is_first {
        true => write(&opened.out.join("report.html"), &report::html(&opened.out, seen)?),
        false => Ok(()),
    };
    let stopped = match trained {
        Ok(stopped) => stopped,
        Err(failure) => {
            // The report shows the steps until then.
            let _ = write_report(&seen);
            return Err(failure);
        }
    };
    if stopped {
        run.save_checkpoint()?;
        write_report(&seen)?;
        let (out, done) = (quoted(&opened.out), run.done());
        let text =
            format!("interrupted behind step {done}; saved: fp8 train --resume {out} goes on from there");
        return Ok(Some(Failure::Stopped(text)));
    }
    let result = match opened.options.export {
        None => run.finish(None)?,
        Some(scheme) => run.finish_with(&mut |trainer, out| {
            in_fp8::write(out, scheme, |whole| trainer.save_result(whole, None))
        })?,
    };
    write_report(&seen)?;
    if is_first {
        finish(&opened.out, &result, &seen, as_json, run.trainer().has_adapter())?;
    }
    Ok(None)
}

/// Takes all steps. Returns whether a signal has ended it before the last.
fn train(
    run: &mut TrainRun,
    live: &mut Live,
    seen: &mut Seen,
    prints: bool,
    stop: &AtomicBool,
) -> Result<bool, Failure> {
    let mut trace = SlotTrace::new(TRACED);
    while let Some(record) = run.step()? {
        if record.saturated.is_some() {
            let scaling = run.trainer().scaling();
            trace.record(record.step, scaling).map_err(fp8_nn::Error::from).map_err(fp8_hf::Error::from)?;
            let states: Vec<SlotState> = slot_states(scaling).map_err(fp8_hf::Error::from)?;
            seen.telemetry.record(usize::try_from(record.step).unwrap_or(usize::MAX), states);
            seen.advice = trace.advice().iter().map(ToString::to_string).collect();
        }
        live.step(&record);
        if prints {
            output::print(&format!("{}\n", record.json()))?;
        }
        if run.any(stop.load(Ordering::Relaxed))? && run.done() < run.total() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes `config.toml`, and a copy of the recipe's file.
fn write_options(out: &Path, config: &str, recipe: Option<&RecipeName>) -> Result<(), Failure> {
    if let Some(RecipeName::File(path)) = recipe {
        let text = fs::read_to_string(path);
        write(
            &out.join(RECIPE),
            &text.map_err(|error| Failure::work(format!("{}: {error}", path.display())))?,
        )?;
    }
    write(&out.join(CONFIG), config)
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let written = AtomicFile::create(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.commit()
    });
    written.map_err(|error| Failure::work(format!("{}: {error}", path.display())))
}

/// Prints the result.
fn finish(out: &Path, result: &Path, seen: &Seen, as_json: bool, is_adapter: bool) -> Result<(), Failure> {
    let records: Vec<TrainRecord> = TrainRun::read_log(out)?;
    let last = records.last().cloned().unwrap_or_default();
    let skipped = records.iter().filter(|record| record.skipped).count();
    let validation = records.iter().rev().find_map(|record| record.validation_loss);
    let report: PathBuf = out.join("report.html");
    if as_json {
        let value = json!({
            "result": result.display().to_string(),
            "report": report.display().to_string(),
            "steps": last.step,
            "skipped": skipped,
            "loss": last.loss,
            "validation_loss": validation,
            "validation_loss_before": seen.first_validation,
        });
        output::print(&format!("{value}\n"))?;
        return Ok(());
    }
    let mut text = format!("{} steps, loss {:.4}", last.step, last.loss);
    if let Some(loss) = validation {
        let before = seen.first_validation.map(|loss| format!(", {loss:.4} before")).unwrap_or_default();
        text += &format!(", validation loss {loss:.4}{before}");
    }
    if skipped > 0 {
        text += &format!("; {skipped} steps were skipped");
    }
    text += &format!("\n{}\n{}\n", report.display(), result.display());
    let (base, result) = (&seen.base(), quoted(result));
    text += &match is_adapter {
        true => format!(
            "try it: fp8 generate {base} --adapter {result} --prompt \"…\"\nas a part of the model: fp8 merge {base} {result} tuned\n"
        ),
        false => format!("try it: fp8 generate {result} --prompt \"…\"\n"),
    };
    output::print(&text)?;
    Ok(())
}

impl Seen {
    /// The path of the model, as a shell reads it.
    fn base(&self) -> String {
        let table = self.config.parse::<toml::Table>().unwrap_or_default();
        let model = table.get("model").and_then(toml::Value::as_str).unwrap_or("MODEL").to_owned();
        quoted(Path::new(&model))
    }
}
