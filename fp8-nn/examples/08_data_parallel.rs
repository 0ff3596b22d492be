//! Four ranks with a quarter of the batch each train as one process with the whole: equal losses, and scales equal bit
//! for bit. Then one of them fails, and the others are told.
//!
//! `cargo run --release -p fp8-nn --example 08_data_parallel`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const BATCH: usize = 16;
const SEQ: usize = 16;
const VOCABULARY: i32 = 32;
const STEPS: usize = 20;

type Group = Arc<dyn ProcessGroup>;
type Outcome = Result<(Vec<f32>, ScalingState)>;

fn main() -> Result<()> {
    let alone = train(None, None)?;
    let ranks = on_all_ranks(None)?;
    let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
    println!("step   one process   {RANKS} ranks");
    for step in [0, 4, 9, 14, STEPS - 1] {
        println!("{step:4}   {:11.4}   {:7.4}", alone.0[step], ranks[0].0[step]);
    }
    println!(
        "histories and scales are equal on all ranks: {}",
        ranks.iter().all(|rank| rank.1 == ranks[0].1)
    );

    println!("\nrank 2 gets a token that the vocabulary has not, at step 3:");
    let start = Instant::now();
    for (rank, outcome) in on_all_ranks(Some(3))?.into_iter().enumerate() {
        let said = outcome.err().map_or_else(|| "trained on".to_owned(), |error| error.to_string());
        println!("  rank {rank}: {said}");
    }
    println!("  all within {:.1} s", start.elapsed().as_secs_f32());
    Ok(())
}

fn on_all_ranks(bad_step: Option<usize>) -> Result<Vec<Outcome>> {
    let groups = local("dp", RANKS, Duration::from_secs(30))?;
    Ok(thread::scope(|scope| {
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || train(Some(group), bad_step))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    }))
}

/// The same program on one device and on many.
fn train(group: Option<Group>, bad_step: Option<usize>) -> Outcome {
    let (rank, world_size) = group.as_ref().map_or((0, 1), |group| (group.rank(), group.world_size()));
    let options = GptOptions {
        vocab_size: VOCABULARY as usize,
        num_layers: 2,
        hidden_size: 64,
        num_attention_heads: 4,
        max_seq_length: SEQ,
        ..Default::default()
    };
    let device = Device::cpu();
    let mut model = Gpt::new("gpt", &options, &device, &mut StdRng::seed_from_u64(rank as u64))?;
    let mut scaling = Scaling::new(&model, &device)?;
    if let Some(group) = &group {
        broadcast_parameters(&mut model, &**group)?; // rank 0's, on all
        scaling.set_group(group.clone());
    }
    let mut optimizer = AdamW::new(AdamWOptions::default())?;
    let recipe = Recipe::from(DelayedScaling::default());
    // By the global batch, so that gradients of the ranks add up.
    let cross_entropy =
        ops::CrossEntropyOptions { normalizer: Some((BATCH * SEQ) as f32), ..Default::default() };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (mut ids, targets) = batch(step, rank, world_size, &device)?;
        if bad_step == Some(step) && rank == 2 {
            ids = Tensor::from_vec(vec![VOCABULARY; ids.numel()], *ids.shape(), &device)?;
        }
        let (mut loss, saved) =
            scaling.autocast_with(&recipe, |cx| model.loss_with(cx, &ids, &targets, cross_entropy))?;
        scaling.backward_with(|cx| model.loss_backward(cx, saved))?;
        if let Some(group) = &group {
            all_reduce_gradients(&mut model, &**group)?;
            loss = group.all_reduce("loss", &loss, ReduceOp::Sum)?;
        }
        losses.push(loss.item()?);
        let norm = clip_grad_norm(&mut model, 1.0)?;
        optimizer.step_with_norm(&mut model, 3e-3, &norm)?; // all ranks skip it where the norm is not finite
        zero_grad(&mut model)?;
    }
    Ok((losses, scaling.state()?))
}

/// This rank's part: sequences that count in steps of their own.
fn batch(step: usize, rank: usize, world_size: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let mut rng = StdRng::seed_from_u64(step as u64);
    let rows = BATCH / world_size;
    let counts: Vec<[i32; 2]> =
        (0..BATCH).map(|_| [rng.random_range(0..VOCABULARY), rng.random_range(1..4)]).collect();
    let mine = &counts[rank * rows..][..rows];
    let tokens = |shift: i32| {
        let row =
            |&[start, by]: &[i32; 2]| (0..SEQ as i32).map(move |i| (start + (i + shift) * by) % VOCABULARY);
        Tensor::from_vec(mine.iter().flat_map(row).collect(), [rows, SEQ], device)
    };
    Ok((tokens(0)?, tokens(1)?))
}
