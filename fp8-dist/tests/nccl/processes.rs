//! Ranks that are processes, as on real machines: each with a simulated device of its own.

use crate::child;
use crate::rig::{Rig, environments, open, tensor};
use fp8_dist::{Environment, ReduceOp, nccl, quantized_all_gather};
use fp8_kernels::{DType, Device, Encoding, Scale, ScaleRule, Slot, ops};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

const ROWS: usize = 4;
const COLS: usize = 32;

fn data(rank: usize, ranks: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..ROWS * COLS).map(|i| ((rank * ROWS * COLS + i) as f32 * 0.37).sin()).collect();
    if rank == ranks - 1 {
        x[ROWS * COLS - 1] = 1e4;
    }
    x
}

fn current() -> ScaleRule {
    ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false }
}

fn start_all(name: &str, ranks: usize, more: &[(&str, &str)]) -> Vec<Child> {
    let start = |environment: &Environment| {
        // Ranks that say they are on different machines may share a device.
        let host = format!("machine {}", environment.rank);
        child::start(name, environment, &[more, &[("NCCL_HOSTID", host.as_str())]].concat())
    };
    environments(ranks).iter().map(start).collect()
}

fn codes(x: &fp8_kernels::Operand) -> String {
    x.as_fp8().unwrap().codes().unwrap().iter().map(|code| format!("{code:02x}")).collect()
}

#[test]
fn a_worker() {
    if !child::is_child() {
        return;
    }
    let rig = Rig::new();
    rig.control.set("nccl_shared", "0").unwrap();
    let (environment, device) = (Environment::read().unwrap(), open());
    let (rank, ranks) = (environment.rank, environment.world_size);
    let group = nccl("dp", &environment, &device, Duration::from_secs(30)).unwrap();
    let x = tensor(&data(rank, ranks), &[ROWS, COLS], DType::F32, &device);
    let rule = current();
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
    child::answer(codes(&quantized_all_gather(&*group, "x", &x, &slot).unwrap()));
    for _ in 0..3 {
        let ones = tensor(&[1.0, rank as f32], &[2], DType::F32, &device);
        let sum = group.all_reduce("ones", &ones, ReduceOp::Sum).unwrap();
        child::answer(format!("{:?}", sum.to_vec::<f32>().unwrap()));
    }
    drop((group, x));
    drop(device);
    rig.finish();
}

#[test]
fn processes_compute_what_one_device_does() {
    for (ranks, seed) in [(2, "0"), (4, "5")] {
        let children = start_all("processes::a_worker", ranks, &[("FP8_SIM_SEED", seed)]);
        let whole: Vec<f32> = (0..ranks).flat_map(|rank| data(rank, ranks)).collect();
        let whole = tensor(&whole, &[ranks * ROWS, COLS], DType::F32, &Device::cpu());
        let rule = current();
        let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
        let expected = codes(&ops::quantize(&whole, &slot).unwrap());
        let sum = format!("{:?}", [ranks as f32, (ranks * (ranks - 1) / 2) as f32]);
        for (rank, child) in children.into_iter().enumerate() {
            let (lines, success) = child::finish(child);
            assert!(success, "rank {rank} of {ranks}");
            assert_eq!(lines, [&expected, &sum, &sum, &sum].map(String::clone), "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn a_worker_that_dies() {
    if !child::is_child() {
        return;
    }
    let (environment, device) = (Environment::read().unwrap(), open());
    let dying: usize = std::env::var("DYING").unwrap().parse().unwrap();
    let group = nccl("dp", &environment, &device, Duration::from_secs(60)).unwrap();
    let x = tensor(&[1.0], &[1], DType::F32, &device);
    assert_eq!(group.all_reduce("x", &x, ReduceOp::Sum).unwrap().item().unwrap(), 4.0);
    group.barrier().unwrap();
    if group.rank() == dying {
        thread::sleep(Duration::from_millis(100));
        std::process::abort(); // as a kill: nothing is dropped
    }
    // Queued, and waited for by the host, before the rank dies.
    let started = Instant::now();
    let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
    child::answer(sum.to_vec::<f32>().unwrap_err());
    child::answer(started.elapsed() < Duration::from_secs(5));
    child::answer(group.all_reduce("x", &x, ReduceOp::Sum).unwrap_err());
}

#[test]
fn a_process_that_dies_is_noticed_at_once() {
    for (dying, seed) in [(0, "0"), (2, "3")] {
        let variables = [("DYING", ["0", "1", "2"][dying]), ("FP8_SIM_SEED", seed)];
        let children = start_all("processes::a_worker_that_dies", 4, &variables);
        for (rank, child) in children.into_iter().enumerate() {
            let (lines, success) = child::finish(child);
            assert_eq!(success, rank != dying, "rank {rank}");
            if rank == dying {
                continue;
            }
            let [error, in_time, later] = lines.as_slice() else { panic!("rank {rank}: {lines:?}") };
            assert!(error.contains("group `dp` failed while its work was queued"), "rank {rank}: {error}");
            assert_eq!(in_time, "true");
            assert!(later.contains("failed before"), "rank {rank}: {later}");
        }
    }
}
