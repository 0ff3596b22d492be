//! Each collective against a plain computation.

use crate::{Group, bits, f32s, noise, ranks, tensor};
use fp8_dist::{AmaxGroup, ReduceOp, local};
use fp8_kernels::{DType, Device, Shape, Tensor};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

fn sum(parts: &[Vec<f32>]) -> Vec<f32> {
    (0..parts[0].len()).map(|i| parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i])).collect()
}

fn max(parts: &[Vec<f32>]) -> Vec<f32> {
    (0..parts[0].len()).map(|i| parts.iter().fold(f32::NEG_INFINITY, |max, part| max.max(part[i]))).collect()
}

#[test]
fn all_reduce_on_two_and_four_ranks() {
    for n in [1, 2, 4] {
        let data: Vec<Vec<f32>> = (0..n).map(|rank| noise(35, rank as u64 + 7)).collect();
        let results = ranks(n, |group| {
            let x = f32s(&data[group.rank()], &[5, 7]);
            let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
            let max = group.all_reduce("x", &x, ReduceOp::Max).unwrap();
            let mut y = f32s(&data[group.rank()], &[5, 7]);
            group.all_reduce_in_place("y", &mut y, ReduceOp::Sum).unwrap();
            assert_eq!([sum.shape(), max.shape()], [&[5, 7].into(); 2]);
            [sum, max, y].map(|x| bits(&x.to_vec::<f32>().unwrap()))
        });
        let expected = [bits(&sum(&data)), bits(&max(&data)), bits(&sum(&data))];
        assert!(results.iter().all(|result| *result == expected), "{n} ranks");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn gpus_reduce_in_place_through_their_hosts() {
    use fp8_kernels::{CudaOptions, interop};
    let library = fp8_cuda_sim::library_path();
    let cache_dir = Some(std::env::temp_dir().join("fp8-dist-tests"));
    let options = CudaOptions { library, cache_dir, ..CudaOptions::default() };
    let data: Vec<Vec<f32>> = (0..2).map(|rank| noise(35, rank as u64 + 7)).collect();
    let results = ranks(2, |group| {
        let device = Device::cuda_with_options(&options).unwrap();
        let mut x = tensor(&data[group.rank()], &[5, 7], DType::F32, &device);
        let address = interop::address(&x).unwrap();
        group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
        assert_eq!(interop::address(&x).unwrap(), address);
        // Refused by all: the group fails.
        let other = x.clone();
        let shared = group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap_err().to_string();
        assert!(shared.contains("x"), "{shared}");
        bits(&other.to_vec::<f32>().unwrap())
    });
    assert!(results.iter().all(|result| *result == bits(&sum(&data))));
}

#[test]
fn another_type_is_an_error_on_all_ranks_and_the_group_lives_on() {
    ranks(2, |group| {
        let mut x = Tensor::from_vec(vec![1u8, 2], [2], &Device::cpu()).unwrap();
        let error = group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("u8") && error.contains("f32"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_sum_is_taken_in_rank_order() {
    let values = [1e8f32, 1.0, -1e8, 1.0]; // (1e8 + 1) rounds to 1e8; any other order gives another sum
    let sums = ranks(4, |group| {
        group
            .all_reduce("x", &f32s(&[values[group.rank()], -0.0], &[2]), ReduceOp::Sum)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    });
    assert!(sums.iter().all(|sum| bits(sum) == bits(&[1.0, -0.0])), "{sums:?}");
}

#[test]
fn max_keeps_rest_infinity_and_nan() {
    let rows = [[-1.0, -1.0, 0.0, f32::INFINITY, f32::NAN], [-1.0, 0.0, -1.0, 3.0, f32::INFINITY]];
    let results = ranks(2, |group| {
        let x = f32s(&rows[group.rank()], &[5]);
        group.all_reduce("x", &x, ReduceOp::Max).unwrap().to_vec::<f32>().unwrap()
    });
    assert!(
        results.iter().all(|x| bits(x) == bits(&[-1.0, 0.0, 0.0, f32::INFINITY, f32::NAN])),
        "{results:?}"
    );
}

#[test]
fn all_gather_joins_shards_of_any_dtype_and_different_rows() {
    let rows = [2, 0, 3, 1];
    let gathered = |group: Group| {
        let (rank, device) = (group.rank(), Device::cpu());
        let ids: Vec<i32> = (0..rows[rank] * 2).map(|i| (10 * rank + i) as i32).collect();
        let ids = Tensor::from_vec(ids, [rows[rank], 2], &device).unwrap();
        let codes = Tensor::from_vec(vec![rank as u8; 3 * rows[rank]], [rows[rank], 1, 3], &device).unwrap();
        let half = tensor(&vec![rank as f32; rows[rank]], &[rows[rank]], DType::BF16, &device);
        let [ids, codes, half] = [ids, codes, half].map(|x| group.all_gather("x", &x).unwrap());
        assert_eq!(
            (ids.shape(), codes.shape(), half.shape()),
            (&[6, 2].into(), &[6, 1, 3].into(), &[6].into())
        );
        assert_eq!(half.dtype(), DType::BF16);
        (ids.to_vec::<i32>().unwrap(), codes.to_vec::<u8>().unwrap(), half.to_f32_vec().unwrap())
    };
    for (ids, codes, half) in ranks(4, gathered) {
        assert_eq!(ids, [0, 1, 2, 3, 20, 21, 22, 23, 24, 25, 30, 31]);
        assert_eq!(codes, [[0; 6].as_slice(), &[2; 9], &[3; 3]].concat());
        assert_eq!(half, [0.0, 0.0, 2.0, 2.0, 2.0, 3.0]);
    }
}

#[test]
fn broadcast_is_the_roots() {
    let results = ranks(4, |group| {
        let x = Tensor::from_vec(vec![group.rank() as i32; 3], [3], &Device::cpu()).unwrap();
        group.broadcast("x", &x, 2).unwrap().to_vec::<i32>().unwrap()
    });
    assert_eq!(results, vec![vec![2; 3]; 4]);
}

#[test]
fn results_share_no_storage() {
    ranks(2, |group| {
        let mut x = f32s(&[1.0], &[1]);
        for _ in 0..100 {
            let mut all = [
                group.all_reduce("x", &x, ReduceOp::Sum).unwrap(),
                group.all_gather("x", &x).unwrap(),
                group.broadcast("x", &x, 0).unwrap(),
            ];
            all.iter_mut().for_each(|x| x.as_mut_slice::<f32>("result").unwrap().fill(3.0));
            x.as_mut_slice::<f32>("x").unwrap().fill(2.0); // while the other rank may still be reading
        }
    });
}

#[test]
fn an_argument_that_is_wrong_on_all_ranks_leaves_the_group_alive() {
    ranks(2, |group| {
        let device = Device::cpu();
        let errors = [
            group.all_reduce("x", &Tensor::zeros([2], DType::U8, &device).unwrap(), ReduceOp::Sum),
            group.all_gather("x", &Tensor::scalar(1.0, &device).unwrap()),
            group.reduce_scatter("x", &Tensor::zeros([3, 2], DType::F32, &device).unwrap(), ReduceOp::Max),
            group.reduce_scatter("x", &Tensor::scalar(1.0, &device).unwrap(), ReduceOp::Sum),
            group.broadcast("x", &Tensor::zeros([2], DType::F32, &device).unwrap(), 2),
        ]
        .map(|result| result.unwrap_err().to_string());
        assert_eq!(
            errors,
            [
                "all_reduce(sum) `x`: dtype u8: expected f32, bf16, f16 or i32; cast first",
                "all_gather `x`: shape [] on 2 ranks: a scalar has no dimension 0; reshape it to [1]",
                "reduce_scatter(max) `x`: shape [3, 2] on 2 ranks: dimension 0 must be a multiple of the world size",
                "reduce_scatter(sum) `x`: shape [] on 2 ranks: dimension 0 must be a multiple of the world size",
                "broadcast(from rank 2) `x`: root 2 is not a rank of this group: expected 0..2",
            ]
        );
        group.barrier().unwrap();
    });
}

#[test]
fn options_of_a_group_are_checked() {
    let error = |world_size, deadline| local("dp", world_size, deadline).unwrap_err();
    assert_eq!(error(0, Duration::MAX).to_string(), "group `dp`: world_size = 0: expected at least 1");
    assert_eq!(
        error(2, Duration::ZERO).to_string(),
        "group `dp`: deadline = 0ns: expected more than 0: how long ranks wait for each other"
    );
    let groups = local("dp", 1, Duration::MAX).unwrap(); // longer than clocks run
    groups[0].barrier().unwrap();
    let group: Arc<dyn AmaxGroup> = groups[0].clone();
    assert_eq!((group.id(), group.world_size(), groups[0].rank()), ("dp", 1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn collectives_of_any_shape_and_world_size(
        n in 1usize..=5,
        trailing in prop::collection::vec(0usize..4, 0..3),
        rows in prop::collection::vec(0usize..4, 5),
        blocks in 0usize..3,
        seed: u64,
    ) {
        let shape = |rows: usize| [&[rows], trailing.as_slice()].concat();
        let width: usize = trailing.iter().product();
        let shards: Vec<Vec<f32>> = (0..n).map(|r| noise(rows[r] * width, seed ^ r as u64)).collect();
        let grads: Vec<Vec<f32>> = (0..n).map(|r| noise(blocks * n * width, seed ^ (9 + r as u64))).collect();
        let results = ranks(n, |group| {
            let rank = group.rank();
            let whole = group.all_gather("x", &f32s(&shards[rank], &shape(rows[rank]))).unwrap();
            let grad = f32s(&grads[rank], &shape(blocks * n));
            let part = group.reduce_scatter("g", &grad, ReduceOp::Sum).unwrap();
            let joined = group.all_gather("g", &part).unwrap();
            let sum = group.all_reduce("g", &grad, ReduceOp::Sum).unwrap();
            assert_eq!(*part.shape(), Shape::from_slice(&shape(blocks)).unwrap());
            assert_eq!(*whole.shape(), Shape::from_slice(&shape(rows[..n].iter().sum())).unwrap());
            [whole, joined, sum].map(|x| bits(&x.to_vec::<f32>().unwrap()))
        });
        let expected = [bits(&shards.concat()), bits(&sum(&grads)), bits(&sum(&grads))];
        prop_assert!(results.iter().all(|result| *result == expected));
    }
}
