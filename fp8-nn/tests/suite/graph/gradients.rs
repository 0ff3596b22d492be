//! The notes about gradients that recorded steps and their replays make.

use super::ranks::ranks;
use crate::every_device::support::*;
use fp8_nn::fp8_kernels::Graph;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

struct Job {
    fc: Linear,
    optimizer: AdamW,
    scaling: Scaling,
    x: Tensor,
}

impl Job {
    /// A job that has run every part of a step once, so that each can be recorded.
    fn new() -> Self {
        let mut job = Self::untrained();
        (0..2).for_each(|_| job.step().unwrap());
        job
    }

    fn untrained() -> Self {
        let fc = linear("fc", 16, 16, 1);
        let scaling = Scaling::new(&fc, &device()).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        Self { fc, optimizer, scaling, x: noise([16, 16], 2) }
    }

    /// A step that ends with gradients of 0.
    fn step(&mut self) -> Result<()> {
        self.backward(&current())?;
        self.optimizer.step(&mut self.fc, 0.1)?;
        zero_grad(&mut self.fc)
    }

    fn backward(&mut self, recipe: &Recipe) -> Result<()> {
        let Self { fc, scaling, x, .. } = self;
        step(scaling, recipe, &AutocastOptions::default(), fc, x, x).map(drop)
    }

    fn record(&mut self, part: impl FnOnce(&mut Self) -> Result<()>) -> Result<Graph> {
        device().capture(|| part(self)).map(|(graph, ())| graph)
    }

    /// Whether gradients wait for a step.
    fn waits(&self) -> bool {
        let dir = tempfile::tempdir().unwrap();
        checkpoint::save(dir.path(), &self.fc, &self.optimizer, &self.scaling, &BTreeMap::new()).is_err()
    }
}

#[test]
fn replays_add_gradients_and_use_them() {
    let mut job = Job::new();
    assert!(!job.waits());
    let backward = job.record(|job| job.backward(&current())).unwrap();
    assert!(job.waits());
    let step = job.record(|job| job.optimizer.step(&mut job.fc, 0.1)).unwrap();
    assert!(!job.waits());
    for _ in 0..2 {
        backward.replay().unwrap();
        assert!(job.waits());
        step.replay().unwrap();
        assert!(!job.waits());
    }
    // A step that could not be recorded has added nothing.
    let refused = error(job.record(|job| {
        job.backward(&current())?;
        Err(Error::UnknownWeight("w".into()))
    }));
    assert!(refused.contains("`w`") && !job.waits(), "{refused}");
    job.record(Job::step).unwrap().replay().unwrap();
    assert!(!job.waits());
}

/// Eager steps replace gradients that were cleared, and a recorded one that does not begin with clearing adds to them; or the other way
/// round. Neither needs a product that the other did not have.
#[test]
fn recorded_products_are_those_of_eager_steps() {
    let mut job = Job::untrained();
    zero_grad(&mut job.fc).unwrap();
    (0..2).for_each(|_| job.step().unwrap());
    job.record(Job::step).unwrap().replay().unwrap();

    // Products of other extents.
    let mut job = Job { x: noise([32, 16], 2), ..Job::untrained() };
    for _ in 0..2 {
        // Read, and so set to 0.
        weight_grad(&job);
        job.backward(&current()).unwrap();
        zero_grad(&mut job.fc).unwrap();
    }
    let clears_first = job.record(|job| {
        zero_grad(&mut job.fc)?;
        job.backward(&current())
    });
    clears_first.unwrap().replay().unwrap();
}

/// Gradients, with NaN in the memory of those that are not cleared.
fn weight_grad(job: &Job) -> Vec<f32> {
    values(job.fc.weight().main_grad())
}

fn times(factor: f32, gradient: &[f32]) -> Vec<f32> {
    gradient.iter().map(|value| factor * value).collect()
}

#[test]
fn a_recorded_step_adds_to_gradients_unless_it_clears_them_itself() {
    let spoil = |job: &mut Job| {
        for parameter in parameters_mut(&mut job.fc) {
            ops::scale_in_place(parameter.main_grad_mut(), f32::NAN, "gradient").unwrap();
        }
        zero_grad(&mut job.fc).unwrap();
    };
    let mut job = Job::new();
    job.backward(&current()).unwrap();
    let once = weight_grad(&job);
    // Cleared before it is recorded, and never read: replays add all the same.
    spoil(&mut job);
    let adds = job.record(|job| job.backward(&current())).unwrap();
    assert_eq!(weight_grad(&job), once);
    adds.replay().unwrap();
    assert_eq!(weight_grad(&job), times(2.0, &once));
    // Cleared between replays.
    spoil(&mut job);
    adds.replay().unwrap();
    assert_eq!(weight_grad(&job), once);
    spoil(&mut job);
    adds.replay().unwrap();
    adds.replay().unwrap();
    assert_eq!(weight_grad(&job), times(2.0, &once));
    drop(adds);
    let whole = job.record(|job| {
        zero_grad(&mut job.fc)?;
        job.backward(&current())
    });
    let whole = whole.unwrap();
    assert_eq!(weight_grad(&job), once);
    for _ in 0..2 {
        whole.replay().unwrap();
        assert_eq!(weight_grad(&job), once);
    }
    job.backward(&current()).unwrap();
    assert_eq!(weight_grad(&job), times(2.0, &once));
    whole.replay().unwrap();
    assert_eq!(weight_grad(&job), once);
}

#[test]
fn a_recorded_step_that_only_clears_gradients_clears_them_in_each_replay() {
    let mut job = Job::new();
    job.backward(&current()).unwrap();
    let once = weight_grad(&job);
    let clears = job.record(|job| zero_grad(&mut job.fc)).unwrap();
    assert_eq!(weight_grad(&job), [0.0; 256]);
    job.backward(&current()).unwrap();
    assert_eq!(weight_grad(&job), once);
    clears.replay().unwrap();
    assert_eq!(weight_grad(&job), [0.0; 256]);
}

#[test]
fn a_step_that_could_not_be_recorded_has_cleared_nothing() {
    let mut job = Job::new();
    job.backward(&current()).unwrap();
    let once = weight_grad(&job);
    let fails = |job: &mut Job| -> Result<()> {
        zero_grad(&mut job.fc)?;
        Err(Error::UnknownWeight("w".into()))
    };
    error(job.record(fails));
    assert_eq!(weight_grad(&job), once);
    assert!(job.waits());
    job.backward(&current()).unwrap();
    assert_eq!(weight_grad(&job), times(2.0, &once));
    error(job.record(|job| {
        zero_grad(&mut job.fc)?;
        job.backward(&current())?;
        Err(Error::UnknownWeight("w".into()))
    }));
    assert_eq!(weight_grad(&job), times(2.0, &once));
}

#[test]
fn sums_over_ranks_are_decided_while_recording() {
    if unless_simulated(true, false) {
        return; // one GPU is one rank, which sums nothing
    }
    ranks(|group| {
        let mut job = Job::new();
        let sum = |job: &mut Job| all_reduce_gradients(&mut job.fc, &*group);
        sum(&mut job).unwrap(); // compares the ranks
        zero_grad(&mut job.fc).unwrap();
        let twice = error(job.record(|job| sum(job).and_then(|()| sum(job))));
        assert!(twice.contains("is already a sum over group `dp`"), "{twice}");
        sum(&mut job).unwrap(); // the recorded one did not run
        zero_grad(&mut job.fc).unwrap();
        let whole = job.record(|job| {
            job.backward(&current())?;
            sum(job)?;
            job.optimizer.step(&mut job.fc, 0.1)?;
            zero_grad(&mut job.fc)
        });
        let whole = whole.unwrap();
        (0..2).for_each(|_| whole.replay().unwrap());
        let part = job.record(|job| job.backward(&current()).and_then(|()| sum(job))).unwrap();
        assert_eq!(error(sum(&mut job)), twice);
        zero_grad(&mut job.fc).unwrap();
        part.replay().unwrap();
        assert_eq!(error(sum(&mut job)), twice);
        zero_grad(&mut job.fc).unwrap();

        job.backward(&delayed()).unwrap();
        zero_grad(&mut job.fc).unwrap();
        let lone = error(job.record(|job| job.backward(&delayed()).and_then(|()| sum(job))));
        assert!(lone.contains("Scaling::set_group"), "{lone}");
        sum(&mut job).unwrap();
    });
}
