//! Whatever goes wrong between ranks is an error on every rank, never a hang.

use crate::rig::{Group, LONG, Rig, SEEDS, SHORT, ranks, try_ranks};
use fp8_dist::{Failure, ReduceOp, Result};
use fp8_kernels::{DType, Device, Tensor};
use std::thread;
use std::time::{Duration, Instant};

const IN_TIME: Duration = Duration::from_secs(5);

fn reduce(group: &Group, what: &str, device: &Device) -> Result<Tensor> {
    group.all_reduce(what, &Tensor::from_vec(vec![1.0f32], [1], device)?, ReduceOp::Sum)
}

fn message<T>(result: Result<T>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

/// Returns the error that a rank gets, either from its call or from its device when it reads the result of the call.
/// Empty if there is none.
fn told(group: &Group, device: &Device) -> String {
    match reduce(group, "x", device) {
        Ok(sum) => sum.to_vec::<f32>().err().map(|error| error.to_string()).unwrap_or_default(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn different_calls_and_sizes() {
    let rig = Rig::new();
    let started = Instant::now();
    for error in ranks(2, |group, device| match group.rank() {
        0 => message(reduce(&group, "grads", device)),
        _ => message(group.barrier()),
    }) {
        assert!(
            error.contains("the call is barrier on rank 1 and all_reduce(sum) `grads` on rank 0"),
            "{error}"
        );
    }
    for error in ranks(4, |group, device| {
        let rows = if group.rank() == 2 { 4 } else { 3 };
        let x = Tensor::zeros([2, rows], DType::F32, device).unwrap();
        message(group.all_reduce("x", &x, ReduceOp::Sum))
    }) {
        assert!(error.contains("the shape is [2, 4] on rank 2 and [2, 3] on rank 0"), "{error}");
    }
    for error in ranks(2, |group, device| {
        let x = Tensor::zeros([group.rank(), 3 + group.rank()], DType::U8, device).unwrap();
        message(group.all_gather("x", &x))
    }) {
        assert!(error.contains("the shape, dimension 0 aside, is [1, 4] on rank 1"), "{error}");
    }
    assert!(started.elapsed() < 3 * IN_TIME);
    rig.finish();
}

#[test]
fn a_rank_that_stays_away() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let started = Instant::now();
        let results = try_ranks(4, SHORT, |group, device| {
            // Compared once; from now on NCCL alone would notice.
            assert_eq!(reduce(&group, "x", device).unwrap().item().unwrap(), 4.0);
            if group.rank() == 3 {
                thread::sleep(SHORT * 3);
                return told(&group, device);
            }
            told(&group, device)
        });
        assert!(started.elapsed() < IN_TIME);
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap();
            assert!(
                error.contains("all_reduce(sum) `x` was not done 600ms after it was queued"),
                "rank {rank}: {error}"
            );
        }
    }
    rig.finish();
}

#[test]
fn a_rank_that_leaves_gives_up_or_panics() {
    let rig = Rig::new();
    for (kind, expected) in [
        (0, "rank 2 gave up: out of tokens"),
        (1, "rank 2 gave up: its thread panicked"),
        (2, "rank 2 left the group: every rank must make the same number of calls"),
    ] {
        for seed in SEEDS {
            rig.control.set("seed", &seed.to_string()).unwrap();
            let started = Instant::now();
            let results = try_ranks(4, LONG, |group, device| {
                reduce(&group, "x", device).unwrap().item().unwrap();
                if group.rank() == 2 {
                    thread::sleep(Duration::from_millis(30));
                    match kind {
                        0 => group.poison("out of tokens"),
                        2 => return Default::default(),
                        _ => std::panic::resume_unwind(Box::new("a broken rank")),
                    }
                }
                let error = told(&group, device);
                (error, message(group.barrier()))
            });
            assert!(started.elapsed() < IN_TIME);
            for (rank, result) in results.into_iter().enumerate() {
                let Ok((error, later)) = result else {
                    assert_eq!((kind, rank), (1, 2));
                    continue;
                };
                if (kind, rank) == (2, 2) {
                    continue;
                }
                assert!(error.contains(expected), "rank {rank}: {error}");
                assert!(later.contains(expected) && later.contains("failed before"), "rank {rank}: {later}");
            }
        }
    }
    rig.finish();
}

#[test]
fn an_aborted_result_is_never_read() {
    let rig = Rig::new();
    let results = try_ranks(2, LONG, |group, device| {
        let first = reduce(&group, "x", device).unwrap();
        assert_eq!(first.item().unwrap(), 2.0);
        group.barrier().unwrap();
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(30));
            group.poison("enough");
            return Vec::new();
        }
        let sum = reduce(&group, "x", device).unwrap();
        // Queued alone; the word of the other's end arrives while this thread waits for the stream.
        let errors = [sum.to_vec::<f32>().unwrap_err(), first.to_vec::<f32>().unwrap_err()];
        errors.map(|error| error.to_string()).to_vec()
    });
    for error in results.into_iter().next().unwrap().unwrap() {
        assert!(
            error.contains("group `dp` failed while its work was queued: rank 1 gave up: enough"),
            "{error}"
        );
    }
    rig.finish();
}

#[test]
fn a_failure_while_nothing_is_queued_leaves_the_device_alone() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let x = reduce(&group, "x", device).unwrap();
        assert_eq!(x.item().unwrap(), 2.0);
        group.barrier().unwrap();
        thread::sleep(Duration::from_millis(50)); // until the watch has found the collective done
        group.barrier().unwrap();
        if group.rank() == 1 {
            group.poison("enough");
        }
        let error = loop {
            match group.barrier() {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.failure(), Some(&Failure::GaveUp { rank: 1, reason: "enough".into() }));
        thread::sleep(Duration::from_millis(20));
        assert_eq!(x.item().unwrap(), 2.0);
    });
    rig.finish();
}

#[test]
fn a_function_of_nccl_that_fails() {
    let rig = Rig::new();
    for (function, code, text) in [
        ("ncclAllReduce", 1, "ncclAllReduce: unhandled cuda error (1)"),
        ("ncclCommGetAsyncError", 6, "remote process exited or there was a network error (6)"),
    ] {
        rig.control.set("clear_fail", "").unwrap();
        let started = Instant::now();
        let results = try_ranks(2, LONG, |group, device| {
            assert_eq!(reduce(&group, "x", device).unwrap().item().unwrap(), 2.0);
            group.barrier().unwrap();
            if group.rank() == 0 {
                rig.control.fail(function, 1, code).unwrap();
            }
            group.barrier().ok(); // the asynchronous error may be found before
            let mut errors = String::new();
            while errors.is_empty() {
                errors = told(&group, device);
            }
            errors
        });
        assert!(started.elapsed() < IN_TIME);
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap();
            assert!(error.contains(text) && error.contains("gave up"), "{function}, rank {rank}: {error}");
        }
    }
    rig.finish();
}

#[test]
fn of_a_group_of_calls_the_one_that_failed_is_named() {
    let rig = Rig::new();
    for function in ["ncclGroupStart", "ncclBroadcast", "ncclGroupEnd"] {
        rig.control.set("clear_fail", "").unwrap();
        rig.control.fail(function, 1, 3).unwrap();
        let errors = ranks(2, |group, device| {
            // Parts of different lengths are gathered by a group of broadcasts.
            let x = Tensor::zeros([1 + group.rank(), 2], DType::F32, device).unwrap();
            let error = message(group.all_gather("x", &x));
            if error.is_empty() { message(group.barrier()) } else { error }
        });
        for error in errors {
            assert!(error.contains(&format!("{function}: internal error (3)")), "{function}: {error}");
        }
    }
    rig.finish();
}

#[test]
fn a_driver_that_fails_is_not_taken_for_another_device() {
    let rig = Rig::new();
    let mut failed = 0;
    for count in 1..=8 {
        let errors = ranks(1, |group, device| {
            let x = Tensor::from_vec(vec![1.0f32], [1], device).unwrap();
            rig.control.fail("cuCtxGetCurrent", count, 999).unwrap();
            let error = message(group.all_reduce("x", &x, ReduceOp::Sum));
            rig.control.set("clear_fail", "").unwrap();
            error
        });
        // The group's own threads ask for the context, too, and may be the ones that see the failure.
        assert!(errors[0].is_empty() || errors[0].contains("failed with 999"), "call {count}: {}", errors[0]);
        failed += usize::from(!errors[0].is_empty());
    }
    assert!(failed > 0, "no call of the collective asked for the context");
    rig.finish();
}

#[test]
fn a_queued_collective_that_cannot_be_watched_is_not_trusted() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let mut x = Tensor::from_vec(vec![1.0f32], [1], device).unwrap();
        group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x.item().unwrap(), 2.0);
        thread::sleep(Duration::from_millis(50)); // until the watch has found the collective done
        group.barrier().unwrap();
        if group.rank() == 1 {
            return [message(group.barrier()), String::new()];
        }
        rig.control.fail("cuEventCreate", 1, 2).unwrap();
        [
            message(group.all_reduce_in_place("x", &mut x, ReduceOp::Sum)),
            message(x.item().map_err(Into::into)),
        ]
    });
    let [[failed, read], [told, _]] = &errors[..] else { unreachable!() };
    assert!(failed.contains("cuEventCreate failed with 2"), "{failed}");
    assert!(read.contains("has queued all_reduce(sum) `x` and could not mark its end"), "{read}");
    assert!(told.contains("rank 0 gave up"), "{told}");
    rig.finish();
}
