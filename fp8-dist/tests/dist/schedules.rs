//! Ranks at random paces, many rounds: nothing hangs and no exchange is mixed up with its neighbours.

use crate::{LONG, f32s, ranks, try_ranks};
use fp8_dist::{Failure, ReduceOp};
use fp8_kernels::{Device, Tensor};
use std::thread;
use std::time::Duration;

/// xorshift64*.
struct Pace(u64);

impl Pace {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1)
    }

    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % below
    }

    fn jitter(&mut self) {
        match self.next(8) {
            0 => thread::sleep(Duration::from_micros(self.next(300))),
            1 | 2 => thread::yield_now(),
            _ => {}
        }
    }
}

#[test]
fn many_rounds_of_all_collectives() {
    for (n, seed) in [(2, 1), (2, 2), (4, 3), (4, 4), (7, 5)] {
        ranks(n, |group| {
            let (rank, total) = (group.rank(), (n * (n - 1) / 2) as f32);
            let mut schedule = Pace::new(seed); // the same on all ranks
            let mut pace = Pace::new(seed * 100 + rank as u64);
            for round in 0..400u16 {
                pace.jitter();
                let value = f32::from(round) * 16.0 + rank as f32;
                let sum = f32::from(round) * 16.0 * n as f32 + total;
                let all: Vec<f32> = (0..n).map(|rank| f32::from(round) * 16.0 + rank as f32).collect();
                // One name for all rounds: only the order keeps them apart.
                match schedule.next(6) {
                    0 => {
                        let x = group.all_reduce("x", &f32s(&[value], &[1]), ReduceOp::Sum).unwrap();
                        assert_eq!(x.item().unwrap(), sum);
                    }
                    1 => {
                        let x = group.all_reduce("x", &f32s(&[value], &[1]), ReduceOp::Max).unwrap();
                        assert_eq!(x.item().unwrap(), all[n - 1]);
                    }
                    2 => {
                        let x = group.all_gather("x", &f32s(&[value], &[1])).unwrap();
                        assert_eq!(x.to_vec::<f32>().unwrap(), all);
                    }
                    3 => {
                        let x =
                            group.reduce_scatter("x", &f32s(&vec![value; n], &[n]), ReduceOp::Sum).unwrap();
                        assert_eq!(x.to_vec::<f32>().unwrap(), [sum]);
                    }
                    4 => {
                        let root = schedule.next(n as u64) as usize;
                        let x = group.broadcast("x", &f32s(&[value], &[1]), root).unwrap();
                        assert_eq!(x.item().unwrap(), all[root]);
                    }
                    _ => group.barrier().unwrap(),
                }
            }
        });
    }
}

#[test]
fn a_failure_at_a_random_moment_reaches_all() {
    for seed in 0..60 {
        let (n, kind, last) = (2 + seed as usize % 3, seed % 3, Pace::new(seed).next(40));
        let results = try_ranks(n, LONG, |group| {
            let mut pace = Pace::new(seed * 100 + group.rank() as u64);
            for round in 0.. {
                pace.jitter();
                if group.rank() == n - 1 && round == last {
                    match kind {
                        0 => group.poison("enough"),
                        1 => return None,
                        _ => std::panic::resume_unwind(Box::new("a broken rank")),
                    }
                }
                if let Err(error) = group.all_gather("x", &f32s(&[1.0], &[1])) {
                    return Some((round, error.failure().cloned().unwrap()));
                }
            }
            None
        });
        for (rank, result) in results.into_iter().enumerate() {
            if rank == n - 1 && kind != 0 {
                continue;
            }
            let (round, failure) = result.unwrap().unwrap();
            assert_eq!(round, last, "seed {seed}, rank {rank}: an exchange that some completed failed here");
            let expected = match kind {
                0 => Failure::GaveUp { rank: n - 1, reason: "enough".into() },
                1 => Failure::Left { ranks: vec![n - 1] },
                _ => Failure::GaveUp { rank: n - 1, reason: "its thread panicked".into() },
            };
            assert_eq!(failure, expected, "seed {seed}, rank {rank}");
        }
    }
}

#[test]
fn threads_that_share_a_handle_take_turns() {
    ranks(2, |group| {
        thread::scope(|scope| {
            for _ in 0..4 {
                let group = &group;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let x = Tensor::from_vec(vec![1u8], [1], &Device::cpu()).unwrap();
                        assert_eq!(group.all_gather("x", &x).unwrap().to_vec::<u8>().unwrap(), [1, 1]);
                    }
                });
            }
        });
    });
}
