//! The model in training: all that this program asks of the library, in one place.

use std::path::Path;

use fp8_nn::checkpoint;
use fp8_nn::prelude::*;

use crate::batches::{self, Batch};
use crate::options::{DeviceName, Dtype, FormatName, RecipeName, Settings};
use crate::telemetry::SlotState;
use crate::train::{Metadata, Run, StepResult, Trainer};

/// Gradients are scaled down to this norm where theirs is larger.
const MAX_GRAD_NORM: f32 = 1.0;

/// Model, optimizer, scaling state and recipe of one training.
#[derive(Debug)]
pub(crate) struct Session {
    device: Device,
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    autocast: AutocastOptions,
}

impl Session {
    fn new(settings: &Settings, device: DeviceName, run: Run) -> Result<Self> {
        let device = match device {
            DeviceName::Cpu => Device::cpu(),
            DeviceName::Cuda(index) => Device::cuda(index)?,
        };
        let options = GptOptions {
            vocab_size: 256,
            num_layers: settings.layers,
            hidden_size: settings.hidden,
            num_attention_heads: settings.heads,
            max_seq_length: settings.seq,
            ..Default::default()
        };
        // The stream that no batch is drawn from.
        let mut rng = batches::stream(settings.seed, 0);
        let model = Gpt::new("gpt", &options, &device, &mut rng)?;
        let optimizer = AdamW::new(AdamWOptions::default())?;
        let scaling = Scaling::new(&model, &device)?;
        let compute_dtype = match settings.dtype {
            Dtype::F32 => None,
            Dtype::Bf16 => Some(DType::BF16),
        };
        let autocast = AutocastOptions { enabled: run == Run::Fp8, compute_dtype, ..Default::default() };
        Ok(Self { device, model, optimizer, scaling, recipe: recipe(settings), autocast })
    }

    fn loaded(settings: &Settings, device: DeviceName, run: Run, dir: &Path) -> Result<Self> {
        let mut session = Self::new(settings, device, run)?;
        checkpoint::load(dir, &mut session.model, &mut session.optimizer, &mut session.scaling)?;
        Ok(session)
    }

    fn tensors(&self, batch: &Batch) -> Result<(Tensor, Tensor)> {
        let shape = [batch.rows, batch.len];
        let ids = Tensor::from_vec(batch.ids.clone(), shape, &self.device)?;
        Ok((ids, Tensor::from_vec(batch.targets.clone(), shape, &self.device)?))
    }

    fn train(&mut self, batch: &Batch, lr: f32, observed: bool) -> Result<StepResult> {
        let (ids, targets) = self.tensors(batch)?;
        self.scaling.set_counting(observed);
        let mut cx = self.scaling.scope(&self.recipe, &self.autocast)?;
        let (loss, saved) = self.model.loss(&mut cx, &ids, &targets)?;
        cx.commit()?;
        let mut cx = self.scaling.backward()?;
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        let grad_norm = clip_grad_norm(&mut self.model, MAX_GRAD_NORM)?;
        self.optimizer.step(&mut self.model, lr)?;
        zero_grad(&mut self.model)?;
        Ok(StepResult { loss: loss.item()?, grad_norm })
    }

    fn loss(&mut self, batch: &Batch) -> Result<f32> {
        let (ids, targets) = self.tensors(batch)?;
        let mut cx = self.scaling.eval_with(&self.recipe, &self.autocast)?;
        let (loss, _) = self.model.loss(&mut cx, &ids, &targets)?;
        Ok(loss.item()?)
    }

    /// Scores of the byte after `context`.
    fn scores(&mut self, context: &[u8]) -> Result<Vec<f32>> {
        let ids = context.iter().map(|&byte| i32::from(byte)).collect();
        let ids = Tensor::from_vec::<i32>(ids, [1, context.len()], &self.device)?;
        let mut cx = self.scaling.eval_with(&self.recipe, &self.autocast)?;
        let logits = self.model.forward(&mut cx, &ids)?.0.to_f32_vec()?;
        Ok(logits[logits.len().saturating_sub(256)..].to_vec())
    }
}

/// In high precision the recipe is there, and nothing asks it.
fn recipe(settings: &Settings) -> Recipe {
    let fp8_format = match settings.format {
        FormatName::Hybrid => Format::Hybrid,
        FormatName::E4m3 => Format::E4M3,
    };
    match settings.recipe {
        RecipeName::Current => CurrentScaling { fp8_format, ..Default::default() }.into(),
        RecipeName::Delayed | RecipeName::None => {
            let (margin, amax_history_len) = (settings.margin, settings.history_len);
            DelayedScaling { margin, amax_history_len, fp8_format, ..Default::default() }.into()
        }
    }
}

/// The sentence of an error.
fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Trainer for Session {
    fn start(settings: &Settings, device: DeviceName, run: Run) -> Result<Self, String> {
        Self::new(settings, device, run).map_err(sentence)
    }

    fn resume(settings: &Settings, device: DeviceName, run: Run, dir: &Path) -> Result<Self, String> {
        Self::loaded(settings, device, run, dir).map_err(sentence)
    }

    fn metadata(dir: &Path) -> Result<Metadata, String> {
        checkpoint::metadata(dir).map_err(sentence)
    }

    fn save(&self, dir: &Path, metadata: &Metadata) -> Result<(), String> {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, metadata).map_err(sentence)
    }

    fn step(&mut self, batch: &Batch, lr: f32, observed: bool) -> Result<StepResult, String> {
        self.train(batch, lr, observed).map_err(sentence)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<f32, String> {
        self.loss(batch).map_err(sentence)
    }

    fn next_byte(&mut self, context: &[u8]) -> Result<Vec<f32>, String> {
        self.scores(context).map_err(sentence)
    }

    fn slots(&self) -> Result<Vec<SlotState>, String> {
        // Slots that quantized nothing belong to tensors that this model keeps in high precision.
        let reports = self.scaling.slot_reports().map_err(sentence)?.into_iter();
        let reports = reports.filter(|report| report.elements > 0);
        let states = reports.map(|report| SlotState {
            name: report.name.to_string(),
            backward: report.direction == Direction::Backward,
            amax: report.amax,
            scale: report.scale,
            saturated: report.saturated,
            underflowed: report.underflowed,
            elements: report.elements,
        });
        Ok(states.collect())
    }

    fn parameters(&self) -> usize {
        num_parameters(&self.model).unwrap_or_default()
    }

    fn fp8_gemms_per_step(&self) -> usize {
        self.model.fp8_gemms_per_step()
    }
}
