//! Tensors from one rank to another.

use crate::{Group, LONG, SHORT, f32s, noise, ranks, try_ranks};
use fp8_dist::{Failure, ReduceOp};
use fp8_kernels::{DType, Device, Tensor, bf16};
use std::thread;
use std::time::{Duration, Instant};

fn received(group: &Group, what: &str, len: usize, from: usize) -> fp8_dist::Result<Vec<f32>> {
    let mut x = f32s(&vec![0.0; len], &[len]);
    group.recv(what, &mut x, from)?;
    Ok(x.to_vec().unwrap())
}

#[test]
fn each_rank_sends_to_each_other_one() {
    for (n, len) in [(2, 0), (2, 1), (3, 35), (4, 100_003)] {
        let data = |from: usize, to: usize| noise(len, (from * 8 + to) as u64);
        ranks(n, |group| {
            let this = group.rank();
            let others = || (0..n).filter(|&other| other != this);
            others().for_each(|to| group.send("x", &f32s(&data(this, to), &[len]), to).unwrap());
            for from in others() {
                assert!(received(&group, "x", len, from).unwrap() == data(from, this));
            }
            let sent = group.traffic().moves;
            assert_eq!((sent.calls, sent.bytes), (n as u64 - 1, ((n - 1) * len * 4) as u64));
        });
    }
}

#[test]
fn ten_million_elements_and_other_dtypes() {
    let len = 10_000_019;
    let value = |index: usize| bf16::from_f32((index % 251) as f32);
    ranks(2, |group| {
        if group.rank() == 1 {
            let x = Tensor::from_vec((0..len).map(value).collect(), [len], &Device::cpu()).unwrap();
            group.send("x", &x, 0).unwrap();
            let codes = Tensor::from_vec(vec![7u8, 8], [2, 1], &Device::cpu()).unwrap();
            group.send("codes", &codes, 0).unwrap();
            return;
        }
        let mut x = Tensor::zeros([len], DType::BF16, &Device::cpu()).unwrap();
        group.recv("x", &mut x, 1).unwrap();
        assert!(x.as_slice::<bf16>().unwrap().iter().enumerate().all(|(index, x)| *x == value(index)));
        let mut codes = Tensor::zeros([2, 1], DType::U8, &Device::cpu()).unwrap();
        group.recv("codes", &mut codes, 1).unwrap();
        assert_eq!(codes.to_vec::<u8>().unwrap(), [7, 8]);
    });
}

#[test]
fn they_arrive_in_order_between_collectives_and_only_two_ranks_take_part() {
    ranks(3, |group| {
        match group.rank() {
            0 => (0..5).for_each(|i| group.send(&format!("x{i}"), &f32s(&[i as f32], &[1]), 2).unwrap()),
            1 => group.send("y", &f32s(&[9.0], &[1]), 2).unwrap(),
            _ => assert_eq!(received(&group, "x0", 1, 0).unwrap(), [0.0]),
        }
        // What is not received yet stays where it is.
        let sum = group.all_reduce("sum", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap();
        assert_eq!(sum.to_vec::<f32>().unwrap(), [3.0]);
        if group.rank() == 2 {
            assert_eq!(received(&group, "y", 1, 1).unwrap(), [9.0]);
            (1..5).for_each(|i| assert_eq!(received(&group, &format!("x{i}"), 1, 0).unwrap(), [i as f32]));
        }
        group.barrier().unwrap();
    });
}

#[test]
fn another_name_dtype_or_shape_ends_the_group_on_both_ranks() {
    let bf16s = || Tensor::zeros([2], DType::BF16, &Device::cpu()).unwrap();
    let cases: [(&str, Tensor, &str); 3] = [
        (
            "y",
            f32s(&[0.0; 2], &[2]),
            "the call is send(to rank 1) `y` on rank 0 and receive(from rank 0) `x` on rank 1",
        ),
        ("x", bf16s(), "the dtype is bf16 on rank 0 and f32 on rank 1"),
        ("x", f32s(&[0.0; 3], &[3]), "the shape is [3] on rank 0 and [2] on rank 1"),
    ];
    for (name, x, expected) in cases {
        let errors = ranks(2, |group| match group.rank() {
            0 => {
                group.send(name, &x, 1).unwrap();
                group.barrier().unwrap_err().to_string()
            }
            _ => received(&group, "x", 2, 0).unwrap_err().to_string(),
        });
        assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    }
}

#[test]
fn a_rank_that_leaves_has_sent_what_it_sent_and_is_not_waited_for() {
    for (sender, receiver) in [(0, 1), (1, 0), (1, 2)] {
        let started = Instant::now();
        let results = ranks(3, |group| {
            if group.rank() == sender {
                group.send("x", &f32s(&[4.0; 100_000], &[100_000]), receiver).unwrap();
                return None;
            }
            if group.rank() != receiver {
                thread::sleep(Duration::from_millis(300));
                return None;
            }
            thread::sleep(Duration::from_millis(100));
            assert!(received(&group, "x", 100_000, sender).unwrap() == [4.0; 100_000]);
            received(&group, "more", 1, sender).unwrap_err().failure().cloned()
        });
        assert_eq!(results[receiver], Some(Failure::Left { ranks: vec![sender] }), "{sender} to {receiver}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_rank_that_has_left_is_sent_nothing() {
    for (leaver, sender) in [(1, 0), (1, 2), (0, 1)] {
        let results = ranks(3, |group| {
            if group.rank() != sender {
                let wait = if group.rank() == leaver { 0 } else { 700 };
                thread::sleep(Duration::from_millis(wait));
                return None;
            }
            thread::sleep(Duration::from_millis(300));
            let send = |_: usize| group.send("x", &f32s(&[1.0], &[1]), leaver);
            // The first may be on its way before this rank knows.
            let error = (0..20).map(|i| {
                thread::sleep(Duration::from_millis(10));
                send(i)
            });
            error.filter_map(Result::err).next().and_then(|error| error.failure().cloned())
        });
        assert_eq!(results[sender], Some(Failure::Left { ranks: vec![leaver] }), "{sender} to {leaver}");
    }
}

#[test]
fn of_ranks_that_wait_for_each_other_the_silent_one_is_late() {
    let results = try_ranks(3, SHORT, |group| {
        let rank = group.rank();
        if rank == 2 {
            thread::sleep(3 * SHORT);
            return None;
        }
        // Rank 0 has waited longer than rank 1, for which it waits.
        thread::sleep(Duration::from_millis(100 * rank as u64));
        received(&group, "x", 1, rank + 1).unwrap_err().failure().cloned()
    });
    let [first, second] = [0, 1].map(|rank| results[rank].as_ref().unwrap().clone().unwrap());
    let missing = |failure| match failure {
        Failure::Deadline { missing, .. } => missing,
        other => panic!("{other}"),
    };
    // Over TCP rank 0 does not know for whom rank 1 waits.
    let found = [missing(first), missing(second)];
    assert!(found == [[2], [2]] || found == [[1], [1]], "{found:?}");
}

#[test]
fn ranks_that_wait_for_each_other_name_each_other() {
    let results = try_ranks(2, SHORT, |group| {
        let other = 1 - group.rank();
        received(&group, "x", 1, other).unwrap_err().failure().cloned()
    });
    let results: Vec<_> = results.into_iter().map(|result| result.unwrap().unwrap()).collect();
    // The one whose deadline came first says who is late, which is the other.
    let late = |rank| Failure::Deadline { missing: vec![rank], waited: SHORT };
    assert!(results[0] == results[1] && (results[0] == late(0) || results[0] == late(1)), "{results:?}");
}

#[test]
fn a_tensor_that_is_not_sent_is_missed_at_the_deadline() {
    for receiver in [0, 1] {
        let results = try_ranks(3, SHORT, |group| {
            if group.rank() == receiver {
                let started = Instant::now();
                let error = received(&group, "x", 1, 2).unwrap_err();
                assert!((SHORT..4 * SHORT).contains(&started.elapsed()), "{:?}", started.elapsed());
                let again = received(&group, "x", 1, 2).unwrap_err().to_string();
                assert!(again.contains("this group failed before"), "{again}");
                return error.failure().cloned();
            }
            thread::sleep(3 * SHORT);
            let error = group.send("x", &f32s(&[1.0], &[1]), receiver).unwrap_err();
            error.failure().cloned()
        });
        let late = Failure::Deadline { missing: vec![2], waited: SHORT };
        for result in results {
            assert_eq!(result.unwrap().as_ref(), Some(&late));
        }
    }
}

#[test]
fn a_rank_that_gives_up_is_not_waited_for() {
    for (lost, waiting) in [(0, 1), (1, 0), (2, 1)] {
        let started = Instant::now();
        let results = try_ranks(3, LONG, |group| {
            if group.rank() == lost {
                group.poison("out of tokens");
                return None;
            }
            received(&group, "x", 1, if group.rank() == waiting { lost } else { waiting })
                .unwrap_err()
                .failure()
                .cloned()
        });
        let gave_up = Failure::GaveUp { rank: lost, reason: "out of tokens".to_owned() };
        for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != lost) {
            assert_eq!(result.unwrap(), Some(gave_up.clone()), "rank {rank}");
        }
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn no_rank_sends_to_itself_or_to_nobody() {
    ranks(2, |group| {
        let mut x = f32s(&[1.0], &[1]);
        for peer in [group.rank(), 2, usize::MAX] {
            let errors = [group.send("x", &x, peer).unwrap_err(), group.recv("x", &mut x, peer).unwrap_err()];
            let expected = format!("expected another rank of this group than {}, of 0..2", group.rank());
            assert!(errors.iter().all(|error| error.to_string().ends_with(&expected)), "{errors:?}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_place_that_is_shared_ends_the_group() {
    let errors = try_ranks(2, LONG, |group| {
        let mut x = f32s(&[1.0], &[1]);
        let _other = x.clone();
        match group.rank() {
            0 => group.barrier().unwrap_err().to_string(),
            _ => group.recv("x", &mut x, 0).unwrap_err().to_string(),
        }
    });
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("shares its storage"), "{error}");
    }
}
