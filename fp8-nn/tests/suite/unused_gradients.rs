//! Checkpoints between the microbatches of a step, whose gradients they would not contain.

use crate::every_device::support::{delayed, device, error, linear, noise, step};
use fp8_nn::checkpoint::SaveOptions;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

struct Job {
    fc: Linear,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new() -> Self {
        let fc = linear("fc", 16, 16, 1);
        let scaling = Scaling::new(&fc, &device()).unwrap();
        Self { fc, optimizer: AdamW::new(AdamWOptions::default()).unwrap(), scaling }
    }

    fn microbatch(&mut self) {
        let (x, dy) = (noise([4, 16], 2), noise([4, 16], 3));
        step(&mut self.scaling, &delayed(), &AutocastOptions::default(), &mut self.fc, &x, &dy).unwrap();
    }

    fn save(&self, dir: &Path) -> Result<()> {
        checkpoint::save(dir, &self.fc, &self.optimizer, &self.scaling, &BTreeMap::new())
    }

    fn save_without(&self, dir: &Path) -> Result<()> {
        let options = SaveOptions { without_gradients: true };
        checkpoint::save_with_options(
            dir,
            &self.fc,
            &self.optimizer,
            &self.scaling,
            &BTreeMap::new(),
            &options,
        )
    }

    fn load(&mut self, dir: &Path) -> Vec<String> {
        let Self { fc, optimizer, scaling } = self;
        checkpoint::load(dir, fc, optimizer, scaling).unwrap().without_gradients
    }
}

const REFUSED: &str = "the gradient of `fc.weight` and of 1 more was added to since the last optimizer step, and gradients are \
                       not saved: take the step or call zero_grad first, or save with SaveOptions::without_gradients";

#[test]
fn a_save_between_two_microbatches_is_refused() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new());
    job.save(dir.path()).unwrap(); // before the first one
    let file = || std::fs::read(checkpoint::path(dir.path())).unwrap();
    let old = file();
    job.microbatch();
    let refused = error(job.save(dir.path()));
    assert!(refused.ends_with(REFUSED), "{refused}");
    assert!(file() == old);
    job.microbatch();
    assert_eq!(error(job.save(dir.path())), refused);
    job.optimizer.step(&mut job.fc, 0.1).unwrap();
    job.save(dir.path()).unwrap(); // gradients are still there, and used
    assert!(job.fc.weight().main_grad().to_f32_vec().unwrap().iter().any(|&x| x != 0.0));
    clip_grad_norm(&mut job.fc, 0.1).unwrap();
    job.save(dir.path()).unwrap();
    job.microbatch();
    assert_eq!(error(job.save(dir.path())), refused);
    zero_grad(&mut job.fc).unwrap();
    job.save(dir.path()).unwrap();
}

#[test]
fn the_load_report_names_gradients_that_were_left_out() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new());
    job.microbatch();
    job.save_without(dir.path()).unwrap();
    assert_eq!(Job::new().load(dir.path()), ["fc.weight", "fc.bias"]);
    parameters_mut(&mut job.fc)[0].zero_grad().unwrap();
    job.save_without(dir.path()).unwrap();
    assert_eq!(Job::new().load(dir.path()), ["fc.bias"]);
    // Where there is nothing to leave out, the option changes no byte.
    let files = ["with", "without"].map(|name| dir.path().join(name));
    zero_grad(&mut job.fc).unwrap();
    job.save(&files[0]).unwrap();
    job.save_without(&files[1]).unwrap();
    let [with, without] = files.each_ref().map(|dir| std::fs::read(checkpoint::path(dir)).unwrap());
    assert!(with == without);
    assert!(Job::new().load(&files[0]).is_empty());
}

#[test]
fn a_step_that_was_skipped_has_used_its_gradients() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new());
    let fill = |job: &mut Job| {
        for parameter in parameters_mut(&mut job.fc) {
            let shape = *parameter.shape();
            let value = Tensor::full(f32::INFINITY, shape, DType::F32, &device()).unwrap();
            parameter.accumulate(&value).unwrap();
        }
        assert!(job.save(dir.path()).is_err());
    };
    fill(&mut job);
    job.optimizer.step(&mut job.fc, 0.1).unwrap();
    assert_eq!(job.optimizer.skipped_steps().unwrap(), 1);
    job.save(dir.path()).unwrap();
    let scaler = LossScaler::new(LossScalerOptions::default(), &device()).unwrap();
    fill(&mut job);
    scaler.step(&mut job.optimizer, &mut job.fc, 0.1).unwrap();
    scaler.update().unwrap();
    assert_eq!(scaler.skipped_steps().unwrap(), 1);
    job.save(dir.path()).unwrap();
    fill(&mut job);
    job.optimizer.step(&mut job.fc, f32::NAN).unwrap_err(); // a step that fails uses nothing
    assert!(job.save(dir.path()).is_err());
}

#[test]
fn each_parameter_waits_for_its_own_step() {
    let (dir, mut job) = (tempfile::tempdir().unwrap(), Job::new());
    let refused = |job: &Job| error(job.save(dir.path()));
    job.microbatch();
    // An optimizer of the user's own.
    parameters_mut(&mut job.fc)[0].update(|_, _| Ok(())).unwrap();
    let bias = refused(&job);
    assert!(bias.contains("the gradient of `fc.bias` was added to since"), "{bias}");
    parameters_mut(&mut job.fc)[1].update(|_, _| Err::<(), _>(Error::UnknownWeight("w".into()))).unwrap_err();
    assert_eq!(refused(&job), bias);
    // What is frozen has no gradient, and has none when it is thawed.
    for trainable in [false, true] {
        parameters_mut(&mut job.fc)[1].set_trainable(trainable).unwrap();
        job.save(dir.path()).unwrap();
    }
    // Gradients that the caller sets count as added.
    *parameters_mut(&mut job.fc)[1].main_grad_mut() = noise([16], 4);
    assert_eq!(refused(&job), bias);
    job.optimizer.step(&mut job.fc, 0.1).unwrap();
    job.save(dir.path()).unwrap();
    parameters_mut(&mut job.fc)[1].main_grad_mut().copy_from(&noise([16], 5), "grad").unwrap();
    assert_eq!(refused(&job), bias);
}
