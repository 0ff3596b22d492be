//! A trainer without a model, for tests. Its only weight falls with every step by an amount that depends on the batch,
//! the learning rate and its value.

use std::fs;
use std::path::Path;

use fp8_nn::GenerateOptions;

use crate::train::batches::Batch;
use crate::train::options::{DeviceName, Place, Settings};
use crate::train::ranks::Ranks;
use crate::train::telemetry::SlotState;
use crate::train::trainer::{Metadata, Observe, Run, StepResult, Trainer};

/// With this seed, the sixth and the seventh step have a bad batch.
pub(crate) const BAD_BATCHES: u64 = 13;

#[derive(Debug)]
pub(crate) struct Fake {
    has_bad_batches: bool,
    run: Run,
    weight: f32,
    steps: u64,
    layers: usize,
    seq: usize,
}

impl Trainer for Fake {
    fn start(settings: &Settings, place: Place, _: &Ranks, run: Run) -> Result<Self, String> {
        match place.device {
            DeviceName::Cpu => Ok(Self {
                has_bad_batches: settings.seed == BAD_BATCHES,
                run,
                weight: settings.hidden as f32 / 40.0,
                steps: 0,
                layers: settings.layers,
                seq: settings.seq,
            }),
            DeviceName::Cuda(index) => Err(format!("CUDA device {index}: libcuda.so.1 not found")),
            DeviceName::CudaOfRank => Err("CUDA device 0: libcuda.so.1 not found".to_owned()),
        }
    }

    fn resume(
        settings: &Settings,
        place: Place,
        ranks: &Ranks,
        run: Run,
        dir: &Path,
    ) -> Result<Self, String> {
        let state = fs::read_to_string(dir.join("state")).map_err(|error| error.to_string())?;
        let (weight, steps) = state.split_once(' ').ok_or("state is corrupt")?;
        let weight = f32::from_bits(weight.parse().map_err(|_| "weight is corrupt")?);
        let steps = steps.parse().map_err(|_| "steps are corrupt")?;
        Ok(Self { weight, steps, ..Self::start(settings, place, ranks, run)? })
    }

    fn metadata(dir: &Path) -> Result<Metadata, String> {
        let text = fs::read_to_string(dir.join("metadata.json")).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    fn save(&self, dir: &Path, metadata: &Metadata) -> Result<(), String> {
        let text = serde_json::to_string(metadata).map_err(|error| error.to_string())?;
        fs::create_dir_all(dir).map_err(|error| error.to_string())?;
        fs::write(dir.join("metadata.json"), text).map_err(|error| error.to_string())?;
        let state = format!("{} {}", self.weight.to_bits(), self.steps);
        fs::write(dir.join("state"), state).map_err(|error| error.to_string())
    }

    fn step(&mut self, batch: &Batch, lr: f32, _: Observe) -> Result<StepResult, String> {
        if self.has_bad_batches && (5..7).contains(&self.steps) {
            self.steps += 1;
            return Ok(StepResult { loss: f32::NAN, grad_norm: f32::NAN, loss_scale: None, skipped: true });
        }
        let noise = (batch.ids.iter().map(|&id| f64::from(id)).sum::<f64>().sin() * 0.1) as f32;
        let rounding = if self.run == Run::Fp8 { 0.01 * (self.steps as f32).sin() } else { 0.0 };
        let loss = self.weight + noise + rounding + 1.5;
        self.weight -= self.weight * lr * (7.0 + noise);
        self.steps += 1;
        let grad_norm = self.weight.abs() + 0.3 * noise;
        Ok(StepResult { loss, grad_norm, loss_scale: None, skipped: false })
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<f32, String> {
        Ok(self.weight + 1.5 + batch.ids[0] as f32 * 1e-4)
    }

    fn continue_text(&mut self, prompt: &[u8], options: &GenerateOptions) -> Result<Vec<u8>, String> {
        let last = u64::from(*prompt.last().ok_or("no prompt")?);
        // As `Gpt::generate` has it.
        if options.max_new_tokens == 0 || prompt.len() + options.max_new_tokens - 1 > self.seq {
            return Err(format!("{} and {} bytes: {}", prompt.len(), options.max_new_tokens, self.seq));
        }
        // Printable bytes that depend on the prompt and on the seed.
        let byte = |i: u64| 32 + ((last + options.seed + i * 7) % 95) as u8;
        Ok((0..options.max_new_tokens as u64).map(byte).collect())
    }

    fn slots(&mut self) -> Result<Vec<SlotState>, String> {
        let mut slots = Vec::new();
        for layer in 0..self.layers {
            for linear in ["attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"] {
                for (kind, base) in [("input", 4.0), ("weight", 0.2), ("grad_output", 1e-4)] {
                    let seed = (layer * 31 + linear.len() * 7) as f32;
                    let amax = base * (1.5 + (self.steps as f32 * 0.05 + seed).sin()) * (1.0 + layer as f32);
                    let backward = kind == "grad_output";
                    let max = if backward { 57344.0 } else { 448.0 };
                    slots.push(SlotState {
                        name: format!("gpt.blocks.{layer}.{linear}.{kind}"),
                        backward,
                        amax,
                        scale: max / (amax * 1.2),
                        has_powers_of_two: false,
                        saturated: self.steps * if backward { 1 } else { (seed as u64) % 5 },
                        underflowed: self.steps * (seed as u64) * if backward { 40 } else { 3 },
                        elements: self.steps * 98_304,
                        nan: 0,
                        sqnr: None,
                        is_nvfp4: false,
                        nvfp4: None,
                    });
                }
            }
        }
        Ok(slots)
    }

    fn device(&self) -> String {
        "cpu".to_owned()
    }

    fn parameters(&self) -> usize {
        12_345
    }

    fn fp8_gemms_per_step(&self) -> usize {
        self.layers * 12
    }

    fn emulated_gemms_per_step(&self) -> Vec<(String, usize)> {
        vec![("emulated: in another way".to_owned(), self.layers * 4)]
    }
}
