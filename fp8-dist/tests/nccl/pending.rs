//! Reductions on a second queue of the device, beside its other work.

use crate::rig::{Rig, SEEDS, SHORT, integers, ranks, reduced, tensor, try_ranks};
use fp8_dist::{Failure, ReduceOp};
use fp8_kernels::{DType, Tensor, ops};
use std::thread;
use std::time::{Duration, Instant};

const IN_TIME: Duration = Duration::from_secs(5);

fn add_one(x: &Tensor) -> Tensor {
    let ones = Tensor::full(1.0, *x.shape(), DType::F32, x.device()).unwrap();
    ops::add(x, &ones).unwrap()
}

#[test]
fn they_read_what_was_queued_before_and_what_is_queued_after_the_wait_reads_them() {
    let rig = Rig::new();
    for (n, seed) in [2, 3].into_iter().flat_map(|n| SEEDS.map(|seed| (n, seed))) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let lens = [35, 0, 4096];
        let data: Vec<Vec<f32>> = (0..n).map(|rank| integers(4096, rank as u64)).collect();
        let results = ranks(n, |group, device| {
            let mut found = Vec::new();
            for _ in 0..3 {
                // Computed on the device, so that the queue has to wait for it.
                let of =
                    |&len: &usize| add_one(&tensor(&data[group.rank()][..len], &[len], DType::F32, device));
                let tensors: Vec<_> = lens.iter().map(of).collect();
                let pending = group.start_all_reduce("x", tensors, ReduceOp::Sum);
                let beside = add_one(&tensor(&[1.0; 100], &[100], DType::F32, device));
                let sums = pending.wait().unwrap();
                let sums: Vec<_> = sums.iter().map(|sum| add_one(sum).to_vec::<f32>().unwrap()).collect();
                assert_eq!(beside.to_vec::<f32>().unwrap(), [2.0; 100]);
                found.push(sums);
            }
            let sent = group.traffic().reductions;
            let bytes = 3 * (35 + 4096) * 4 * 2 * (n as u64 - 1) / n as u64;
            assert_eq!(sent.calls, 3);
            assert!(sent.bytes.abs_diff(bytes) < 9, "{} bytes, not {bytes}", sent.bytes);
            found
        });
        let sum: Vec<f32> = reduced(&data, |a, b| a + b).iter().map(|x| x + n as f32 + 1.0).collect();
        let expected = lens.map(|len| sum[..len].to_vec()).to_vec();
        assert!(results.iter().all(|rank| rank.iter().all(|found| *found == expected)), "{n}, seed {seed}");
    }
    assert_eq!(rig.calls("ncclGroupStart"), rig.calls("ncclGroupEnd"));
    rig.finish();
}

#[test]
fn collectives_of_both_queues_have_one_order() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let results = ranks(2, |group, device| {
            let x = |value: f32| tensor(&vec![value + group.rank() as f32; 64], &[64], DType::F32, device);
            let mut found = Vec::new();
            for _ in 0..3 {
                let first = group.start_all_reduce("first", vec![x(1.0), x(2.0)], ReduceOp::Sum);
                let second = group.all_reduce("second", &x(3.0), ReduceOp::Sum).unwrap();
                let third = group.start_all_reduce("third", vec![x(4.0)], ReduceOp::Max);
                let fourth = group.all_gather("fourth", &x(0.0)).unwrap();
                let third = third.wait().unwrap();
                let first = first.wait().unwrap();
                let all = [&first[0], &first[1], &second, &third[0], &fourth];
                found.push(all.map(|x| x.to_vec::<f32>().unwrap()[63]));
            }
            found
        });
        assert!(results.iter().flatten().all(|found| *found == [3.0, 5.0, 7.0, 5.0, 0.0]), "{results:?}");
    }
    rig.finish();
}

#[test]
fn a_recorded_step_contains_both_queues() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let results = ranks(2, |group, device| {
            let mut kept = Some(vec![
                tensor(&[1.0; 4], &[4], DType::F32, device),
                tensor(&[2.0; 9], &[9], DType::F32, device),
            ]);
            let mut beside = tensor(&[1.0; 4], &[4], DType::F32, device);
            let early = device.capture(|| {
                group
                    .start_all_reduce("early", vec![tensor(&[1.0], &[1], DType::F32, device)], ReduceOp::Sum)
                    .wait()
            });
            assert!(early.is_err(), "the hosts have not compared it");
            let mut step = || {
                let pending = group.start_all_reduce("x", kept.take().unwrap(), ReduceOp::Sum);
                group.all_reduce_in_place("beside", &mut beside, ReduceOp::Sum)?;
                kept = Some(pending.wait()?);
                Ok::<_, fp8_dist::Error>(())
            };
            step().unwrap();
            let before = group.traffic();
            let (graph, ()) = device.capture(step).unwrap(); // runs it once
            (0..3).for_each(|_| graph.replay().unwrap());
            let kept = kept.unwrap().iter().map(|x| x.to_vec::<f32>().unwrap()[0]).collect::<Vec<_>>();
            let after = group.traffic();
            assert_eq!(after.reductions.calls - before.reductions.calls, 2 * 4, "replays are counted");
            drop(graph);
            (kept, beside.to_vec::<f32>().unwrap())
        });
        // Doubled five times.
        assert_eq!(results, vec![(vec![32.0, 64.0], vec![32.0; 4]); 2], "seed {seed}");
    }
    rig.finish();
}

#[test]
fn what_is_dropped_is_reduced_and_its_memory_used_again_only_then() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let results = ranks(2, |group, device| {
            let x = || tensor(&[1.0; 1000], &[1000], DType::F32, device);
            drop(group.start_all_reduce("x", vec![x()], ReduceOp::Sum));
            let next: Vec<_> = (0..4).map(|_| x()).collect(); // in the memory of the other, perhaps
            next.iter().all(|x| x.to_vec::<f32>().unwrap() == [1.0; 1000])
        });
        assert_eq!(results, [true, true], "seed {seed}");
    }
    rig.finish();
}

#[test]
fn integers_are_added_by_the_hosts_and_shared_storage_is_an_error() {
    let rig = Rig::new();
    let results = try_ranks(2, SHORT, |group, device| {
        let counts = || Tensor::from_vec(vec![group.rank() as i32, 5], [2], device).unwrap();
        let mut floats = [1.0, 2.0].map(|x| tensor(&[x], &[1], DType::F32, device));
        group.all_reduce_coalesced("floats", &mut floats, ReduceOp::Sum).unwrap();
        assert_eq!(floats.each_ref().map(|x| x.item().unwrap()), [2.0, 4.0]);
        let sums = group.start_all_reduce("tokens", vec![counts(), counts()], ReduceOp::Sum).wait().unwrap();
        assert!(sums.iter().all(|sum| sum.to_vec::<i32>().unwrap() == [1, 10]));
        let x = tensor(&[1.0], &[1], DType::F32, device);
        let shared = vec![x.clone(), x];
        group.start_all_reduce("x", shared, ReduceOp::Sum).wait().unwrap_err().to_string()
    });
    for result in results {
        let error = result.unwrap();
        assert!(error.contains("shares its storage"), "{error}"); // its own, or that with which the other gave up
    }
    rig.finish();
}

#[test]
fn a_rank_that_does_not_start_is_noticed_in_time() {
    let rig = Rig::new();
    let started = Instant::now();
    let errors = try_ranks(2, SHORT, |group, device| {
        let x = tensor(&[1.0; 64], &[64], DType::F32, device);
        let start = |x| group.start_all_reduce("x", vec![x], ReduceOp::Sum).wait();
        let x = start(x).unwrap().remove(0);
        if group.rank() == 1 {
            thread::sleep(SHORT * 3);
            return None;
        }
        let pending = start(x);
        let read = pending.map(|sums| device.synchronize().map(|()| sums));
        assert!(!matches!(read, Ok(Ok(_))), "it has a sum of one rank alone");
        group.barrier().unwrap_err().failure().cloned()
    });
    assert!(started.elapsed() < IN_TIME);
    let failure = errors[0].as_ref().unwrap();
    assert!(matches!(failure, Some(Failure::GaveUp { rank: 0, .. })), "{failure:?}");
    rig.finish();
}

#[test]
fn sizes_that_differ_are_named() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let lens = [[3, 5], [5, 3]][group.rank()];
        let tensors = lens.map(|len| tensor(&vec![1.0; len], &[len], DType::F32, device)).to_vec();
        group.start_all_reduce("x", tensors, ReduceOp::Sum).wait().unwrap_err().to_string()
    });
    let expected = "the shape is [5] of f32, [3] of f32 on rank 1 and [3] of f32, [5] of f32 on rank 0";
    assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    rig.finish();
}
