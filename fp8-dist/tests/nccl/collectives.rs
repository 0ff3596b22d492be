//! Each collective against a plain computation, under several schedules of the device.

use crate::rig::{Rig, SEEDS, integers, ranks, reduced, tensor};
use fp8_dist::{Error, ReduceOp, quantized_all_gather};
use fp8_kernels::{
    Cell, DType, Device, Encoding, Scale, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy, UNSET, ops,
};

const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

#[test]
fn reductions() {
    let rig = Rig::new();
    for (n, seed) in [2, 4].into_iter().flat_map(|n| SEEDS.map(|seed| (n, seed))) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let data: Vec<Vec<f32>> = (0..n).map(|rank| integers(n * 35, rank as u64)).collect();
        let results = ranks(n, |group, device| {
            let mine = &data[group.rank()];
            let x = tensor(mine, &[n * 5, 7], DType::F32, device);
            let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
            let max = group.all_reduce("x", &x, ReduceOp::Max).unwrap();
            let part = group.reduce_scatter("x", &x, ReduceOp::Sum).unwrap();
            let mut y = tensor(mine, &[n * 5, 7], DType::F32, device);
            group.all_reduce_in_place("y", &mut y, ReduceOp::Sum).unwrap();
            let joined = group.all_gather("part", &part).unwrap();
            let none = group.all_reduce("none", &tensor(&[], &[0, 3], DType::F32, device), ReduceOp::Sum);
            assert_eq!(none.unwrap().numel(), 0);
            assert_eq!(part.shape(), &[5, 7].into());
            [sum, max, y, joined].map(|x| x.to_vec::<f32>().unwrap())
        });
        let (sum, max) = (reduced(&data, |a, b| a + b), reduced(&data, f32::max));
        let expected = [sum.clone(), max, sum.clone(), sum];
        assert!(results.iter().all(|result| *result == expected), "{n} ranks, seed {seed}");
    }
    rig.finish();
}

#[test]
fn reductions_of_16_bits_are_near_a_sum_in_f32() {
    let rig = Rig::new();
    for (dtype, unit) in [(DType::BF16, 2f32.powi(-8)), (DType::F16, 2f32.powi(-11))] {
        let n = 4;
        let data: Vec<Vec<f32>> = (0..n).map(|rank| integers(n * 6, rank as u64)).collect();
        let parts: Vec<Vec<f32>> =
            data.iter().map(|x| tensor(x, &[x.len()], dtype, &Device::cpu()).to_f32_vec().unwrap()).collect();
        let results = ranks(n, |group, device| {
            let x = tensor(&data[group.rank()], &[n * 2, 3], dtype, device);
            let sum = group.all_reduce("x", &x, ReduceOp::Sum).unwrap();
            let mean = group.all_reduce("x", &x, ReduceOp::Avg).unwrap();
            let max = group.all_reduce("x", &x, ReduceOp::Max).unwrap();
            let part = group.reduce_scatter("x", &x, ReduceOp::Sum).unwrap();
            let joined = group.all_gather("part", &part).unwrap();
            let mut y = x;
            group.all_reduce_in_place("y", &mut y, ReduceOp::Sum).unwrap();
            [sum, mean, max, joined, y].map(|x| {
                assert_eq!(x.dtype(), dtype);
                x.to_f32_vec().unwrap()
            })
        });
        let (sum, max) = (reduced(&parts, |a, b| a + b), reduced(&parts, f32::max));
        // Each of the additions, and the result, is rounded.
        let magnitudes: Vec<Vec<f32>> =
            parts.iter().map(|part| part.iter().map(|x| x.abs()).collect()).collect();
        let bound = reduced(&magnitudes, |a, b| a + b);
        for [found, mean, largest, joined, in_place] in results {
            assert_eq!((&largest, &joined, &in_place), (&max, &found, &found));
            for (i, sum) in sum.iter().enumerate() {
                let tolerance = n as f32 * unit * bound[i];
                assert!((found[i] - sum).abs() <= tolerance, "{dtype}: {} and {sum}", found[i]);
                assert!(
                    (mean[i] - sum / n as f32).abs() <= tolerance / n as f32 + unit * sum.abs(),
                    "{dtype}"
                );
            }
        }
    }
    rig.finish();
}

#[test]
fn hosts_add_integers() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let of = |values: [i32; 2]| Tensor::from_vec(values.to_vec(), [2], device).unwrap();
        let mine = of([[3, i32::MAX], [4, -1]][group.rank()]);
        let sum = group.all_reduce("tokens", &mine, ReduceOp::Sum).unwrap();
        assert_eq!((sum.to_vec::<i32>().unwrap(), sum.device()), (vec![7, i32::MAX - 1], device));
        let part = group.reduce_scatter("tokens", &mine, ReduceOp::Sum).unwrap();
        assert_eq!(part.to_vec::<i32>().unwrap(), [[7, i32::MAX - 1][group.rank()]]);
        let mut place = mine;
        group.all_reduce_in_place("tokens", &mut place, ReduceOp::Max).unwrap();
        assert_eq!(place.to_vec::<i32>().unwrap(), [4, i32::MAX]);
        let error = group.all_reduce("tokens", &place, ReduceOp::Sum).unwrap_err().to_string();
        assert_eq!(
            error,
            "all_reduce(sum) `tokens`: a sum does not fit into i32: add smaller numbers, or in f32"
        );
        let error = group.all_reduce("tokens", &place, ReduceOp::Avg).unwrap_err().to_string();
        assert_eq!(error, "all_reduce(avg) `tokens`: dtype i32: expected f32, bf16 or f16; cast first");
        group.barrier().unwrap();
    });
    rig.finish();
}

#[test]
fn results_have_the_transpose_policy_of_what_was_given() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        for policy in [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never] {
            let device = device.clone().with_transpose_policy(policy);
            let x = tensor(&[1.0; 8], &[2, 4], DType::F32, &device);
            let slot =
                Slot { scale: Scale::FromAmax { amax: 1.0, rule: &CURRENT }, ..Slot::off(Encoding::E4M3) };
            let gather = || quantized_all_gather(&*group, "quantized", &x, &slot).unwrap();
            let results = [
                group.all_reduce("x", &x, ReduceOp::Sum).unwrap(),
                group.reduce_scatter("x", &x, ReduceOp::Sum).unwrap(),
                group.all_gather("x", &x).unwrap(),
                group.broadcast("x", &x, 1).unwrap(),
                // The first call goes through the hosts, the second does not.
                gather().dequantize(DType::F32).unwrap(),
                gather().dequantize(DType::F32).unwrap(),
            ];
            assert_eq!(results.map(|x| x.device().transpose_policy()), [policy; 6]);
        }
    });
    rig.finish();
}

#[test]
fn all_ranks_get_the_same_bits_of_a_sum() {
    let rig = Rig::new();
    let results = ranks(4, |group, device| {
        let x: Vec<f32> = integers(1000, group.rank() as u64).iter().map(|x| (x * 0.37).sin()).collect();
        let sum = group.all_reduce("x", &tensor(&x, &[1000], DType::F32, device), ReduceOp::Sum).unwrap();
        sum.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(results.iter().all(|result| *result == results[0]));
    rig.finish();
}

#[test]
fn gathers_of_any_dtype_and_different_rows() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let rows = [2, 0, 3, 1];
        let results = ranks(4, |group, device| {
            let rank = group.rank();
            let ids: Vec<i32> = (0..rows[rank] * 2).map(|i| (10 * rank + i) as i32).collect();
            let ids = Tensor::from_vec(ids, [rows[rank], 2], device).unwrap();
            let codes =
                Tensor::from_vec(vec![rank as u8; 3 * rows[rank]], [rows[rank], 1, 3], device).unwrap();
            let half = tensor(&vec![rank as f32; rows[rank]], &[rows[rank]], DType::BF16, device);
            let even = Tensor::from_vec(vec![rank as u8; 5], [1, 5], device).unwrap();
            let [ids, codes, half, even] =
                [ids, codes, half, even].map(|x| group.all_gather("x", &x).unwrap());
            assert_eq!((ids.shape(), codes.shape()), (&[6, 2].into(), &[6, 1, 3].into()));
            assert_eq!(even.to_vec::<u8>().unwrap(), [[0; 5], [1; 5], [2; 5], [3; 5]].concat());
            (ids.to_vec::<i32>().unwrap(), codes.to_vec::<u8>().unwrap(), half.to_f32_vec().unwrap())
        });
        for (ids, codes, half) in results {
            assert_eq!(ids, [0, 1, 2, 3, 20, 21, 22, 23, 24, 25, 30, 31]);
            assert_eq!(codes, [[0; 6].as_slice(), &[2; 9], &[3; 3]].concat());
            assert_eq!(half, [0.0, 0.0, 2.0, 2.0, 2.0, 3.0]);
        }
    }
    rig.finish();
}

#[test]
fn broadcasts_from_every_root() {
    let rig = Rig::new();
    let results = ranks(4, |group, device| {
        let x = Tensor::from_vec(vec![group.rank() as i32; 3], [3], device).unwrap();
        [0, 1, 2, 3].map(|root| group.broadcast("x", &x, root).unwrap().to_vec::<i32>().unwrap())
    });
    assert_eq!(results, vec![[0, 1, 2, 3].map(|root| vec![root; 3]); 4]);
    rig.finish();
}

#[test]
fn collectives_wait_for_no_host() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let mut x = tensor(&[1.0; 64], &[64], DType::F32, device);
        for _ in 0..5 {
            group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap();
            x = ops::add(&x, &x).unwrap(); // its storage goes back while the collective may be queued
        }
        x.to_vec::<f32>().unwrap()
    });
    assert_eq!(results, vec![vec![1024.0; 64]; 2]);
    assert_eq!(rig.calls("ncclAllReduce"), 10);
    rig.finish();
}

#[test]
fn quantized_bytes_of_one_device_with_an_outlier_on_the_last_rank() {
    let rig = Rig::new();
    let [rows, cols] = [12, 16];
    let mut x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
    x[rows * cols - 1] = 1e4;
    let delayed = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    for (seed, shards) in SEEDS.into_iter().zip([[6, 6].as_slice(), &[3; 4], &[0, 5, 0, 7], &[5, 7]]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let policies = [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never];
        for (is_delayed, policy) in
            [true, false].into_iter().flat_map(|it| policies.map(|policy| (it, policy)))
        {
            let quantize = |device: &Device, f: &dyn Fn(&Slot<'_>) -> fp8_kernels::Operand| {
                let scale = Cell::new(UNSET, device).unwrap();
                let scale_of = match is_delayed {
                    true => Scale::Cell { cell: &scale, first: &delayed, keep: true },
                    false => Scale::FromTensor(&CURRENT),
                };
                let slot = Slot { scale: scale_of, columnwise: true, ..Slot::off(Encoding::E4M3) };
                let whole = f(&slot);
                let whole = whole.as_fp8().unwrap();
                let columns = whole.columnwise().map(|codes| codes.to_vec::<u8>().unwrap());
                let kept = scale.read().unwrap();
                (whole.codes().unwrap(), columns, whole.scale_inv().item().unwrap(), kept)
            };
            let cpu = Device::cpu().with_transpose_policy(policy);
            let joined = tensor(&x, &[rows, cols], DType::BF16, &cpu);
            let expected = quantize(&cpu, &|slot| ops::quantize(&joined, slot).unwrap());
            let results = ranks(shards.len(), |group, device| {
                let rank = group.rank();
                let start = shards[..rank].iter().sum::<usize>() * cols;
                let mine = &x[start..start + shards[rank] * cols];
                let device = &device.clone().with_transpose_policy(policy);
                let shard = tensor(mine, &[shards[rank], cols], DType::BF16, device);
                quantize(device, &|slot| quantized_all_gather(&*group, "x", &shard, slot).unwrap())
            });
            assert!(results.iter().all(|result| *result == expected), "{shards:?} {policy:?}, seed {seed}");
            assert_eq!(expected.1.is_some(), policy == TransposePolicy::WithCast);
            assert_eq!(expected.2, (448.0f32 / 9984.0).recip()); // 1e4 in bf16
        }
    }
    rig.finish();
}

#[test]
fn an_argument_that_is_wrong_on_all_ranks_leaves_the_group_alive() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let errors = [
            group.all_reduce("x", &Tensor::zeros([2], DType::U8, device).unwrap(), ReduceOp::Sum),
            group.all_gather("x", &Tensor::scalar(1.0, device).unwrap()),
            group.reduce_scatter("x", &Tensor::zeros([3, 2], DType::F32, device).unwrap(), ReduceOp::Max),
            group.broadcast("x", &Tensor::zeros([2], DType::F32, device).unwrap(), 2),
        ]
        .map(|result| result.unwrap_err().to_string());
        assert_eq!(
            errors,
            [
                "all_reduce(sum) `x`: dtype u8: expected f32, bf16, f16 or i32; cast first",
                "all_gather `x`: shape [] on 2 ranks: a scalar has no dimension 0; reshape it to [1]",
                "reduce_scatter(max) `x`: shape [3, 2] on 2 ranks: dimension 0 must be a multiple of the world size",
                "broadcast(from rank 2) `x`: root 2 is not a rank of this group: expected 0..2",
            ]
        );
        group.barrier().unwrap();
    });
    rig.finish();
}

#[test]
fn a_tensor_on_another_device_is_told_to_all() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let other = if group.rank() == 1 { Device::cpu() } else { device.clone() };
        group.all_reduce("x", &Tensor::scalar(1.0, &other).unwrap(), ReduceOp::Sum).unwrap_err()
    });
    assert!(matches!(&results[1], Error::Device { .. }));
    assert_eq!(results[1].to_string(), "all_reduce(sum) `x`: a tensor on cpu: expected one on cuda:0");
    assert!(
        results[0].to_string().contains("rank 1 gave up: all_reduce(sum) `x`: a tensor on cpu"),
        "{}",
        results[0]
    );
    rig.finish();
}
