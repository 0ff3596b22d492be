//! `quantize_many` where some or all of the tensors are bf16 and consist of whole tiles: the kernel for those.

use super::case::{Outcome, cases};
use super::compare::same;
use super::data::{exact, normal};
use super::quantize::fp8;
use super::whole::{check, edged, matrix, needles_beside_nan, with_cast};
use crate::oracle::fp8;
use fp8_kernels::{Cell, DType, Device, Encoding, REST, Slot, ops};

cases![
    many_at_once: Formats,
    many_in_runs,
    an_amax_in_each_warp: Formats,
    an_amax_beside_nan: Formats,
];

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

/// Beside it are smaller values, and in one warp nothing but zeros.
fn an_amax_in_each_warp(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for warp in 0..8 {
        let value = |row: usize, col: usize| match (row / 16, row % 16, col) {
            (at, row, col) if at == warp && row == 2 * warp && col == 7 * warp => 0xC61C,
            (at, ..) if at == (warp + 3) % 8 => 0,
            _ => 0x3F80,
        };
        let bits = (0..128 * 64).map(|i| value(i / 64, i % 64)).collect();
        let x = matrix(bits, [128, 64], device)?;
        let many = |slot: &Slot<'_>| Ok(ops::quantize_many(&[(&x, *slot)])?.remove(0));
        check(&format!("{warp}"), &x, encoding, 2.0, many)?;
    }
    Ok(())
}

fn an_amax_beside_nan(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for (i, x) in needles_beside_nan(device)?.into_iter().enumerate() {
        let many = |slot: &Slot<'_>| Ok(ops::quantize_many(&[(&x, *slot)])?.remove(0));
        check(&format!("{i}"), &x, encoding, 2.0, many)?;
    }
    Ok(())
}
