//! Tensors that go directly from rank to rank where ranks are processes: each collective against a plain computation.

use crate::{Group, bits, noise, ranks};
use fp8_dist::ReduceOp;
use fp8_kernels::{DType, Device, Tensor, bf16};
use std::thread;

/// More bytes of f32 than travel with a message.
const LARGE: usize = 40_000;

fn f32s(data: Vec<f32>, dims: &[usize]) -> Tensor {
    Tensor::from_vec(data, fp8_kernels::Shape::from_slice(dims).unwrap(), &Device::cpu()).unwrap()
}

fn in_rank_order(parts: &[Vec<f32>]) -> Vec<f32> {
    (0..parts[0].len()).map(|i| parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i])).collect()
}

#[test]
fn sums_of_ten_million_elements() {
    let len = 10_000_019; // a prime: no rank's part is as long as another's
    let value = |index: usize, rank: usize| ((index * 31 + rank * 17) % 1009) as f32 / 64.0;
    ranks(3, |group| {
        let data = (0..len).map(|index| value(index, group.rank())).collect();
        let mut x = f32s(data, &[len]);
        group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
        let found: &[f32] = x.as_slice().unwrap();
        let sum = |index| value(index, 0) + value(index, 1) + value(index, 2);
        let differs = (0..len).find(|&index| found[index].to_bits() != f32::to_bits(sum(index)));
        assert_eq!(differs, None);
    });
}

#[test]
fn sums_of_any_length_around_the_pieces() {
    // 16,384 elements are combined at a time, and 16 times as many wait.
    for len in [32_769, 49_151, 16_384 * 4, 16_384 * 33 + 1, 16_384 * 64] {
        for n in [2, 4] {
            let data: Vec<_> = (0..n).map(|rank| noise(len, rank as u64)).collect();
            let expected = bits(&in_rank_order(&data));
            ranks(n, |group| {
                let x = f32s(data[group.rank()].clone(), &[len]);
                let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
                assert!(bits(sum.as_slice().unwrap()) == expected, "{len} elements, {n} ranks");
                if len.is_multiple_of(n) {
                    let part = group.reduce_scatter("x", &x, ReduceOp::Sum).unwrap();
                    let own = group.rank() * len / n..(group.rank() + 1) * len / n;
                    assert!(bits(part.as_slice().unwrap()) == expected[own], "part of {len}, {n} ranks");
                }
                assert_eq!(x.as_slice::<f32>().unwrap(), data[group.rank()], "an argument is not changed");
            });
        }
    }
}

#[test]
fn gathers_of_large_small_and_empty_shards() {
    // Of a rank, the rows of 100 elements: some travel with the message, some directly.
    for rows in [[0, 700, 3], [900, 0, 0], [1, 2, 3], [400, 500, 600]] {
        ranks(3, |group| {
            let shard = |rank: usize| -> Vec<f32> {
                (0..rows[rank] * 100).map(|index| (rank * 100_000 + index) as f32).collect()
            };
            let expected: Vec<f32> = (0..3).flat_map(shard).collect();
            let x = f32s(shard(group.rank()), &[rows[group.rank()], 100]);
            let joined = group.all_gather("x", &x).unwrap();
            assert_eq!(joined.shape(), &[rows.iter().sum(), 100].into());
            assert!(joined.as_slice::<f32>().unwrap() == expected, "{rows:?}");
            let bytes = Tensor::from_vec(
                vec![group.rank() as u8; rows[group.rank()] * 1000],
                [rows[group.rank()] * 1000],
                &Device::cpu(),
            );
            let joined = group.all_gather("bytes", &bytes.unwrap()).unwrap();
            let expected: Vec<u8> = (0..3).flat_map(|rank| vec![rank as u8; rows[rank] * 1000]).collect();
            assert!(joined.as_slice::<u8>().unwrap() == expected, "{rows:?}");
        });
    }
}

#[test]
fn rows_that_no_tensor_holds_are_an_error_on_all_ranks() {
    // A tensor without elements may have 2⁶¹ − 1 rows.
    ranks(9, |group| {
        let x = f32s(Vec::new(), &[(1 << 61) - 1, 0]);
        let error = group.all_gather("x", &x).unwrap_err().to_string();
        assert!(error.contains("the rows of all ranks together exceed usize"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn broadcasts_from_each_rank() {
    ranks(4, |group| {
        for root in 0..4 {
            let values = |rank: usize| vec![bf16::from_f32(rank as f32); 2 * LARGE];
            let x = Tensor::from_vec(values(group.rank()), [2, LARGE], &Device::cpu()).unwrap();
            let sent = group.broadcast("x", &x, root).unwrap();
            assert_eq!((sent.dtype(), sent.shape()), (DType::BF16, &[2, LARGE].into()));
            assert!(sent.as_slice::<bf16>().unwrap() == values(root));
        }
    });
}

#[test]
fn a_wrong_argument_is_an_error_on_all_ranks_and_the_group_lives_on() {
    ranks(3, |group| {
        let bytes = Tensor::from_vec(vec![1u8; 3 * LARGE * 4], [3, LARGE * 4], &Device::cpu()).unwrap();
        let error = group.all_reduce("bytes", &bytes, ReduceOp::Sum).unwrap_err().to_string();
        assert_eq!(error, "all_reduce(sum) `bytes`: dtype u8: expected f32, bf16, f16 or i32; cast first");
        let x = f32s(vec![1.0; 2 * LARGE], &[2, LARGE]);
        let error = group.reduce_scatter("x", &x, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("must be a multiple of the world size"), "{error}");
        let error = group.broadcast("x", &x, 3).unwrap_err().to_string();
        assert!(error.contains('3'), "{error}");
        assert_eq!(group.all_reduce("x", &x, ReduceOp::Avg).unwrap().as_slice::<f32>().unwrap()[LARGE], 1.0);
        let tokens = Tensor::from_vec(vec![i32::MAX; LARGE], [LARGE], &Device::cpu()).unwrap();
        let error = group.all_reduce("tokens", &tokens, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("a sum does not fit into i32"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn shapes_that_differ_are_named() {
    let errors = ranks(2, |group| {
        // On one rank large, on the other small.
        let len = [LARGE, 5][group.rank()];
        group.all_reduce("x", &f32s(vec![0.0; len], &[len]), ReduceOp::Sum).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("[5]") && error.contains("[40000]")), "{errors:?}");
}

#[test]
fn ranks_that_leave_right_after_a_large_sum_have_sent_everything() {
    for round in 0..20 {
        let results = ranks(4, |group: Group| {
            let x = f32s(vec![group.rank() as f32; 10 * LARGE], &[10 * LARGE]);
            let sum = group.all_reduce("x", &x, ReduceOp::Sum);
            drop(group);
            sum.map(|sum| sum.as_slice::<f32>().unwrap().iter().all(|&sum| sum == 6.0))
        });
        assert!(results.iter().all(|result| matches!(result, Ok(true))), "round {round}: {results:?}");
    }
}

#[test]
fn threads_that_share_a_handle_do_not_mix_their_tensors() {
    ranks(2, |group| {
        // Which thread comes first is the same on both ranks, since sums of one name and shape are interchangeable.
        let sum = || {
            for _ in 0..5 {
                let x = f32s(vec![1.0 + group.rank() as f32; LARGE], &[LARGE]);
                let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
                assert!(sum.as_slice::<f32>().unwrap().iter().all(|&sum| sum == 3.0));
            }
        };
        thread::scope(|scope| {
            (0..3).for_each(|_| drop(scope.spawn(sum)));
        });
    });
}
