//! The whole job: both trainings, then everything that is written and printed.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use crate::config::{self, Config};
use crate::failure::Failure;
use crate::report;
use crate::sample::{self, Sample, printable};
use crate::summary::{self, ReportDir, Summary};
use crate::train::{self, Journey};
use crate::trainer::{Run, Trainer};

/// Does it. What is wrong with checkpoints or folders shows before the first step.
pub(crate) fn run<T: Trainer>(
    config: &Config,
    interrupt: &AtomicBool,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let mut journeys = Vec::new();
    for (run, checkpoint) in &config.runs {
        let (run, settings) = (*run, &config.settings);
        let (trainer, step) = match checkpoint {
            None => (T::start(settings, config.place, run).map_err(Failure::input)?, 0),
            Some(checkpoint) => {
                let trainer = T::resume(settings, config.place, run, &checkpoint.dir);
                let trainer = trainer.map_err(|error| config::bad(&checkpoint.dir, &error))?;
                if let Some(note) = trainer.resume_note().filter(|_| !config.quiet) {
                    // A note that cannot be shown is no reason to end a training.
                    let _ = writeln!(std::io::stderr(), "{}: {note}", checkpoint.dir.display());
                }
                (trainer, checkpoint.step)
            }
        };
        journeys.push(Journey { run, trainer, step });
    }
    let folder = ReportDir::open(&config.report_dir)?;
    // From here on the checkpoint folder can always be resumed from, and a folder that cannot be written is found
    // before an hour of training rather than after it.
    for journey in &journeys {
        train::save(config, journey).map_err(|failure| match failure {
            Failure::Training(sentence) => Failure::Input(sentence),
            other => other,
        })?;
    }

    let mut outcomes = Vec::new();
    for journey in &mut journeys {
        outcomes.push(train::train(config, journey, interrupt)?);
    }
    let Some(last) = journeys.last_mut() else { return Ok(()) };
    let failed = |error: String| Failure::training(format!("sample: {error}"));
    let sample = match config.sample {
        0 => None,
        _ => Some(sample::generate(config, last.run, &mut last.trainer).map_err(failed)?),
    };
    let summary = Summary::new(config, &outcomes, &last.trainer);
    let report = report::html(config, &summary, &outcomes, sample.as_ref()).map_err(Failure::Training)?;
    folder.write("steps.csv", &summary::steps_csv(&outcomes))?;
    folder.write("summary.json", &summary.json()?)?;
    folder.write("report.html", &report)?;

    let text = results(config, &summary, sample.as_ref(), &folder);
    // Whoever closed stdout does not want to read it; the files are written.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    Ok(())
}

/// What stdout shows.
fn results(config: &Config, summary: &Summary, sample: Option<&Sample>, folder: &ReportDir) -> String {
    let mut text = String::new();
    if let Some(sample) = sample {
        let (model, prompt) = (sample.run.title(), printable(&sample.prompt));
        text += &format!(
            "The {model} model goes on from …\n\n{prompt}\n\n… with\n\n{}\n\n",
            printable(&sample.bytes)
        );
    }
    text += &summary.table();
    text += &format!("\n{}\n", folder.path().join("report.html").display());
    if let Some(dir) = &config.save {
        let goes_on = if config.stop_at < config.settings.steps { "; --resume goes on from it" } else { "" };
        let runs: Vec<&str> = config.runs.iter().map(|(run, _)| Run::name(*run)).collect();
        text += &format!("{}: checkpoints {}{goes_on}\n", dir.display(), runs.join(", "));
    }
    text
}

#[cfg(test)]
mod tests;
