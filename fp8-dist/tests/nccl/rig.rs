//! The simulated device, used in turns, and ranks on it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use crate::ports;
use fp8_cuda_sim::{Control, library_path};
use fp8_dist::{Environment, ProcessGroup, Result, nccl};
use fp8_kernels::{CudaAllocator, CudaOptions, DType, Device, Shape, Tensor, ops};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Longer than any test waits when nothing is wrong.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Short enough to wait for.
pub(crate) const SHORT: Duration = Duration::from_millis(600);
pub(crate) const SEEDS: [u64; 4] = [0, 1, 2, 77];

pub(crate) type Group = Arc<dyn ProcessGroup>;

static TURN: Mutex<()> = Mutex::new(());

/// The right to use the simulated device, in its default settings but for ranks that share it.
pub(crate) struct Rig {
    pub(crate) control: Control,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        // A test that failed in its turn says so itself.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::open(&library_path().unwrap()).unwrap();
        for (key, value) in
            [("clear_fail", ""), ("seed", "0"), ("reset", ""), ("nccl_shared", "1"), ("reset_calls", "")]
        {
            control.set(key, value).unwrap();
        }
        Self { control, _turn: turn }
    }

    pub(crate) fn calls(&self, function: &str) -> u64 {
        self.control.calls().get(function).copied().unwrap_or(0)
    }

    /// Once all groups and devices are gone: nothing lives, and nothing was found wrong.
    #[track_caller]
    pub(crate) fn finish(self) {
        assert_eq!(self.control.live(), "");
        assert_eq!(self.control.reports(), "");
    }
}

/// Each tensor is an allocation of its own: every byte beyond its end is seen.
pub(crate) fn open() -> Device {
    let options = CudaOptions {
        library: Some(library_path().unwrap()),
        cache_dir: Some(std::env::temp_dir().join("fp8-dist-tests")),
        allocator: Some(CudaAllocator::Exact),
        ..CudaOptions::default()
    };
    Device::cuda_with_options(&options).unwrap()
}

pub(crate) fn environments(ranks: usize) -> Vec<Environment> {
    let alone = Environment {
        world_size: ranks,
        exact_port: true,
        // Without a name a group waits for other jobs to show up.
        run_id: "test".to_owned(),
        ..Environment::on_this_machine(ports::free())
    };
    (0..ranks).map(|rank| Environment { rank, local_rank: rank, ..alone.clone() }).collect()
}

/// Runs `f` as every rank, each in a thread with a device of its own; in rank order. `Err` for a panic.
pub(crate) fn join<T: Send>(
    ranks: usize,
    deadline: Duration,
    f: impl Fn(usize, Result<Group>, &Device) -> T + Sync,
) -> Vec<thread::Result<T>> {
    thread::scope(|scope| {
        let f = &f;
        let run = |environment: Environment| {
            scope.spawn(move || {
                let device = open();
                f(environment.rank, nccl("dp", &environment, &device, deadline), &device)
            })
        };
        let threads: Vec<_> = environments(ranks).into_iter().map(run).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    })
}

pub(crate) fn try_ranks<T: Send>(
    ranks: usize,
    deadline: Duration,
    f: impl Fn(Group, &Device) -> T + Sync,
) -> Vec<thread::Result<T>> {
    join(ranks, deadline, |_, group, device| {
        let group = group.unwrap();
        // All are there: a rank that fails at once would else be an error of another's rendezvous.
        group.barrier().unwrap();
        f(group, device)
    })
}

pub(crate) fn ranks<T: Send>(ranks: usize, f: impl Fn(Group, &Device) -> T + Sync) -> Vec<T> {
    let unwind = |rank: thread::Result<T>| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    try_ranks(ranks, LONG, f).into_iter().map(unwind).collect()
}

pub(crate) fn tensor(data: &[f32], shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let shape = Shape::from_slice(shape).unwrap();
    ops::cast(&Tensor::from_vec(data.to_vec(), shape, device).unwrap(), dtype).unwrap()
}

/// Integers around 0: their sums are exact in every order.
pub(crate) fn integers(len: usize, seed: u64) -> Vec<f32> {
    (0..len as u64)
        .map(|i| ((i + 1).wrapping_mul(seed * 2 + 0x9E37_79B9_7F4A_7C15) >> 54) as f32 - 512.0)
        .collect()
}

/// Sums over the ranks, and maxima.
pub(crate) fn reduced(parts: &[Vec<f32>], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    (0..parts[0].len()).map(|i| parts[1..].iter().fold(parts[0][i], |all, part| f(all, part[i]))).collect()
}
