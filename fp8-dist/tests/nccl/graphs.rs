//! Collectives inside captured graphs: every replay is one, and no host says a word.

use crate::rig::{Group, Rig, SEEDS, SHORT, ranks, tensor, try_ranks};
use fp8_dist::{ReduceOp, Result};
use fp8_kernels::{Arena, ArenaOptions, DType, Device, Graph, Tensor};
use std::thread;
use std::time::{Duration, Instant};

const IN_TIME: Duration = Duration::from_secs(5);

/// Four numbers that a recorded step sums over two ranks, again and again; it has run once, and the sum is 4.
fn record(group: &Group, device: &Device) -> (Graph, Tensor) {
    let mut x = tensor(&[1.0; 4], &[4], DType::F32, device);
    let mut step = || group.all_reduce_in_place("x", &mut x, ReduceOp::Sum);
    step().unwrap();
    let (graph, ()) = device.capture(step).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [4.0; 4]);
    (graph, x)
}

#[test]
fn every_replay_reduces() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        rig.control.set("reset_calls", "").unwrap();
        let results = ranks(2, |group, device| {
            let rank = group.rank();
            let arena =
                Arena::new(3, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device).unwrap();
            let mut x = tensor(&[1.0; 4], &[4], DType::F32, device);
            // Once outside: calls are compared, and NCCL has what it needs.
            group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
            group.all_reduce_max("forward", &arena).unwrap();
            let step = || -> Result<()> {
                group.all_reduce_in_place("x", &mut x, ReduceOp::Sum)?;
                group.all_reduce_max("forward", &arena).unwrap();
                Ok(())
            };
            let (graph, ()) = device.capture(step).unwrap(); // runs it once
            let mut rows = Vec::new();
            for round in 0..3 {
                arena.merge_staged(&[[1.0, -1.0, 0.5], [0.25, -1.0, 8.0 * round as f32]][rank]).unwrap();
                graph.replay().unwrap();
                rows.push(arena.staged().unwrap());
            }
            drop(graph);
            (x.to_vec::<f32>().unwrap(), rows)
        });
        let rows = vec![vec![1.0, -1.0, 0.5], vec![1.0, -1.0, 8.0], vec![1.0, -1.0, 16.0]];
        assert_eq!(results, vec![(vec![32.0; 4], rows); 2], "seed {seed}");
        assert_eq!(rig.calls("ncclAllReduce"), 8); // four each: two outside, two captured
    }
    rig.finish();
}

#[test]
fn a_replay_after_a_rank_has_left() {
    let rig = Rig::new();
    let started = Instant::now();
    let errors = ranks(2, |group, device| {
        let (graph, _x) = record(&group, device);
        if group.rank() == 1 {
            return String::new();
        }
        graph.replay().and_then(|()| device.synchronize()).unwrap_err().to_string()
    });
    assert!(started.elapsed() < IN_TIME);
    assert!(errors[0].contains("rank 1 left the group"), "{}", errors[0]);
    rig.finish();
}

#[test]
fn a_replay_that_another_rank_does_not_come_to() {
    let rig = Rig::new();
    let started = Instant::now();
    let results = try_ranks(2, SHORT, |group, device| {
        let (graph, _x) = record(&group, device);
        group.barrier().unwrap();
        if group.rank() == 1 {
            thread::sleep(SHORT * 3);
        }
        graph.replay().and_then(|()| device.synchronize()).unwrap_err().to_string()
    });
    assert!(started.elapsed() < IN_TIME);
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap();
        let late = "a recorded step with all_reduce(sum) `x` was not done 600ms after it was queued";
        assert!(error.contains(late), "rank {rank}: {error}");
    }
    rig.finish();
}

#[test]
fn the_handle_goes_before_the_graph_or_after() {
    let rig = Rig::new();
    let started = Instant::now();
    for is_group_first in [true, false] {
        let sums = ranks(2, |group, device| {
            let (graph, x) = record(&group, device);
            let group = (!is_group_first).then_some(group);
            graph.replay().unwrap();
            let sum = x.to_vec::<f32>().unwrap();
            drop(graph);
            drop(group);
            sum
        });
        assert_eq!(sums, vec![vec![8.0; 4]; 2]);
    }
    assert!(started.elapsed() < IN_TIME, "NCCL waits for graphs that hold its collectives");
    rig.finish();
}
