//! Ranks that compare their training state.

use crate::support::{LONG, ranks, try_ranks};
use fp8_dist::{Error, ProcessGroup, ReduceOp, StateDigest};
use std::sync::Arc;

fn state(pieces: &[(&str, f32)]) -> Vec<StateDigest> {
    pieces.iter().map(|&(name, value)| StateDigest::new(name, [value.to_le_bytes()])).collect()
}

fn agree(group: &Arc<dyn ProcessGroup>, pieces: &[(&str, f32)]) -> Result<(), String> {
    group.agree_on_state("parameters", &state(pieces)).map_err(|error| error.to_string())
}

/// `difference` is what all ranks are told.
fn expect(results: &[Result<(), String>], difference: &str) {
    let remedy =
        "replicas must have the same state; call `broadcast_state`, or load the same checkpoint on all ranks";
    let expected = format!("agree_on_state `parameters`: {difference}: {remedy}");
    for result in results {
        assert_eq!(result.as_ref().unwrap_err(), &expected);
    }
}

#[test]
fn equal_state_agrees_and_equal_nans_are_equal() {
    for result in ranks(3, |group| agree(&group, &[("a", f32::NAN), ("b", -0.0)])) {
        assert_eq!(result, Ok(()));
    }
    let results = ranks(3, |group| agree(&group, &[("a", if group.rank() == 2 { 0.0 } else { -0.0 })]));
    expect(&results, "a differs between rank 2 and rank 0");
    assert!(ranks(2, |group| agree(&group, &[])).iter().all(Result::is_ok));
}

#[test]
fn the_first_difference_is_named_on_every_rank_and_the_group_lives_on() {
    let cases: [(&[(&str, f32)], &str); 4] = [
        (&[("a", 1.0), ("b", 3.0), ("c", 4.0)], "b differs between rank 1 and rank 0"),
        (&[("a", 1.0), ("c", 3.0)], "b is missing on rank 1, and rank 0 has it"),
        (&[("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 0.0)], "d is missing on rank 0, and rank 1 has it"),
        (&[], "a is missing on rank 1, and rank 0 has it"),
    ];
    let ours: &[(&str, f32)] = &[("a", 1.0), ("b", 2.0), ("c", 3.0)];
    let all = ranks(3, |group| {
        let mut results = Vec::new();
        for (theirs, _) in cases {
            results.push(agree(&group, if group.rank() == 1 { theirs } else { ours }));
        }
        group.barrier().unwrap();
        agree(&group, ours).unwrap();
        results
    });
    for (case, (_, difference)) in cases.iter().enumerate() {
        expect(&all.iter().map(|results| results[case].clone()).collect::<Vec<_>>(), difference);
    }
}

#[test]
fn the_error_says_which_ranks_have_the_piece() {
    let errors = ranks(2, |group| {
        let both: &[(&str, f32)] = &[("a", 1.0), ("b", 2.0)];
        let state = state(if group.rank() == 0 { both } else { &both[..1] });
        match group.agree_on_state("parameters", &state).unwrap_err() {
            fp8_dist::fp8_recipe::Error::Group(error) => *error.downcast::<Error>().unwrap(),
            other => panic!("{other}"),
        }
    });
    for error in errors {
        let Error::State { name, rank: 1, is_there: false, other: 0, is_on_other: true, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(&**name, "b");
    }
}

#[test]
fn a_rank_that_compares_alone_is_told_what_that_means() {
    for comparing in [0, 1] {
        let errors = try_ranks(2, LONG, |group| {
            if group.rank() == comparing {
                return agree(&group, &[("a", 1.0)]).unwrap_err();
            }
            group.all_reduce("x", &crate::f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap_err().to_string()
        });
        let other = 1 - comparing;
        let expected = format!(
            "rank {comparing} called agree_on_state `parameters` while rank {other} called all_reduce(sum) `x`: parameters, \
             optimizer or scaling state were loaded or set on rank {comparing} and not on rank {other}; load or set them on \
             all ranks, or call `broadcast_state` on all"
        );
        for error in errors {
            let error = error.unwrap();
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}

#[test]
fn handles_have_numbers_of_their_own() {
    let mut numbers: Vec<u64> =
        [2, 3].iter().flat_map(|&n| ranks(n, |group| group.handle_number())).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!((numbers.len(), numbers.contains(&0)), (5, false));
}
