//! Checks of scales of rows and blocks for bf16 matrices that consist of whole tiles, without counters.

use super::case::Outcome;
use super::compare::same;
use super::data::{Random, specials};
use super::quantize_blocks::{needle_in_each_row_and_column, needle_in_each_warp, rules, same_fp8, uneven};
use super::reference::{Got, same_as_cpu};
use super::whole::{EDGES, edged, matrix};
use fp8_format::Blocks;
use fp8_kernels::Tensor;
use fp8_kernels::{BlockRule, Cell, DType, Device, Encoding, REST, Result, Scale, Slot, bf16, ops};

/// The rules with these blocks.
pub(super) fn rules_of(blocks: &[Blocks]) -> Vec<BlockRule> {
    rules().into_iter().filter(|rule| blocks.contains(&rule.blocks())).collect()
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

/// Several tiles, in both directions.
pub(super) fn several_tiles(device: &Device, encoding: Encoding, rules: &[BlockRule]) -> Outcome {
    for (i, rule) in rules.iter().copied().enumerate() {
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
pub(super) fn special_values(device: &Device, encoding: Encoding, rules: &[BlockRule]) -> Outcome {
    let specials = specials();
    for (i, rule) in rules.iter().copied().enumerate() {
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
    for (value, rule) in EDGES.into_iter().zip(rules.iter().copied().cycle()) {
        same_as_cpu(&format!("{value:#x} {rule:?}"), device, |device| {
            by_blocks(&matrix(vec![value; 128 * 128], [128, 128], device)?, encoding, rule, true)
        })?;
    }
    Ok(())
}

/// Each row's, column's and block's largest value in a place of its own, and the tile's in each warp in turn; and NaN in each
/// place of a thread's part.
pub(super) fn needles(device: &Device, encoding: Encoding, rules: &[BlockRule]) -> Outcome {
    let quantized = |values: &[f32], rule: BlockRule| {
        same_as_cpu(&format!("{rule:?}"), device, |device| {
            let bits = values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
            by_blocks(&matrix(bits, [128, 128], device)?, encoding, rule, true)
        })
    };
    for &rule in rules {
        quantized(&needle_in_each_row_and_column(), rule)?;
    }
    for (values, rule) in needle_in_each_warp(rules) {
        quantized(&values, rule)?;
    }
    for (i, rule) in (0..32).zip(rules.iter().copied().cycle()) {
        let mut values = needle_in_each_row_and_column();
        values[(44 + i / 8) * 128 + 72 + i % 8] = if i % 2 == 0 { f32::NAN } else { -f32::NAN };
        quantized(&values, rule)?;
    }
    // The largest value in each place of a thread's part, with NaN in the same column.
    for (i, kind) in rules.iter().enumerate() {
        if rules[..i].iter().any(|before| before.blocks() == kind.blocks()) {
            continue;
        }
        let place = |i: usize| (44 + i / 8) * 128 + 72 + i % 8;
        for i in 0..32 {
            let mut values = vec![1.0; 128 * 128];
            values[place(i)] = if i % 2 == 0 { 300.0 } else { -300.0 };
            values[place((i + 8) % 32)] = f32::NAN;
            quantized(&values, *kind)?;
        }
    }
    Ok(())
}

/// Sums of columns beside the codes.
pub(super) fn sums(device: &Device, encoding: Encoding, rules: &[BlockRule]) -> Outcome {
    for &rule in rules {
        for (shape, every) in [([128, 128], u64::MAX), ([256, 256], 3000)] {
            let dy = edged(shape, every, 4, device)?;
            let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(encoding) };
            let (codes, dbias) = ops::quantize_dbias(&dy, &slot)?;
            let what = format!("{shape:?} {rule:?}");
            same_fp8(&what, &codes, &ops::quantize(&dy, &slot)?)?;
            let sums = ops::column_sums(&dy)?.to_f32_vec()?;
            same(&what, &dbias.to_f32_vec()?, &sums, shape[1])?;
        }
    }
    Ok(())
}

/// `cases_of![B1x128, B128x128]`: the cases of a file whose kernels quantize with these scales.
macro_rules! cases_of {
    ($($blocks:ident),+) => {
        $crate::cases::whole_blocks::cases_of!(
            [$(fp8_format::Blocks::$blocks),+] several_tiles, special_values, needles, sums
        );
    };
    ($blocks:tt $($name:ident),+) => {
        $crate::cases::case::cases![$($name: Formats),+];

        $(fn $name(
            device: &fp8_kernels::Device,
            encoding: fp8_kernels::Encoding,
        ) -> $crate::cases::case::Outcome {
            let rules = $crate::cases::whole_blocks::rules_of(&$blocks);
            $crate::cases::whole_blocks::$name(device, encoding, &rules)
        })+
    };
}
pub(crate) use cases_of;
