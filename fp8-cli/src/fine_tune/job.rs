//! The training itself: steps, progress, report and result.

use crate::failure::Failure;
use crate::fine_tune::line::{CONFIG, RECIPE};
use crate::fine_tune::live::Live;
use crate::fine_tune::seen::Seen;
use crate::fine_tune::setup::Opened;
use crate::fine_tune::{plan, report};
use crate::gathers;
use crate::table::quoted;
use crate::train::options::RecipeName;
use crate::train::ranks::Ranks;
use crate::train::telemetry::{SlotState, Telemetry, slot_states};
use crate::{in_fp8, output};
use fp8_hf::{Scheme, TrainRecord, TrainRun, Trainer};
use fp8_nn::fp8_kernels::AtomicFile;
use fp8_nn::fp8_recipe::SlotTrace;
use serde_json::json;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Advice is about this many of the last observed steps.
const TRACED: usize = 100;

/// Trains to the end, or until a signal. Returns why it was stopped, if all ranks have stopped it.
pub(super) fn run(opened: Opened, stop: &AtomicBool) -> Result<Option<Failure>, Failure> {
    let plan = opened.plan;
    let steps = opened.run.total_steps(opened.data.train.len())?;
    let summary = plan::sentences(&opened, &plan, steps);
    let first = plan::json(&opened, &plan, steps);
    let (options, ranks, out) = (opened.options, opened.ranks, opened.out);
    let prints = options.json && ranks.is_first();
    let live = |done| Live::new(options.quiet || options.json, done, steps);
    live(0).say(&summary);
    if prints {
        output::print(&format!("{first}\n"))?;
    }
    let trainer =
        Trainer::new(opened.folder, opened.adapter, &opened.trainer, &opened.device, ranks.train_ranks())?;
    let is_resumed = options.resume.is_some();
    if ranks.is_first() && !is_resumed {
        write_options(&out, &opened.config, options.recipe.as_ref())?;
    }
    let (data, validation) = (Box::new(opened.data.train), opened.data.validation);
    let validation = validation.map(|part| Box::new(part) as Box<dyn fp8_hf::SequenceSource>);
    let run = match is_resumed {
        true => TrainRun::resume(&out, trainer, data, validation, &opened.run)?,
        false => TrainRun::start(&out, trainer, data, validation, &opened.run)?,
    };
    let export = options.export.and_then(|export| export.0);
    expect_no_result(&out, export)?;
    let mut live = live(run.done());
    if let Some(note) = run.resume_note() {
        live.say(&format!("{}: {note}\n", out.display()));
    }
    let seen = Seen {
        plan,
        first_validation: None,
        telemetry: Telemetry::new(usize::try_from(steps).unwrap_or(usize::MAX)),
        advice: Vec::new(),
        gathered_in_high_precision: Vec::new(),
        config: opened.config,
        summary,
        device: options.device.to_string(),
    };
    let mut job = Job { run, out, ranks, seen, prints, as_json: options.json };
    // From here on a failure is one of the work.
    let done = job.work(&mut live, export, stop).map_err(of_work);
    live.finish();
    done
}

/// A failure behind the first step is none of the options.
fn of_work(failure: Failure) -> Failure {
    match failure {
        Failure::Input(sentence) => Failure::Work(sentence),
        other => other,
    }
}

/// Refuses to export a run that has its result.
fn expect_no_result(out: &Path, export: Option<Scheme>) -> Result<(), Failure> {
    let result = out.join("final");
    match export {
        Some(scheme) if result.join("config.json").exists() => Err(Failure::input(format!(
            "--export {}: {} is there already: fp8 quantize {} OUT --scheme {} writes it in FP8",
            scheme.name(),
            result.display(),
            quoted(&result),
            scheme.name()
        ))),
        _ => Ok(()),
    }
}

/// A run, and what is seen of it.
struct Job {
    run: TrainRun,
    out: PathBuf,
    ranks: Ranks,
    seen: Seen,
    /// Whether this process prints lines of JSON.
    prints: bool,
    as_json: bool,
}

impl Job {
    fn work(
        &mut self,
        live: &mut Live,
        export: Option<Scheme>,
        stop: &AtomicBool,
    ) -> Result<Option<Failure>, Failure> {
        let begun = self.run.done();
        if begun == 0 {
            self.seen.first_validation = self.run.evaluate()?.map(|evaluation| evaluation.loss);
        }
        if let Some(loss) = self.seen.first_validation {
            live.say(&format!("validation loss before the first step: {loss:.4}\n"));
        }
        let stopped = match train(&mut self.run, live, &mut self.seen, self.prints, stop) {
            Ok(stopped) => stopped,
            Err(failure) => {
                // The report shows the steps until then.
                let _ = self.report();
                return Err(failure);
            }
        };
        if stopped {
            self.run.save_checkpoint()?;
            self.report()?;
            return Ok(Some(Failure::Stopped(self.interrupted())));
        }
        let result = match export {
            None => self.run.finish(None)?,
            Some(scheme) => self.run.finish_with(&mut |trainer, out| match trainer.is_first() {
                true => in_fp8::write(out, scheme, |whole| trainer.save_result(whole, None)),
                false => trainer.save_result(out, None), // sends its part, and writes nothing
            })?,
        };
        // A run that was complete keeps its report.
        if self.run.done() > begun || !self.out.join(REPORT).exists() {
            self.report()?;
        }
        if self.ranks.is_first() {
            finish(&self.out, &result, &self.seen, self.as_json, self.run.trainer().has_adapter())?;
        }
        Ok(None)
    }

    fn report(&self) -> Result<(), Failure> {
        match self.ranks.is_first() {
            true => write(&self.out.join(REPORT), &report::html(&self.out, &self.seen)?),
            false => Ok(()),
        }
    }

    fn interrupted(&self) -> String {
        let (out, done) = (quoted(&self.out), self.run.done());
        let again = match self.ranks.count() {
            1 => format!("fp8 train --resume {out} goes on from there"),
            count => format!(
                "fp8 launch -n {count} -- fp8 train --resume {out} goes on from there, or fp8 train --resume {out} --dp 1 in one process"
            ),
        };
        format!("interrupted behind step {done}; saved: {again}")
    }
}

const REPORT: &str = "report.html";

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
            seen.gathered_in_high_precision = gathers::in_high_precision(run.trainer().model());
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
    fs::create_dir_all(out).map_err(|error| Failure::input(format!("--out {}: {error}", out.display())))?;
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
    let report: PathBuf = out.join(REPORT);
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
    let mut text = format!("{}, loss {:.4}", plan::count(last.step, "step"), last.loss);
    if let Some(loss) = validation {
        let before = seen.first_validation.map(|loss| format!(", {loss:.4} before")).unwrap_or_default();
        text += &format!(", validation loss {loss:.4}{before}");
    }
    if skipped > 0 {
        text += &format!("; {} skipped", plan::count(skipped as u64, "step"));
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
