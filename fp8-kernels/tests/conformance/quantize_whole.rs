//! `quantize`, `quantize_dbias`, `quantize_many` and scales of blocks for matrices of bf16 that consist of whole tiles, without
//! counters: the kernels for those.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{Random, exact, normal, specials};
use super::quantize::fp8;
use super::quantize_blocks::{needle_in_each_row_and_column, needle_in_each_warp, rules, same_fp8, uneven};
use super::reference::{Got, same_as_cpu};
use crate::oracle::fp8;
use fp8_kernels::{
    BlockRule, Cell, DType, Device, Encoding, Operand, REST, Result, Scale, Slot, Tensor, TransposePolicy,
    bf16, ops,
};

cases![
    every_value: Formats,
    special_values_in_each_place: Formats,
    several_strips_and_runs: Formats,
    sums_have_the_order_of_column_sums: Formats,
    sums_without_a_transpose,
    an_amax_in_each_place: Formats,
    an_amax_beside_nan: Formats,
    many_at_once: Formats,
    many_in_runs,
    blocks: Formats,
    blocks_of_special_values: Formats,
    needles_in_blocks: Formats,
    blocks_with_sums,
];

/// NaN of both signs and the ends of their ranges, and what is beside them.
const EDGES: [u16; 9] = [0x7F81, 0x7FFF, 0xFF81, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F, 0x8000, 0x0001];

fn matrix(bits: Vec<u16>, [rows, cols]: [usize; 2], device: &Device) -> Result<Tensor> {
    Tensor::from_vec(bits.into_iter().map(bf16::from_bits).collect(), [rows, cols], device)
}

/// Normal values in which one in `every` is an edge.
fn edged(shape: [usize; 2], every: u64, seed: u64, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let mut value = || match random.bits() % every {
        0 => EDGES[(random.bits() % EDGES.len() as u64) as usize],
        _ => bf16::from_f32(random.normal()).to_bits(),
    };
    matrix((0..shape[0] * shape[1]).map(|_| value()).collect(), shape, device)
}

fn with_cast(device: &Device) -> Device {
    device.clone().with_transpose_policy(TransposePolicy::WithCast)
}

/// Codes, the transpose, amax and factor of `run`, against the oracle.
fn check(
    what: &str,
    x: &Tensor,
    encoding: Encoding,
    scale: f32,
    run: impl FnOnce(&Slot<'_>) -> Result<Operand>,
) -> Outcome {
    let device = x.device();
    let (cell, amax, rule) = (Cell::new(scale, device)?, Cell::new(REST, device)?, exact(encoding));
    let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
    let got = fp8(run(&slot)?)?;
    let want = fp8::quantize(&x.to_f32_vec()?, encoding, scale);
    let [rows, cols] = x.shape().matrix();
    same(what, &got.codes()?, &want.codes, cols)?;
    let turned = got.columnwise().ok_or("no transpose was made with the cast")?;
    same(
        &format!("{what}: transposed"),
        &turned.to_vec::<u8>()?,
        &fp8::transpose(&want.codes, rows, cols),
        rows,
    )?;
    same(&format!("{what}: amax"), &[amax.read()?], &[want.amax], 1)?;
    same(&format!("{what}: scale_inv"), &[got.scale_inv().item()?], &[1.0 / scale], 1)
}

fn every_value(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    let x = matrix((0..=u16::MAX).collect(), [256, 256], device)?;
    for scale in [1.0f32, -0.7, 57.3] {
        check(&format!("scale {scale}"), &x, encoding, scale.abs(), |slot| {
            // The sign of a cell says that its scale is not confirmed.
            let cell = Cell::new(scale, device)?;
            let rule = exact(encoding);
            ops::quantize(
                &x,
                &Slot { amax: slot.amax, columnwise: true, ..Slot::fixed(encoding, &cell, &rule) },
            )
        })?;
    }
    Ok(())
}

/// One edge in a tile: in each row and column of one thread's part, and at the tile's corners.
fn special_values_in_each_place(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    let part = (0..32).map(|i| [60 + i / 8, 24 + i % 8]);
    for (i, [row, col]) in part.chain([[0, 0], [0, 63], [127, 0], [127, 63]]).enumerate() {
        let mut bits: Vec<u16> = normal([128, 64], DType::BF16, 1, device)?
            .to_vec::<bf16>()?
            .iter()
            .map(|v| v.to_bits())
            .collect();
        bits[row * 64 + col] = EDGES[i % 4];
        let x = matrix(bits, [128, 64], device)?;
        check(&format!("NaN at [{row}, {col}]"), &x, encoding, 3.0, |slot| ops::quantize(&x, slot))?;
        let (q, _) = ops::quantize_dbias(
            &x,
            &Slot { scale: Scale::FromTensor(&exact(encoding)), ..Slot::off(encoding) },
        )?;
        same("dbias", &fp8(q)?.codes()?[row * 64 + col..][..1], &[0x7F], 1)?;
    }
    Ok(())
}

/// Strips beside each other, rows of tiles below each other, and as many tiles as make a simulated device's blocks take two, but
/// one of them one.
fn several_strips_and_runs(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for (i, shape) in [[128, 64], [128, 192], [384, 64], [256, 320], [97 * 128, 64]].into_iter().enumerate() {
        for every in [7, 1000, u64::MAX] {
            if every == 7 && shape[0] > 384 {
                continue;
            }
            let x = edged(shape, every, i as u64, device)?;
            check(&format!("{shape:?}"), &x, encoding, 1.7, |slot| ops::quantize(&x, slot))?;
        }
    }
    Ok(())
}

fn sums_have_the_order_of_column_sums(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for (i, shape) in [[128, 64], [384, 192], [97 * 128, 64]].into_iter().enumerate() {
        for every in [5000, u64::MAX] {
            let x = edged(shape, every, 10 + i as u64, device)?;
            let what = format!("{shape:?}, an edge in {every}");
            let mut dbias = None;
            check(&what, &x, encoding, 1.7, |slot| {
                let (codes, sums) = ops::quantize_dbias(&x, slot)?;
                dbias = Some(sums);
                Ok(codes)
            })?;
            let got = dbias.ok_or("no sums")?.to_f32_vec()?;
            same(&format!("{what}: sums"), &got, &ops::column_sums(&x)?.to_f32_vec()?, shape[1])?;
        }
    }
    Ok(())
}

fn sums_without_a_transpose(device: &Device) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::OnDemand);
    let (cell, rule) = (Cell::new(2.0, device)?, exact(Encoding::E5M2));
    let x = edged([256, 128], 900, 3, device)?;
    let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E5M2, &cell, &rule) };
    let (codes, sums) = ops::quantize_dbias(&x, &slot)?;
    let codes = fp8(codes)?;
    equal("a transpose", codes.columnwise().is_some(), false)?;
    same("codes", &codes.codes()?, &fp8::quantize(&x.to_f32_vec()?, Encoding::E5M2, 2.0).codes, 128)?;
    same("sums", &sums.to_f32_vec()?, &ops::column_sums(&x)?.to_f32_vec()?, 128)
}

/// The largest value in each place of one thread's part, with NaN in another place of it or without: maxima with and without NaN
/// are found in different ways.
fn an_amax_beside_nan(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    let place = |i: usize| (60 + i / 8) * 64 + 24 + i % 8;
    for i in 0..64 {
        let mut bits = vec![0x3F80; 128 * 64];
        bits[place(i % 32)] = bf16::from_f32(if i % 2 == 0 { 1e4 } else { -1e4 }).to_bits();
        if i < 32 {
            bits[place((i + 11) % 32)] = 0xFF81;
        }
        let x = matrix(bits, [128, 64], device)?;
        check(&format!("{i}"), &x, encoding, 2.0, |slot| ops::quantize(&x, slot))?;
        check(&format!("{i}, with sums"), &x, encoding, 2.0, |slot| Ok(ops::quantize_dbias(&x, slot)?.0))?;
        let many = |slot: &Slot<'_>| Ok(ops::quantize_many(&[(&x, *slot)])?.remove(0));
        check(&format!("{i}, of many"), &x, encoding, 2.0, many)?;
    }
    Ok(())
}

/// The largest value in every place that a thread's part has, and in every warp, with both signs.
fn an_amax_in_each_place(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    let noise: Vec<u16> =
        normal([256, 128], DType::BF16, 5, device)?.to_vec::<bf16>()?.iter().map(|v| v.to_bits()).collect();
    for place in (0..256 * 128).step_by(811) {
        let mut bits = noise.clone();
        bits[place] = bf16::from_f32(if place % 2 == 0 { 1e4 } else { -1e4 }).to_bits();
        // NaN beside it, in other parts, or nowhere.
        match place % 3 {
            0 => bits[place ^ 1] = 0xFFC0,
            1 => bits[(place + 64 * 128) % (256 * 128)] = 0x7F90,
            _ => {}
        }
        let x = matrix(bits, [256, 128], device)?;
        check(&format!("a needle at {place}"), &x, encoding, 2.0, |slot| ops::quantize(&x, slot))?;
    }
    Ok(())
}

/// Whole tiles of both formats among other tensors, some of which keep no amax.
fn many_at_once(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    let other = if encoding == Encoding::E4M3 { Encoding::E5M2 } else { Encoding::E4M3 };
    let kinds = [
        ([128, 64], DType::BF16, encoding),
        ([130, 66], DType::BF16, encoding),
        ([384, 192], DType::BF16, other),
        ([128, 64], DType::F32, encoding),
        ([128, 128], DType::BF16, encoding),
        ([256, 64], DType::F16, other),
        ([128, 72], DType::BF16, encoding),
        ([136, 64], DType::BF16, encoding),
    ];
    check_many(&kinds, device)
}

/// More tiles than make a simulated device's blocks take two: runs begin within rows of tiles and end in the next tensor.
fn many_in_runs(device: &Device) -> Outcome {
    let device = &with_cast(device);
    let kinds = [
        ([384, 64 * 11], DType::BF16, Encoding::E4M3),
        ([128, 64 * 3], DType::BF16, Encoding::E5M2),
        ([640, 64 * 13], DType::BF16, Encoding::E4M3),
    ];
    check_many(&kinds, device)
}

fn check_many(kinds: &[([usize; 2], DType, Encoding)], device: &Device) -> Outcome {
    let mut tensors = Vec::new();
    for (i, &(shape, dtype, encoding)) in kinds.iter().enumerate() {
        let x = if dtype == DType::BF16 {
            edged(shape, 500, i as u64, device)?
        } else {
            normal(shape, dtype, i as u64, device)?
        };
        let scale = 0.5 + i as f32;
        tensors.push((x, Cell::new(scale, device)?, Cell::new(REST, device)?, exact(encoding), scale));
    }
    let slots =
        tensors.iter().zip(kinds).enumerate().map(|(i, ((x, cell, amax, rule, _), &(_, _, encoding)))| {
            let amax = (i % 3 != 1).then_some(amax);
            (x, Slot { amax, columnwise: true, ..Slot::fixed(encoding, cell, rule) })
        });
    let together = ops::quantize_many(&slots.collect::<Vec<_>>())?;
    for (i, (operand, (x, _, amax, _, scale))) in together.into_iter().zip(&tensors).enumerate() {
        let (shape, dtype, encoding) = kinds[i];
        let (what, got) = (format!("{i}: {dtype} {shape:?}"), fp8(operand)?);
        let want = fp8::quantize(&x.to_f32_vec()?, encoding, *scale);
        same(&what, &got.codes()?, &want.codes, shape[1])?;
        let turned = got.columnwise().ok_or("no transpose was made with the cast")?;
        same(&what, &turned.to_vec::<u8>()?, &fp8::transpose(&want.codes, shape[0], shape[1]), shape[0])?;
        same(&what, &[got.scale_inv().item()?], &[1.0 / scale], 1)?;
        same(&what, &[amax.read()?], &[if i % 3 == 1 { REST } else { want.amax }], 1)?;
    }
    Ok(())
}

/// Codes, factors and the amax under `rule`, with nothing counted.
fn by_blocks(x: &Tensor, encoding: Encoding, rule: BlockRule, columnwise: bool) -> Result<Vec<Got>> {
    let amax = Cell::new(REST, x.device())?;
    let slot = Slot { amax: Some(&amax), columnwise, scale: Scale::Blocks(rule), ..Slot::off(encoding) };
    let operand = ops::quantize(x, &slot)?;
    let mut all = vec![Got::Numbers(vec![amax.read()?])];
    all.extend(operand.as_fp8().cloned().map(Got::from));
    Ok(all)
}

fn blocks(device: &Device, encoding: Encoding) -> Outcome {
    for (i, rule) in rules().into_iter().enumerate() {
        for (turn, shape) in [[128, 128], [256, 384], [384, 128]].into_iter().enumerate() {
            let columnwise = (turn + i) % 4 != 3;
            same_as_cpu(&format!("{shape:?} {rule:?}, columnwise: {columnwise}"), device, |device| {
                let x = uneven(shape, DType::BF16, turn as u64, device)?;
                by_blocks(&x, encoding, rule, columnwise)
            })?;
        }
    }
    Ok(())
}

/// Rows, columns and blocks of nothing but one value, and tiles in which each thread meets edges.
fn blocks_of_special_values(device: &Device, encoding: Encoding) -> Outcome {
    let specials = specials();
    for (i, rule) in rules().into_iter().enumerate() {
        let mut random = Random::new(i as u64);
        let noise: Vec<f32> = (0..128 * 256).map(|_| random.normal()).collect();
        let inputs = [
            // The left tile has a value for each row, the right one a value for each block of 32, and zeros.
            (0..128 * 256)
                .map(|at| (at / 256, at % 256))
                .map(|(row, col)| match col / 128 {
                    0 => specials[row % specials.len()],
                    _ if row / 32 == 1 => specials[(col / 32 + i) % specials.len()],
                    _ if row % 3 == 0 => specials[col % specials.len()],
                    _ => 0.0,
                })
                .collect::<Vec<f32>>(),
            noise
                .iter()
                .enumerate()
                .map(|(at, &v)| if at % 37 == i { specials[at / 37 % specials.len()] } else { v })
                .collect(),
        ];
        for values in inputs {
            same_as_cpu(&format!("{rule:?}"), device, |device| {
                let bits = values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
                by_blocks(&matrix(bits, [128, 256], device)?, encoding, rule, true)
            })?;
        }
    }
    for (value, rule) in EDGES.into_iter().zip(rules()) {
        same_as_cpu(&format!("{value:#x} {rule:?}"), device, |device| {
            by_blocks(&matrix(vec![value; 128 * 128], [128, 128], device)?, encoding, rule, true)
        })?;
    }
    Ok(())
}

/// Each row's, column's and block's largest value in a place of its own, and the tile's in each warp in turn; and NaN in each
/// place of a thread's part.
fn needles_in_blocks(device: &Device, encoding: Encoding) -> Outcome {
    let quantized = |values: &[f32], rule: BlockRule| {
        same_as_cpu(&format!("{rule:?}"), device, |device| {
            let bits = values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
            by_blocks(&matrix(bits, [128, 128], device)?, encoding, rule, true)
        })
    };
    for rule in rules() {
        quantized(&needle_in_each_row_and_column(), rule)?;
    }
    for (values, rule) in needle_in_each_warp() {
        quantized(&values, rule)?;
    }
    for (i, rule) in (0..32).zip(rules().into_iter().cycle()) {
        let mut values = needle_in_each_row_and_column();
        values[(44 + i / 8) * 128 + 72 + i % 8] = if i % 2 == 0 { f32::NAN } else { -f32::NAN };
        quantized(&values, rule)?;
    }
    Ok(())
}

fn blocks_with_sums(device: &Device) -> Outcome {
    for rule in rules() {
        for (shape, every) in [([128, 128], u64::MAX), ([256, 256], 3000)] {
            let dy = edged(shape, every, 4, device)?;
            let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(Encoding::E5M2) };
            let (codes, dbias) = ops::quantize_dbias(&dy, &slot)?;
            let what = format!("{shape:?} {rule:?}");
            same_fp8(&what, &codes, &ops::quantize(&dy, &slot)?)?;
            let sums = ops::column_sums(&dy)?.to_f32_vec()?;
            same(&what, &dbias.to_f32_vec()?, &sums, shape[1])?;
        }
    }
    Ok(())
}
