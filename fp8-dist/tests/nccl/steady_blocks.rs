//! Gathers with scales for rows and blocks, of columnwise codes, and in high precision, once ranks have agreed on them: nothing is
//! exchanged between hosts, and the call can be recorded.

use crate::rig::{Rig, SEEDS, SHORT, ranks, tensor, try_ranks};
use crate::steady::{shard, values};
use fp8_dist::{ProcessGroup, Result, gather_codes, quantized_all_gather};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::{BlockScaling, MxRounding};
use fp8_kernels::ops::DropoutKey;
use fp8_kernels::{
    BlockRule, DType, Device, DropoutDraw, Encoding, Fp8Tensor, Nvfp4Rule, Operand, Scale, ScaleRule, Shape,
    Slot, StochasticRounding, Tensor, TransposePolicy, ops,
};
use std::time::{Duration, Instant};

const COLS: usize = 140; // a whole block of 128 and a part of one

const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

fn slot(rule: BlockRule, columnwise: bool) -> Slot<'static> {
    Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(Encoding::E4M3) }
}

/// The shape, and the bytes of codes and factors of both layouts; of values in high precision the bytes.
fn bytes(x: &Operand) -> (Shape, Vec<Vec<u8>>) {
    let of = |x: &Tensor| match x.dtype() {
        DType::U8 => x.to_vec::<u8>().unwrap(),
        _ => x.to_f32_vec().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    match x {
        Operand::High(x) => (*x.shape(), vec![of(x)]),
        Operand::Fp8(x) => {
            let rowwise = x.rowwise().map(|codes| [of(codes), of(x.scale_inv())]);
            let columnwise = x.columnwise().zip(x.columnwise_scale_inv());
            let columnwise = columnwise.map(|(codes, factors)| [of(codes), of(factors)]);
            (*x.shape(), [rowwise, columnwise].into_iter().flatten().flatten().collect())
        }
    }
}

/// Compares `gather` of each rank's rows, eager and recorded, with `whole` of all on the CPU.
fn check(
    text: &str,
    dtype: DType,
    rows: &[usize],
    gather: impl Fn(&dyn ProcessGroup, &Tensor) -> Result<Operand> + Sync,
    whole: impl Fn(&Tensor) -> Operand + Sync,
) {
    let total: usize = rows.iter().sum();
    let x = |round: usize| values(total * COLS, round);
    let cpu = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
    let expected = |round| bytes(&whole(&tensor(&x(round), &[total, COLS], dtype, &cpu)));
    ranks(rows.len(), |group, device| {
        let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let of = |round| shard(&x(round), rows, group.rank(), COLS, DType::F32, &device);
        let run = |x: &Tensor| gather(&*group, &ops::cast(x, dtype)?);
        assert!(bytes(&run(&of(0)).unwrap()) == expected(0), "{text}");
        let exchanges = group.traffic().exchanges;
        assert!(bytes(&run(&of(1)).unwrap()) == expected(1), "{text}: again");
        let mut input = of(2);
        let (graph, found) = device.capture(|| run(&input)).unwrap();
        assert!(bytes(&found) == expected(2), "{text}: recorded");
        for round in 3..5 {
            input.write(&of(round).to_vec::<f32>().unwrap(), "input").unwrap();
            graph.replay().unwrap();
            assert!(bytes(&found) == expected(round), "{text}: replayed");
        }
        assert_eq!(group.traffic().exchanges, exchanges, "{text}");
        // The graph keeps what it needs.
        drop(group);
        graph.replay().unwrap();
        assert!(bytes(&found) == expected(4), "{text}: without the group");
    });
}

/// With scales for rows, lines, squares and MX blocks.
fn rules() -> [BlockRule; 4] {
    let [row, line, square] = [Blocks::Row, Blocks::B1x128, Blocks::B128x128]
        .map(|blocks| BlockRule::F32(BlockScaling::new(blocks)));
    [row, line, square, BlockRule::Mx(MxRounding::Ceil)]
}

#[test]
fn recorded_gathers_with_block_scales_are_those_of_one_device() {
    let rig = Rig::new();
    for (rule, seed) in rules().into_iter().zip(SEEDS) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        for (columnwise, dtype) in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
            // Shards of whole blocks, whose codes are gathered, and others, whose values are.
            for rows in [[128, 7], [3, 5]] {
                let slot = slot(rule, columnwise);
                let text = format!("{rule:?} {dtype} columnwise {columnwise} rows {rows:?}");
                let gather =
                    |group: &dyn ProcessGroup, x: &Tensor| quantized_all_gather(group, "x", x, &slot);
                check(&text, dtype, &rows, gather, |x| ops::quantize(x, &slot).unwrap());
            }
        }
    }
    rig.finish();
}

/// Tries ranks whose rows are whole blocks or not, rounded to nearest and stochastically.
#[test]
fn recorded_gathers_in_nvfp4_are_those_of_one_device() {
    let rig = Rig::new();
    let draw = DropoutDraw::from(DropoutKey { seed: 3, offset: 5 });
    for (rows, seed) in [[32, 16], [16, 5], [20, 12]].into_iter().zip(SEEDS) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        for (columnwise, dtype) in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
            let rule = Nvfp4Rule { hadamard: true, ..Nvfp4Rule::default() };
            let slot = Slot { scale: Scale::Nvfp4(rule), columnwise, ..Slot::off(Encoding::E2M1) };
            let text = format!("{dtype} columnwise {columnwise} rows {rows:?}");
            let gather = |group: &dyn ProcessGroup, x: &Tensor| quantized_all_gather(group, "x", x, &slot);
            check(&text, dtype, &rows, gather, |x| ops::quantize(x, &slot).unwrap());
        }
        // A draw on the host cannot be recorded.
        let rule = Nvfp4Rule {
            hadamard: true,
            random: Some(StochasticRounding::new(&draw)),
            ..Nvfp4Rule::default()
        };
        let slot = Slot { scale: Scale::Nvfp4(rule), columnwise: true, ..Slot::off(Encoding::E2M1) };
        let (total, cpu) = (rows.iter().sum::<usize>(), Device::cpu());
        let x = values(total * COLS, 1);
        let whole = ops::quantize(&tensor(&x, &[total, COLS], DType::F32, &cpu), &slot).unwrap();
        ranks(2, |group, device| {
            let shard = shard(&x, &rows, group.rank(), COLS, DType::F32, device);
            let found = quantized_all_gather(&*group, "x", &shard, &slot).unwrap();
            assert!(bytes(&found) == bytes(&whole), "rounded stochastically, rows {rows:?}");
        });
    }
    rig.finish();
}

#[test]
fn recorded_gathers_of_codes_are_those_of_one_device() {
    let rig = Rig::new();
    let one = Slot {
        scale: Scale::FromAmax { amax: 6.0, rule: &CURRENT },
        columnwise: true,
        ..Slot::off(Encoding::E4M3)
    };
    let [row, line, square, mx] = rules();
    type Change = fn(&Fp8Tensor) -> Fp8Tensor;
    let both: Change = Fp8Tensor::clone;
    let columnwise: Change = Fp8Tensor::for_backward;
    let deep: Change = |x| {
        let [rows, cols] = x.matrix();
        x.for_backward().reshape([rows / 2, 2, cols]).unwrap()
    };
    let mut cases = vec![(slot(row, false), both, "rowwise"), (one, columnwise, "one scale, columnwise")];
    for rule in [line, square, mx] {
        cases.push((slot(rule, false), both, "rowwise"));
        cases.push((slot(rule, true), both, "both"));
        cases.push((slot(rule, true), columnwise, "columnwise"));
        cases.push((slot(rule, true), deep, "columnwise, of three dimensions"));
    }
    for ((slot, change, layouts), seed) in cases.into_iter().zip(SEEDS.into_iter().cycle()) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let text = format!("{:?} {layouts}", slot.scale);
        let gather = |group: &dyn ProcessGroup, x: &Tensor| {
            let x = change(ops::quantize(x, &slot)?.as_fp8().unwrap());
            gather_codes(group, "x", &x).map(Operand::Fp8)
        };
        let whole = |x: &Tensor| Operand::Fp8(change(ops::quantize(x, &slot).unwrap().as_fp8().unwrap()));
        check(&text, DType::F32, &[128, 6], gather, whole);
    }
    rig.finish();
}

#[test]
fn recorded_gathers_in_high_precision_are_copies() {
    let rig = Rig::new();
    for dtype in [DType::F32, DType::BF16] {
        for rows in [[2, 2], [0, 3]] {
            let slot = Slot::off(Encoding::E4M3);
            let gather = |group: &dyn ProcessGroup, x: &Tensor| quantized_all_gather(group, "x", x, &slot);
            check(&format!("{dtype} rows {rows:?}"), dtype, &rows, gather, |x| Operand::High(x.clone()));
        }
    }
    rig.finish();
}

#[test]
fn shards_whose_scales_have_one_shape_are_told_apart() {
    let rig = Rig::new();
    let slot = slot(rules()[1], false);
    ranks(2, |group, device| {
        for _ in 0..2 {
            // Two scales a row both times.
            for (rows, cols) in [([5, 7], 256), ([5, 3], 130)] {
                let x = values((rows[0] + rows[1]) * cols, 1);
                let part = shard(&x, &rows, group.rank(), cols, DType::F32, device);
                let found = quantized_all_gather(&*group, "x", &part, &slot).unwrap();
                let whole = tensor(&x, &[rows[0] + rows[1], cols], DType::F32, &Device::cpu());
                assert!(bytes(&found) == bytes(&ops::quantize(&whole, &slot).unwrap()), "{rows:?}");
            }
        }
    });
    rig.finish();
}

#[test]
fn the_first_call_of_a_name_cannot_be_recorded() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let [x, longer] = [128, 256].map(|rows| Tensor::full(1.0, [rows, 16], DType::F32, device).unwrap());
        for slot in rules()[1..].iter().map(|rule| slot(*rule, true)) {
            let known = format!("known {:?}", slot.scale);
            for function in ["quantized_all_gather", "gather_codes"] {
                let gather = |what: &str, x: &Tensor| match function {
                    "gather_codes" => {
                        let codes = ops::quantize(x, &slot)?.as_fp8().unwrap().for_backward();
                        gather_codes(&*group, what, &codes).map(drop)
                    }
                    _ => quantized_all_gather(&*group, what, x, &slot).map(drop),
                };
                gather(&known, &x).unwrap();
                // Another name, and another shape.
                for (what, x) in [("x", &x), (&*known, &longer)] {
                    let refused = device.capture(|| gather(what, x)).unwrap_err().to_string();
                    let expected = format!(
                        "{function} `{what}`: cannot be recorded: call it once before recording, with this name and shape"
                    );
                    assert!(refused.starts_with(&expected), "{refused}");
                }
                // The group is usable.
                gather(&known, &x).unwrap();
            }
        }
    });
    rig.finish();
}

#[test]
fn columns_and_layouts_that_differ_are_told_at_the_first_call() {
    let rig = Rig::new();
    for rule in rules().into_iter().skip(1) {
        let error = |found: Result<Operand>| found.unwrap_err().to_string();
        let all = ranks(2, |group, device| {
            let x = Tensor::full(1.0, [128, 16 * (1 + group.rank())], DType::F32, device).unwrap();
            error(quantized_all_gather(&*group, "x", &x, &slot(rule, true)))
        });
        assert!(all.iter().all(|error| error.contains("[128, 32]")), "{all:?}");
        let all = ranks(2, |group, device| {
            let x = Tensor::full(1.0, [128, 16], DType::F32, device).unwrap();
            let x = ops::quantize(&x, &slot(rule, group.rank() == 1)).unwrap().as_fp8().unwrap().clone();
            error(gather_codes(&*group, "x", &x).map(Operand::Fp8))
        });
        assert!(all.iter().all(|error| error.contains("columnwise factors for")), "{all:?}");
    }
    rig.finish();
}

#[test]
fn rows_that_do_not_come_together_again_end_the_group() {
    let rig = Rig::new();
    for rule in [rules()[1], rules()[2]] {
        let started = Instant::now();
        let errors = try_ranks(2, SHORT, |group, device| {
            let gather = |rows: usize| -> Result<()> {
                let x = Tensor::full(1.0, [rows, 16], DType::F32, device)?;
                quantized_all_gather(&*group, "x", &x, &slot(rule, true))?;
                Ok(device.synchronize()?)
            };
            gather(128).unwrap();
            gather(128 * (1 + group.rank())).unwrap_err().to_string()
        });
        assert!(started.elapsed() < Duration::from_secs(6));
        for error in errors {
            let error = error.unwrap();
            assert!(error.contains("600ms"), "{error}");
        }
        rig.control.set("reset", "").unwrap();
    }
}

#[test]
fn factors_of_columnwise_codes_that_differ_are_told_at_the_next_wait() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let x = Tensor::full(1.0, [2, 16], DType::F32, &device).unwrap();
        let gather = |amax: f32| {
            let slot = Slot {
                scale: Scale::FromAmax { amax, rule: &CURRENT },
                columnwise: true,
                ..Slot::off(Encoding::E4M3)
            };
            let codes = ops::quantize(&x, &slot).unwrap().as_fp8().unwrap().for_backward();
            assert!(codes.rowwise().is_none());
            gather_codes(&*group, "x", &codes).unwrap()
        };
        gather(448.0);
        gather([448.0, 224.0][group.rank()]).codes().unwrap_err().to_string()
    });
    for error in errors {
        let expected =
            "gather_codes `x` by dequantization factors: the scale is 0.5 on rank 1 and 1 on rank 0";
        assert!(error.starts_with(expected), "{error}");
    }
    rig.finish();
}
