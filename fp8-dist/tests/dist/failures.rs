//! Whatever goes wrong between ranks is an error on every rank, never a hang.

use crate::{Group, LONG, SHORT, f32s, ranks, try_ranks};
use fp8_dist::{Error, Failure, ReduceOp, Result};
use fp8_kernels::{Arena, ArenaOptions, DType, Device, Tensor};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

fn reduce(group: &Group, what: &str) -> Result<Tensor> {
    group.all_reduce(what, &f32s(&[1.0], &[1]), ReduceOp::Sum)
}

fn message<T>(result: Result<T>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

/// All ranks but these got this error, and a later call refers to it.
fn expect_all(results: Vec<(String, String)>, call: &str, failure: &str) {
    for (rank, (error, later)) in results.into_iter().enumerate() {
        assert_eq!(error, format!("{call}: {failure}"), "rank {rank}");
        let expected =
            format!("barrier: this group failed before ({failure}); create a new group to continue");
        assert_eq!(later, expected, "rank {rank}");
    }
}

#[test]
fn different_calls() {
    let results = ranks(2, |group| {
        let error =
            if group.rank() == 0 { message(reduce(&group, "grads")) } else { message(group.barrier()) };
        (error, message(group.barrier()))
    });
    let failure = "the call is barrier on rank 1 and all_reduce(sum) `grads` on rank 0: \
                   all ranks must make the same calls in the same order, with the same dtype and shape";
    assert_eq!(results[0].0, format!("all_reduce(sum) `grads`: {failure}"));
    assert_eq!(results[1].0, format!("barrier: {failure}"));
    let later = format!("barrier: this group failed before ({failure}); create a new group to continue");
    assert!(results.iter().all(|result| result.1 == later), "{results:?}");
}

#[test]
fn different_keys_operators_and_roots() {
    type Call = fn(&Group) -> Result<Tensor>;
    let cases: [([Call; 2], &str); 3] = [
        ([|g| reduce(g, "a"), |g| reduce(g, "b")], "all_reduce(sum) `b` on rank 1 and all_reduce(sum) `a`"),
        (
            [|g| reduce(g, "a"), |g| g.all_reduce("a", &f32s(&[1.0], &[1]), ReduceOp::Max)],
            "all_reduce(max) `a` on rank 1 and all_reduce(sum) `a`",
        ),
        (
            [|g| g.broadcast("w", &f32s(&[1.0], &[1]), 0), |g| g.broadcast("w", &f32s(&[1.0], &[1]), 1)],
            "broadcast(from rank 1) `w` on rank 1 and broadcast(from rank 0) `w`",
        ),
    ];
    for (calls, expected) in cases {
        for error in ranks(2, |group| message(calls[group.rank()](&group))) {
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn different_shapes_and_dtypes() {
    let cases = [
        ([DType::F32; 2], [[2, 3], [2, 4]], "the shape is [2, 4] on rank 2 and [2, 3] on rank 0"),
        ([DType::F32, DType::BF16], [[2, 3], [2, 3]], "the dtype is bf16 on rank 2 and f32 on rank 0"),
    ];
    for (dtypes, shapes, expected) in cases {
        let results = ranks(4, |group| {
            let odd = usize::from(group.rank() == 2);
            let x = Tensor::zeros(shapes[odd], dtypes[odd], &Device::cpu()).unwrap();
            (message(group.all_reduce("x", &x, ReduceOp::Sum)), message(group.barrier()))
        });
        let rule = "all ranks must make the same calls in the same order, with the same dtype and shape";
        expect_all(results, "all_reduce(sum) `x`", &format!("{expected}: {rule}"));
    }
    for error in ranks(2, |group| {
        let x = Tensor::zeros([group.rank(), 3 + group.rank()], DType::U8, &Device::cpu()).unwrap();
        message(group.all_gather("x", &x))
    }) {
        assert!(
            error.contains("the shape, dimension 0 aside, is [1, 4] on rank 1 and [0, 3] on rank 0"),
            "{error}"
        );
    }
}

#[test]
fn different_names() {
    let agree = |names: [&'static [&'static str]; 2]| {
        ranks(2, |group| {
            let names: Vec<Arc<str>> = names[group.rank()].iter().map(|&name| name.into()).collect();
            let agreed = group.agree_on_names("forward", &names);
            (agreed.err().map(|error| error.to_string()).unwrap_or_default(), message(group.barrier()))
        })
    };
    let same: &[&str] = &["a", "b", "c"];
    assert!(agree([same, same]).iter().all(|result| result.0.is_empty() && result.1.is_empty()));
    for (other, expected) in [
        (["a", "x", "c"].as_slice(), "name 1 is `x` on rank 1 and `b` on rank 0"),
        (["a", "b"].as_slice(), "name 2 is missing on rank 1 and `c` on rank 0"),
        (["a", "b", "c", "d"].as_slice(), "name 3 is `d` on rank 1 and missing on rank 0"),
        ([].as_slice(), "name 0 is missing on rank 1 and `a` on rank 0"),
    ] {
        let failure = format!("{expected}: build the same model on all ranks");
        expect_all(agree([same, other]), "agree_on_names `forward`", &failure);
    }
}

#[test]
fn different_arenas() {
    let errors = ranks(2, |group| {
        let arena = Arena::new(2 + group.rank(), ArenaOptions::default(), &Device::cpu()).unwrap();
        group.all_reduce_max("forward", &arena).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("the shape is [3] on rank 1 and [2] on rank 0")),
        "{errors:?}"
    );
}

#[test]
fn a_rank_that_stays_away() {
    let groups = crate::groups(4, SHORT);
    let started = Instant::now();
    let results: Vec<_> = thread::scope(|scope| {
        let waiting: Vec<_> =
            [0, 2].map(|rank| &groups[rank]).map(|group| scope.spawn(move || reduce(group, "x"))).into();
        waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(started.elapsed() >= SHORT && started.elapsed() < LONG);
    for result in results {
        let error = result.unwrap_err();
        let missing = vec![1, 3];
        assert_eq!(error.failure(), Some(&Failure::Deadline { missing, waited: SHORT }));
        assert_eq!(
            error.to_string(),
            "all_reduce(sum) `x`: ranks 1 and 3 did not arrive within 500ms: check whether they are still \
             running, or use a longer deadline"
        );
    }
    // Too late.
    let late = reduce(&groups[1], "x").unwrap_err();
    assert!(matches!(late.failure(), Some(Failure::Deadline { .. })), "{late:?}");
    let later = reduce(&groups[1], "x");
    assert!(matches!(later, Err(Error::Poisoned { failure: Failure::Deadline { .. }, .. })), "{later:?}");
}

#[test]
fn poison_wakes_those_who_wait_and_stops_those_who_come() {
    let results = ranks(4, |group| {
        if group.rank() == 3 {
            thread::sleep(Duration::from_millis(50));
            group.poison("out of tokens");
            group.poison("a second thought"); // the first reason counts
            return (message(reduce(&group, "x")), message(group.barrier()));
        }
        (message(reduce(&group, "x")), message(group.barrier()))
    });
    let failure = "rank 3 gave up: out of tokens";
    let [(last, _)] = &results[3..] else { panic!("four ranks") };
    assert!(last.starts_with("all_reduce(sum) `x`: this group failed before (rank 3 gave up"), "{last}");
    expect_all(results[..3].to_vec(), "all_reduce(sum) `x`", failure);
}

#[test]
fn a_completed_exchange_stays_completed() {
    for _ in 0..200 {
        let sums = ranks(2, |group| {
            let sum = reduce(&group, "x").and_then(|sum| Ok(sum.item()?));
            group.poison("done"); // perhaps before the other rank has looked into its mailbox
            sum
        });
        assert!(sums.iter().all(|sum| matches!(sum, Ok(2.0))), "{sums:?}");
    }
}

#[test]
fn a_rank_that_drops_its_handle() {
    let started = Instant::now();
    let results = try_ranks(4, LONG, |group| {
        reduce(&group, "first").unwrap();
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(50));
            return (String::new(), String::new()); // early
        }
        (message(reduce(&group, "second")), message(group.barrier()))
    });
    assert!(started.elapsed() < LONG);
    let mut results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
    results.remove(1);
    let failure = "rank 1 left the group: every rank must make the same number of calls";
    expect_all(results, "all_reduce(sum) `second`", failure);
}

#[test]
fn a_rank_that_left_while_nobody_waited() {
    let mut groups = crate::groups(3, LONG);
    let clone = groups[2].clone();
    groups.pop();
    thread::scope(|scope| {
        groups.iter().chain([&clone]).for_each(|group| drop(scope.spawn(|| group.barrier().unwrap())))
    });
    drop(clone); // the last handle of rank 2
    let error = groups[0].barrier().unwrap_err();
    assert_eq!(error.failure(), Some(&Failure::Left { ranks: vec![2] }));
}

#[test]
fn a_rank_that_panics() {
    let started = Instant::now();
    let results = try_ranks(4, LONG, |group| {
        reduce(&group, "first").unwrap();
        if group.rank() == 2 {
            thread::sleep(Duration::from_millis(50));
            std::panic::resume_unwind(Box::new("a broken rank")); // without the message on stderr
        }
        message(reduce(&group, "second"))
    });
    assert!(started.elapsed() < LONG);
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(error) => assert_eq!(error, "all_reduce(sum) `second`: rank 2 gave up: its thread panicked"),
            Err(_) => assert_eq!(rank, 2),
        }
    }
}

#[test]
fn shared_storage_in_place_is_told_to_all() {
    let results = ranks(2, |group| {
        let mut grad = f32s(&[1.0, 2.0], &[2]);
        let holder = (group.rank() == 1).then(|| grad.clone());
        let error = message(group.all_reduce_in_place("fc.weight.grad", &mut grad, ReduceOp::Sum));
        drop(holder);
        assert_eq!(grad.to_vec::<f32>().unwrap(), [1.0, 2.0]); // nothing was summed
        error
    });
    assert!(
        results[1].starts_with(
            "fc.weight.grad: cannot be changed in place, because 1 other tensor shares its storage"
        ),
        "{}",
        results[1]
    );
    assert!(
        results[0].contains("rank 1 gave up: fc.weight.grad: cannot be changed in place"),
        "{}",
        results[0]
    );
}
