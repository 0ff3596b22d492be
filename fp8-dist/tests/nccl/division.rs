//! Groups of GPUs that are divided: each new group has a communicator of its own.

use crate::rig::{Group, Rig, SEEDS, ranks, tensor};
use fp8_dist::{Mesh, MeshOptions, ProcessGroup, ReduceOp};
use fp8_kernels::{DType, Device};

fn sum(group: &dyn ProcessGroup, number: usize, device: &Device) -> f32 {
    let x = tensor(&[number as f32], &[1], DType::F32, device);
    group.all_reduce("numbers", &x, ReduceOp::Sum).unwrap().item().unwrap()
}

fn split(group: &Group, id: &str, color: usize, key: usize) -> Group {
    group.split(id, Some(color), key).unwrap().unwrap()
}

#[test]
fn rows_and_columns_of_a_mesh_and_the_whole_take_turns() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let results = ranks(4, |world, device| {
            let rank = world.rank();
            let row = split(&world, "tp", rank / 2, rank);
            let column = split(&world, "dp", rank % 2, 9 - rank);
            assert_eq!(
                (row.members(), column.members()),
                (vec![rank / 2 * 2, rank / 2 * 2 + 1], vec![rank % 2 + 2, rank % 2],)
            );
            // All queued before the first result is read.
            let x = tensor(&[rank as f32], &[1], DType::F32, device);
            let sums = [&row, &world, &column, &row]
                .map(|group| group.all_reduce("numbers", &x, ReduceOp::Sum).unwrap());
            sums.map(|sum| sum.item().unwrap())
        });
        let expected =
            [[1.0, 6.0, 2.0, 1.0], [1.0, 6.0, 4.0, 1.0], [5.0, 6.0, 2.0, 5.0], [5.0, 6.0, 4.0, 5.0]];
        assert_eq!(results, expected, "seed {seed}");
    }
    rig.finish();
}

#[test]
fn a_group_of_some_ranks_outlives_the_whole() {
    let rig = Rig::new();
    let results = ranks(4, |world, device| {
        let (rank, some) = (world.rank(), world.subgroup("some", &[3, 1]).unwrap());
        let whole = sum(&*world, rank, device);
        drop(world);
        some.map(|some| (some.rank(), some.members(), whole, sum(&*some, rank, device)))
    });
    let of = |rank| Some((rank, vec![3, 1], 6.0, 4.0));
    assert_eq!(results, [None, of(1), None, of(0)]);
    rig.finish();
}

#[test]
fn the_failure_of_a_group_without_queued_work_leaves_the_others() {
    let rig = Rig::new();
    ranks(4, |world, device| {
        let pair = split(&world, "pair", world.rank() / 2, 0);
        // Both are there: a rank that fails at once would else be an error of the other's rendezvous.
        pair.barrier().unwrap();
        if world.rank() == 3 {
            pair.poison("enough");
        }
        let ended = pair.barrier();
        assert_eq!(ended.is_err(), world.rank() >= 2, "{ended:?}");
        assert_eq!(sum(&*world, 1, device), 4.0);
    });
    rig.finish();
}

#[test]
fn a_mesh_of_gpus() {
    let rig = Rig::new();
    let results = ranks(4, |world, device| {
        let rank = world.rank();
        let mesh = Mesh::new(world, &MeshOptions { dp: 2, tp: 2 }).unwrap();
        [mesh.dp(), mesh.tp(), mesh.world()].map(|group| sum(&**group, rank, device))
    });
    assert_eq!(results, [[2.0, 1.0, 6.0], [4.0, 1.0, 6.0], [2.0, 5.0, 6.0], [4.0, 5.0, 6.0]]);
    rig.finish();
}
