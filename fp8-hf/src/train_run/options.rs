//! Options of a run, and the schedule and the order that follow from them.

use crate::{Error, Result};
use fp8_nn::Schedule;
use std::time::Duration;

/// The learning rate behind the warm-up: see [`Schedule`].
///
/// ```
/// use fp8_hf::ScheduleKind;
/// assert_eq!(ScheduleKind::default(), ScheduleKind::Cosine);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScheduleKind {
    /// It stays.
    Constant,
    /// It falls linearly.
    Linear,
    /// It falls along half a period of a cosine. Default.
    #[default]
    Cosine,
    /// It stays, and falls linearly in the last fifth of the steps.
    WarmupStableDecay,
}

/// The steps in which the learning rate rises.
///
/// ```
/// use fp8_hf::Warmup;
/// assert_eq!([Warmup::Share(0.05).of(100), Warmup::Share(0.05).of(3), Warmup::Steps(7).of(100)], [5, 1, 7]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// A share of all steps, from 0 to 1, rounded up.
    Share(f64),
    /// So many steps.
    Steps(u64),
}

impl Warmup {
    /// Returns the number of steps of a run that has `total`. A share leaves at least the last one.
    #[must_use]
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Share(share) => ((total as f64 * share).ceil() as u64).min(total.saturating_sub(1)),
            Self::Steps(steps) => steps,
        }
    }
}

/// Options of a [`TrainRun`](crate::TrainRun), where there is an example.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainRunOptions {
    /// The sequences of a step, over all micro-batches and ranks. Default: 8.
    pub batch: usize,
    /// The number of times that all sequences are seen, each time in another order. Default: 1.
    pub epochs: u64,
    /// The steps in all, in place of `epochs`. Default: `None`.
    pub steps: Option<u64>,
    /// The highest learning rate. Default: 1e-5.
    pub lr: f32,
    /// The way from there. Default: [`ScheduleKind::Cosine`].
    pub schedule: ScheduleKind,
    /// The steps in which the rate rises to its highest. Default: a share of 0.05.
    pub warmup: Warmup,
    /// The last rate as a fraction of the highest. Default: 0.1.
    pub min_ratio: f32,
    /// The seed of the order of sequences. Default: 1337.
    pub seed: u64,
    /// Evaluates the sequences for validation every so many steps, and behind the last; 0: behind the last alone. Default: `None`, a
    /// tenth of all steps.
    pub eval_every: Option<u64>,
    /// The most sequences for validation that are evaluated. Default: 128.
    pub eval_sequences: usize,
    /// Writes a checkpoint every so many steps; 0: never for their number. Default: 0.
    pub checkpoint_every: u64,
    /// Writes a checkpoint when so much time has gone since the last. Default: 10 minutes.
    pub checkpoint_after: Duration,
    /// The number of newest checkpoints that are kept; the one with the lowest validation loss is, too. Default: 2.
    pub keep: usize,
    /// The number of steps in a row without a finite norm of gradients at which the run ends. Default: 10.
    pub most_non_finite: u64,
    /// Counts saturated values every so many steps; 0: never. Default: `None`, about a hundred times in a run.
    pub observe_every: Option<u64>,
}

impl Default for TrainRunOptions {
    fn default() -> Self {
        Self {
            batch: 8,
            epochs: 1,
            steps: None,
            lr: 1e-5,
            schedule: ScheduleKind::Cosine,
            warmup: Warmup::Share(0.05),
            min_ratio: 0.1,
            seed: 1337,
            eval_every: None,
            eval_sequences: 128,
            checkpoint_every: 0,
            checkpoint_after: Duration::from_secs(600),
            keep: 2,
            most_non_finite: 10,
            observe_every: None,
        }
    }
}

/// The steps of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    pub(super) total: u64,
    sequences: u64,
    batch: u64,
}

impl TrainRunOptions {
    /// Returns the steps of a run over so many sequences.
    pub(super) fn steps_of(&self, sequences: usize) -> Result<Steps> {
        let refused = |option, value: String, remedy: &str| {
            Err(Error::Option { part: "TrainRun".to_owned(), option, value, remedy: remedy.to_owned() })
        };
        if self.batch == 0 {
            return refused("batch", "0".into(), "expected at least 1");
        }
        if sequences == 0 {
            return refused("data", "no sequence".into(), "expected at least one to train on");
        }
        if u32::try_from(sequences).is_err() {
            return refused(
                "data",
                format!("{sequences} sequences"),
                "expected fewer than 2³²: use longer sequences",
            );
        }
        if let Warmup::Share(share) = self.warmup
            && !(0.0..=1.0).contains(&share)
        {
            return refused(
                "warmup",
                share.to_string(),
                "expected a share from 0 to 1, or a number of steps",
            );
        }
        for (option, number) in [("keep", self.keep as u64), ("most_non_finite", self.most_non_finite)] {
            if number == 0 {
                return refused(option, "0".into(), "expected at least 1");
            }
        }
        let (sequences, batch) = (sequences as u64, self.batch as u64);
        let total = self.steps.unwrap_or_else(|| sequences.div_ceil(batch).saturating_mul(self.epochs));
        if total == 0 {
            let option = if self.steps.is_some() { "steps" } else { "epochs" };
            return refused(option, "0".into(), "expected at least 1");
        }
        if let Warmup::Steps(steps) = self.warmup
            && steps >= total.max(1)
            && steps > 0
        {
            let remedy = format!("the run has {total} steps: expected fewer");
            return refused("warmup", steps.to_string(), &remedy);
        }
        Ok(Steps { total, sequences, batch })
    }

    /// Checks the options that do not depend on the data.
    ///
    /// ```
    /// use fp8_hf::TrainRunOptions;
    /// TrainRunOptions::default().check()?;
    /// let error = TrainRunOptions { lr: -1.0, ..Default::default() }.check().unwrap_err();
    /// assert!(error.to_string().contains("lr = -1"));
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// An option out of its range.
    pub fn check(&self) -> Result<()> {
        // With as many sequences as there can be.
        let total = self.steps_of(u32::MAX as usize)?.total;
        self.schedule(total).map(drop)
    }

    /// Returns the number of steps of a run over so many sequences.
    ///
    /// ```
    /// use fp8_hf::TrainRunOptions;
    /// let options = TrainRunOptions { batch: 8, epochs: 2, ..Default::default() };
    /// assert_eq!(options.total_steps(20)?, 2 * 3); // the last step of an epoch has 4 sequences
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// An option out of its range; no sequence, or 2³² of them.
    pub fn total_steps(&self, sequences: usize) -> Result<u64> {
        Ok(self.steps_of(sequences)?.total)
    }

    pub(super) fn schedule(&self, total: u64) -> Result<Schedule> {
        let (warmup, ratio) = (self.warmup.of(total), self.min_ratio);
        let schedule = match self.schedule {
            ScheduleKind::Constant => Schedule::constant(self.lr, warmup),
            ScheduleKind::Linear => Schedule::linear(self.lr, warmup, total, ratio),
            ScheduleKind::Cosine => Schedule::cosine(self.lr, warmup, total, ratio),
            ScheduleKind::WarmupStableDecay => {
                let decay = total.div_ceil(5).min(total.saturating_sub(warmup));
                Schedule::warmup_stable_decay(self.lr, warmup, total, decay, ratio)
            }
        };
        Ok(schedule?)
    }

    /// Whether the validation loss is measured behind step `step`, counted from 1.
    pub(super) fn evaluates(&self, step: u64, total: u64) -> bool {
        let every = self.eval_every.unwrap_or_else(|| total.div_ceil(10));
        step == total || (every > 0 && step.is_multiple_of(every))
    }

    /// Whether step `step`, counted from 1, counts saturated values.
    pub(super) fn observes(&self, step: u64, total: u64) -> bool {
        let every = self.observe_every.unwrap_or_else(|| total.div_ceil(100));
        every > 0 && (step == total || step.is_multiple_of(every))
    }
}

impl Steps {
    /// The steps of an epoch, of which the last may have fewer sequences.
    pub(super) fn of_epoch(&self) -> u64 {
        self.sequences.div_ceil(self.batch)
    }

    /// Returns the epoch of a step, counted from 0, and the places of its sequences in the epoch's order.
    pub(super) fn place(&self, step: u64) -> (u64, std::ops::Range<usize>) {
        let (epoch, within) = (step / self.of_epoch(), step % self.of_epoch());
        let start = within * self.batch;
        (epoch, start as usize..(start + self.batch).min(self.sequences) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_each_epoch() {
        let steps = TrainRunOptions { batch: 4, epochs: 2, ..Default::default() }.steps_of(10).unwrap();
        assert_eq!(steps.total, 6);
        let places: Vec<_> = (0..6).map(|step| steps.place(step)).collect();
        assert_eq!(places, [(0, 0..4), (0, 4..8), (0, 8..10), (1, 0..4), (1, 4..8), (1, 8..10)]);
    }

    #[test]
    fn options_out_of_range_are_named() {
        let plain = TrainRunOptions::default;
        for (options, sequences, expected) in [
            (TrainRunOptions { batch: 0, ..plain() }, 1, "TrainRun: batch = 0: expected at least 1"),
            (plain(), 0, "TrainRun: data = no sequence: expected at least one to train on"),
            (
                plain(),
                1 << 32,
                "TrainRun: data = 4294967296 sequences: expected fewer than 2³²: use longer sequences",
            ),
            (
                TrainRunOptions { warmup: Warmup::Share(1.5), ..plain() },
                1,
                "TrainRun: warmup = 1.5: expected a share from 0 to 1, or a number of steps",
            ),
            (
                TrainRunOptions { warmup: Warmup::Steps(8), steps: Some(8), ..plain() },
                1,
                "TrainRun: warmup = 8: the run has 8 steps: expected fewer",
            ),
            (TrainRunOptions { keep: 0, ..plain() }, 1, "TrainRun: keep = 0: expected at least 1"),
            (
                TrainRunOptions { most_non_finite: 0, ..plain() },
                1,
                "TrainRun: most_non_finite = 0: expected at least 1",
            ),
            (TrainRunOptions { epochs: 0, ..plain() }, 1, "TrainRun: epochs = 0: expected at least 1"),
            (TrainRunOptions { steps: Some(0), ..plain() }, 1, "TrainRun: steps = 0: expected at least 1"),
        ] {
            assert_eq!(options.steps_of(sequences).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn rates_rise_and_fall() {
        let options = TrainRunOptions { lr: 1.0, ..Default::default() };
        let schedule = options.schedule(100).unwrap();
        assert_eq!((schedule.lr(0), schedule.lr(4)), (0.2, 1.0));
        assert!((schedule.lr(99) - 0.1).abs() < 1e-6);
        // A single step has the highest rate's end.
        for kind in [
            ScheduleKind::Constant,
            ScheduleKind::Linear,
            ScheduleKind::Cosine,
            ScheduleKind::WarmupStableDecay,
        ] {
            let options = TrainRunOptions { schedule: kind, ..options.clone() };
            assert!((1..20).all(|total| options.schedule(total).unwrap().lr(0) > 0.0), "{kind:?}");
        }
    }
}
