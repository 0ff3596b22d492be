//! Results in memory that the caller gives.

use crate::{Group, LONG, f32s, noise, ranks, try_ranks};
use fp8_dist::{Failure, ReduceOp, Result};
use fp8_kernels::{DType, Device, Tensor};

/// Small and large ones, which go directly from rank to rank where ranks are processes.
const ROWS: [[usize; 3]; 4] = [[2, 3, 1], [0, 0, 0], [30_000, 1, 40_000], [20_000, 20_000, 20_000]];

fn address(x: &Tensor) -> *const f32 {
    x.as_slice::<f32>().unwrap().as_ptr()
}

#[test]
fn they_have_the_bits_that_are_returned_otherwise() {
    for rows in ROWS {
        ranks(3, |group| {
            let rank = group.rank();
            let x = f32s(&noise(rows[rank] * 2, rank as u64), &[rows[rank], 2]);
            let mut out = Tensor::full(f32::NAN, [rows.iter().sum(), 2], DType::F32, &Device::cpu()).unwrap();
            let place = address(&out);
            group.all_gather_into("x", &x, &mut out).unwrap();
            let expected = group.all_gather("x", &x).unwrap();
            assert!(out.as_slice::<f32>().unwrap() == expected.as_slice::<f32>().unwrap(), "{rows:?}");

            let len = 3 * rows[0];
            let x = f32s(&noise(len, 9 + rank as u64), &[len]);
            let mut part = Tensor::full(f32::NAN, [rows[0]], DType::F32, &Device::cpu()).unwrap();
            group.reduce_scatter_into("sum", &x, ReduceOp::Sum, &mut part).unwrap();
            let expected = group.reduce_scatter("sum", &x, ReduceOp::Sum).unwrap();
            assert!(part.as_slice::<f32>().unwrap() == expected.as_slice::<f32>().unwrap(), "{rows:?}");

            for root in 0..3 {
                let mut x = f32s(&noise(len, 20 + rank as u64), &[len]);
                group.broadcast_in_place("root", &mut x, root).unwrap();
                assert!(x.as_slice::<f32>().unwrap() == noise(len, 20 + root as u64), "{rows:?} from {root}");
            }
            assert_eq!(address(&out), place);
        });
    }
}

#[test]
fn integers_too() {
    ranks(2, |group| {
        let of = |values: &[i32]| Tensor::from_vec(values.to_vec(), [values.len()], &Device::cpu()).unwrap();
        let (x, mut part, mut all) = (of(&[1, 2]), of(&[0]), of(&[0; 4]));
        group.reduce_scatter_into("x", &x, ReduceOp::Sum, &mut part).unwrap();
        group.all_gather_into("x", &x, &mut all).unwrap();
        assert_eq!(part.to_vec::<i32>().unwrap(), [[2], [4]][group.rank()]);
        assert_eq!(all.to_vec::<i32>().unwrap(), [1, 2, 1, 2]);
    });
}

#[test]
fn memory_of_another_shape_or_dtype_is_an_error_on_all_ranks_and_the_group_lives_on() {
    ranks(2, |group| {
        let x = f32s(&[1.0; 4], &[2, 2]);
        let zeros = |dims: [usize; 2], dtype| Tensor::zeros(dims, dtype, &Device::cpu()).unwrap();
        let mut outs = [zeros([3, 2], DType::F32), zeros([4, 2], DType::BF16)];
        let [small, other] = &mut outs;
        let errors = [
            group.all_gather_into("x", &x, small).unwrap_err().to_string(),
            group.all_gather_into("x", &x, other).unwrap_err().to_string(),
            group.reduce_scatter_into("x", &x, ReduceOp::Sum, small).unwrap_err().to_string(),
        ];
        let expected = [
            "all_gather `x`: a result of [4, 2] of f32 does not fit into a tensor of [3, 2] of f32",
            "all_gather `x`: a result of [4, 2] of f32 does not fit into a tensor of [4, 2] of bf16",
            "reduce_scatter(sum) `x`: a result of [1, 2] of f32 does not fit into a tensor of [3, 2] of f32",
        ];
        assert_eq!(errors, expected);
        let error = group.broadcast_in_place("x", &mut f32s(&[1.0], &[1]), 2).unwrap_err().to_string();
        assert!(error.contains("root 2 is not a rank"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn memory_that_differs_between_ranks_or_is_shared_ends_the_group() {
    let differing = |group: &Group| -> Result<()> {
        let mut out = f32s(&vec![0.0; 2 + group.rank()], &[2 + group.rank()]);
        group.all_gather_into("x", &f32s(&[1.0], &[1]), &mut out)
    };
    for failure in try_ranks(2, LONG, |group| differing(&group).unwrap_err().failure().cloned()) {
        let failure = failure.unwrap();
        assert!(matches!(failure, Some(Failure::Disagree { property: "the shape", .. })), "{failure:?}");
    }
    let shared = |group: &Group| -> Result<()> {
        let (mut out, x) = (f32s(&[0.0; 2], &[2]), f32s(&[1.0], &[1]));
        let _other = (group.rank() == 1).then(|| out.clone());
        group.all_gather_into("x", &x, &mut out)
    };
    for error in try_ranks(2, LONG, |group| shared(&group).unwrap_err().to_string()) {
        let error = error.unwrap();
        assert!(error.contains("shares its storage"), "{error}");
    }
}
