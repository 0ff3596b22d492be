//! Recorded steps of several ranks.

use super::{Group, Training, rate, recorded_beside};
use crate::every_device::support::*;
use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_dist::{Environment, nccl};
use fp8_nn::prelude::*;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

/// `f` on each of two ranks that share the simulated GPU, or on the one rank that a real GPU holds.
pub(super) fn ranks<T: Send>(f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let world_size = unless_simulated(1, 2);
    if world_size > 1 {
        Control::open(&library_path().unwrap()).unwrap().set("nccl_shared", "1").unwrap();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    thread::scope(|scope| {
        let run = |rank| {
            let run_id = "test".to_owned(); // without one a group waits for other jobs
            let alone = Environment { run_id, ..Environment::on_this_machine(port) };
            let here = Environment { rank, local_rank: rank, world_size, exact_port: true, ..alone };
            let f = &f;
            scope.spawn(move || f(nccl("dp", &here, &device(), Duration::from_secs(60)).unwrap()))
        };
        let threads: Vec<_> = (0..world_size).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn replays_of_ranks_have_the_bits_of_eager_steps() {
    let finals = ranks(|group| {
        let (mut eager, mut recorded) = (Training::of(&group, delayed()), Training::of(&group, delayed()));
        let (graph, _) = recorded_beside(&mut eager, &mut recorded, |eager, recorded| {
            for Training { model, optimizer, scaling, .. } in [eager, recorded] {
                broadcast_parameters(model, &*group).unwrap(); // where they lie
                broadcast_state(model, optimizer, scaling, &*group, 0).unwrap();
            }
        });
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
        drop(graph);
        all(&recorded)
    });
    assert!(finals.iter().all(|end| *end == finals[0]), "ranks differ");
}

#[test]
fn recorded_sums_beside_backward_have_the_bits_of_eager_sums_behind_it() {
    let finals = ranks(|group| {
        let (mut eager, mut recorded) =
            (Training::of(&group, delayed()), Training::overlapping(&group, delayed()));
        let (graph, _) = recorded_beside(&mut eager, &mut recorded, |_, _| {});
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
        let before = group.traffic();
        graph.replay().unwrap();
        assert_eq!(group.traffic().exchanges, before.exchanges, "the hosts exchange nothing");
        let bytes = group.traffic().reductions.bytes - before.reductions.bytes;
        let ranks = group.world_size() as u64;
        let all_bytes = 2 * (ranks - 1) * 4 * num_parameters(&recorded.model) as u64 / ranks;
        assert!(bytes.abs_diff(all_bytes) < 100, "{bytes} bytes, not {all_bytes}");
        drop(graph);
        all(&recorded)
    });
    assert!(finals.iter().all(|end| *end == finals[0]), "ranks differ");
}

#[test]
fn a_step_in_which_ranks_would_compare_state_is_not_recorded() {
    if unless_simulated(true, false) {
        return; // one GPU is one rank, which compares nothing
    }
    ranks(|group| {
        let mut training = Training::of(&group, delayed());
        for step in 0..2 {
            training.eager(step);
        }
        let compare = |training: &mut Training| {
            let Training { model, optimizer, scaling, .. } = training;
            agree(model, optimizer, scaling, &*group)
        };
        compare(&mut training).unwrap();
        let refused = error(device().capture(|| compare(&mut training)));
        assert!(refused.starts_with("agree") && refused.contains("call it between steps"), "{refused}");
        let refused = error(device().capture(|| {
            let Training { model, optimizer, scaling, .. } = &mut training;
            broadcast_state(model, optimizer, scaling, &*group, 0)
        }));
        assert!(refused.starts_with("broadcast_state") && refused.contains("between steps"), "{refused}");
        broadcast_parameters(&mut training.model, &*group).unwrap();
        let refused = error(device().capture(|| all_reduce_gradients(&mut training.model, &*group)));
        assert!(refused.contains("run one step before a step is recorded"), "{refused}");
        training.eager(2);
        training.load(3);
        device().capture(|| training.queue(rate(3))).unwrap();
    });
}
