//! `quantize` and `quantize_dbias` of bf16 matrices that consist of whole tiles, without counters: the kernels for those.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{exact, normal};
use super::quantize::fp8;
use super::whole::{EDGES, check, edged, matrix, needles_beside_nan, with_cast};
use crate::oracle::fp8;
use fp8_kernels::{Cell, DType, Device, Encoding, Scale, Slot, TransposePolicy, bf16, ops};

cases![
    every_value: Formats,
    special_values_in_each_place: Formats,
    several_strips_and_runs: Formats,
    sums_have_the_order_of_column_sums: Formats,
    sums_without_a_transpose,
    an_amax_in_each_place: Formats,
    an_amax_beside_nan: Formats,
];

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

fn an_amax_beside_nan(device: &Device, encoding: Encoding) -> Outcome {
    let device = &with_cast(device);
    for (i, x) in needles_beside_nan(device)?.into_iter().enumerate() {
        check(&format!("{i}"), &x, encoding, 2.0, |slot| ops::quantize(&x, slot))?;
        check(&format!("{i}, with sums"), &x, encoding, 2.0, |slot| Ok(ops::quantize_dbias(&x, slot)?.0))?;
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
