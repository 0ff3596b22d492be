//! Ranks as threads, and data for them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use fp8_dist::ProcessGroup;
use fp8_kernels::{DType, Device, Tensor, ops};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Longer than any test waits when nothing is wrong.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Short enough to wait for.
pub(crate) const SHORT: Duration = Duration::from_millis(500);

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// Runs `f` as every rank of a new group, each in a thread that owns its handle; in rank order. `Err` for a panic.
pub(crate) fn try_ranks<T: Send>(
    ranks: usize,
    deadline: Duration,
    f: impl Fn(Group) -> T + Sync,
) -> Vec<thread::Result<T>> {
    let groups = crate::groups(ranks, deadline);
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    })
}

pub(crate) fn ranks<T: Send>(ranks: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let unwind = |rank: thread::Result<T>| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    try_ranks(ranks, LONG, f).into_iter().map(unwind).collect()
}

/// Values of both signs around 1, the same for the same seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / f32::powi(2.0, 23) - 1.0
    };
    (0..len).map(|_| 2.0 * next()).collect()
}

pub(crate) fn tensor(data: &[f32], shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let shape = fp8_kernels::Shape::from_slice(shape).unwrap();
    ops::cast(&Tensor::from_vec(data.to_vec(), shape, device).unwrap(), dtype).unwrap()
}

pub(crate) fn f32s(data: &[f32], shape: &[usize]) -> Tensor {
    tensor(data, shape, DType::F32, &Device::cpu())
}

pub(crate) fn bits(data: &[f32]) -> Vec<u32> {
    data.iter().map(|value| value.to_bits()).collect()
}
