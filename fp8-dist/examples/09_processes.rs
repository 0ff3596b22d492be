//! Four processes train one number together over TCP, each told by its environment who it is, as under `torchrun`. Then
//! one of them dies, and the others are told.
//!
//! `cargo run -p fp8-dist --example 09_processes` starts them itself, with the variables that
//! `torchrun --no-python --nproc-per-node 4 target/debug/examples/09_processes` would set. With the argument `nccl` each
//! takes the GPU of its `LOCAL_RANK`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use fp8_dist::{Environment, ProcessGroup, ReduceOp, tcp};
use fp8_kernels::{Device, Tensor};
use std::net::TcpListener;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

const RANKS: usize = 4;
const STEPS: usize = 20;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}

fn run() -> Outcome<ExitCode> {
    match env::var_os("RANK") {
        Some(_) => work(&Environment::read()?),
        None => launch(),
    }
}

/// Starts the processes of all ranks and waits for them, like `torchrun`.
fn launch() -> Outcome<ExitCode> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut children = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(env::current_exe()?);
        let numbers =
            [("RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_RANK", rank), ("MASTER_PORT", port.into())];
        command.args(env::args_os().skip(1)).env("MASTER_ADDR", "127.0.0.1");
        children.push(command.envs(numbers.map(|(name, value)| (name, value.to_string()))).spawn()?);
    }
    let mut all = true;
    for (rank, mut child) in children.into_iter().enumerate() {
        all &= child.wait()?.success() || rank == RANKS - 1; // the last one dies on purpose
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn join(environment: &Environment) -> Outcome<(Arc<dyn ProcessGroup>, Device)> {
    let deadline = Duration::from_secs(30);
    match env::args().nth(1).as_deref() {
        None => Ok((tcp("dp", environment, deadline)?, Device::cpu())),
        #[cfg(feature = "cuda")]
        Some("nccl") => {
            let device = Device::cuda(environment.local_rank)?;
            Ok((fp8_dist::nccl("dp", environment, &device, deadline)?, device))
        }
        Some(other) => {
            Err(format!("argument {other}: expected none, or nccl in a build with the feature cuda").into())
        }
    }
}

/// Every rank has a number of its own; the mean of their gradients leads all to the mean of the numbers.
fn work(environment: &Environment) -> Outcome<ExitCode> {
    let (group, device) = join(environment)?;
    let (rank, ranks) = (group.rank(), group.world_size() as f32);
    let (target, mut w) = (rank as f32, 10.0);
    for _ in 0..STEPS {
        let grad = Tensor::scalar(w - target, &device)?;
        w -= 0.5 * group.all_reduce("grad", &grad, ReduceOp::Sum)?.item()? / ranks;
    }
    let expected = (ranks - 1.0) / 2.0;
    println!("rank {rank}: {w:.4} after {STEPS} steps, expected {expected}");
    if (w - expected).abs() > 1e-3 {
        return Err(format!("rank {rank}: {w} after {STEPS} steps, expected {expected}").into());
    }
    group.barrier()?;
    if rank + 1 == group.world_size() && rank > 0 {
        thread::sleep(Duration::from_millis(300));
        std::process::abort(); // as a kill: nothing is dropped
    }
    let start = Instant::now();
    match group.barrier() {
        Err(error) => println!("rank {rank}, {:.1} s later: {error}", start.elapsed().as_secs_f32()),
        Ok(()) if group.world_size() == 1 => {}
        Ok(()) => return Err("a rank died, and the barrier returned no error".into()),
    }
    Ok(ExitCode::SUCCESS)
}
