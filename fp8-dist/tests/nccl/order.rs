//! Calls that the ranks have compared before and now make in different orders: no host takes part in them.

use crate::rig::{Rig, ranks, tensor};
use fp8_dist::{Failure, ReduceOp};
use fp8_kernels::DType;
use std::thread;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(5); // two seconds, and a busy machine

/// The sentence that names both calls.
fn swapped(first: &str, second: &str) -> String {
    format!("the call is {first}, [64] of f32 on rank 1 and {second}, [64] of f32 on rank 0")
}

#[test]
fn two_that_one_rank_swaps_are_named_in_time() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let mut x = tensor(&[1.0; 64], &[64], DType::F32, device);
        let mut sum = |what| group.all_reduce_in_place(what, &mut x, ReduceOp::Sum);
        for _ in 0..2 {
            ["a", "b", "c"].into_iter().for_each(|what| sum(what).unwrap());
        }
        let order = [["a", "b", "c"], ["a", "c", "b"]][group.rank()];
        order.into_iter().for_each(|what| sum(what).unwrap());
        let swapped = Instant::now();
        let error = loop {
            match group.barrier() {
                Ok(()) => thread::sleep(Duration::from_millis(5)),
                Err(error) => break error,
            }
        };
        (swapped.elapsed(), error.failure().cloned(), error.to_string())
    });
    for (took, failure, sentence) in results {
        assert!(took < SOON, "{took:?}");
        assert!(matches!(failure, Some(Failure::Disagree { .. })), "{sentence}");
        assert!(sentence.contains(&swapped("all_reduce(sum) `c`", "all_reduce(sum) `b`")), "{sentence}");
    }
    drop(rig); // the devices have failed
}

#[test]
fn replays_and_calls_between_them_are_compared() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let [mut x, mut y] = [1.0, 2.0].map(|x| tensor(&[x; 64], &[64], DType::F32, device));
        let mut step = || {
            group.all_reduce_in_place("x", &mut x, ReduceOp::Sum)?;
            let pending = group.start_all_reduce(
                "z",
                vec![tensor(&[1.0; 64], &[64], DType::F32, device)],
                ReduceOp::Sum,
            );
            pending.wait().map(drop)
        };
        step().unwrap();
        let (graph, ()) = device.capture(step).unwrap();
        let mut sum = || group.all_reduce_in_place("y", &mut y, ReduceOp::Sum);
        sum().unwrap();
        // In one order on both ranks.
        for _ in 0..3 {
            graph.replay().unwrap();
            sum().unwrap();
        }
        thread::sleep(Duration::from_millis(1200));
        group.barrier().unwrap();
        let swapped = Instant::now();
        if group.rank() == 0 {
            graph.replay().unwrap();
            let _ = sum(); // the group may have failed
        } else {
            sum().unwrap();
            let _ = graph.replay(); // the group may have failed
        }
        let error = loop {
            match group.barrier() {
                Ok(()) => thread::sleep(Duration::from_millis(5)),
                Err(error) => break error,
            }
        };
        (swapped.elapsed(), error.to_string())
    });
    for (took, sentence) in results {
        assert!(took < SOON, "{took:?}");
        assert!(sentence.contains(&swapped("all_reduce(sum) `y`", "all_reduce(sum) `x`")), "{sentence}");
    }
    drop(rig);
}

#[test]
fn equal_orders_are_no_error_however_many_calls_there_are() {
    let rig = Rig::new();
    ranks(3, |group, device| {
        let mut x = tensor(&[0.0; 4], &[4], DType::F32, device);
        let started = Instant::now();
        let mut count = 0;
        loop {
            for what in ["a", "b"] {
                group.all_reduce_in_place(what, &mut x, ReduceOp::Sum).unwrap();
            }
            count += 1;
            if count % 16 == 0 {
                // All ranks make the same number of rounds.
                let done = tensor(
                    &[f32::from(u8::from(started.elapsed() >= Duration::from_millis(2000)))],
                    &[1],
                    DType::F32,
                    device,
                );
                let done = group.all_reduce("done", &done, ReduceOp::Max).unwrap();
                if done.item().unwrap() > 0.0 {
                    break;
                }
            }
        }
        group.barrier().unwrap();
    });
    rig.finish();
}
