//! Two ranks that share the simulated GPU, and a step of theirs over NCCL.

use crate::fault::Fault;
use crate::rig::{Rig, open};
use crate::training::{Stage, Training};
use fp8_nn::fp8_dist::{Environment, nccl, quantized_all_gather};
use fp8_nn::fp8_kernels::{Scale, ScaleRule, Slot};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

type Group = Arc<dyn ProcessGroup>;

const RANKS: usize = 2;
/// Longer than a test may take: who waits for it has not been told.
const DEADLINE: Duration = Duration::from_secs(60);

/// The results of a rank as bytes: the loss, what it gathered and scattered, and a checkpoint of all that lasts.
pub(crate) type Bits = Vec<Vec<u8>>;

/// The result of a rank, and the time that it took.
pub(crate) struct Ended {
    pub(crate) result: Result<Bits>,
    /// From forming the group to having dropped all.
    pub(crate) took: Duration,
}

/// Writes the checkpoint that steps start from. What the end of a device calls.
pub(crate) fn prepare(rig: &Rig) -> BTreeMap<String, u64> {
    let training = Training::warm(open(rig.path().join("kernels")));
    training.save(&rig.path().join("start")).unwrap();
    rig.calls(|| drop(training)).0
}

/// Both ranks load the checkpoint on devices of their own, form a group, take a step and part, while `faults` come to
/// pass. Which functions were called meanwhile, and how often; in rank order, what became of each.
pub(crate) fn run(rig: &Rig, faults: &[Fault]) -> (BTreeMap<String, u64>, Vec<Ended>) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (ready, go) = (Barrier::new(RANKS + 1), Barrier::new(RANKS + 1));
    let begin = |rank: usize| {
        let mut training = Training::new(open(rig.path().join("kernels")));
        let ids = (0..16).map(|i| (i * (3 + 2 * rank as i32) + 1) % 16).collect();
        training.ids = Tensor::from_vec::<i32>(ids, [1, 16], &training.device).unwrap();
        training.restore(&rig.path().join("start"));
        ready.wait();
        go.wait();
        let started = Instant::now();
        let run_id = "test".to_owned(); // without one a group waits for other jobs
        let alone = Environment { run_id, ..Environment::on_this_machine(port) };
        let here = Environment { rank, local_rank: rank, world_size: RANKS, exact_port: true, ..alone };
        let result = whole(&mut training, &here, rig.path());
        drop(training);
        Ended { result, took: started.elapsed() }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || begin(rank))).collect();
        ready.wait();
        rig.stop_failing();
        rig.control.set("reset_calls", "").unwrap();
        for Fault { function, count, code } in faults {
            rig.control.fail(function, *count, *code).unwrap();
        }
        go.wait();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        rig.stop_failing();
        (rig.control.calls(), ended)
    })
}

/// A group's life.
fn whole(training: &mut Training, environment: &Environment, folder: &Path) -> Result<Bits> {
    let group = nccl("dp", environment, &training.device, DEADLINE)?;
    training.scaling.set_group(group.clone());
    let mut bits = step(training, &group)?;
    let folder = folder.join(format!("rank {}", group.rank()));
    training.save(&folder)?;
    bits.push(std::fs::read(checkpoint::path(&folder)).unwrap());
    // Nobody leaves while another has something to do.
    group.barrier()?;
    Ok(bits)
}

/// A step with all collectives that there are.
fn step(training: &mut Training, group: &Group) -> Result<Bits> {
    broadcast_parameters(&mut training.model, &**group)?;
    let loss = training.queue_until(&mut |training| match training.stage {
        Stage::Clip => all_reduce_gradients(&mut training.model, &**group),
        _ => Ok(()),
    })?;
    let rank = group.rank();
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    let values = |rows: usize| {
        let values = (0..rows * 16).map(|i| (i * (rank + 3) % 41) as f32 - 20.0).collect();
        Tensor::from_vec::<f32>(values, [rows, 16], &training.device)
    };
    let mut bits = Vec::new();
    // Shards of one length are gathered by one call, of several by a group of broadcasts.
    for (what, rows) in [("a weight", 2), ("an uneven weight", 1 + rank)] {
        let whole = quantized_all_gather(&**group, what, &values(rows)?, &slot)?;
        bits.push(whole.as_fp8().unwrap().codes()?);
    }
    let part = group.reduce_scatter("a gradient", &values(4)?, ReduceOp::Sum)?;
    bits.push(part.to_vec::<f32>()?.iter().flat_map(|value| value.to_le_bytes()).collect());
    training.stage = Stage::Read;
    bits.push(loss.item()?.to_le_bytes().to_vec());
    Ok(bits)
}
