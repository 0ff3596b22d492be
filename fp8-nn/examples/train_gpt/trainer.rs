//! What the training loop asks of a model, so that everything around the model can be tested without one.

use std::collections::BTreeMap;
use std::path::Path;

use crate::batches;
use crate::options::{Place, Settings};
use crate::telemetry::SlotState;

/// Which of the two trainings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Run {
    HighPrecision,
    Fp8,
}

impl Run {
    /// Its name in files and folders.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::HighPrecision => "high_precision",
            Self::Fp8 => "fp8",
        }
    }

    /// Its name in prose.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::HighPrecision => "high precision",
            Self::Fp8 => "FP8",
        }
    }
}

/// Strings that a checkpoint keeps beside its tensors.
pub(crate) type Metadata = BTreeMap<String, String>;

/// A model in training: what the loop asks of it. An error is one sentence.
pub(crate) trait Trainer: Sized {
    /// Initial weights from the seed; for [`Run::Fp8`], with the settings' recipe.
    fn start(settings: &Settings, place: Place, run: Run) -> Result<Self, String>;
    /// The state that [`Trainer::save`] left in `dir`.
    fn resume(settings: &Settings, place: Place, run: Run, dir: &Path) -> Result<Self, String>;
    /// What resuming could not take over as it was saved, in one line; none where all was.
    fn resume_note(&self) -> Option<&str> {
        None
    }
    /// The strings that [`Trainer::save`] left in `dir`.
    fn metadata(dir: &Path) -> Result<Metadata, String>;
    /// Writes everything that decides the next step to `dir`: all of it, or nothing. Refuses a model that is not finite.
    fn save(&self, dir: &Path, metadata: &Metadata) -> Result<(), String>;
    /// One optimizer step; the loss is that of the weights before it. When `observed`, its quantizers count what
    /// they lose; that takes time and changes no bit.
    fn step(&mut self, batch: &batches::Batch, lr: f32, observed: bool) -> Result<StepResult, String>;
    /// Mean loss over the batch; changes nothing that a later step sees.
    fn evaluate(&mut self, batch: &batches::Batch) -> Result<f32, String>;
    /// Scores of the 256 values of the byte after `context`; changes nothing that a later step sees.
    fn next_byte(&mut self, context: &[u8]) -> Result<Vec<f32>, String>;
    /// The quantizer slots after an observed step, always in the same order; none in high precision.
    fn slots(&self) -> Result<Vec<SlotState>, String>;
    /// Where it computes, in words.
    fn device(&self) -> String;
    /// Number of parameters.
    fn parameters(&self) -> usize;
    /// FP8 matrix products of one training step.
    fn fp8_gemms_per_step(&self) -> usize;
}

/// What a step tells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepResult {
    pub(crate) loss: f32,
    /// Before clipping.
    pub(crate) grad_norm: f32,
}
