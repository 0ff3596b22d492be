//! A complete training loop, to copy and change: a small GPT learns text in FP8 with delayed scaling.
//!
//! The loop has AdamW, gradient accumulation, clipping, a learning-rate schedule, evaluation, and checkpoints. It trains
//! 60 steps, then resumes from the checkpoint of step 30 and gets the same losses, bit for bit.
//!
//! `cargo run --release -p fp8-nn --example 10_training_loop`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::path::Path;

/// Put your own text here. The last tenth of it is held out.
const TEXT: &[u8] = include_bytes!("../../fp8-cli/data/shakespeare.txt");
/// Bytes in a sequence, and sequences in a micro-batch.
const SEQ: usize = 32;
const MICRO_BATCH: usize = 4;
/// An optimizer step adds up the gradients of this many micro-batches.
const GRADIENT_ACCUMULATION_STEPS: usize = 2;
const STEPS: u64 = 60;

/// Everything that a checkpoint stores, and what the loop needs besides.
struct Training {
    device: Device,
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    schedule: Schedule,
}

impl Training {
    fn new() -> Result<Self> {
        let device = Device::cpu(); // or Device::cuda(0)?
        let options = GptOptions {
            vocab_size: 256,
            num_layers: 2,
            layer: TransformerLayerOptions {
                hidden_size: 64,
                ffn_hidden_size: 256,
                attention: AttentionOptions {
                    num_attention_heads: 4,
                    max_seq_length: SEQ,
                    ..Default::default()
                },
                ..Default::default()
            },
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device, &mut StdRng::seed_from_u64(0))?;
        let optimizer = AdamW::new(AdamWOptions::default())?;
        let scaling = Scaling::new(&model, &device)?;
        let recipe = Recipe::from(DelayedScaling { amax_history_len: 16, ..Default::default() });
        let schedule = Schedule::cosine(3e-3, 6, STEPS, 0.1)?; // peak, warm-up steps, all steps, last rate / peak
        Ok(Self { device, model, optimizer, scaling, recipe, schedule })
    }

    /// One optimizer step; returns the mean loss of its micro-batches and the norm of the gradients.
    fn step(&mut self, step: u64) -> Result<(f32, f32)> {
        // Dividing each sum by the targets of all micro-batches makes the gradients add up to those of the mean.
        let targets = (GRADIENT_ACCUMULATION_STEPS * MICRO_BATCH * SEQ) as f32;
        let mean = ops::CrossEntropyOptions { normalizer: Some(targets), ..Default::default() };
        // Batches depend on the step alone, so that resuming needs no state of the data.
        let mut rng = StdRng::seed_from_u64(step);
        let mut loss = 0.0;
        for _ in 0..GRADIENT_ACCUMULATION_STEPS {
            let text = &TEXT[..TEXT.len() / 10 * 9];
            let starts: Vec<usize> =
                (0..MICRO_BATCH).map(|_| rng.random_range(0..text.len() - SEQ)).collect();
            let (ids, targets) = batch(text, &starts, &self.device)?;
            let mut cx = self.scaling.autocast(&self.recipe)?;
            let (part, saved) =
                self.model.loss_with_info(&mut cx, &ids, &targets, mean, &SequenceInfo::default())?;
            cx.commit()?; // updates the scales of activations and weights
            let mut cx = self.scaling.backward()?;
            self.model.loss_backward(&mut cx, saved)?; // adds to the gradients
            cx.commit()?; // updates the scales of gradients
            loss += part.item()?;
        }
        let norm = clip_grad_norm(&mut self.model, 1.0)?;
        // A step whose gradients are not finite is skipped.
        self.optimizer.step_with_norm(&mut self.model, self.schedule.lr(step), &norm)?;
        zero_grad(&mut self.model)?;
        Ok((loss, norm.item()?))
    }

    /// Mean loss on held-out text. An evaluation scope quantizes with the scales as they are and changes no state.
    fn evaluate(&mut self) -> Result<f32> {
        let text = &TEXT[TEXT.len() / 10 * 9..];
        let starts: Vec<usize> = (0..16).map(|window| window * 1000).collect();
        let (ids, targets) = batch(text, &starts, &self.device)?;
        let loss = self.scaling.in_eval(&self.recipe, |cx| Ok(self.model.loss(cx, &ids, &targets)?.0))?;
        Ok(loss.item()?)
    }

    fn save(&self, dir: &Path, step: u64) -> Result<()> {
        let metadata = BTreeMap::from([("step".to_owned(), step.to_string())]);
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &metadata)
    }

    /// Returns the training and the step to continue with.
    fn resume(dir: &Path) -> Result<(Self, u64)> {
        let mut new = Self::new()?;
        let loaded = checkpoint::load(dir, &mut new.model, &mut new.optimizer, &mut new.scaling)?;
        let step = loaded.metadata.get("step").and_then(|step| step.parse().ok()).unwrap_or(0);
        Ok((new, step))
    }
}

fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("fp8-training-loop-{}", std::process::id()));
    let mut training = Training::new()?;
    let (before, mut losses) = (training.evaluate()?, Vec::new());
    for step in 0..STEPS {
        if step == STEPS / 2 {
            training.save(&dir, step)?;
        }
        let (loss, norm) = training.step(step)?;
        losses.push(loss);
        if step % 10 == 0 || step + 1 == STEPS {
            let rate = training.schedule.lr(step);
            println!("step {step:2}: loss {loss:.4}, gradient norm {norm:.3}, learning rate {rate:.1e}");
        }
    }
    let after = training.evaluate()?;
    println!("held-out loss: {before:.4} before, {after:.4} after");
    assert!(after < before - 1.0, "the model learned nothing");

    let (mut resumed, first) = Training::resume(&dir)?;
    let again = (first..STEPS).map(|step| Ok(resumed.step(step)?.0)).collect::<Result<Vec<_>>>()?;
    assert_eq!(again, losses[first as usize..], "resuming changed the training");
    println!("resumed from step {first}: the {} losses have the same bits", again.len());
    std::fs::remove_dir_all(&dir).map_err(|source| Error::Io { path: dir, source })
}

/// Sequences of the text as ids, and the byte after each as its target.
fn batch(text: &[u8], starts: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
    let tensor = |shift: usize| {
        let bytes = starts.iter().flat_map(|start| &text[start + shift..][..SEQ]);
        Tensor::from_vec(bytes.map(|&byte| i32::from(byte)).collect(), [starts.len(), SEQ], device)
    };
    Ok((tensor(0)?, tensor(1)?))
}
