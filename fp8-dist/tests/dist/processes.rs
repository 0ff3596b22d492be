//! Ranks that are processes.

use crate::{bits, child, environments, f32s, groups, noise};
use fp8_dist::{Environment, ProcessGroup, ReduceOp, quantized_all_gather, tcp};
use fp8_kernels::{Cell, Device, Encoding, Scale, ScalePolicy, ScaleRule, Slot, UNSET, ops};
use fp8_recipe::{AutocastOptions, DelayedScaling, Recipe, Scaling, SlotName, SlotRole, Slots};
use std::process::Child;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

struct Model(SlotName);

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        f(&self.0);
    }
}

/// All that a rank computes, in one number a line.
fn work(group: Arc<dyn ProcessGroup>) -> Vec<String> {
    let rank = group.rank();
    let mut lines = Vec::new();
    let x = f32s(&noise(300_000, rank as u64), &[300, 1000]); // more than a piece
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let sum = group.all_reduce("x", &x, op).unwrap().to_vec::<f32>().unwrap();
        lines.push(digest(bits(&sum).into_iter().flat_map(u32::to_le_bytes)));
    }
    let part = group.all_gather("g", &group.reduce_scatter("g", &x, ReduceOp::Sum).unwrap()).unwrap();
    lines.push(digest(bits(&part.to_vec::<f32>().unwrap()).into_iter().flat_map(u32::to_le_bytes)));

    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let scale = Cell::new(UNSET, &Device::cpu()).unwrap();
    let slot =
        Slot { scale: Scale::Cell { cell: &scale, first: &rule, keep: true }, ..Slot::off(Encoding::E4M3) };
    let whole = quantized_all_gather(&*group, "x", &x, &slot).unwrap();
    lines.push(digest(whole.as_fp8().unwrap().codes().unwrap().into_iter()));
    lines.push(format!("{:?}", scale.read().unwrap()));

    let model = Model(SlotName::new("fc", SlotRole::Input));
    let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
    let options = AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() };
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    for _ in 0..3 {
        let mut cx = scaling.scope(&recipe, &options).unwrap();
        let value = [1.0, 2.5, 7.0, 4.0][rank];
        ops::quantize(&f32s(&[value], &[1, 1]), &cx.slot(&model.0).unwrap()).unwrap();
        cx.commit().unwrap();
    }
    lines.push(format!("{:?}", scaling.state().unwrap()));
    lines
}

/// FNV-1a.
fn digest(bytes: impl Iterator<Item = u8>) -> String {
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("{hash:016x}")
}

fn start_all(name: &str, ranks: usize, more: &[(&str, &str)]) -> Vec<Child> {
    environments(ranks).iter().map(|environment| child::start(name, environment, more)).collect()
}

fn group() -> Arc<dyn ProcessGroup> {
    tcp("dp", &Environment::read().unwrap(), Duration::from_secs(30)).unwrap()
}

#[test]
fn a_worker() {
    if child::is_child() {
        work(group()).iter().for_each(child::answer);
    }
}

#[test]
fn processes_compute_what_threads_do() {
    for ranks in [2, 4] {
        let children = start_all("processes::a_worker", ranks, &[]);
        let threads = thread::scope(|scope| {
            let run = |group| scope.spawn(move || work(group));
            let threads: Vec<_> =
                fp8_dist::local("dp", ranks, crate::LONG).unwrap().into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (rank, child) in children.into_iter().enumerate() {
            let (lines, success) = child::finish(child);
            assert!(success, "rank {rank}");
            assert_eq!(lines, threads[rank], "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn a_worker_that_dies() {
    if !child::is_child() {
        return;
    }
    let group = group();
    let dying: usize = std::env::var("DYING").unwrap().parse().unwrap();
    group.barrier().unwrap();
    if group.rank() == dying {
        thread::sleep(Duration::from_millis(100)); // rank 0's process carries the others' news of the barrier
        std::process::abort(); // as a kill: nothing is dropped
    }
    let started = Instant::now();
    let error = group.all_reduce("x", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap_err();
    child::answer(error);
    child::answer(started.elapsed() < Duration::from_secs(5));
    child::answer(group.barrier().unwrap_err());
}

#[test]
fn a_process_that_dies_is_noticed_at_once() {
    for dying in [0, 2] {
        let children = start_all("processes::a_worker_that_dies", 4, &[("DYING", &dying.to_string())]);
        for (rank, child) in children.into_iter().enumerate() {
            let (lines, success) = child::finish(child);
            assert_eq!(success, rank != dying, "rank {rank}");
            if rank == dying {
                continue;
            }
            let lost = format!("rank {dying} is lost: its connection closed; its process has probably ended");
            let [error, in_time, later] = lines.as_slice() else { panic!("rank {rank}: {lines:?}") };
            assert!(error.contains(&lost), "rank {rank}: {error}");
            assert_eq!(in_time, "true");
            assert!(later.contains(&lost) && later.contains("failed before"), "rank {rank}: {later}");
        }
    }
}

#[test]
fn a_worker_that_returns_at_once() {
    if child::is_child() {
        let group = group();
        group.barrier().unwrap();
        // Nothing keeps rank 0's process until the others have heard of the barrier, but this group.
    }
}

#[test]
fn the_last_exchange_reaches_all_before_rank_0_ends() {
    for _ in 0..5 {
        for child in start_all("processes::a_worker_that_returns_at_once", 3, &[]) {
            assert!(child::finish(child).1);
        }
    }
}

#[test]
fn many_groups_one_after_the_other() {
    for _ in 0..20 {
        let groups = groups(2, crate::LONG);
        thread::scope(|scope| {
            groups.iter().for_each(|group| drop(scope.spawn(|| group.barrier().unwrap())));
        });
    }
}
