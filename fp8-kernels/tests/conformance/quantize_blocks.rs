//! `quantize` with scales for rows, blocks and MX blocks, and the way back, bit for bit as on the CPU, which is compared with recorded
//! data in `fp8-format` and `tests/blocks.rs`.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{ENCODINGS, FLOATS, Random, specials, tensor};
use super::reference::{Got, same_as_cpu, same_blocks};
use fp8_format::Blocks;
use fp8_format::slice::{BlockScaling, MxRounding};
use fp8_kernels::{
    BlockRule, Cell, Counters, DType, Device, Encoding, Fp8Tensor, Operand, REST, Result, Scale, Slot,
    Tensor, ops,
};

cases![
    codes_and_factors: DtypesAndFormats,
    special_values: DtypesAndFormats,
    scales_of_every_exponent: Formats,
    needles: Dtypes,
    many_tensors,
    dbias_sums_the_unquantized: Dtypes,
    dequantizes: Formats,
    tiles_are_transposed_on_demand,
    tensors_without_elements,
];

/// One value, partial blocks in both directions, whole ones, and tiles that end within a block of 32.
const SHAPES: [[usize; 2]; 8] =
    [[1, 1], [3, 40], [5, 129], [96, 33], [256, 128], [130, 72], [97, 260], [257, 16]];

/// All rules, with other epsilons and bounds than the defaults among them.
pub(super) fn rules() -> Vec<BlockRule> {
    let scaling = |blocks, power_2_scales| BlockScaling { power_2_scales, ..BlockScaling::new(blocks) };
    let mut rules: Vec<BlockRule> = [Blocks::Row, Blocks::B1x128, Blocks::B128x128]
        .into_iter()
        .flat_map(|blocks| [scaling(blocks, false), scaling(blocks, true)])
        .map(BlockRule::F32)
        .collect();
    rules.extend([MxRounding::Ceil, MxRounding::Floor].map(BlockRule::Mx));
    rules.push(BlockRule::RowsThenTensor(scaling(Blocks::Row, true)));
    rules.push(BlockRule::F32(BlockScaling { epsilon: 0.25, ..scaling(Blocks::B1x128, false) }));
    rules.push(BlockRule::F32(BlockScaling { scale_max: Some(3.5e5), ..scaling(Blocks::B128x128, false) }));
    rules.push(BlockRule::RowsThenTensor(BlockScaling { epsilon: 0.5, ..scaling(Blocks::Row, false) }));
    rules
}

/// One rule for each way in which amaxes are found: of a tile, of all columns, of MX blocks and of 1 × 128 blocks.
pub(super) fn rules_for_warps() -> Vec<BlockRule> {
    let rules = rules();
    [4, 8, 6, 2].map(|rule: usize| rules[rule]).to_vec()
}

/// Rows and columns of sizes that differ from neighbour to neighbour, so that the scale of another block shows.
pub(super) fn uneven([rows, cols]: [usize; 2], dtype: DType, seed: u64, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let size = |i: usize| f32::powi(2.0, (i % cols / 16 % 5) as i32 * 2 - (i / cols / 8 % 3) as i32 * 3);
    tensor((0..rows * cols).map(|i| random.normal() * size(i)).collect(), [rows, cols], dtype, device)
}

/// Codes of a tensor under `slot`, its amax and its counters.
pub(super) fn results(
    device: &Device,
    encoding: Encoding,
    rule: BlockRule,
    columnwise: bool,
    run: impl FnOnce(&Slot<'_>) -> Result<Operand>,
) -> Result<Vec<Got>> {
    let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
    let (amax_cell, counts) = (Some(&amax), Some(&counters));
    let scale = Scale::Blocks(rule);
    let slot = Slot { scale, amax: amax_cell, counters: counts, columnwise, ..Slot::off(encoding) };
    let operand = run(&slot)?;
    let counts = counters.read()?;
    let numbers = [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|n| n as f32);
    let mut all = vec![Got::Numbers([&numbers[..], &[amax.read()?]].concat())];
    all.extend(operand.as_fp8().cloned().map(Got::from));
    Ok(all)
}

fn codes_and_factors(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    for (turn, shape) in SHAPES.into_iter().enumerate() {
        for (i, rule) in rules().into_iter().enumerate() {
            // Each shape with half of the rules, and one copy or both.
            if (turn + i + encoding as usize).is_multiple_of(2) {
                continue;
            }
            let columnwise = !(turn + i / 2 + dtype as usize).is_multiple_of(4);
            let what = format!("{dtype} {shape:?} {encoding} {rule:?}, columnwise: {columnwise}");
            same_as_cpu(&what, device, |device| {
                let x = uneven(shape, dtype, turn as u64, device)?;
                results(device, encoding, rule, columnwise, |slot| ops::quantize(&x, slot))
            })?;
        }
    }
    for (cols, rule) in RAGGED.zip(rules()) {
        same_as_cpu(&format!("{dtype} {cols} columns, {encoding} {rule:?}"), device, |device| {
            let x = uneven([5, cols], dtype, 1, device)?;
            results(device, encoding, rule, true, |slot| ops::quantize(&x, slot))
        })?;
    }
    Ok(())
}

/// Rows of zeros, subnormals, the largest, infinities and NaN, each in a block with others and in a block of its own.
fn special_rows(specials: &[f32]) -> (Vec<f32>, [usize; 2]) {
    let mut random = Random::new(3);
    let mut values = Vec::new();
    for &special in specials {
        // 32 of this one, 96 among others, 32 of it and of zeros, which take the longer way to codes in each lane.
        values.extend([special; 32]);
        values.extend((0..96).map(|i| if i == 50 { special } else { random.normal() }));
        values.extend((0..32).map(|i| if (i + i / 8) % 2 == 0 { special } else { 0.0 }));
    }
    (values, [specials.len(), 160])
}

fn special_values(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    for (i, rule) in rules().into_iter().enumerate() {
        // Each value is in each of a thread's four rows in turn.
        let mut specials = specials();
        specials.rotate_right(i / 2 % 4);
        let (mut values, shape @ [rows, cols]) = special_rows(&specials);
        if i % 2 == 1 {
            // Beside an infinity the scale is 1, and values saturate.
            (0..rows).for_each(|row| values[row * cols + 129] = f32::INFINITY);
        }
        same_as_cpu(&format!("{dtype} {encoding} {rule:?}"), device, |device| {
            let x = tensor(values.clone(), shape, dtype, device)?;
            results(device, encoding, rule, i % 3 != 0, |slot| ops::quantize(&x, slot))
        })?;
    }
    Ok(())
}

/// Amaxes of every binade, at and beside its powers of two and beside 1.75 times those, where MX scales change.
fn scales_of_every_exponent(device: &Device, encoding: Encoding) -> Outcome {
    let amaxes = (0..255u32).flat_map(|exponent| {
        [0, 1, 0x0060_0000, 0x0060_0001, 0x007f_ffff]
            .map(|mantissa| f32::from_bits(exponent << 23 | mantissa))
    });
    // An amax, and one that is a quarter of it, in each block of 32.
    let values: Vec<f32> =
        amaxes.flat_map(|amax| (0..32).map(move |i| if i == 7 { amax } else { amax * 0.25 })).collect();
    let rows = values.len() / 32;
    for rule in rules() {
        same_as_cpu(&format!("{encoding} {rule:?}"), device, |device| {
            let x = Tensor::from_vec(values.clone(), [rows, 32], device)?;
            results(device, encoding, rule, false, |slot| ops::quantize(&x, slot))
        })?;
    }
    Ok(())
}

/// Columns of which a thread's eight leave each number over.
pub(super) const RAGGED: std::ops::Range<usize> = 9..16;

/// Rows and columns of a whole tile.
pub(super) const TILE: usize = 128;

/// A tile of 0.5 with one larger value in each row and each column, such that every row of a thread meets every lane of its
/// columns; no two neighbours are equal.
pub(super) fn needle_in_each_row_and_column() -> Vec<f32> {
    let mut values = vec![0.5; TILE * TILE];
    for row in 0..TILE {
        values[row * TILE + row / 4 + row % 4 * 32] = 3.0 + 0.37 * (row % 13) as f32;
    }
    values
}

/// For each of a thread block's warps a tile whose largest value is in one of its rows, and one of the rules in turn: the tile's
/// amax is found from every quarter of its rows, and the amax of all columns from every quarter of them. Beside the value are
/// zeros, which take the longer way to their codes, or not: each lane meets both.
pub(super) fn needle_in_each_warp(rules: &[BlockRule]) -> impl Iterator<Item = (Vec<f32>, BlockRule)> {
    (0..16).zip(rules.iter().cycle()).map(|(warp, &rule)| {
        let mut values = vec![if warp < 8 { 0.0 } else { 0.5 }; TILE * TILE];
        values[(8 * warp + warp % 8) * TILE + 8 * warp + warp % 8] = 30.0;
        (values, rule)
    })
}

/// Each row's, column's and block's largest value in a place of its own, and the tile's in each warp in turn.
fn needles(device: &Device, dtype: DType) -> Outcome {
    let quantized = |values: &[f32], rule: BlockRule| {
        same_as_cpu(&format!("{dtype} {rule:?}"), device, |device| {
            let x = tensor(values.to_vec(), [TILE, TILE], dtype, device)?;
            results(device, Encoding::E4M3, rule, true, |slot| ops::quantize(&x, slot))
        })
    };
    for (i, rule) in rules().into_iter().enumerate() {
        if i % 3 == dtype as usize % 3 {
            quantized(&needle_in_each_row_and_column(), rule)?;
        }
    }
    if dtype == DType::F32 {
        for (values, rule) in needle_in_each_warp(&rules_for_warps()) {
            quantized(&values, rule)?;
        }
    }
    Ok(())
}

fn many_tensors(device: &Device) -> Outcome {
    let rules = rules();
    let operands = |device: &Device| -> Result<Vec<Got>> {
        let tensors: Vec<Tensor> = (0..rules.len())
            .map(|i| uneven([3 + 9 * i, 50 + 30 * i], FLOATS[i % 3], i as u64, device))
            .collect::<Result<_>>()?;
        let slots = tensors.iter().zip(&rules).map(|(x, rule)| {
            (x, Slot { scale: Scale::Blocks(*rule), columnwise: true, ..Slot::off(Encoding::E4M3) })
        });
        let operands = ops::quantize_many(&slots.collect::<Vec<_>>())?;
        Ok(operands.iter().filter_map(Operand::as_fp8).cloned().map(Got::from).collect())
    };
    same_as_cpu("many tensors", device, operands)
}

fn dbias_sums_the_unquantized(device: &Device, dtype: DType) -> Outcome {
    for (i, shape) in [[5, 129], [140, 72], [300, 16]].into_iter().enumerate() {
        for rule in rules() {
            let dy = uneven(shape, dtype, i as u64, device)?;
            let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(Encoding::E5M2) };
            let (codes, dbias) = ops::quantize_dbias(&dy, &slot)?;
            let alone = ops::quantize(&dy, &slot)?;
            let what = format!("{dtype} {shape:?} {rule:?}");
            same_fp8(&what, &codes, &alone)?;
            let sums = ops::column_sums(&dy)?.to_f32_vec()?;
            same(&what, &dbias.to_f32_vec()?, &sums, shape[1])?;
        }
    }
    Ok(())
}

pub(super) fn same_fp8(what: &str, got: &Operand, want: &Operand) -> Outcome {
    let fp8 = |operand: &Operand| -> Result<Fp8Tensor, String> {
        operand.as_fp8().cloned().ok_or_else(|| "got high precision, want FP8".to_owned())
    };
    same_blocks(what, &fp8(got)?, &fp8(want)?)
}

/// Into every type, both layouts, and special values with the smallest and the largest factors.
fn dequantizes(device: &Device, encoding: Encoding) -> Outcome {
    let numbers: Vec<f32> = specials().into_iter().step_by(2).filter(|value| !value.is_nan()).collect();
    let (special, special_shape) = special_rows(&numbers);
    for shape in [[5, 129], [130, 72], [3, 256], [33, 96], special_shape] {
        for rule in rules() {
            same_as_cpu(&format!("{shape:?} {rule:?}"), device, |device| {
                let x = if shape == special_shape {
                    tensor(special.clone(), shape, DType::F32, device)?
                } else {
                    uneven(shape, DType::F32, 5, device)?
                };
                let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(encoding) };
                let codes = ops::quantize(&x, &slot)?;
                let turned = codes.as_fp8().map(Fp8Tensor::transposed).transpose()?;
                let mut all = Vec::new();
                for dtype in FLOATS {
                    all.push(Got::Tensor(codes.dequantize(dtype)?));
                    let turned = turned.as_ref().map(|turned| turned.dequantize(dtype)).transpose()?;
                    all.extend(turned.map(Got::Tensor));
                }
                Ok(all)
            })?;
        }
    }
    Ok(())
}

/// The only blocks whose transpose can be made from codes.
fn tiles_are_transposed_on_demand(device: &Device) -> Outcome {
    for shape in [[130, 260], [3, 300]] {
        let x = uneven(shape, DType::F32, 5, device)?;
        let rule = BlockRule::F32(BlockScaling::new(Blocks::B128x128));
        let slot = |columnwise| Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(Encoding::E4M3) };
        let both = ops::quantize(&x, &slot(true))?.as_fp8().cloned().ok_or("want FP8")?;
        let made = ops::quantize(&x, &slot(false))?.as_fp8().cloned().ok_or("want FP8")?.with_columnwise()?;
        same_blocks(&format!("{shape:?}"), &made, &both)?;
        let back = both.for_backward();
        equal("without the rowwise codes", back.rowwise().is_none(), true)?;
        same("codes made back", &back.codes()?, &both.codes()?, shape[1])?;
        let values = both.dequantize(DType::F32)?.to_f32_vec()?;
        same("values made back", &back.dequantize(DType::F32)?.to_f32_vec()?, &values, shape[1])?;
    }
    Ok(())
}

fn tensors_without_elements(device: &Device) -> Outcome {
    for rule in rules() {
        for shape in [[0, 5], [3, 0]] {
            for encoding in ENCODINGS {
                same_as_cpu(&format!("{shape:?} {rule:?}"), device, |device| {
                    let x = Tensor::zeros(shape, DType::F32, device)?;
                    results(device, encoding, rule, true, |slot| ops::quantize(&x, slot))
                })?;
            }
        }
    }
    Ok(())
}
