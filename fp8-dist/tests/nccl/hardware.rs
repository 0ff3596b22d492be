//! Tests of groups of real GPUs. With `FP8_TEST_DEVICE=cuda` they use the GPUs of this machine, at most eight, one for
//! each rank. Otherwise the ranks share the simulated GPU.

#![expect(
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking; which GPUs it had is part of its result"
)]

use crate::rig::{LONG, Rig, environments, integers, open, reduced, tensor};
use fp8_dist::{ProcessGroup, ReduceOp, Result, nccl, quantized_all_gather};
use fp8_kernels::{
    Arena, ArenaOptions, Cell, DType, Device, Encoding, Scale, ScaleRule, Slot, TransposePolicy, UNSET, ops,
};
use std::thread;

/// The most GPUs, and so ranks, of a group here.
const MOST: usize = 8;

/// A device for each rank. With the simulated GPU, also the test's turn to use it.
struct Gpus {
    rig: Option<Rig>,
    devices: Vec<Device>,
}

impl Gpus {
    fn new() -> Self {
        match std::env::var("FP8_TEST_DEVICE").as_deref() {
            Err(_) | Ok("") => {
                let rig = Rig::new();
                Self { rig: Some(rig), devices: (0..4).map(|_| open()).collect() }
            }
            Ok("cuda") => {
                let mut devices = vec![Device::cuda(0).unwrap()];
                devices.extend((1..MOST).map_while(|ordinal| Device::cuda(ordinal).ok()));
                println!("{} GPUs, the first is {}", devices.len(), devices[0]);
                Self { rig: None, devices }
            }
            Ok(other) => panic!("FP8_TEST_DEVICE={other}: expected cuda, or nothing for the simulated GPU"),
        }
    }

    /// Runs `f` in groups of one rank, of two, and of all, as far as there are devices; what each rank of each gave.
    fn groups<T: Send>(&self, f: impl Fn(&dyn ProcessGroup, &Device) -> T + Sync) -> Vec<Vec<T>> {
        let mut sizes = vec![1, 2, self.devices.len()];
        sizes.retain(|size| *size <= self.devices.len());
        sizes.dedup();
        sizes.into_iter().map(|size| self.group(size, &f)).collect()
    }

    fn group<T: Send>(&self, size: usize, f: impl Fn(&dyn ProcessGroup, &Device) -> T + Sync) -> Vec<T> {
        let f = &f;
        thread::scope(|scope| {
            let threads: Vec<_> = environments(size)
                .into_iter()
                .zip(&self.devices)
                .map(|(environment, device)| {
                    scope.spawn(move || {
                        let group = nccl("dp", &environment, device, LONG).unwrap();
                        // All are there: a rank that fails at once would else be an error of another's rendezvous.
                        group.barrier().unwrap();
                        f(&*group, device)
                    })
                })
                .collect();
            let unwind = |panic| std::panic::resume_unwind(panic);
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(unwind)).collect()
        })
    }

    #[track_caller]
    fn finish(self) {
        drop(self.devices);
        if let Some(rig) = self.rig {
            rig.finish();
        }
    }
}

#[test]
fn collectives() {
    let gpus = Gpus::new();
    let results = gpus.groups(|group, device| {
        let (rank, size) = (group.rank(), group.world_size());
        let x = tensor(&integers(size * 3000, rank as u64), &[size * 3, 1000], DType::F32, device);
        let sum = group.all_reduce("sum", &x, ReduceOp::Sum).unwrap();
        let max = group.all_reduce("max", &x, ReduceOp::Max).unwrap();
        let part = group.reduce_scatter("part", &x, ReduceOp::Sum).unwrap();
        let joined = group.all_gather("joined", &part).unwrap();
        let last = group.broadcast("last", &x, size - 1).unwrap();
        [sum, max, joined, last].map(|x| x.to_vec::<f32>().unwrap())
    });
    for ranks in results {
        let size = ranks.len();
        let data: Vec<_> = (0..size).map(|rank| integers(size * 3000, rank as u64)).collect();
        let sum = reduced(&data, |a, b| a + b);
        let expected = [sum.clone(), reduced(&data, f32::max), sum, data[size - 1].clone()];
        assert!(ranks.iter().all(|result| *result == expected), "{size} ranks");
    }
    gpus.finish();
}

/// The bytes of the whole tensor quantized at once, with an outlier on the last rank.
#[test]
fn quantized_gathers() {
    let gpus = Gpus::new();
    let whole = |size: usize| {
        let mut x: Vec<f32> = (0..size * 48 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
        *x.last_mut().unwrap() = 1e4;
        x
    };
    let quantized = |device: &Device, f: &dyn Fn(&Slot<'_>) -> fp8_kernels::Operand| {
        let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
        let scale = Cell::new(UNSET, device).unwrap();
        let scale_of = Scale::Cell { cell: &scale, first: &rule, keep: true };
        let operand = f(&Slot { scale: scale_of, columnwise: true, ..Slot::off(Encoding::E4M3) });
        let codes = operand.as_fp8().unwrap();
        let columns = codes.columnwise().map(|codes| codes.to_vec::<u8>().unwrap());
        (codes.codes().unwrap(), columns, scale.read().unwrap())
    };
    let results = gpus.groups(|group, device| {
        let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let mine = &whole(group.world_size())[group.rank() * 48 * 64..][..48 * 64];
        let shard = tensor(mine, &[48, 64], DType::BF16, &device);
        quantized(&device, &|slot| quantized_all_gather(group, "x", &shard, slot).unwrap())
    });
    for ranks in results {
        let cpu = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
        let x = tensor(&whole(ranks.len()), &[ranks.len() * 48, 64], DType::BF16, &cpu);
        let expected = quantized(&cpu, &|slot| ops::quantize(&x, slot).unwrap());
        assert!(ranks.iter().all(|result| *result == expected), "{} ranks", ranks.len());
    }
    gpus.finish();
}

/// Each replay of a recorded step reduces gradients and amaxes.
#[test]
fn recorded_collectives() {
    let gpus = Gpus::new();
    let results = gpus.groups(|group, device| {
        let options = ArenaOptions { history_len: 2, ..ArenaOptions::default() };
        let arena = Arena::new(2, options, device).unwrap();
        let mut x = tensor(&[1.0; 64], &[64], DType::F32, device);
        let mut step = || -> Result<()> {
            group.all_reduce_in_place("x", &mut x, ReduceOp::Sum)?;
            group.all_reduce_max("forward", &arena).unwrap();
            Ok(())
        };
        step().unwrap(); // calls are compared, and NCCL has what it needs
        let (graph, ()) = device.capture(&mut step).unwrap(); // runs it once
        let mut rows = Vec::new();
        for round in 1..=3 {
            arena.merge_staged(&[group.rank() as f32, (10 * round) as f32]).unwrap();
            graph.replay().unwrap();
            rows.push(arena.staged().unwrap());
        }
        drop(graph);
        (x.to_vec::<f32>().unwrap(), rows)
    });
    for ranks in results {
        let size = ranks.len() as f32;
        let rows = [10.0, 20.0, 30.0].map(|most| vec![size - 1.0, most]).to_vec();
        assert_eq!(ranks, vec![(vec![size.powi(5); 64], rows); ranks.len()]);
    }
    gpus.finish();
}
