//! One training: the loop over steps, what it records, and how it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fp8_nn::CosineSchedule;

use crate::batches;
use crate::config::Config;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::telemetry::Telemetry;
use crate::trainer::{Run, Trainer};

/// One line of steps.csv.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Record {
    /// From 1.
    pub(crate) step: usize,
    pub(crate) loss: f32,
    pub(crate) grad_norm: f32,
    pub(crate) lr: f32,
    pub(crate) ms: f64,
}

/// A model on its way: how many steps it has behind it.
#[derive(Debug)]
pub(crate) struct Journey<T> {
    pub(crate) run: Run,
    pub(crate) trainer: T,
    pub(crate) step: usize,
}

/// What one training showed.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) run: Run,
    pub(crate) records: Vec<Record>,
    pub(crate) telemetry: Telemetry,
    /// Nats per byte.
    pub(crate) held_out_loss: f64,
}

impl Outcome {
    /// Steps that changed nothing: the optimizer leaves everything as it is where gradients have no finite norm.
    pub(crate) fn skipped_steps(&self) -> usize {
        self.records.iter().filter(|record| !record.grad_norm.is_finite()).count()
    }

    /// Median milliseconds of a step; none if there was no step.
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

/// The last learning rate as a part of the highest: low enough for both trainings to settle.
const LAST_RATE: f32 = 0.01;

/// A linear warm-up over a tenth of `steps`, at most a hundred, then a cosine from `highest` down to a hundredth of it.
fn schedule(steps: usize, highest: f32) -> Result<CosineSchedule, String> {
    let warmup = (steps / 10).clamp(1, 100);
    CosineSchedule::new(highest, warmup as u64, steps as u64, LAST_RATE).map_err(|error| error.to_string())
}

/// Trains to the last step asked for, saves, and evaluates.
pub(crate) fn train<T: Trainer>(
    config: &Config,
    journey: &mut Journey<T>,
    interrupt: &AtomicBool,
) -> Result<Outcome, Failure> {
    let settings = &config.settings;
    let run = journey.run;
    let failed = |step: usize, error: String| {
        Failure::training(format!("step {step} of the {} training: {error}", run.title()))
    };
    let schedule = schedule(settings.steps, settings.lr).map_err(Failure::training)?;
    let progress = Progress::new(config, run, journey.step);
    let mut records = Vec::with_capacity(config.stop_at.saturating_sub(journey.step).min(1 << 20));
    let mut telemetry = Telemetry::new(config.stop_at.saturating_sub(journey.step));
    while journey.step < config.stop_at {
        let step = journey.step + 1;
        let batch = batches::training(&config.corpus, settings.seed, step, settings.batch, settings.seq);
        let lr = schedule.lr(step as u64 - 1);
        let observed = run == Run::Fp8 && telemetry.wants(step, config.stop_at);
        let start = Instant::now();
        let result = journey.trainer.step(&batch, lr, observed).map_err(|error| failed(step, error))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if !result.loss.is_finite() {
            let sentence =
                format!("the loss is {}: training diverged, and a lower --lr may help", result.loss);
            return Err(failed(step, sentence));
        }
        journey.step = step;
        records.push(Record { step, loss: result.loss, grad_norm: result.grad_norm, lr, ms });
        if observed {
            telemetry.record(step, journey.trainer.slots().map_err(|error| failed(step, error))?);
        }
        progress.step(step, result.loss);
        if interrupt.load(Ordering::Relaxed) {
            progress.finish();
            return Err(interrupted(config, journey));
        }
    }
    progress.finish();
    save(config, journey)?;
    let held_out_loss = evaluate(config, &mut journey.trainer).map_err(|error| {
        Failure::training(format!("held-out loss of the {} training: {error}", run.title()))
    })?;
    Ok(Outcome { run, records, telemetry, held_out_loss })
}

/// Saves where the configuration says, if it does.
pub(crate) fn save<T: Trainer>(config: &Config, journey: &Journey<T>) -> Result<(), Failure> {
    let Some(folder) = &config.save else { return Ok(()) };
    let dir = folder.join(journey.run.name());
    let metadata = config.metadata(journey.run, journey.step);
    let saved = journey.trainer.save(&dir, &metadata);
    saved.map_err(|error| Failure::training(format!("saving to {}: {error}", dir.display())))
}

fn interrupted<T: Trainer>(config: &Config, journey: &Journey<T>) -> Failure {
    let place = format!("interrupted after step {} of the {} training", journey.step, journey.run.title());
    match (&config.save, save(config, journey)) {
        (_, Err(failure)) => failure,
        (Some(dir), Ok(())) => {
            Failure::Interrupted(format!("{place}; saved: --resume {} goes on from there", dir.display()))
        }
        (None, Ok(())) => Failure::Interrupted(format!("{place}; nothing is saved without --save DIR")),
    }
}

fn evaluate<T: Trainer>(config: &Config, trainer: &mut T) -> Result<f64, String> {
    let (mut sum, mut windows) = (0.0, 0);
    for batch in batches::held_out(&config.corpus, config.settings.batch, config.settings.seq) {
        sum += f64::from(trainer.evaluate(&batch)?) * batch.rows as f64;
        windows += batch.rows;
    }
    Ok(sum / windows as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_warms_up_and_falls_to_a_hundredth() {
        let rates = |steps: usize, highest| {
            let schedule = schedule(steps, highest).unwrap();
            move |step: u64| schedule.lr(step - 1)
        };
        let rate = rates(400, 2e-3);
        assert_eq!(rate(1), 2e-3 / 40.0);
        assert_eq!(rate(40), 2e-3);
        assert!((rate(220) - 1.01e-3).abs() < 1e-9);
        assert!((rate(400) - 2e-5).abs() < 1e-9);
        assert!((40..400).all(|step| rate(step) > rate(step + 1)));
        assert_eq!(rates(1, 2e-3)(1), 2e-3);
        assert_eq!(rates(100_000, 1.0)(100), 1.0);
    }

    #[test]
    fn medians() {
        let outcome = |ms: &[f64]| Outcome {
            run: Run::Fp8,
            records: ms
                .iter()
                .map(|&ms| Record { step: 1, loss: 0.0, grad_norm: 0.0, lr: 0.0, ms })
                .collect(),
            telemetry: Telemetry::new(0),
            held_out_loss: 0.0,
        };
        assert_eq!(outcome(&[]).median_step_ms(), None);
        assert_eq!(outcome(&[3.0, 1.0, 2.0]).median_step_ms(), Some(2.0));
        assert_eq!(outcome(&[4.0, 1.0, 2.0, 3.0]).median_step_ms(), Some(2.5));
    }
}
