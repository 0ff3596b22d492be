//! Gathers of tensors that are in FP8 already: the bytes that quantizing the whole gives.

use crate::gather_blocks::{layouts, rules};
use crate::{noise, ranks, tensor};
use fp8_dist::gather_codes;
use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Scale, ScaleRule, Slot, TransposePolicy, ops};

const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

fn quantized(x: &[f32], shape: &[usize], slot: &Slot<'_>, policy: TransposePolicy) -> Fp8Tensor {
    let device = Device::cpu().with_transpose_policy(policy);
    let x = tensor(x, shape, DType::BF16, &device);
    ops::quantize(&x, slot).unwrap().as_fp8().unwrap().clone()
}

/// Gathers shards of so many rows, and compares with the whole. `change` is applied to shards and whole.
fn check(
    slot: &Slot<'_>,
    rows: &[usize],
    others: &[usize],
    policy: TransposePolicy,
    change: fn(&Fp8Tensor) -> Fp8Tensor,
) {
    let row: usize = others.iter().product();
    let total: usize = rows.iter().sum();
    let x = noise(total * row, 7);
    let shape = |rows: usize| [&[rows], others].concat();
    let whole = change(&quantized(&x, &shape(total), slot, policy));
    ranks(rows.len(), |group| {
        let rank = group.rank();
        let start = rows[..rank].iter().sum::<usize>() * row;
        let shard = quantized(&x[start..start + rows[rank] * row], &shape(rows[rank]), slot, policy);
        let found = gather_codes(&*group, "x", &change(&shard)).unwrap();
        let text =
            format!("{:?} columnwise {} rows {rows:?} {others:?} {policy:?}", slot.scale, slot.columnwise);
        assert_eq!((found.shape(), found.encoding()), (whole.shape(), whole.encoding()), "{text}");
        assert!(layouts(&found) == layouts(&whole), "{text}");
    });
}

const POLICIES: [TransposePolicy; 3] =
    [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never];

#[test]
fn codes_with_one_scale() {
    // Whatever the values are, the amax of each shard.
    let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    for (encoding, columnwise) in [(Encoding::E4M3, true), (Encoding::E5M2, false)] {
        let slot =
            Slot { scale: Scale::FromAmax { amax: 2.0, rule: &rule }, columnwise, ..Slot::off(encoding) };
        for policy in POLICIES {
            for (rows, others) in [
                (&[3, 2][..], &[5][..]),
                (&[0, 4, 1], &[3, 7]),
                (&[0, 0], &[4]),
                (&[700, 0, 301], &[130]),
                (&[2, 3], &[0, 5]),
            ] {
                check(&slot, rows, others, policy, Fp8Tensor::clone);
                check(&slot, rows, others, policy, Fp8Tensor::for_backward);
            }
        }
    }
}

#[test]
fn codes_with_scales_for_rows_and_blocks() {
    for rule in rules() {
        let slot = |columnwise| Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(Encoding::E4M3) };
        for policy in POLICIES {
            check(&slot(false), &[128, 256, 7], &[140], policy, Fp8Tensor::clone);
            let alone = quantized(&noise(128 * 140, 3), &[128, 140], &slot(true), policy);
            // Factors of the transpose's rows span all rows, so they are other ones in the whole.
            let spans = alone.columnwise().is_some() && {
                let blocks = alone.columnwise_blocks();
                blocks.is_none() || blocks == Some(fp8_kernels::fp8_format::Blocks::Row)
            };
            if !spans {
                check(&slot(true), &[128, 256, 7], &[140], policy, Fp8Tensor::clone);
                check(&slot(true), &[128, 256, 7], &[140], policy, Fp8Tensor::for_backward);
                check(&slot(true), &[64, 64], &[2, 140], policy, Fp8Tensor::clone);
            }
        }
        // Rowwise codes of any shards, but for blocks of several rows.
        if rule.blocks() != fp8_kernels::fp8_format::Blocks::B128x128 {
            check(&slot(false), &[1, 0, 6], &[140], TransposePolicy::WithCast, Fp8Tensor::clone);
            check(&slot(false), &[3, 2], &[4, 96], TransposePolicy::WithCast, Fp8Tensor::clone);
        }
    }
}

fn errors(of: impl Fn(usize) -> Fp8Tensor + Sync) -> Vec<String> {
    ranks(2, |group| gather_codes(&*group, "x", &of(group.rank())).unwrap_err().to_string())
}

#[test]
fn shards_that_do_not_fit_together_are_named_on_all_ranks() {
    let with = |amax: f32, encoding| {
        let slot = Slot { scale: Scale::FromAmax { amax, rule: &CURRENT }, ..Slot::off(encoding) };
        quantized(&[1.0; 6], &[2, 3], &slot, TransposePolicy::WithCast)
    };
    let found = errors(|rank| with([448.0, 224.0][rank], Encoding::E4M3));
    for error in found {
        assert!(error.contains("the scale is 2 on rank 1 and 1 on rank 0"), "{error}");
    }
    let found = errors(|rank| with(448.0, [Encoding::E4M3, Encoding::E5M2][rank]));
    assert!(found.iter().all(|error| error.contains("codes of E5M2")), "{found:?}");
    let blocks = |rule, columnwise, rows: usize| {
        let slot = Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(Encoding::E4M3) };
        quantized(&noise(rows * 140, 3), &[rows, 140], &slot, TransposePolicy::WithCast)
    };
    let [rows, lines, squares, mx, ..] = rules();
    for (rule, columnwise) in [(squares, false), (lines, true), (mx, true)] {
        for error in errors(|_| blocks(rule, columnwise, 33)) {
            assert!(error.contains("needs a multiple of 128 rows"), "{rule:?}: {error}");
        }
    }
    for error in errors(|_| blocks(rows, true, 128)) {
        assert!(error.contains("gather a tensor without a columnwise copy"), "{error}");
    }
    // Blocks along the only dimension would lie in two shards.
    let vector = |rule| {
        let slot = Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E4M3) };
        quantized(&noise(100, 3), &[100], &slot, TransposePolicy::WithCast)
    };
    for rule in [rows, lines, mx] {
        for error in errors(|_| vector(rule)) {
            assert!(error.contains("need two dimensions"), "{error}");
        }
    }
    // Layouts that differ.
    let found = errors(|rank| blocks(lines, rank == 1, 128));
    assert!(found.iter().all(|error| error.contains("columnwise factors for")), "{found:?}");
}
