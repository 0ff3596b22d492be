//! Data-parallel training over TCP, to copy and change: each process trains on its part of the batch, and all keep the
//! same weights, scales and optimizer state.
//!
//! `cargo run --release -p fp8-nn --example 11_training_over_tcp` starts two processes on this machine. A launcher starts any number,
//! on one machine or on several: `fp8 launch`, `torchrun --no-python`, `mpirun`, `mpiexec` or `srun`. By hand, set four variables for
//! each process, as `torchrun` does:
//!
//! ```text
//! fp8 launch -n 4 -- target/release/examples/11_training_over_tcp
//!
//! RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 target/release/examples/11_training_over_tcp
//! RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 target/release/examples/11_training_over_tcp
//! ```
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use fp8_nn::fp8_dist::{Environment, tcp};
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng, rngs::StdRng};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;
use std::{env, net::TcpListener};

const PROCESSES: usize = 2;
/// Sequences in the batch of all processes, and tokens in a sequence.
const GLOBAL_BATCH: usize = 16;
const SEQ: usize = 16;
const VOCABULARY: i32 = 32;
const STEPS: u64 = 40;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let run =
        |environment: Environment| if environment.world_size > 1 { train(&environment) } else { launch() };
    match Environment::detect().map_err(Failure::from).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the processes on this machine. With a launcher, you do not need this function.
fn launch() -> Result<(), Failure> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let program = env::current_exe()?;
    println!("starting {PROCESSES} processes; by hand, each is started with");
    println!(
        "  RANK=0 WORLD_SIZE={PROCESSES} MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {}",
        program.display()
    );
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", PROCESSES.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn()
    };
    let processes = (0..PROCESSES).map(start).collect::<Result<Vec<_>, _>>()?;
    for (rank, mut process) in processes.into_iter().enumerate() {
        let status = process.wait()?;
        if !status.success() {
            return Err(format!("rank {rank}: {status}").into());
        }
    }
    Ok(())
}

/// Trains as one of the processes.
fn train(environment: &Environment) -> Result<(), Failure> {
    // If a process does not answer for 30 s, the others return an error that names it.
    let group: Arc<dyn ProcessGroup> = tcp("dp", environment, Duration::from_secs(30))?;
    let (rank, world_size) = (group.rank(), group.world_size());
    if !GLOBAL_BATCH.is_multiple_of(world_size) {
        return Err(
            format!("WORLD_SIZE={world_size}: expected a divisor of the batch, {GLOBAL_BATCH}").into()
        );
    }

    let device = Device::cpu();
    let options = GptOptions {
        vocab_size: VOCABULARY as usize,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 64,
            ffn_hidden_size: 256,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: SEQ, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, &device, &mut StdRng::seed_from_u64(rank as u64))?;
    broadcast_parameters(&mut model, &*group)?; // all start from the weights of rank 0
    let mut optimizer = AdamW::new(AdamWOptions::default())?;
    let mut scaling = Scaling::new(&model, &device)?;
    scaling.set_group(group.clone()); // all use the largest amax of any rank
    let recipe = Recipe::from(DelayedScaling::default());
    let schedule = Schedule::cosine(3e-3, 4, STEPS, 0.1)?;
    // Dividing by the targets of the global batch makes the gradients of the ranks add up to those of the mean.
    let targets = (GLOBAL_BATCH * SEQ) as f32;
    let mean = ops::CrossEntropyOptions { normalizer: Some(targets), ..Default::default() };

    let (mut first, mut last) = (0.0, 0.0);
    for step in 0..STEPS {
        let (ids, targets) = batch(step, rank, world_size, &device)?;
        let mut cx = scaling.autocast(&recipe)?;
        let (loss, saved) = model.loss_with_info(&mut cx, &ids, &targets, mean, &SequenceInfo::default())?;
        cx.commit()?; // one all-reduce of the amaxes of activations and weights
        let mut cx = scaling.backward()?;
        model.loss_backward(&mut cx, saved)?;
        cx.commit()?; // one all-reduce of the amaxes of gradients
        all_reduce_gradients(&mut model, &*group)?;
        let norm = clip_grad_norm(&mut model, 1.0)?;
        optimizer.step_with_norm(&mut model, schedule.lr(step), &norm)?;
        zero_grad(&mut model)?;

        last = group.all_reduce("loss", &loss, ReduceOp::Sum)?.item()?; // of the global batch
        if step == 0 {
            first = last;
        }
        if rank == 0 && (step % 10 == 0 || step + 1 == STEPS) {
            println!("step {step:2}: loss {last:.4}");
        }
    }
    assert!(last < 0.8 * first, "the model learned nothing: a loss of {last} after {first}");
    agree(&model, &optimizer, &scaling, &*group)?; // an error if the ranks differ in one bit
    println!("rank {rank} of {world_size}: weights, moments and scales are equal on all ranks");
    Ok(())
}

/// This rank's part of the batch: sequences that count in steps of their own, modulo the vocabulary.
fn batch(step: u64, rank: usize, world_size: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let mut rng = StdRng::seed_from_u64(step);
    let sequences: Vec<[i32; 2]> =
        (0..GLOBAL_BATCH).map(|_| [rng.random_range(0..VOCABULARY), rng.random_range(1..4)]).collect();
    let rows = GLOBAL_BATCH / world_size;
    let mine = &sequences[rank * rows..][..rows];
    let tensor = |shift: i32| {
        let tokens = mine.iter().flat_map(|&[start, stride]| {
            (0..SEQ as i32).map(move |index| (start + (index + shift) * stride) % VOCABULARY)
        });
        Tensor::from_vec(tokens.collect(), [rows, SEQ], device)
    };
    Ok((tensor(0)?, tensor(1)?))
}
