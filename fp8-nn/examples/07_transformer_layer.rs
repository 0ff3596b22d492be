//! A transformer block learns a function in FP8 as it does in high precision; with its activations recomputed it has the
//! same bits; and from a checkpoint it goes on as if nothing had happened.
//!
//! `cargo run --release -p fp8-nn --example 07_transformer_layer`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;

const SHAPE: [usize; 3] = [8, 16, 32]; // batch, sequence, hidden
const STEPS: u64 = 120;

struct Job<M> {
    model: M,
    optimizer: AdamW,
    scaling: Scaling,
}

impl<M: Module> Job<M> {
    fn new(model: M) -> Result<Self> {
        let scaling = Scaling::new(&model, &Device::cpu())?;
        let optimizer = AdamW::new(AdamWOptions { weight_decay: 0.0, ..Default::default() })?;
        Ok(Self { model, optimizer, scaling })
    }

    /// The mean squared difference from each position's predecessor, step by step.
    fn train(&mut self, options: &AutocastOptions, steps: std::ops::Range<u64>) -> Result<Vec<f32>> {
        let recipe = Recipe::from(DelayedScaling { amax_history_len: 16, ..Default::default() });
        let mut losses = Vec::new();
        for step in steps {
            let (x, target) = batch(step)?;
            let mut cx = self.scaling.scope(&recipe, options)?;
            let (y, saved) = self.model.forward(&mut cx, &x)?;
            cx.commit()?;
            let difference = ops::add(&y, &ops::scale(&target, -1.0)?)?;
            let square: f32 = difference.to_f32_vec()?.iter().map(|d| d * d).sum();
            losses.push(square / y.numel() as f32);
            let dy = ops::scale(&difference, 2.0 / y.numel() as f32)?;
            self.scaling.in_backward(|cx| self.model.backward(cx, saved, &dy))?;
            self.optimizer.step(&mut self.model, 1e-2)?;
            zero_grad(&mut self.model)?;
        }
        Ok(losses)
    }
}

fn main() -> Result<()> {
    let (fp8, off) = (AutocastOptions::default(), AutocastOptions { enabled: false, ..Default::default() });
    let mut job = Job::new(block()?)?;
    println!("a block of {} parameters learns to look one position back", num_parameters(&job.model));
    let losses = job.train(&fp8, 0..STEPS)?;
    let high = Job::new(block()?)?.train(&off, 0..STEPS)?;
    println!("\nstep      FP8      f32");
    for step in (0..STEPS as usize).step_by(20).chain([STEPS as usize - 1]) {
        println!("{step:4}   {:.4}   {:.4}", losses[step], high[step]);
    }

    let recomputed = Job::new(Recompute { inner: block()? })?.train(&fp8, 0..STEPS)?;
    println!("\nactivations recomputed: losses have the same bits: {}", recomputed == losses);

    let dir = std::env::temp_dir().join(format!("fp8-nn-example-{}", std::process::id()));
    checkpoint::save(&dir, &job.model, &job.optimizer, &job.scaling, &BTreeMap::new())?;
    let mut resumed = Job::new(block()?)?;
    checkpoint::load(&dir, &mut resumed.model, &mut resumed.optimizer, &mut resumed.scaling)?;
    let went_on = job.train(&fp8, STEPS..STEPS + 5)? == resumed.train(&fp8, STEPS..STEPS + 5)?;
    println!("resumed from a checkpoint: losses have the same bits: {went_on}");
    std::fs::remove_dir_all(&dir).map_err(|source| Error::Io { path: dir, source })
}

fn block() -> Result<TransformerLayer> {
    let options = TransformerLayerOptions {
        hidden_size: SHAPE[2],
        ffn_hidden_size: 2 * SHAPE[2],
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            rope: true,
            max_seq_length: SHAPE[1],
            ..Default::default()
        },
        activation: Activation::Swiglu,
        norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
        init: InitOptions { init_std: 0.1, ..Default::default() },
        ..Default::default()
    };
    TransformerLayer::new("block", options, &Device::cpu(), &mut StdRng::seed_from_u64(1))
}

/// Noise, and the noise of the position before.
fn batch(seed: u64) -> Result<(Tensor, Tensor)> {
    let ([_, seq, hidden], mut rng) = (SHAPE, StdRng::seed_from_u64(seed));
    let x: Vec<f32> = (0..SHAPE.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut target = x.clone();
    for (target, x) in target.chunks_mut(seq * hidden).zip(x.chunks(seq * hidden)) {
        target[hidden..].copy_from_slice(&x[..(seq - 1) * hidden]);
    }
    let tensor = |values| Ok::<_, Error>(Tensor::from_vec(values, SHAPE, &Device::cpu())?);
    Ok((tensor(x)?, tensor(target)?))
}
