//! Groups that are divided: who is with whom, what the new groups compute, and what the end of one means for the others.

use crate::{Group, f32s, ranks, try_ranks};
use fp8_dist::{AmaxGroup, Error, Failure, Mesh, MeshOptions, ProcessGroup, ReduceOp};
use std::sync::Arc;
use std::time::Duration;

/// The sum of the ranks' numbers in the first group, computed by `group`.
fn sum(group: &dyn ProcessGroup, number: usize) -> f32 {
    group.all_reduce("numbers", &f32s(&[number as f32], &[1]), ReduceOp::Sum).unwrap().item().unwrap()
}

fn split(group: &Group, id: &str, color: usize, key: usize) -> Arc<dyn ProcessGroup> {
    group.split(id, Some(color), key).unwrap().unwrap()
}

#[test]
fn ranks_of_a_color_are_a_group_in_the_order_of_their_keys() {
    let results = ranks(4, |world| {
        let rank = world.rank();
        let rows = split(&world, "tp", rank / 2, rank);
        let reversed = split(&world, "dp", rank % 2, 9 - rank);
        let alone = split(&world, "alone", rank, 0);
        assert_eq!((rows.id(), reversed.id(), alone.world_size()), ("tp", "dp", 1));
        // All groups at once, in turns.
        let sums: Vec<f32> =
            [&rows, &world, &reversed, &alone, &rows].map(|group| sum(&**group, rank)).to_vec();
        (rows.rank(), rows.members(), reversed.rank(), reversed.members(), sums)
    });
    assert_eq!(
        results,
        [
            (0, vec![0, 1], 1, vec![2, 0], vec![1.0, 6.0, 2.0, 0.0, 1.0]),
            (1, vec![0, 1], 1, vec![3, 1], vec![1.0, 6.0, 4.0, 1.0, 1.0]),
            (0, vec![2, 3], 0, vec![2, 0], vec![5.0, 6.0, 2.0, 2.0, 5.0]),
            (1, vec![2, 3], 0, vec![3, 1], vec![5.0, 6.0, 4.0, 3.0, 5.0]),
        ]
    );
}

#[test]
fn a_group_of_some_ranks_has_the_order_of_their_list() {
    let results = ranks(4, |world| {
        let rank = world.rank();
        let some = world.subgroup("some", &[3, 1]).unwrap()?;
        let gathered =
            some.all_gather("ranks", &f32s(&[rank as f32], &[1])).unwrap().to_vec::<f32>().unwrap();
        Some((some.rank(), some.members(), gathered))
    });
    let of = |rank| Some((rank, vec![3, 1], vec![3.0, 1.0]));
    assert_eq!(results, [None, of(1), None, of(0)]);
}

#[test]
fn a_new_group_can_be_divided_and_knows_the_members_of_the_job() {
    ranks(4, |world| {
        let rank = world.rank();
        let odd = split(&world, "parity", rank % 2, rank);
        let last = odd.subgroup("last", &[1]).unwrap();
        assert_eq!(last.map(|last| last.members()), (rank >= 2).then(|| vec![rank]));
        // Threads that share no group run at the same time.
        let upper: Arc<dyn AmaxGroup> = odd.clone();
        assert_eq!(upper.members(), [rank % 2, rank % 2 + 2]);
    });
}

#[test]
fn a_rank_without_a_color_joins_no_group() {
    ranks(3, |world| {
        let color = (world.rank() != 1).then_some(7);
        let group = world.split("some", color, 0).unwrap();
        assert_eq!(group.map(|group| group.members()), color.map(|_| vec![0, 2]));
        assert!(world.split("none", None, 0).unwrap().is_none());
        world.barrier().unwrap();
    });
}

#[test]
fn wrong_lists_of_ranks_are_errors_and_the_group_lives_on() {
    ranks(2, |world| {
        for (list, shown) in [(&[][..], "[]"), (&[0, 2], "[0, 2]"), (&[1, 1], "[1, 1]")] {
            let error = world.subgroup("some", list).unwrap_err().to_string();
            let expected =
                format!("group `some`: ranks = {shown}: expected different ranks of the group, at least one");
            assert_eq!(error, expected);
        }
        world.barrier().unwrap();
    });
}

#[test]
fn different_lists_of_ranks_are_named() {
    let results = ranks(2, |world| {
        let list = [[0, 1], [1, 0]][world.rank()];
        world.subgroup("some", &list).unwrap_err()
    });
    for error in results {
        let Some(Failure::Disagree { value, other_value, .. }) = error.failure() else { panic!("{error}") };
        let [ours, theirs] = ["[0, 1]", "[1, 0]"].map(|ranks| format!("split into `some of ranks {ranks}`"));
        assert_eq!((other_value, value), (&ours, &theirs));
    }
}

#[test]
fn a_list_that_is_wrong_on_one_rank_is_told_to_all() {
    let results = ranks(2, |world| {
        let list: &[usize] = [&[0, 1][..], &[0, 9]][world.rank()];
        world.subgroup("some", list).unwrap_err().to_string()
    });
    for error in results {
        assert!(error.contains("[0, 1]") && error.contains("[0, 9]"), "{error}");
    }
}

#[test]
fn ranks_that_arrange_other_meshes_are_told_so() {
    for sizes in [[(1, 4), (4, 1)], [(2, 2), (4, 1)], [(2, 2), (3, 1)]] {
        let results = ranks(4, |world| {
            let (dp, tp) = sizes[usize::from(world.rank() == 3)];
            Mesh::new(world, &MeshOptions { dp, tp }).unwrap_err().to_string()
        });
        for error in results {
            let [(first, _), (second, _)] = sizes;
            assert!(
                error.contains(&format!("`dp {first}`")) && error.contains(&format!("`dp {second}`")),
                "{error}"
            );
        }
    }
}

#[test]
fn threads_that_divide_one_group_at_once_get_groups_of_their_own_divisions() {
    let results = ranks(4, |world| {
        std::thread::scope(|scope| {
            let halves = || {
                (0..20).all(|_| {
                    // Whichever thread of a rank comes first, all ranks divide alike.
                    let half = split(&world, "half", world.rank() / 2, 0);
                    half.world_size() == half.members().len() && half.barrier().is_ok()
                })
            };
            [scope.spawn(halves), scope.spawn(halves)].map(|thread| thread.join().unwrap())
        })
    });
    assert_eq!(results, [[true; 2]; 4]);
}

#[test]
fn the_failure_of_a_group_does_not_end_the_others() {
    ranks(4, |world| {
        let pair = split(&world, "pair", world.rank() / 2, 0);
        if world.rank() == 3 {
            pair.poison("enough");
        }
        let ended = pair.barrier();
        assert_eq!(ended.is_err(), world.rank() >= 2, "{ended:?}");
        assert_eq!(sum(&*world, 1), 4.0);
    });
}

#[test]
fn groups_outlive_the_group_that_was_divided() {
    ranks(4, |world| {
        let pair = split(&world, "pair", world.rank() % 2, 0);
        drop(world);
        assert_eq!(sum(&*pair, 1), 2.0);
    });
}

#[test]
fn a_rank_that_dies_is_missed_in_all_its_groups() {
    let results = try_ranks(4, Duration::from_secs(20), |world| {
        let rank = world.rank();
        let pair = split(&world, "pair", rank / 2, 0);
        assert!(rank != 3, "this rank dies");
        [pair.barrier(), world.barrier()].map(|ended| ended.err())
    });
    for (rank, result) in results.into_iter().enumerate() {
        match (rank, result) {
            (3, result) => assert!(result.is_err()),
            (2, Ok([Some(pair), Some(world)])) => {
                // The new group has two ranks: this one is 0 there, the other 1.
                assert!(matches!(pair.failure(), Some(Failure::GaveUp { rank: 1, .. })), "{pair}");
                assert!(matches!(world.failure(), Some(Failure::GaveUp { rank: 3, .. })), "{world}");
            }
            (_, Ok([None, Some(Error::Failed { failure: Failure::GaveUp { rank: 3, .. }, .. })])) => {}
            (_, other) => panic!("rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn a_mesh_has_a_group_for_each_way_of_dividing_the_work() {
    for (dp, tp) in [(1, 4), (4, 1), (2, 2)] {
        let results = ranks(4, |world| {
            let rank = world.rank();
            let mesh = Mesh::new(world, &MeshOptions { dp, tp }).unwrap();
            assert_eq!((mesh.dp().rank(), mesh.tp().rank()), (rank / tp, rank % tp));
            let amaxes: Arc<dyn AmaxGroup> = mesh.amax_group();
            assert_eq!((amaxes.world_size(), amaxes.members()), (4, vec![0, 1, 2, 3]));
            let members =
                |belongs: &dyn Fn(usize) -> bool| (0..4).filter(|&other| belongs(other)).collect::<Vec<_>>();
            assert_eq!(mesh.dp().members(), members(&|other| other % tp == rank % tp));
            assert_eq!(mesh.tp().members(), members(&|other| other / tp == rank / tp));
            [mesh.dp(), mesh.tp(), mesh.world()].map(|group| sum(&**group, rank))
        });
        for (rank, sums) in results.into_iter().enumerate() {
            let of = |ranks: Vec<usize>| ranks.into_iter().sum::<usize>() as f32;
            let replicas = (0..4).filter(|other| other % tp == rank % tp).collect();
            let layers = (0..4).filter(|other| other / tp == rank / tp).collect();
            assert_eq!(sums, [of(replicas), of(layers), 6.0], "dp {dp}, tp {tp}, rank {rank}");
        }
    }
}

#[test]
fn a_mesh_of_another_size_is_refused() {
    ranks(2, |world| {
        for (dp, tp) in [(2, 2), (1, 1), (0, 2), (usize::MAX, 2)] {
            let error = Mesh::new(world.clone(), &MeshOptions { dp, tp }).unwrap_err().to_string();
            let expected = format!(
                "group `dp`: mesh = dp {dp} × tp {tp} on 2 ranks: expected sizes whose product is the number of ranks"
            );
            assert_eq!(error, expected);
        }
        world.barrier().unwrap();
    });
}
