//! Tests of forming a group of GPUs, and of conditions that prevent it.

use crate::rig::{LONG, Rig, SHORT, environments, join, open, tensor};
use fp8_dist::{Error, ReduceOp, Result, nccl};
use fp8_kernels::{DType, Device};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

fn messages<T>(joined: Vec<thread::Result<Result<Arc<T>>>>) -> Vec<String>
where
    T: ?Sized,
{
    joined
        .into_iter()
        .map(|joined| joined.unwrap().err().map(|error| error.to_string()).unwrap_or_default())
        .collect()
}

#[test]
fn two_ranks_on_one_gpu() {
    let rig = Rig::new();
    rig.control.set("nccl_shared", "0").unwrap();
    for error in messages(join(2, LONG, |_, group, _| group)) {
        assert!(error.contains("ncclCommInitRankConfig: invalid usage (5)"), "{error}");
    }
    rig.finish();
}

#[test]
fn one_gpu() {
    let rig = Rig::new();
    rig.control.set("nccl_shared", "0").unwrap();
    for rank in join(1, LONG, |_, group, device| {
        let x = tensor(&[3.0], &[1], DType::F32, device);
        group.unwrap().all_reduce("x", &x, ReduceOp::Sum).unwrap().item().unwrap()
    }) {
        assert_eq!(rank.unwrap(), 3.0);
    }
    rig.finish();
}

#[test]
fn a_function_of_nccl_that_fails_on_one_rank() {
    let rig = Rig::new();
    for (function, code, text) in [
        ("ncclGetVersion", 3, "internal error (3)"),
        ("ncclGetUniqueId", 2, "ncclGetUniqueId: unhandled system error (2)"),
        ("ncclCommInitRankConfig", 1, "ncclCommInitRankConfig: unhandled cuda error (1)"),
        ("ncclCommGetAsyncError", 2, "ncclCommInitRankConfig: unhandled system error (2)"),
    ] {
        rig.control.set("clear_fail", "").unwrap();
        rig.control.fail(function, 1, code).unwrap();
        let started = Instant::now();
        let errors = messages(join(3, LONG, |_, group, device| {
            // Where the group forms before the others know, its first collective tells.
            group.and_then(|group| {
                let x = tensor(&[3.0], &[1], DType::F32, device);
                let sum = group.all_reduce("x", &x, ReduceOp::Sum)?;
                sum.item()?;
                Ok(group)
            })
        }));
        assert!(started.elapsed() < Duration::from_secs(5));
        assert!(errors.iter().all(|error| error.contains(text)), "{function}: {errors:?}");
    }
    rig.finish();
}

#[test]
fn an_error_of_nccl_is_told_in_its_own_words() {
    let rig = Rig::new();
    for (function, code, text) in [
        (
            "ncclGetVersion",
            3,
            "group `dp`: ncclGetVersion: internal error (3): see the report of the simulated device",
        ),
        (
            "ncclGetUniqueId",
            2,
            "group `dp`: ncclGetUniqueId: unhandled system error (2): see the report of the simulated device",
        ),
    ] {
        rig.control.set("clear_fail", "").unwrap();
        rig.control.fail(function, 1, code).unwrap();
        assert_eq!(messages(join(1, LONG, |_, group, _| group)), [text]);
    }
    rig.finish();
}

#[test]
fn a_rank_that_never_comes() {
    let rig = Rig::new();
    let device = open();
    let environment = environments(2).remove(0);
    let error = nccl("dp", &environment, &device, SHORT).unwrap_err().to_string();
    assert!(error.contains("rank 1 did not arrive within 600ms"), "{error}");
    drop(device);
    rig.finish();
}

#[test]
fn a_device_that_is_no_gpu() {
    let alone = environments(1).remove(0);
    let error = nccl("dp", &alone, &Device::cpu(), SHORT).unwrap_err();
    assert!(matches!(error, Error::Kernels(_)) && error.to_string().contains("cpu"), "{error}");
}
