//! One training: the loop over steps, what it records, and how it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fp8_nn::Schedule;
use fp8_nn::fp8_kernels::MemoryUse;

use crate::failure::Failure;
use crate::train::batches;
use crate::train::config::Config;
use crate::train::options::{ScheduleName, Settings};
use crate::train::progress::Progress;
use crate::train::telemetry::Telemetry;
use crate::train::trainer::{Observe, Run, StepResult, Trainer};

/// At most this many windows of the held-out text are evaluated after the last step.
const FINAL_WINDOWS: usize = 256;

/// At most this many windows are evaluated for a point of the validation curve.
pub(crate) const CURVE_WINDOWS: usize = 48;

/// One line of steps.csv.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Record {
    /// Counted from 1.
    pub(crate) step: usize,
    pub(crate) loss: f32,
    pub(crate) grad_norm: f32,
    pub(crate) lr: f32,
    /// The scale of the loss in this step, if it has one.
    pub(crate) loss_scale: Option<f32>,
    /// Whether the step changed no weight, because a gradient was not finite.
    pub(crate) skipped: bool,
    /// The time of the step, including what is read for the report if it is observed.
    pub(crate) ms: f64,
    /// Loss on a part of the held-out text after this step, if it was evaluated.
    pub(crate) validation_loss: Option<f64>,
}

/// A model and the number of steps it was trained for.
#[derive(Debug)]
pub(crate) struct Journey<T> {
    pub(crate) run: Run,
    pub(crate) trainer: T,
    pub(crate) step: usize,
}

/// The way in which a training ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum End {
    /// It did the last step asked for.
    Complete,
    /// The loss of this step was not finite, and neither were those of as many steps before as may be skipped.
    Diverged { step: usize, loss: f64 },
    /// Ctrl-C came during this step.
    Interrupted { step: usize },
}

/// The results of one training.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) run: Run,
    pub(crate) records: Vec<Record>,
    pub(crate) telemetry: Telemetry,
    /// Advice about tensors that lost values.
    pub(crate) advice: Vec<String>,
    pub(crate) end: End,
    /// Loss on the held-out text after the last step, in nats per byte. `None` unless the training is complete.
    pub(crate) held_out_loss: Option<f64>,
    /// Bytes at the peak of the training.
    pub(crate) memory: Option<MemoryUse>,
    /// Bytes that this process has sent to the other ranks in the steps.
    pub(crate) bytes_sent: u64,
}

impl Outcome {
    /// Counts the steps that changed no weight: the optimizer skips a step with gradients that are not finite.
    pub(crate) fn skipped_steps(&self) -> usize {
        self.records.iter().filter(|record| record.skipped).count()
    }

    /// Median milliseconds of a step; `None` if there was no step.
    pub(crate) fn median_step_ms(&self) -> Option<f64> {
        let mut ms: Vec<f64> = self.records.iter().map(|record| record.ms).collect();
        ms.sort_by(f64::total_cmp);
        let middle = ms.len() / 2;
        match ms.len() {
            0 => None,
            len if len.is_multiple_of(2) => Some((ms[middle - 1] + ms[middle]) / 2.0),
            _ => Some(ms[middle]),
        }
    }
}

/// The last learning rate as a fraction of the highest, low enough for both trainings to settle.
const LAST_RATE: f32 = 0.01;

/// A linear warm-up over a tenth of the steps, at most a hundred, then the way down from the highest rate to a hundredth of it.
fn schedule(settings: &Settings) -> Result<Schedule, String> {
    let (steps, highest) = (settings.steps as u64, settings.lr);
    let warmup = (steps / 10).clamp(1, 100);
    let schedule = match settings.schedule {
        ScheduleName::Constant => Schedule::constant(highest, warmup),
        ScheduleName::Linear => Schedule::linear(highest, warmup, steps, LAST_RATE),
        ScheduleName::Cosine => Schedule::cosine(highest, warmup, steps, LAST_RATE),
        // In the last fifth; in a training of one step there is nothing behind the warm-up.
        ScheduleName::Wsd => Schedule::warmup_stable_decay(highest, warmup, steps, steps / 5, LAST_RATE),
    };
    schedule.map_err(|error| error.to_string())
}

/// Trains to the last step asked for, saves, and evaluates. A training that diverges or is interrupted returns what it
/// recorded until then.
///
/// One bad batch does not end it: where the loss is infinite or NaN, so is the norm of the gradients, and the optimizer leaves the
/// weights as they are. It counts as diverged when more than `skip_non_finite` steps in a row have no finite loss.
pub(crate) fn train<T: Trainer>(
    config: &Config,
    journey: &mut Journey<T>,
    interrupt: &AtomicBool,
) -> Result<Outcome, Failure> {
    let settings = &config.settings;
    let run = journey.run;
    let failed = |step: usize, error: String| {
        Failure::work(format!("step {step} of the {} training: {error}", run.title()))
    };
    let schedule = schedule(settings).map_err(Failure::work)?;
    let progress = Progress::new(config, run, journey.step);
    let steps = config.stop_at.saturating_sub(journey.step);
    let validation = batches::held_out(&config.corpus, settings.batch, settings.seq, CURVE_WINDOWS);
    let mut outcome = Outcome {
        run,
        records: Vec::with_capacity(steps.min(1 << 20)),
        telemetry: Telemetry::new(steps),
        advice: Vec::new(),
        end: End::Complete,
        held_out_loss: None,
        memory: None,
        bytes_sent: 0,
    };
    let mut lost = 0; // steps in a row
    while journey.step < config.stop_at {
        let step = journey.step + 1;
        let batch = batches::training(&config.corpus, settings.seed, step, settings.batch, settings.seq);
        let lr = schedule.lr(step as u64 - 1);
        let observed = run == Run::Fp8 && outcome.telemetry.wants(step, config.stop_at);
        let observe = match observed {
            false => Observe::Nothing,
            true if outcome.telemetry.measures(step, config.stop_at) => Observe::Blocks,
            true => Observe::Counts,
        };
        let (start, sent) = (Instant::now(), config.ranks.bytes_sent());
        let result = journey.trainer.step(&batch, lr, observe).map_err(|error| failed(step, error))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        outcome.bytes_sent += config.ranks.bytes_sent() - sent;
        let StepResult { loss, grad_norm, loss_scale, skipped } = result;
        let mut record = Record { step, loss, grad_norm, lr, loss_scale, skipped, ms, validation_loss: None };
        lost = if loss.is_finite() { 0 } else { lost + 1 };
        if lost > config.skip_non_finite {
            outcome.records.push(record);
            outcome.end = End::Diverged { step, loss: loss.into() };
            progress.finish();
            return Ok(outcome);
        }
        journey.step = step;
        if observed && loss.is_finite() {
            outcome.telemetry.record(step, journey.trainer.slots().map_err(|error| failed(step, error))?);
            record.ms = start.elapsed().as_secs_f64() * 1e3;
            outcome.advice = journey.trainer.advice();
        }
        if config.evaluates(step) {
            let loss = evaluate(&validation, &mut journey.trainer).map_err(|error| failed(step, error))?;
            record.validation_loss = Some(loss).filter(|loss| loss.is_finite());
        }
        outcome.records.push(record);
        progress.step(step, loss, loss_scale);
        let stop =
            config.ranks.any(interrupt.load(Ordering::Relaxed)).map_err(|error| failed(step, error))?;
        if stop {
            progress.finish();
            outcome.end = End::Interrupted { step };
            return Ok(outcome);
        }
    }
    progress.finish();
    outcome.memory = journey.trainer.memory();
    save(config, journey)?;
    let held_out = batches::held_out(&config.corpus, settings.batch, settings.seq, FINAL_WINDOWS);
    let loss = evaluate(&held_out, &mut journey.trainer)
        .map_err(|error| Failure::work(format!("held-out loss of the {} training: {error}", run.title())))?;
    match loss.is_finite() {
        true => outcome.held_out_loss = Some(loss),
        false => outcome.end = End::Diverged { step: journey.step, loss },
    }
    Ok(outcome)
}

/// Saves a checkpoint if the configuration names a folder for it.
pub(crate) fn save<T: Trainer>(config: &Config, journey: &Journey<T>) -> Result<(), Failure> {
    let Some(folder) = &config.save else { return Ok(()) };
    let dir = folder.join(journey.run.name());
    let metadata = config.metadata(journey.run, journey.step);
    // The first rank writes. If it fails, the others learn it when it leaves them.
    let saved = journey.trainer.save(&dir, &metadata);
    saved.map_err(|error| Failure::work(format!("saving to {}: {error}", dir.display())))
}

/// Turns a training that did not complete into the failure that the program ends with. Saves an interrupted one.
pub(crate) fn stopped<T: Trainer>(config: &Config, journey: &Journey<T>, end: End) -> Option<Failure> {
    let title = journey.run.title();
    match end {
        End::Complete => None,
        End::Diverged { step, loss } => Some(Failure::work(format!(
            "step {step} of the {title} training: the loss is {loss}: training diverged, and a lower --lr may help"
        ))),
        End::Interrupted { step } => {
            let place = format!("interrupted after step {step} of the {title} training");
            Some(match (&config.save, save(config, journey)) {
                (_, Err(failure)) => failure,
                (Some(dir), Ok(())) => {
                    let dir = dir.display();
                    Failure::Stopped(format!("{place}; saved: --resume {dir} continues from there"))
                }
                (None, Ok(())) => Failure::Stopped(format!("{place}; nothing is saved without --save DIR")),
            })
        }
    }
}

/// Mean loss over all windows of the batches.
fn evaluate<T: Trainer>(batches: &[batches::Batch], trainer: &mut T) -> Result<f64, String> {
    let (mut sum, mut windows) = (0.0, 0);
    for batch in batches {
        sum += f64::from(trainer.evaluate(batch)?) * batch.rows as f64;
        windows += batch.rows;
    }
    Ok(sum / windows as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_warms_up_and_falls_to_a_hundredth() {
        let of = |name: &str, steps: usize, highest: f32| {
            let line = [format!("--steps={steps}"), format!("--lr={highest}"), format!("--schedule={name}")];
            let schedule = schedule(&crate::train::options::parse(line).unwrap().0.settings).unwrap();
            move |step: u64| schedule.lr(step - 1)
        };
        let rates = |steps, highest| of("cosine", steps, highest);
        let rate = rates(400, 2e-3);
        assert_eq!(rate(1), 2e-3 / 40.0);
        assert_eq!(rate(40), 2e-3);
        assert!((rate(220) - 1.01e-3).abs() < 1e-9);
        assert!((rate(400) - 2e-5).abs() < 1e-9);
        assert!((40..400).all(|step| rate(step) > rate(step + 1)));
        assert_eq!(rates(1, 2e-3)(1), 2e-3);
        assert_eq!(rates(100_000, 1.0)(100), 1.0);
        let [constant, linear, wsd] = ["constant", "linear", "wsd"].map(|name| of(name, 400, 2e-3));
        assert_eq!([constant(20), constant(40), constant(400)], [1e-3, 2e-3, 2e-3]);
        assert!((linear(220) - 1.01e-3).abs() < 1e-9 && (linear(400) - 2e-5).abs() < 1e-9);
        assert_eq!([wsd(40), wsd(320)], [2e-3; 2]);
        assert!(wsd(321) < 2e-3 && (wsd(360) - 1.01e-3).abs() < 1e-9 && (wsd(400) - 2e-5).abs() < 1e-9);
        // Trainings of few steps have a rate.
        for name in ["constant", "linear", "cosine", "wsd"] {
            assert!((1..=9).all(|steps| of(name, steps as usize, 1.0)(steps) > 0.0), "{name}");
        }
    }

    #[test]
    fn medians() {
        let outcome = |ms: &[f64]| Outcome {
            run: Run::Fp8,
            records: ms.iter().map(|&ms| Record { ms, ..Record::default() }).collect(),
            telemetry: Telemetry::new(0),
            advice: Vec::new(),
            end: End::Complete,
            held_out_loss: None,
            memory: None,
            bytes_sent: 0,
        };
        assert_eq!(outcome(&[]).median_step_ms(), None);
        assert_eq!(outcome(&[3.0, 1.0, 2.0]).median_step_ms(), Some(2.0));
        assert_eq!(outcome(&[4.0, 1.0, 2.0, 3.0]).median_step_ms(), Some(2.5));
    }
}
