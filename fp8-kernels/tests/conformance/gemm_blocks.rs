//! `gemm_fp8` of operands with scales for rows, blocks and MX blocks.
//!
//! On a GPU products are the library's, or emulated: on the simulated one each case runs with a library that has scale modes and
//! with one that has none. Small integers times powers of two have one right result in any order, so that a factor of another block or
//! a wrong layout shows; the other cases have bounds.

use super::case::{Outcome, cases};
use super::compare::{ensure, equal, same};
use super::data::{FLOATS, Random};
use super::fp8_product::is_hardware;
use super::quantize_blocks::{rules, uneven};
use fp8_cuda_sim::{Control, library_path};
use fp8_format::Blocks;
use fp8_format::slice::BlockScaling;
use fp8_kernels::{
    BlockRule, DType, Device, Encoding, Fp8Tensor, Operand, Result, Scale, ScaleRule, Slot, Tensor, ops,
};
use ops::Accumulation;
use std::sync::{Mutex, PoisonError};

cases![
    exact_products,
    exact_products_of_a_linear,
    rows_with_every_bias_and_type,
    sums_of_normal_numbers,
    without_products,
];

/// Runs a case with every library that a simulated device can have. The version is the process's: cases that depend on it take turns.
pub(super) fn with_every_library(device: &Device, run: impl Fn(&Device) -> Outcome) -> Outcome {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if !device.is_simulated() {
        return run(device);
    }
    let control = Control::open(&library_path().ok_or("the simulated driver was not built")?)?;
    control.set("cublas", "120805")?;
    let without_modes = run(device);
    control.set("cublas", "130100")?;
    without_modes?;
    run(device)
}

/// Returns integers up to 4, scaled by a power of two for each row and for each 32 columns. Each value is exact in bf16, and
/// sums of their products are exact in f32.
pub(super) fn small([rows, cols]: [usize; 2], seed: u64, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let values = (0..rows * cols).map(|i| {
        let power = (i % cols / 32 % 3) as i32 - (i / cols % 2) as i32;
        ((random.bits() >> 40) % 9) as f32 * f32::powi(2.0, power) - 4.0 * f32::powi(2.0, power)
    });
    Tensor::from_vec(values.collect(), [rows, cols], device)
}

/// Both operands of every product that there is; `None` has one scale.
pub(super) fn pairs() -> Vec<[Option<BlockRule>; 2]> {
    let rules: Vec<Option<BlockRule>> = rules().into_iter().map(Some).chain([None]).collect();
    let blocks = |rule: &Option<BlockRule>| rule.map(|rule| rule.blocks());
    let all = rules.iter().flat_map(|a| rules.iter().map(move |b| [*a, *b]));
    let is_pair = |[a, b]: &[Option<BlockRule>; 2]| {
        (a.is_some() || b.is_some()) && ops::can_multiply(blocks(a), blocks(b))
    };
    all.filter(is_pair).collect()
}

pub(super) fn quantized(x: &Tensor, rule: Option<BlockRule>, encoding: Encoding) -> Result<Operand> {
    let one = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: true };
    let scale = rule.map_or(Scale::FromTensor(&one), Scale::Blocks);
    ops::quantize(x, &Slot { scale, columnwise: true, ..Slot::off(encoding) })
}

pub(super) fn fp8(operand: &Operand) -> Result<&Fp8Tensor, String> {
    operand.as_fp8().ok_or_else(|| "got high precision, want FP8".to_owned())
}

/// Whether all codes are exact: powers of two as scales, of which none underflows or saturates here.
fn is_exact(rule: Option<BlockRule>) -> bool {
    rule.is_none_or(|rule| rule.has_powers_of_two())
}

const DIMS: [[usize; 3]; 5] = [[16, 16, 32], [5, 3, 40], [33, 17, 129], [48, 130, 256], [130, 20, 300]];

fn exact_products(device: &Device) -> Outcome {
    with_every_library(device, products_of_small_integers)
}

fn products_of_small_integers(device: &Device) -> Outcome {
    for (turn, [a_rule, b_rule]) in pairs().into_iter().enumerate() {
        if !(is_exact(a_rule) && is_exact(b_rule)) {
            continue;
        }
        let dims @ [m, n, k] = DIMS[turn % DIMS.len()];
        let dtype = [DType::F32, DType::BF16, DType::F16][turn % 3];
        let hybrid = if turn % 2 == 0 { Encoding::E5M2 } else { Encoding::E4M3 };
        let run = |device: &Device| -> Result<[Tensor; 2]> {
            let a = quantized(&small([m, k], 1, device)?, a_rule, hybrid)?;
            let b = quantized(&small([n, k], 2, device)?, b_rule, Encoding::E4M3)?;
            let (Some(a), Some(b)) = (a.as_fp8(), b.as_fp8()) else {
                return Ok([small([1, 1], 0, device)?, small([1, 1], 0, device)?]);
            };
            let bias = small([1, n], 3, device)?.reshape([n])?;
            let bias = (turn % 4 != 0).then_some(&bias);
            let y = ops::gemm_fp8(a, b, bias, dtype, Accumulation::Split)?;
            let mut sum = Tensor::full(3.0, [m, n], DType::F32, device)?;
            ops::gemm_fp8_accumulate(a, b, &mut sum, "sum", ops::Accumulation::Split)?;
            Ok([y, sum])
        };
        let ([y, sum], [want, want_sum]) = (run(device)?, run(&Device::cpu())?);
        let what = format!("{a_rule:?} {b_rule:?} {dims:?} {dtype}");
        equal(&what, (*y.shape(), y.dtype()), (*want.shape(), dtype))?;
        same(&what, &y.to_f32_vec()?, &want.to_f32_vec()?, n)?;
        same(&format!("{what}, accumulated"), &sum.to_f32_vec()?, &want_sum.to_f32_vec()?, n)?;
    }
    Ok(())
}

/// fprop, dgrad and wgrad, which read both layouts, from what a layer keeps.
fn exact_products_of_a_linear(device: &Device) -> Outcome {
    with_every_library(device, products_of_a_linear)
}

fn products_of_a_linear(device: &Device) -> Outcome {
    // The second one has as many factors as a whole number of thread blocks, the third a whole number of fours of blocks.
    [[40, 130, 33], [128, 256, 16], [16, 512, 130]].into_iter().try_for_each(|dims| linear_of(dims, device))
}

fn linear_of([tokens, inputs, outputs]: [usize; 3], device: &Device) -> Outcome {
    for rule in rules().into_iter().filter(|rule| rule.has_powers_of_two()) {
        let line = match rule {
            BlockRule::F32(scaling) if scaling.blocks == Blocks::B128x128 => {
                BlockRule::F32(BlockScaling { blocks: Blocks::B1x128, ..scaling })
            }
            BlockRule::RowsThenTensor(scaling) => BlockRule::F32(scaling),
            other => other,
        };
        let run = |device: &Device| -> Result<[Tensor; 3]> {
            let x = quantized(&small([tokens, inputs], 1, device)?, Some(line), Encoding::E4M3)?;
            let w = quantized(&small([outputs, inputs], 2, device)?, Some(rule), Encoding::E4M3)?;
            let dy = quantized(&small([tokens, outputs], 3, device)?, Some(line), Encoding::E5M2)?;
            let y = ops::fprop(&x, &w, None, DType::F32, ops::Accumulation::Fast)?;
            let dx = ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split)?;
            let mut dw = Tensor::full(1.0, [outputs, inputs], DType::F32, device)?;
            ops::wgrad(&dy.for_backward(), &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split)?;
            Ok([y, dx, dw])
        };
        for ((got, want), name) in run(device)?.iter().zip(run(&Device::cpu())?).zip(["y", "dx", "dw"]) {
            same(
                &format!("{rule:?} {tokens} tokens: {name}"),
                &got.to_f32_vec()?,
                &want.to_f32_vec()?,
                want.shape().last_dim(),
            )?;
        }
    }
    Ok(())
}

/// Row factors on either side or on both, whose sums a kernel finishes where the library has no mode for them.
fn rows_with_every_bias_and_type(device: &Device) -> Outcome {
    with_every_library(device, finished_rows)
}

fn finished_rows(device: &Device) -> Outcome {
    let row = Some(BlockRule::F32(BlockScaling { power_2_scales: true, ..BlockScaling::new(Blocks::Row) }));
    // As many sums as a thread block has threads.
    let [m, n, k] = [16, 16, 40];
    for [a_rule, b_rule] in [[row, row], [row, None], [None, row]] {
        for bias_dtype in [None].into_iter().chain(FLOATS.map(Some)) {
            for dtype in FLOATS {
                let run = |device: &Device| -> Result<Vec<f32>> {
                    let a = quantized(&small([m, k], 1, device)?, a_rule, Encoding::E5M2)?;
                    let b = quantized(&small([n, k], 2, device)?, b_rule, Encoding::E4M3)?;
                    let (Some(a), Some(b)) = (a.as_fp8(), b.as_fp8()) else { return Ok(Vec::new()) };
                    let bias = small([1, n], 3, device)?.reshape([n])?;
                    let bias = bias_dtype.map(|dtype| ops::cast(&bias, dtype)).transpose()?;
                    ops::gemm_fp8(a, b, bias.as_ref(), dtype, Accumulation::Split)?.to_f32_vec()
                };
                let (got, want) = (run(device)?, run(&Device::cpu())?);
                equal("sums", want.len(), m * n)?;
                same(&format!("{a_rule:?} {b_rule:?} bias {bias_dtype:?} {dtype}"), &got, &want, n)?;
            }
        }
    }
    Ok(())
}

/// Against sums in f64 of the dequantized values, within a bound by the sums of magnitudes.
fn sums_of_normal_numbers(device: &Device) -> Outcome {
    with_every_library(device, normal_sums)
}

fn normal_sums(device: &Device) -> Outcome {
    for (turn, [a_rule, b_rule]) in pairs().into_iter().enumerate() {
        let dims @ [m, n, k] = DIMS[(turn + 2) % DIMS.len()];
        let a = quantized(&uneven([m, k], DType::BF16, 4, device)?, a_rule, Encoding::E4M3)?;
        let b = quantized(&uneven([n, k], DType::F32, 5, device)?, b_rule, Encoding::E4M3)?;
        let got = ops::gemm_fp8(fp8(&a)?, fp8(&b)?, None, DType::F32, Accumulation::Split)?.to_f32_vec()?;
        let [a_values, b_values] = [&a, &b].map(|x| x.dequantize(DType::F32).and_then(|x| x.to_f32_vec()));
        let (a_values, b_values) = (a_values?, b_values?);
        let powers_of_two = is_exact(a_rule) && is_exact(b_rule);
        let blocks = [fp8(&a)?.blocks(), fp8(&b)?.blocks()];
        let emulation = ops::emulation(device, blocks[0], blocks[1], powers_of_two);
        // bf16 rounds both values to 8 bits.
        let share = match emulation {
            Some(ops::Emulation::Rounded) => 2f64.powi(-7),
            _ if is_hardware(device) => 1.0 / 512.0,
            _ => 32.0 * 2f64.powi(-24),
        };
        for (i, got) in got.into_iter().enumerate() {
            let [row, col] = [i / n, i % n];
            let products =
                (0..k).map(|l| f64::from(a_values[row * k + l]) * f64::from(b_values[col * k + l]));
            let (sum, bound) = products.fold((0.0, 0.0), |(sum, bound), v| (sum + v, bound + f64::abs(v)));
            let off = (f64::from(got) - sum).abs();
            ensure(off <= share * bound, || {
                format!(
                    "{a_rule:?} {b_rule:?} {dims:?} [{row}, {col}]: {got} instead of {sum}, off by {off:e} of {bound:e}"
                )
            })?;
        }
    }
    Ok(())
}

fn without_products(device: &Device) -> Outcome {
    for [a_rule, b_rule] in pairs().into_iter().step_by(3) {
        for [m, n, k] in [[0, 3, 40], [3, 0, 40], [3, 4, 0]] {
            let a = quantized(&Tensor::zeros([m, k], DType::F32, device)?, a_rule, Encoding::E4M3)?;
            let b = quantized(&Tensor::zeros([n, k], DType::F32, device)?, b_rule, Encoding::E4M3)?;
            let bias = Tensor::full(2.0, [n], DType::F32, device)?;
            let y = ops::gemm_fp8(fp8(&a)?, fp8(&b)?, Some(&bias), DType::F32, Accumulation::Split)?;
            same(&format!("{a_rule:?} {b_rule:?}"), &y.to_f32_vec()?, &vec![2.0; m * n], n)?;
            let mut sum = Tensor::full(3.0, [m, n], DType::F32, device)?;
            ops::gemm_fp8_accumulate(fp8(&a)?, fp8(&b)?, &mut sum, "sum", ops::Accumulation::Split)?;
            same("accumulated", &sum.to_f32_vec()?, &vec![3.0; m * n], n)?;
        }
    }
    Ok(())
}
