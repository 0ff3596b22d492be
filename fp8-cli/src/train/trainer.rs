//! The interface between the training loop and a model. With it, everything around the model can be tested without one.

use std::collections::BTreeMap;
use std::path::Path;

use fp8_nn::GenerateOptions;
use fp8_nn::fp8_kernels::MemoryUse;

use crate::train::batches;
use crate::train::options::{Place, Settings};
use crate::train::ranks::Ranks;
use crate::train::telemetry::SlotState;

/// One of the two trainings.
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

/// Gradients are scaled down to this norm if theirs is larger.
pub(crate) const MAX_GRAD_NORM: f32 = 1.0;

/// Strings that a checkpoint stores besides its tensors.
pub(crate) type Metadata = BTreeMap<String, String>;

/// A model in training. Every error is one sentence.
pub(crate) trait Trainer: Sized {
    /// Draws the initial weights from the seed. [`Run::Fp8`] trains with the recipe of the settings.
    fn start(settings: &Settings, place: Place, ranks: &Ranks, run: Run) -> Result<Self, String>;
    /// Loads the state that [`Trainer::save`] wrote to `dir`.
    fn resume(settings: &Settings, place: Place, ranks: &Ranks, run: Run, dir: &Path)
    -> Result<Self, String>;
    /// Returns one line about what could not be restored exactly as it was saved, if anything.
    fn resume_note(&self) -> Option<&str> {
        None
    }
    /// Reads the strings that [`Trainer::save`] wrote to `dir`.
    fn metadata(dir: &Path) -> Result<Metadata, String>;
    /// Writes everything that the next step depends on to `dir`, atomically. Refuses a model that is not finite. All ranks call it.
    fn save(&self, dir: &Path, metadata: &Metadata) -> Result<(), String>;
    /// Does one optimizer step with the batch of all ranks and returns the loss of the weights before it. What is observed takes time and
    /// changes no bit of the results.
    fn step(&mut self, batch: &batches::Batch, lr: f32, observe: Observe) -> Result<StepResult, String>;
    /// Returns the mean loss over the batch, and changes nothing that a later step reads.
    fn evaluate(&mut self, batch: &batches::Batch) -> Result<f32, String>;
    /// Returns `max_new_tokens` bytes that continue `prompt`, and changes nothing that a later step reads.
    fn continue_text(&mut self, prompt: &[u8], options: &GenerateOptions) -> Result<Vec<u8>, String>;
    /// Returns the quantizer slots after an observed step, always in the same order. High precision has none.
    fn slots(&mut self) -> Result<Vec<SlotState>, String>;
    /// Returns what to change about tensors that lost values in the observed steps, in sentences.
    fn advice(&self) -> Vec<String> {
        Vec::new()
    }
    /// Names the device, including the GPU's model.
    fn device(&self) -> String;
    /// Number of parameters.
    fn parameters(&self) -> usize;
    /// Returns the bytes that the training took when they were most, by what they were used for; `None` before the first step.
    fn memory(&self) -> Option<MemoryUse> {
        None
    }
    /// Number of FP8 matrix products in a training step.
    fn fp8_gemms_per_step(&self) -> usize;
    /// Returns what of the attention runs in FP8.
    fn attention(&self) -> Attention {
        Attention::default()
    }
    /// Returns what takes the place of FP8 matrix products that the device does not have, and of how many in a step.
    fn emulated_gemms_per_step(&self) -> Vec<(String, usize)> {
        Vec::new()
    }
    /// Returns the tensors that processes that share tokens have gathered in high precision, although the recipe quantizes them.
    fn gathered_in_high_precision(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The quantities that a step records of its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Observe {
    /// Nothing.
    Nothing,
    /// The saturated and underflowed values, and how exact the codes are if the options ask for it.
    Counts,
    /// The same, and the blocks of tensors in NVFP4 and how exact these are.
    Blocks,
}

/// The parts of the attention that run in FP8.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Attention {
    pub(crate) in_fp8: bool,
    /// Whether projections and attention also exchange FP8.
    pub(crate) exchanges_fp8: bool,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepResult {
    pub(crate) loss: f32,
    /// Norm of all gradients before clipping.
    pub(crate) grad_norm: f32,
    /// The scale of the loss in this step, if it has one.
    pub(crate) loss_scale: Option<f32>,
    /// Whether the step changed no weight.
    pub(crate) skipped: bool,
}
