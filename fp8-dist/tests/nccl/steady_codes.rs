//! Gathers of tensors that are in FP8 already, and of shards whose shapes vary, once ranks have agreed on them.

use crate::rig::{Rig, SEEDS, SHORT, ranks, tensor, try_ranks};
use crate::steady::{Bytes, bytes, shard, values};
use fp8_dist::{gather_codes, quantized_all_gather};
use fp8_kernels::{
    Cell, DType, Device, Encoding, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, TransposePolicy, ops,
};
use std::time::{Duration, Instant};

const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

fn slot(amax: f32) -> Slot<'static> {
    Slot { scale: Scale::FromAmax { amax, rule: &CURRENT }, columnwise: true, ..Slot::off(Encoding::E4M3) }
}

fn quantize(x: &Tensor, slot: &Slot<'_>) -> Fp8Tensor {
    ops::quantize(x, slot).unwrap().as_fp8().unwrap().clone()
}

fn whole(x: &[f32], amax: f32) -> Bytes {
    let cpu = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
    bytes(&Operand::Fp8(quantize(&tensor(x, &[x.len() / 16, 16], DType::F32, &cpu), &slot(amax))))
}

#[test]
fn known_codes_are_gathered_without_hosts_and_recorded() {
    let rig = Rig::new();
    for (seed, rows) in SEEDS.into_iter().zip([[3, 3].as_slice(), &[0, 6], &[5, 0, 1], &[0, 0]]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let x = |round: usize| values(rows.iter().sum::<usize>() * 16, round);
        ranks(rows.len(), |group, device| {
            let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
            let of = |round| shard(&x(round), rows, group.rank(), 16, DType::F32, &device);
            let gather = |x: &Tensor, amax: f32| gather_codes(&*group, "x", &quantize(x, &slot(amax)));
            let found = gather(&of(0), 3.0).unwrap();
            let exchanges = group.traffic().exchanges;
            assert_eq!(bytes(&Operand::Fp8(found)), whole(&x(0), 3.0));
            assert_eq!(bytes(&Operand::Fp8(gather(&of(1), 7.0).unwrap())), whole(&x(1), 7.0));
            let mut input = of(2);
            let (graph, found) = device.capture(|| gather(&input, 5.0)).unwrap();
            let found = Operand::Fp8(found);
            assert_eq!(bytes(&found), whole(&x(2), 5.0));
            input.write(&of(3).to_vec::<f32>().unwrap(), "input").unwrap();
            graph.replay().unwrap();
            assert_eq!(bytes(&found), whole(&x(3), 5.0));
            assert_eq!(group.traffic().exchanges, exchanges);
            // The graph keeps what it needs.
            drop(group);
            graph.replay().unwrap();
            assert_eq!(bytes(&found), whole(&x(3), 5.0));
        });
    }
    rig.finish();
}

#[test]
fn scales_that_differ_are_told_at_the_next_wait() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let x = tensor(&values(16, 3), &[1, 16], DType::F32, device);
        let gather = |amax: f32| gather_codes(&*group, "x", &quantize(&x, &slot(amax))).unwrap();
        gather(448.0);
        let whole = gather([448.0, 224.0][group.rank()]);
        whole.codes().unwrap_err().to_string()
    });
    for error in errors {
        let expected =
            "gather_codes `x` by dequantization factors: the scale is 0.5 on rank 1 and 1 on rank 0";
        assert!(error.starts_with(expected), "{error}");
    }
    rig.finish();
}

#[test]
fn a_name_has_as_many_shapes_as_it_needs() {
    let rig = Rig::new();
    let lengths = [[2, 2], [3, 1], [5, 5], [2, 2], [5, 5], [3, 1]];
    ranks(2, |group, device| {
        let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let scale = Cell::new(2.0, &device).unwrap();
        let held = Slot { scale: Scale::Cell { cell: &scale, first: &CURRENT, keep: true }, ..slot(1.0) };
        let mut exchanges = Vec::new();
        for (round, rows) in lengths.into_iter().enumerate() {
            let x = values((rows[0] + rows[1]) * 16, round);
            let part = shard(&x, &rows, group.rank(), 16, DType::F32, &device);
            let before = group.traffic().exchanges;
            let all = [
                quantized_all_gather(&*group, "held", &part, &held).unwrap(),
                Operand::Fp8(gather_codes(&*group, "codes", &quantize(&part, &held)).unwrap()),
            ];
            exchanges.push(group.traffic().exchanges - before);
            for found in all {
                assert_eq!(bytes(&found), whole(&x, 224.0), "round {round}");
            }
        }
        assert!(exchanges[..3].iter().all(|&count| count > 0) && exchanges[3..] == [0; 3], "{exchanges:?}");
    });
    rig.finish();
}

/// Rank 0's shape is known, but rank 1 had another one then.
#[test]
fn shapes_that_do_not_come_together_again_end_the_group() {
    let rig = Rig::new();
    let started = Instant::now();
    let errors = try_ranks(2, SHORT, |group, device| {
        let scale = Cell::new(2.0, device).unwrap();
        let slot = Slot {
            scale: Scale::Cell { cell: &scale, first: &CURRENT, keep: true },
            ..Slot::off(Encoding::E4M3)
        };
        let gather = |rows: usize| -> fp8_dist::Result<Vec<u8>> {
            let x = Tensor::full(1.0, [rows, 16], DType::F32, device)?;
            let whole = quantized_all_gather(&*group, "x", &x, &slot)?;
            Ok(whole.as_fp8().unwrap().codes()?)
        };
        gather(2).unwrap();
        gather(2 + group.rank()).unwrap_err().to_string()
    });
    assert!(started.elapsed() < Duration::from_secs(6));
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("600ms"), "{error}");
    }
    rig.control.set("reset", "").unwrap();
}
