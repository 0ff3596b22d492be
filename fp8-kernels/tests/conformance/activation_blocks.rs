//! Activations and their gradients with scales for rows, blocks and MX blocks, bit for bit as on the CPU.

use super::case::{Outcome, cases};
use super::compare::same;
use super::data::{ENCODINGS, FLOATS, Random, specials, tensor};
use super::quantize_blocks::{
    RAGGED, TILE, needle_in_each_row_and_column, needle_in_each_warp, results, rules, rules_for_warps, uneven,
};
use super::reference::{Got, same_as_cpu};
use fp8_kernels::ops::Activation;
use fp8_kernels::{BlockRule, DType, Device, Encoding, Result, Scale, Slot, Tensor, ops};

cases![
    activations: Dtypes,
    gradients_of_activations: Dtypes,
    special_values: DtypesAndFormats,
    ragged_columns: Dtypes,
    needles,
    far_values: Dtypes,
];

/// Partial blocks in both directions, tiles of one row and of one column, whole tiles one below the other.
const SHAPES: [[usize; 2]; 5] = [[96, 72], [129, 129], [5, 136], [256, 128], [33, 13]];

/// A shape, and the quantization to test on it.
struct Turn {
    shape: [usize; 2],
    rule: BlockRule,
    encoding: Encoding,
    columnwise: bool,
}

/// A third of the rules for the `i`-th activation: over all activations and types each rule meets each shape.
fn turns(i: usize, dtype: DType) -> impl Iterator<Item = Turn> {
    rules().into_iter().skip(i % 3).step_by(3).enumerate().map(move |(j, rule)| Turn {
        shape: SHAPES[(4 * i + j + dtype as usize) % SHAPES.len()],
        rule,
        encoding: ENCODINGS[(i + j + dtype as usize) % 2],
        columnwise: !(i + 2 * j).is_multiple_of(5),
    })
}

/// The shape of an activation's input.
fn input([rows, cols]: [usize; 2], activation: Activation) -> [usize; 2] {
    [rows, if activation.is_gated() { 2 * cols } else { cols }]
}

fn activations(device: &Device, dtype: DType) -> Outcome {
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        for Turn { shape, rule, encoding, columnwise } in turns(i, dtype) {
            same_as_cpu(&format!("{activation} {dtype} {shape:?} {encoding} {rule:?}"), device, |device| {
                let h = uneven(input(shape, activation), dtype, i as u64, device)?;
                results(device, encoding, rule, columnwise, |slot| ops::activation(&h, activation, slot))
            })?;
        }
    }
    Ok(())
}

/// With sums of columns, whose order is that of the device's own column sums.
fn gradients_of_activations(device: &Device, dtype: DType) -> Outcome {
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        for Turn { shape, rule, encoding, columnwise } in turns(i, dtype) {
            let what = format!("{activation} {dtype} {shape:?} {encoding} {rule:?}");
            let gradient = |device: &Device, h: &Tensor, slot: &Slot<'_>| {
                let dy = uneven(shape, FLOATS[i % 3], 20 + i as u64, device)?;
                ops::activation_backward_quantize_dbias(&dy, h, activation, slot)
            };
            let [rows, width] = input(shape, activation);
            same_as_cpu(&what, device, |device| {
                let h = uneven([rows, width], dtype, i as u64, device)?;
                results(device, encoding, rule, columnwise, |slot| {
                    gradient(device, &h, slot).map(|(codes, _)| codes)
                })
            })?;
            let h = uneven([rows, width], dtype, i as u64, device)?;
            let slot = Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(encoding) };
            let sums = gradient(device, &h, &slot)?.1.to_f32_vec()?;
            let high = gradient(device, &h, &Slot::off(encoding))?.1.to_f32_vec()?;
            same(&what, &sums, &high, width)?;
        }
    }
    Ok(())
}

/// A matrix that has each special value in all lanes, and once among others; in some rows beside an infinity, so that the scale
/// is 1 and values saturate. In the last rows, NaN is in each of the eight places of a vector alone.
fn special_matrix(beside_infinity: bool) -> (Vec<f32>, [usize; 2]) {
    let (specials, cols) = (specials(), 72);
    let mut random = Random::new(3);
    let mut values = Vec::new();
    for (row, &special) in specials.iter().enumerate() {
        values.extend([special; 32]);
        values.extend((32..48).map(|col| if col % 16 == row % 16 { special } else { random.normal() }));
        // Beside zeros each lane takes the longer way to codes.
        values.extend((48..64).map(|col| if (col + col / 8) % 2 == 0 { special } else { 0.0 }));
        values.extend((64..72).map(|col| if beside_infinity && col == 64 { f32::INFINITY } else { special }));
    }
    for place in 0..8 {
        values.extend((0..cols).map(|col| if col == 9 * place { f32::NAN } else { random.normal() }));
    }
    (values, [specials.len() + 8, cols])
}

/// The values themselves, by functions that are the identity for positive inputs and for what they are multiplied by.
fn special_values(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let first = (dtype as usize + encoding as usize) % 3;
    for (i, rule) in rules().into_iter().enumerate().skip(first).step_by(3) {
        let (values, shape @ [rows, cols]) = special_matrix(i / 3 % 2 == 1);
        let ones = |device: &Device| Tensor::full(1.0, shape, dtype, device);
        let special = |device: &Device| tensor(values.clone(), shape, dtype, device);
        // Both halves of each row.
        let gated = |left: &[f32], right: &[f32], device: &Device| {
            let halves = left.chunks(cols).zip(right.chunks(cols));
            tensor(halves.flat_map(|(a, b)| [a, b].concat()).collect(), [rows, 2 * cols], dtype, device)
        };
        let one = vec![1.0; rows * cols];
        let backward = |activation: Activation, dy: Tensor, h: Tensor, device: &Device| {
            results(device, encoding, rule, true, |slot| {
                ops::activation_backward_quantize_dbias(&dy, &h, activation, slot).map(|(codes, _)| codes)
            })
        };
        same_as_cpu(&format!("{dtype} {encoding} {rule:?}"), device, |device: &Device| {
            let (relu, reglu) = (Activation::Relu, Activation::Reglu);
            let [plain, gate] = [special(device)?, gated(&one, &values, device)?];
            let mut all = results(device, encoding, rule, true, |slot| ops::activation(&plain, relu, slot))?;
            all.extend(results(device, encoding, rule, true, |slot| ops::activation(&gate, reglu, slot))?);
            let values_first = gated(&values, &one, device)?;
            all.extend(results(device, encoding, rule, true, |slot| {
                ops::activation(&values_first, reglu, slot)
            })?);
            all.extend(backward(relu, special(device)?, ones(device)?, device)?);
            all.extend(backward(relu, ones(device)?, special(device)?, device)?);
            all.extend(backward(Activation::Srelu, ones(device)?, special(device)?, device)?);
            all.extend(backward(reglu, special(device)?, gated(&one, &one, device)?, device)?);
            all.extend(backward(reglu, ones(device)?, gated(&values, &one, device)?, device)?);
            all.extend(backward(Activation::Sreglu, ones(device)?, gated(&values, &one, device)?, device)?);
            Ok::<_, fp8_kernels::Error>(all)
        })?;
    }
    Ok(())
}

/// Codes of an activation's values and of its gradient.
fn both(h: &Tensor, activation: Activation, rule: BlockRule, device: &Device) -> Result<Vec<Got>> {
    let [rows, width] = h.shape().matrix();
    let cols = if activation.is_gated() { width / 2 } else { width };
    let dy = Tensor::full(1.0, [rows, cols], DType::F32, device)?;
    let mut all = results(device, Encoding::E4M3, rule, true, |slot| ops::activation(h, activation, slot))?;
    all.extend(results(device, Encoding::E4M3, rule, true, |slot| {
        ops::activation_backward_quantize_dbias(&dy, h, activation, slot).map(|(codes, _)| codes)
    })?);
    Ok(all)
}

/// Columns that leave each number of a thread's eight over.
fn ragged_columns(device: &Device, dtype: DType) -> Outcome {
    for activation in [Activation::Relu, Activation::Reglu] {
        for (cols, rule) in RAGGED.zip(rules()) {
            same_as_cpu(&format!("{activation} {dtype} {cols} columns {rule:?}"), device, |device| {
                both(&uneven(input([5, cols], activation), dtype, 1, device)?, activation, rule, device)
            })?;
        }
    }
    Ok(())
}

/// Each row's, column's and block's largest value in a place of its own, and the tile's in each warp in turn.
fn needles(device: &Device) -> Outcome {
    for activation in [Activation::Srelu, Activation::Sreglu] {
        let check = |tile: &[f32], rule: BlockRule| {
            same_as_cpu(&format!("{activation} {rule:?}"), device, |device| {
                let values = tile.chunks(TILE).flat_map(|row| {
                    let gates = if activation.is_gated() { TILE } else { 0 };
                    row.iter().copied().chain(std::iter::repeat_n(0.5, gates))
                });
                let h = tensor(values.collect(), input([TILE, TILE], activation), DType::F32, device)?;
                both(&h, activation, rule, device)
            })
        };
        for rule in rules() {
            check(&needle_in_each_row_and_column(), rule)?;
        }
        for (values, rule) in needle_in_each_warp(&rules_for_warps()) {
            check(&values, rule)?;
        }
    }
    Ok(())
}

/// Inputs at which the sigmoid is 0 or 1, in each of the eight places of a vector.
fn far_values(device: &Device, dtype: DType) -> Outcome {
    let far = [-130.0, 200.0, -6e4, 6e4, -1e30, 1e30, f32::NEG_INFINITY, f32::INFINITY];
    let rows = 8 * far.len();
    for activation in [Activation::Gelu, Activation::Silu, Activation::Geglu, Activation::Swiglu] {
        for rule in rules() {
            same_as_cpu(&format!("{activation} {dtype} {rule:?}"), device, |device| {
                let [_, width] = input([rows, 72], activation);
                let mut random = Random::new(4);
                let values = (0..rows * width).map(|i| match i % width == 9 * (i / width % 8) {
                    true => far[i / width / 8],
                    false => random.normal(),
                });
                both(&tensor(values.collect(), [rows, width], dtype, device)?, activation, rule, device)
            })?;
        }
    }
    Ok(())
}
