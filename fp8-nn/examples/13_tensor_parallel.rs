//! One model on two and on four ranks, with its layers cut over them, trains as on one device. The ranks are threads here; processes
//! take `fp8_dist::Environment::detect` and `connect` in place of `local`, as `11_training_over_tcp` does.
//!
//! For each layout it prints the loss, the parameters of a rank, what ranks have gathered and in which form, and the bytes that a rank
//! has sent to the others. It fails if losses differ from one device's by more than 1 %.
//!
//! `cargo run --release -p fp8-nn --example 13_tensor_parallel`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use fp8_nn::{Gather, TensorParallel, TensorParallelOptions};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const BATCH: usize = 4;
const SEQ: usize = 32;
const VOCABULARY: i32 = 50;
const STEPS: u64 = 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The report of a rank.
struct Run {
    losses: Vec<f32>,
    parameters: usize,
    gathers: Vec<Gather>,
    bytes: u64,
}

fn main() -> Result<(), Failure> {
    let alone = train(1, 1, false)?;
    println!(
        "one device: loss {:.4} to {:.4}, {} parameters",
        alone.losses[0],
        last(&alone),
        alone.parameters
    );
    for (dp, tp, sequence_parallel) in [(1, 2, false), (1, 2, true), (1, 4, true), (2, 2, true)] {
        let run = train(dp, tp, sequence_parallel)?;
        let with = if sequence_parallel { ", sequence parallel" } else { "" };
        println!("dp {dp} × tp {tp}{with}: loss {:.4} to {:.4}", run.losses[0], last(&run));
        let in_fp8 = run.gathers.iter().filter(|gather| gather.in_fp8).count();
        println!(
            "  each rank: {} parameters, {} KB sent; gathered in FP8: {in_fp8} of {} tensors",
            run.parameters,
            run.bytes / 1000,
            run.gathers.len()
        );
        for (alone, found) in alone.losses.iter().zip(&run.losses) {
            if (alone - found).abs() > 0.01 * alone {
                return Err(format!("a loss of {found}, and {alone} on one device").into());
            }
        }
    }
    Ok(())
}

fn last(run: &Run) -> f32 {
    run.losses.last().copied().unwrap_or(f32::NAN)
}

/// Trains on `dp` replicas of `tp` ranks each, and returns what rank 0 reports.
fn train(dp: usize, tp: usize, sequence_parallel: bool) -> Result<Run, Failure> {
    thread::scope(|scope| {
        let worlds = local("world", dp * tp, Duration::from_secs(30))?.into_iter();
        let rank = |world| scope.spawn(move || rank(world, &MeshOptions { dp, tp }, sequence_parallel));
        let ranks: Vec<_> = worlds.map(rank).collect();
        let mut runs = Vec::new();
        for rank in ranks {
            runs.push(rank.join().map_err(|_| "a rank panicked")??);
        }
        Ok(runs.swap_remove(0))
    })
}

fn rank(world: Arc<dyn ProcessGroup>, sizes: &MeshOptions, sequence_parallel: bool) -> Result<Run> {
    let device = Device::cpu();
    let mesh = Mesh::new(world, sizes)?;
    let options = TensorParallelOptions { sequence_parallel, ..Default::default() };
    let tensor_parallel = TensorParallel::new(mesh.tp().clone(), &options)?; // None for one rank
    let attention = AttentionOptions { num_attention_heads: 4, max_seq_length: SEQ, ..Default::default() };
    let layer = TransformerLayerOptions {
        hidden_size: 64,
        ffn_hidden_size: 256,
        attention,
        tensor_parallel: tensor_parallel.clone(),
        ..Default::default()
    };
    let options = GptOptions { vocab_size: VOCABULARY as usize, num_layers: 2, layer, ..Default::default() };
    let mut model = Gpt::new("gpt", &options, &device, &mut StdRng::seed_from_u64(1))?;
    let mut scaling = Scaling::new(&model, &device)?;
    scaling.set_group(mesh.amax_group());
    let mut gradients = Gradients::new(&model, mesh.dp().clone(), GradientsOptions::default())?;
    let mut optimizer = AdamW::new(AdamWOptions::default())?;
    let recipe = Recipe::from(DelayedScaling::default());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (ids, targets) = batch(step, &mesh)?;
        // The mean over the batch of all replicas.
        let mean = ops::CrossEntropyOptions { normalizer: Some((BATCH * SEQ) as f32), ..Default::default() };
        let (loss, saved) = scaling.in_autocast(&recipe, |cx| {
            model.loss_with_info(cx, &ids, &targets, mean, &SequenceInfo::default())
        })?;
        let mut cx = scaling.backward()?;
        gradients.watch(&mut cx, &mut model)?;
        model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        gradients.finish(&mut model)?;
        let norm = clip_grad_norm(&mut model, 1.0)?; // of the whole model
        optimizer.step_with_norm(&mut model, 1e-3, &norm)?;
        zero_grad(&mut model)?;
        losses.push(mesh.dp().all_reduce("loss", &loss, ReduceOp::Sum)?.item()?);
    }
    Ok(Run {
        losses,
        parameters: num_parameters(&model),
        gathers: tensor_parallel.map(|ranks| ranks.gathers()).unwrap_or_default(),
        bytes: mesh.tp().traffic().bytes(),
    })
}

/// The part of a batch that this replica trains with: numbers that rise by a step of their own in each sequence.
fn batch(step: u64, mesh: &Mesh) -> Result<(Tensor, Tensor)> {
    let mut rng = StdRng::seed_from_u64(step);
    let rows = BATCH / mesh.dp().world_size();
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        let (first, rise) = (rng.random_range(0..VOCABULARY), rng.random_range(1..5));
        let value = |i: usize| (first + rise * i as i32) % VOCABULARY;
        ids.extend((0..SEQ).map(value));
        targets.extend((1..=SEQ).map(value));
    }
    let part = |all: Vec<i32>| {
        let first = mesh.dp().rank() * rows * SEQ;
        Tensor::from_vec(all[first..first + rows * SEQ].to_vec(), [rows, SEQ], &Device::cpu())
    };
    Ok((part(ids)?, part(targets)?))
}
