//! Reductions that go on while their ranks compute.

use crate::{SHORT, bits, f32s, noise, ranks, try_ranks};
use fp8_dist::{Failure, ReduceOp};
use fp8_kernels::{DType, Device, Tensor};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// More bytes of f32 than travel with a message.
const LARGE: usize = 40_000;

/// The sum of the ranks' values in rank order.
fn sum(n: usize, values: impl Fn(usize) -> Vec<f32>) -> Vec<u32> {
    let parts: Vec<_> = (0..n).map(values).collect();
    let one = |i| parts[1..].iter().fold(parts[0][i], |sum: f32, part| sum + part[i]);
    bits(&(0..parts[0].len()).map(one).collect::<Vec<_>>())
}

#[test]
fn several_tensors_are_reduced_in_place_by_one_call() {
    // Small ones together, none, large ones, and both.
    for lens in
        [vec![3, 1, 70], vec![], vec![0], vec![LARGE], vec![2 * LARGE, 5, LARGE, 0, 1], vec![30_000; 3]]
    {
        for n in [1, 2, 3] {
            let values = |rank: usize, index: usize| noise(lens[index], (rank * 100 + index) as u64);
            ranks(n, |group| {
                let own = |index| f32s(&values(group.rank(), index), &[lens[index]]);
                let tensors: Vec<_> = (0..lens.len()).map(own).collect();
                let address = |x: &Tensor| x.as_slice::<f32>().unwrap().as_ptr() as usize;
                let before: Vec<_> = tensors.iter().map(address).collect();
                let mut again: Vec<_> = (0..lens.len()).map(own).collect();
                let sums = group.start_all_reduce("x", tensors, ReduceOp::Sum).wait().unwrap();
                assert_eq!(sums.iter().map(address).collect::<Vec<_>>(), before, "other storage");
                for (index, found) in sums.iter().enumerate() {
                    let expected = sum(n, |rank| values(rank, index));
                    assert!(
                        bits(found.as_slice().unwrap()) == expected,
                        "{lens:?}, {n} ranks, tensor {index}"
                    );
                }
                let bytes = lens.iter().sum::<usize>() as u64 * 4;
                let (calls, sent) = (u64::from(!lens.is_empty()), 2 * bytes * (n as u64 - 1) / n as u64);
                let found = group.traffic().reductions;
                assert_eq!(found.calls, calls);
                group.all_reduce_coalesced("again", &mut again, ReduceOp::Sum).unwrap();
                for (again, sum) in again.iter().zip(&sums) {
                    assert!(bits(again.as_slice().unwrap()) == bits(sum.as_slice().unwrap()));
                }
                assert!(found.bytes.abs_diff(sent) <= lens.len() as u64, "{} bytes, not {sent}", found.bytes);
            });
        }
    }
}

#[test]
fn tensors_of_other_dtypes_are_reduced_one_by_one() {
    ranks(2, |group| {
        let rank = group.rank() as f32;
        let of = |dtype| crate::tensor(&[rank + 1.0, 2.0], &[2], dtype, &Device::cpu());
        let counts = Tensor::from_vec(vec![group.rank() as i32, 7], [2], &Device::cpu()).unwrap();
        let tensors = vec![of(DType::F32), of(DType::BF16), counts];
        let sums = group.start_all_reduce("x", tensors, ReduceOp::Sum).wait().unwrap();
        for x in &sums[..2] {
            assert_eq!(x.to_f32_vec().unwrap(), [3.0, 4.0], "{}", x.dtype());
        }
        assert_eq!(sums[2].to_vec::<i32>().unwrap(), [1, 14]);
        let bytes = vec![Tensor::from_vec(vec![1u8], [1], &Device::cpu()).unwrap(); 2];
        let error = group.start_all_reduce("bytes", bytes, ReduceOp::Sum).wait().unwrap_err().to_string();
        assert!(error.contains("storage"), "{error}"); // both are one tensor
    });
}

#[test]
fn a_rank_goes_on_while_another_has_not_started() {
    for len in [10, 2 * LARGE] {
        let started = Barrier::new(2);
        ranks(2, |group| {
            let start = || group.start_all_reduce("x", vec![f32s(&vec![1.0; len], &[len])], ReduceOp::Sum);
            let mut pending = match group.rank() {
                0 => {
                    let mut pending = start();
                    assert!(!pending.is_done(), "of one rank alone");
                    started.wait(); // a call that waits for the other would never come here
                    pending
                }
                _ => {
                    started.wait();
                    start()
                }
            };
            while !pending.is_done() {
                thread::sleep(Duration::from_millis(1));
            }
            assert!(pending.wait().unwrap()[0].as_slice::<f32>().unwrap().iter().all(|&sum| sum == 2.0));
        });
    }
}

#[test]
fn calls_keep_their_order_behind_pending_ones() {
    ranks(3, |group| {
        for round in 0..10 {
            let len = [5, LARGE][round % 2];
            let x = |value: f32| f32s(&vec![value + group.rank() as f32; len], &[len]);
            let first = group.start_all_reduce("first", vec![x(1.0)], ReduceOp::Sum);
            let second = group.start_all_reduce("second", vec![x(2.0), x(3.0)], ReduceOp::Max);
            let third = group.all_reduce("third", &x(4.0), ReduceOp::Sum).unwrap();
            group.barrier().unwrap();
            let fourth = group.start_all_reduce("fourth", vec![x(5.0)], ReduceOp::Sum);
            let gathered = group.all_gather("fifth", &x(0.0)).unwrap();
            // In any order.
            let [fourth, second, first] = [fourth, second, first].map(|pending| pending.wait().unwrap());
            let of = |x: &Tensor| x.as_slice::<f32>().unwrap()[len - 1];
            let sums = [&first[0], &second[0], &second[1], &third, &fourth[0]].map(of);
            assert_eq!(sums, [6.0, 4.0, 5.0, 15.0, 18.0]);
            assert_eq!(gathered.as_slice::<f32>().unwrap()[[0, len, 2 * len][2]], 2.0);
        }
    });
}

#[test]
fn sizes_that_differ_are_named_although_the_sums_of_sizes_agree() {
    for unit in [1, LARGE] {
        let errors = ranks(2, |group| {
            let lens = [[unit, 2 * unit], [2 * unit, unit]][group.rank()];
            let tensors = lens.map(|len| f32s(&vec![1.0; len], &[len])).to_vec();
            group.start_all_reduce("x", tensors, ReduceOp::Sum).wait().unwrap_err().to_string()
        });
        let [a, b] = [unit, 2 * unit];
        let expected = format!("the shape is [{b}], [{a}] on rank 1 and [{a}], [{b}] on rank 0");
        assert!(errors.iter().all(|error| error.contains(&expected)), "{errors:?}");
    }
}

#[test]
fn work_that_nobody_waits_for_is_done_all_the_same() {
    for round in 0..10 {
        let sums = ranks(2, |group| {
            let len = [5, LARGE][round % 2];
            let pending = group.start_all_reduce("x", vec![f32s(&vec![1.0; len], &[len])], ReduceOp::Sum);
            if group.rank() == 0 {
                drop(pending);
                drop(group); // leaves when its part is done
                return 2.0;
            }
            pending.wait().unwrap()[0].as_slice::<f32>().unwrap()[len - 1]
        });
        assert_eq!(sums, [2.0, 2.0]);
    }
}

#[test]
fn the_end_of_another_rank_is_an_error_of_the_wait_and_of_later_calls() {
    let results = try_ranks(3, Duration::from_secs(60), |group| {
        let started = Instant::now();
        let start =
            |what| group.start_all_reduce(what, vec![f32s(&[1.0; 2 * LARGE], &[2 * LARGE])], ReduceOp::Sum);
        match group.rank() {
            1 => panic!("lost on purpose"),
            _ => {
                let [first, second] = ["first", "second"].map(start);
                let error = first.wait().unwrap_err();
                let failure = error.failure().cloned();
                assert!(matches!(failure, Some(Failure::GaveUp { rank: 1, .. })), "{error}");
                assert_eq!(second.wait().unwrap_err().failure().cloned(), failure);
                assert_eq!(group.barrier().unwrap_err().failure().cloned(), failure);
                assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
            }
        }
    });
    assert!(results[1].is_err() && results[0].is_ok() && results[2].is_ok(), "{results:?}");
}

#[test]
fn a_rank_that_panics_with_pending_work_does_not_wait_for_it() {
    let started = Instant::now();
    let results = try_ranks(2, Duration::from_secs(60), |group| match group.rank() {
        0 => {
            let _pending = group.start_all_reduce("x", vec![f32s(&[1.0], &[1])], ReduceOp::Sum);
            thread::sleep(Duration::from_millis(100));
            panic!("lost on purpose");
        }
        _ => {
            thread::sleep(Duration::from_millis(500));
            group.barrier().unwrap_err().to_string()
        }
    });
    assert!(results[0].is_err());
    assert!(results[1].as_ref().unwrap().contains("rank 0 gave up: its thread panicked"), "{results:?}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_rank_that_never_starts_is_named_at_the_deadline() {
    let results = try_ranks(3, SHORT, |group| {
        if group.rank() == 2 {
            thread::sleep(SHORT * 4);
            return None;
        }
        let x = f32s(&[1.0; LARGE], &[LARGE]);
        group.start_all_reduce("x", vec![x], ReduceOp::Sum).wait().unwrap_err().failure().cloned()
    });
    for result in &results[..2] {
        let failure = result.as_ref().unwrap();
        assert!(matches!(failure, Some(Failure::Deadline { missing, .. }) if *missing == [2]), "{failure:?}");
    }
}
