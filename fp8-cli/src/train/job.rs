//! The whole job: both trainings, then everything that is written and printed.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use crate::failure::Failure;
use crate::train::config::{self, Config};
use crate::train::report;
use crate::train::sample::{self, Sample, printable};
use crate::train::shares;
use crate::train::summary::{self, ReportDir, Summary};
use crate::train::trainer::{Run, Trainer};
use crate::train::training::{self, Journey, Outcome};

/// Trains, then writes the report and prints the results. Checkpoints and folders that cannot be used are refused before
/// the first step. A training that diverges or is interrupted leaves a report, too.
pub(crate) fn run<T: Trainer>(
    config: &Config,
    interrupt: &AtomicBool,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    match run_rank::<T>(config, interrupt, out) {
        Ok(stopped) => config.ranks.finish(stopped),
        Err(failure) => Err(config.ranks.give_up(failure)),
    }
}

/// Does the part of this process. Returns why the trainings were stopped, if all ranks have stopped them.
fn run_rank<T: Trainer>(
    config: &Config,
    interrupt: &AtomicBool,
    out: &mut dyn Write,
) -> Result<Option<Failure>, Failure> {
    let mut journeys = Vec::new();
    for (run, checkpoint) in &config.runs {
        let (run, settings) = (*run, &config.settings);
        let (trainer, step) = match checkpoint {
            None => (T::start(settings, config.place, &config.ranks, run).map_err(Failure::input)?, 0),
            Some(checkpoint) => {
                let trainer = T::resume(settings, config.place, &config.ranks, run, &checkpoint.dir);
                let trainer = trainer.map_err(|error| config::bad(&checkpoint.dir, &error))?;
                if let Some(note) = trainer.resume_note().filter(|_| !config.quiet) {
                    // Training continues even if stderr is closed.
                    let _ = writeln!(std::io::stderr(), "{}: {note}", checkpoint.dir.display());
                }
                (trainer, checkpoint.step)
            }
        };
        journeys.push(Journey { run, trainer, step });
    }
    let is_first = config.ranks.is_first();
    let folder = is_first.then(|| ReportDir::open(&config.report_dir)).transpose()?;
    // From here on, the checkpoint folder can always be resumed from. A folder that cannot be written is refused now
    // rather than after an hour of training.
    for journey in &journeys {
        training::save(config, journey).map_err(|failure| match failure {
            Failure::Work(sentence) => Failure::Input(sentence),
            other => other,
        })?;
    }

    let (mut outcomes, mut stopped, mut shares) = (Vec::new(), None, Vec::new());
    for journey in &mut journeys {
        let outcome = training::train(config, journey, interrupt)?;
        let end = outcome.end;
        outcomes.push(outcome);
        // Before the last save, which may fail on the first rank alone. If another rank is lost now, there is a report all the same.
        shares = shares::gather(&config.ranks, &outcomes).unwrap_or_default();
        stopped = training::stopped(config, journey, end);
        if stopped.is_some() {
            break;
        }
    }
    let (Some(folder), Some(last)) = (folder, journeys.last_mut()) else {
        return Ok(stopped);
    };
    let failed = |error: String| Failure::work(format!("sample: {error}"));
    let sample = match (config.sample, &stopped) {
        (0, _) | (_, Some(_)) => None,
        _ if !generates(config) => None,
        _ => Some(sample::generate(config, last.run, &mut last.trainer).map_err(failed)?),
    };
    let summary = Summary::new(config, &outcomes, &last.trainer, shares);
    let written = write(config, &folder, &summary, &outcomes, sample.as_ref());
    if let Some(failure) = stopped {
        let report = folder.path().join("report.html");
        return Ok(Some(failure.with(&match written {
            Ok(()) => format!("{} shows the steps until then", report.display()),
            Err(other) => other.to_string(),
        })));
    }
    written?;

    let text = results(config, &summary, sample.as_ref(), &folder);
    // If stdout is closed, the files are written all the same.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    Ok(None)
}

/// Whether a sample can be generated: one process does that, which has a whole model.
fn generates(config: &Config) -> bool {
    config.ranks.sharing().0 == 1
}

/// Writes the three files of the report folder.
fn write(
    config: &Config,
    folder: &ReportDir,
    summary: &Summary,
    outcomes: &[Outcome],
    sample: Option<&Sample>,
) -> Result<(), Failure> {
    folder.write("steps.csv", &summary::steps_csv(outcomes))?;
    folder.write("summary.json", &summary.json()?)?;
    folder.write("report.html", &report::html(config, summary, outcomes, sample))
}

const NO_SAMPLE: &str = "No sample: processes that share the layers of a model (--tp) generate no text.\n\n";

/// Returns the text for stdout.
fn results(config: &Config, summary: &Summary, sample: Option<&Sample>, folder: &ReportDir) -> String {
    let mut text = String::new();
    if let Some(sample) = sample {
        let (model, prompt) = (sample.run.title(), printable(&sample.prompt));
        text += &format!(
            "Prompt:\n\n{prompt}\n\nThe {model} model continues:\n\n{}\n\n",
            printable(&sample.bytes)
        );
    }
    if config.sample > 0 && !generates(config) {
        text += NO_SAMPLE;
    }
    text += &summary.table();
    text += &format!("\n{}\n", folder.path().join("report.html").display());
    if let Some(dir) = &config.save {
        let goes_on =
            if config.stop_at < config.settings.steps { "; --resume continues from there" } else { "" };
        let runs: Vec<&str> = config.runs.iter().map(|(run, _)| Run::name(*run)).collect();
        text += &format!("{}: checkpoints {}{goes_on}\n", dir.display(), runs.join(", "));
    }
    text
}

#[cfg(test)]
mod tests;
