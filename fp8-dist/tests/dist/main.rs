//! Groups of threads: what they compute together, and what they are told when they cannot.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod collectives;
mod failures;
mod gather;
mod scaling;
mod schedules;

use fp8_dist::{ProcessGroup, local};
use fp8_kernels::{DType, Device, Tensor, ops};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Longer than any test waits when nothing is wrong.
const LONG: Duration = Duration::from_secs(60);
/// Short enough to wait for.
const SHORT: Duration = Duration::from_millis(200);

type Group = Arc<dyn ProcessGroup>;

/// Runs `f` as every rank of a new group, each in a thread that owns its handle; in rank order. `Err` for a panic.
fn try_ranks<T: Send>(
    ranks: usize,
    deadline: Duration,
    f: impl Fn(Group) -> T + Sync,
) -> Vec<thread::Result<T>> {
    let groups = local("dp", ranks, deadline).unwrap();
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    })
}

fn ranks<T: Send>(ranks: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let unwind = |rank: thread::Result<T>| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    try_ranks(ranks, LONG, f).into_iter().map(unwind).collect()
}

/// Values of both signs around 1, the same for the same seed.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / f32::powi(2.0, 23) - 1.0
    };
    (0..len).map(|_| 2.0 * next()).collect()
}

fn tensor(data: &[f32], shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let shape = fp8_kernels::Shape::from_slice(shape).unwrap();
    ops::cast(&Tensor::from_vec(data.to_vec(), shape, device).unwrap(), dtype).unwrap()
}

fn f32s(data: &[f32], shape: &[usize]) -> Tensor {
    tensor(data, shape, DType::F32, &Device::cpu())
}

fn bits(data: &[f32]) -> Vec<u32> {
    data.iter().map(|value| value.to_bits()).collect()
}
