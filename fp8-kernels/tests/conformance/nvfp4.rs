//! NVFP4: quantization of both copies, the way back, and products.
//!
//! Codes are compared with the slices of `fp8-format`, which recorded data checks, and devices with the CPU, bit for bit. Products are
//! compared with sums in f64 of the quantized values, on the simulated device with a library that has the mode and one that has not.

use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, same};
use super::data::{FLOATS, Random, normal, specials, tensor};
use super::fp8_product::is_hardware;
use super::gemm_blocks::with_every_library;
use super::quantize_blocks::uneven;
use super::reference::{Got, same_as_cpu, same_blocks};
use fp8_format::philox::BlockRandom;
use fp8_format::slice::{BlockScaling, Codec, HADAMARD_SIGNS, Nvfp4Copy, Nvfp4Options, Nvfp4Output};
use fp8_format::{Blocks, E4M3, TensorScale};
use fp8_kernels::ops::{Accumulation, DropoutKey};
use fp8_kernels::{
    BlockRule, Cell, Counters, DType, Device, DropoutDraw, DropoutState, Encoding, Error, Fp8Tensor,
    Nvfp4Rule, Operand, REST, Result, Scale, ScaleRule, Slot, StochasticRounding, Tensor, ops,
};

cases![
    copies_are_those_of_the_codec: Dtypes,
    copies: Dtypes,
    special_values: Dtypes,
    special_values_are_alike_at_each_place: Dtypes,
    parts_have_the_bits_of_the_whole: Dtypes,
    each_draw_has_numbers_of_its_own,
    amaxes: Dtypes,
    dbias_sums_the_unquantized: Dtypes,
    dequantizes,
    tiles_are_transposed_on_demand,
    what_is_computed_before_is_rounded_first: Dtypes,
    many_tensors,
    given_amaxes_alone_decide_the_factors,
    products: Dtypes,
    products_with_terms,
    blocks_are_summed_exactly,
    a_nan_stays_in_its_block,
    refuses,
];

/// One value, odd extents, partial blocks both ways, whole tiles of a kernel, and a tile that ends behind a block.
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 40], [16, 16], [33, 50], [17, 129], [96, 33], [128, 64], [130, 72], [257, 16]];

const KEY: DropoutKey = DropoutKey { seed: 0x0123_4567_89AB_CDEF, offset: 7 };

/// Blocks, whether the columnwise copy is transformed, and whether codes are rounded stochastically.
const FORMS: [(Blocks, bool, bool); 5] = [
    (Blocks::B1x16, false, false),
    (Blocks::B1x16, true, false),
    (Blocks::B16x16, false, false),
    (Blocks::B1x16, false, true),
    (Blocks::B1x16, true, true),
];

/// A part without elements has the factors of the whole. NaN is 0, and a negative amax its magnitude.
fn given_amaxes_alone_decide_the_factors(device: &Device) -> Outcome {
    for (amax, shape) in [([3.0, 0.5], [0, 32]), ([f32::NAN, -8.0], [16, 16]), ([-3.0, f32::NAN], [5, 0])] {
        let amaxes = Tensor::from_vec(amax.to_vec(), [2], device)?;
        let x = Tensor::full(0.25, shape, DType::F32, device)?;
        let x = fp4(ops::quantize(&x, &slot(Nvfp4Rule { amax: Some(&amaxes), ..Nvfp4Rule::default() }))?)?;
        for (factors, amax) in [x.tensor_scale(), x.columnwise_tensor_scale()].into_iter().zip(amax) {
            let expected = TensorScale::from_amax(amax);
            let found = factors.ok_or("want factors")?.to_vec::<f32>()?;
            ensure(found == [expected.encode(), expected.decode()], || format!("{amax}: {found:?}"))?;
        }
        ensure(**x.shape() == shape, || format!("{}", x.shape()))?;
    }
    Ok(())
}

fn slot(rule: Nvfp4Rule<'_>) -> Slot<'_> {
    Slot { scale: Scale::Nvfp4(rule), columnwise: true, ..Slot::off(Encoding::E2M1) }
}

fn fp4(operand: Operand) -> Result<Fp8Tensor, String> {
    match operand {
        Operand::Fp8(x) => Ok(x),
        Operand::High(_) => Err("got high precision, want NVFP4".to_owned()),
    }
}

/// Quantizes `x` in one of the forms.
fn quantized(x: &Tensor, (blocks, hadamard, is_random): (Blocks, bool, bool)) -> Result<Operand> {
    let draw = DropoutDraw::from(KEY);
    let random = is_random.then(|| StochasticRounding::new(&draw));
    ops::quantize(x, &slot(Nvfp4Rule { blocks, hadamard, random, ..Nvfp4Rule::default() }))
}

fn bytes(tensor: Option<&Tensor>) -> Result<Vec<u8>> {
    tensor.map_or(Ok(Vec::new()), Tensor::to_vec)
}

fn factors(tensor: Option<&Tensor>) -> Result<Vec<f32>> {
    tensor.map_or(Ok(Vec::new()), Tensor::to_vec)
}

fn copies_are_those_of_the_codec(device: &Device, dtype: DType) -> Outcome {
    for (shape @ [rows, cols], form) in SHAPES.into_iter().flat_map(|shape| FORMS.map(|form| (shape, form))) {
        let (blocks, hadamard, is_random) = form;
        let x = uneven(shape, dtype, 5, device)?;
        let values = x.to_f32_vec()?;
        let got = fp4(quantized(&x, form)?)?;
        let turned = if hadamard { Nvfp4Copy::Hadamard } else { Nvfp4Copy::Columnwise };
        let layouts = [
            (Nvfp4Copy::Rowwise, KEY.offset, got.rowwise(), Some(got.scale_inv()), got.tensor_scale()),
            (
                turned,
                KEY.offset + (1 << 44),
                got.columnwise(),
                got.columnwise_scale_inv(),
                got.columnwise_tensor_scale(),
            ),
        ];
        for (copy, offset, codes, scales, tensor) in layouts {
            let what = format!("{dtype} {shape:?} {form:?} {copy:?}");
            let random = is_random.then(|| BlockRandom::new(KEY.seed, offset));
            let options = Nvfp4Options { copy, blocks, random };
            let [height, width] = copy.shape(rows, cols);
            let [down, across] = blocks.grid(height, width);
            let mut want = (vec![0; height * width.div_ceil(2)], vec![E4M3::ZERO; down * across]);
            let out = Nvfp4Output::new(&mut want.0, &mut want.1);
            let codec = Codec::new();
            // Transformed copies of bf16 are rounded, so that the type counts.
            let whole = if dtype == DType::BF16 {
                let values = x.to_vec::<half::bf16>()?;
                let amax = codec.nvfp4_amax(&values, rows, cols, copy)?;
                codec.quantize_nvfp4(&values, rows, cols, amax, &options, out)?
            } else {
                let amax = codec.nvfp4_amax(&values, rows, cols, copy)?;
                codec.quantize_nvfp4(&values, rows, cols, amax, &options, out)?
            };
            same(&format!("{what}: codes"), &bytes(codes)?, &want.0, width.div_ceil(2))?;
            let want: Vec<u8> = want.1.iter().map(|scale| scale.to_bits()).collect();
            same(&format!("{what}: scales"), &bytes(scales)?, &want, across)?;
            same(&what, &factors(tensor)?, &[whole.encode(), whole.decode()], 2)?;
        }
    }
    Ok(())
}

/// Codes of a tensor, its amax and its counters.
fn results(device: &Device, x: &Tensor, form: (Blocks, bool, bool), columnwise: bool) -> Result<Vec<Got>> {
    let (amax, counters) = (Cell::new(REST, device)?, Counters::new(device)?);
    let (blocks, hadamard, is_random) = form;
    let draw = DropoutDraw::from(KEY);
    let random = is_random.then(|| StochasticRounding::new(&draw));
    let rule = Nvfp4Rule { blocks, hadamard, random, ..Nvfp4Rule::default() };
    let slot = Slot { amax: Some(&amax), counters: Some(&counters), columnwise, ..slot(rule) };
    let operand = ops::quantize(x, &slot)?;
    let counts = counters.read()?;
    let numbers = [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|n| n as f32);
    let mut all = vec![Got::Numbers([&numbers[..], &[amax.read()?]].concat())];
    all.extend(operand.as_fp8().cloned().map(Got::from));
    Ok(all)
}

fn copies(device: &Device, dtype: DType) -> Outcome {
    for (turn, shape) in SHAPES.into_iter().chain([[0, 5], [5, 0]]).enumerate() {
        for (i, form) in FORMS.into_iter().enumerate() {
            let columnwise = !(turn + i + dtype as usize).is_multiple_of(4);
            same_as_cpu(&format!("{dtype} {shape:?} {form:?}"), device, |device| {
                results(device, &uneven(shape, dtype, turn as u64, device)?, form, columnwise)
            })?;
        }
    }
    Ok(())
}

/// Zeros, subnormal numbers, the largest, infinities and NaN: each alone in a block, and with others.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let all = specials();
    for (i, form) in FORMS.into_iter().enumerate() {
        // Infinities and the largest numbers leave nothing of the others: each form without them, too.
        for most in [f32::INFINITY, 1e4, 1e-3] {
            let mut random = Random::new(3);
            let mut values = Vec::new();
            for &special in all.iter().filter(|x| x.is_nan() || x.abs() <= most) {
                values.extend([special; 16]);
                let size = most.min(1.0);
                values.extend((0..24).map(|k| if k == i { special } else { random.normal() * size }));
            }
            let shape = [values.len() / 40, 40];
            same_as_cpu(&format!("{dtype} {form:?} up to {most}"), device, |device| {
                results(device, &tensor(values.clone(), shape, dtype, device)?, form, true)
            })?;
        }
    }
    Ok(())
}

/// A special value at each place of a block of a row and of one of a column, blocks of zeros both ways, and nothing but values so small
/// that their scale is the largest.
fn special_values_are_alike_at_each_place(device: &Device, dtype: DType) -> Outcome {
    let shape @ [rows, cols] = [48, 80];
    for form in FORMS {
        for special in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0] {
            let mut random = Random::new(6);
            let value = |i: usize| {
                let (row, col) = (i / cols, i % cols);
                let number = random.normal();
                match (row / 16, col / 16) {
                    // At odd places of even rows, too.
                    (0, 0 | 1) if (row + col / 16) % 16 == col % 16 => special,
                    (1, _) | (_, 3) => 0.0,
                    _ => number,
                }
            };
            let values: Vec<f32> = (0..rows * cols).map(value).collect();
            same_as_cpu(&format!("{dtype} {form:?} {special}"), device, |device| {
                results(device, &tensor(values.clone(), shape, dtype, device)?, form, true)
            })?;
        }
        // The smallest numbers of the type, which f16 has none of below 2⁻²⁴.
        let smallest = if dtype == DType::F16 { 2_f32.powi(-24) } else { 2_f32.powi(-133) };
        let values: Vec<f32> = (0..rows * cols).map(|i| smallest * ((i * 7) % 13) as f32).collect();
        same_as_cpu(&format!("{dtype} {form:?} {smallest:e}"), device, |device| {
            results(device, &tensor(values.clone(), shape, dtype, device)?, form, true)
        })?;
    }
    Ok(())
}

/// Rows and columns of a part of a tensor with amaxes of the whole: what ranks have.
fn parts_have_the_bits_of_the_whole(device: &Device, dtype: DType) -> Outcome {
    let whole @ [rows, cols] = [64, 80];
    let x = uneven(whole, dtype, 2, device)?;
    let draw = DropoutDraw::from(KEY);
    for (hadamard, is_random) in [(false, false), (true, true)] {
        let amax = ops::nvfp4_amax(&x, hadamard)?;
        let rule = |origin| Nvfp4Rule {
            hadamard,
            amax: Some(&amax),
            random: is_random.then_some(StochasticRounding { draw: &draw, origin, whole: Some(whole) }),
            ..Nvfp4Rule::default()
        };
        let want = fp4(ops::quantize(&x, &slot(rule([0, 0])))?)?;
        let values = x.to_f32_vec()?;
        for (row, col, height, width) in [(32, 0, 32, cols), (0, 48, rows, 32), (16, 16, 32, 48)] {
            let what = format!("{dtype} {hadamard} {is_random} {height}x{width} at {row}, {col}");
            let part = (0..height * width).map(|i| values[(row + i / width) * cols + col + i % width]);
            let part = tensor(part.collect(), [height, width], dtype, device)?;
            let got = fp4(ops::quantize(&part, &slot(rule([row, col])))?)?;
            // The bytes of some rows of a matrix, from a byte of them on.
            let cut = |all: Vec<u8>, pitch: usize, first: usize, count: usize, at: usize, len: usize| {
                (first..first + count)
                    .flat_map(|r| all[r * pitch + at..][..len].to_vec())
                    .collect::<Vec<u8>>()
            };
            let codes = cut(bytes(want.rowwise())?, cols / 2, row, height, col / 2, width / 2);
            same(&what, &bytes(got.rowwise())?, &codes, width / 2)?;
            let scales = cut(bytes(Some(want.scale_inv()))?, cols / 16, row, height, col / 16, width / 16);
            same(&what, &bytes(Some(got.scale_inv()))?, &scales, width / 16)?;
            let codes = cut(bytes(want.columnwise())?, rows / 2, col, width, row / 2, height / 2);
            same(&format!("{what}, columnwise"), &bytes(got.columnwise())?, &codes, height / 2)?;
            let all = bytes(want.columnwise_scale_inv())?;
            let scales = cut(all, rows / 16, col, width, row / 16, height / 16);
            same(&what, &bytes(got.columnwise_scale_inv())?, &scales, height / 16)?;
        }
    }
    Ok(())
}

/// Draws from a state on the device are those of the keys that it gives, and differ from step to step.
fn each_draw_has_numbers_of_its_own(device: &Device) -> Outcome {
    let x = normal([32, 48], DType::F32, 3, device)?;
    let state = DropoutState::new(11, device)?;
    let mut before: Vec<u8> = Vec::new();
    for step in 0..3 {
        let draw = state.draw()?.mask(5);
        let host = DropoutDraw::from(draw.read()?);
        let codes = |draw: &DropoutDraw| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
            let random = Some(StochasticRounding::new(draw));
            let got =
                fp4(ops::quantize(&x, &slot(Nvfp4Rule { hadamard: true, random, ..Nvfp4Rule::default() }))?)?;
            Ok([bytes(got.rowwise())?, bytes(got.columnwise())?].concat())
        };
        let codes = [codes(&draw)?, codes(&host)?];
        same(&format!("step {step}"), &codes[0], &codes[1], 24)?;
        ensure(codes[0] != before, || format!("step {step} has the numbers of the one before"))?;
        before.clone_from(&codes[0]);
    }
    Ok(())
}

fn amaxes(device: &Device, dtype: DType) -> Outcome {
    for shape in SHAPES.into_iter().chain([[0, 3], [300, 130]]) {
        let mut values = uneven(shape, dtype, 9, &Device::cpu())?.to_f32_vec()?;
        values.iter_mut().skip(70).step_by(71).for_each(|value| *value = f32::NAN);
        for hadamard in [false, true] {
            same_as_cpu(&format!("{dtype} {shape:?} {hadamard}"), device, |device| {
                let x = tensor(values.clone(), shape, dtype, device)?;
                Ok(vec![Got::Tensor(ops::nvfp4_amax(&x, hadamard)?)])
            })?;
        }
    }
    // The largest value at each place of a thread's part of a tile.
    for i in 0..32 {
        let values = (0..256).map(|at| if at == i / 8 * 16 + i % 8 { -3.0 } else { 1.0 }).collect();
        let x = tensor(values, [16, 16], dtype, device)?;
        equal(&format!("place {i}"), ops::nvfp4_amax(&x, false)?.to_vec::<f32>()?, vec![3.0; 2])?;
    }
    // Tokens whose transform is one number, each of 16 in turn, here and there in a tile.
    for i in 0..16u32 {
        let (rows, cols, col) = (48, 72, i as usize * 37 % 72);
        let mut values = vec![0.0; rows * cols];
        for j in 0..16u32 {
            let is_negative = (HADAMARD_SIGNS >> j & 1) as u32 ^ (i & j).count_ones() & 1;
            values[(16 * (i as usize % 3) + j as usize) * cols + col] =
                if is_negative == 1 { -1.0 } else { 1.0 };
        }
        let x = tensor(values, [rows, cols], dtype, device)?;
        equal(&format!("number {i}"), ops::nvfp4_amax(&x, true)?.to_vec::<f32>()?, vec![1.0, 4.0])?;
    }
    let x = tensor(vec![4.0, 0.0, 0.0, -8.0], [2, 2], dtype, device)?;
    equal("two tokens", ops::nvfp4_amax(&x, true)?.to_vec::<f32>()?, vec![8.0, 2.0])
}

fn dbias_sums_the_unquantized(device: &Device, dtype: DType) -> Outcome {
    for (shape, form) in [[33, 50], [257, 16], [130, 130], [0, 4]].into_iter().zip(FORMS) {
        let (blocks, hadamard, _) = form;
        let rule = Nvfp4Rule { blocks, hadamard, ..Nvfp4Rule::default() };
        let dy = uneven(shape, dtype, 1, device)?;
        let (got, sums) = ops::quantize_dbias(&dy, &slot(rule))?;
        let plain = ops::quantize(&dy, &slot(rule))?;
        same_blocks(&format!("{dtype} {shape:?} {form:?}"), &fp4(got)?, &fp4(plain)?)?;
        let (_, want) = ops::quantize_dbias(&dy, &Slot::off(Encoding::E4M3))?;
        same(&format!("{dtype} {shape:?} sums"), &sums.to_vec::<f32>()?, &want.to_vec::<f32>()?, shape[1])?;
    }
    Ok(())
}

fn dequantizes(device: &Device) -> Outcome {
    for (shape @ [rows, cols], form) in
        [[33, 50], [5, 129], [64, 64]].into_iter().zip([FORMS[0], FORMS[2], FORMS[3]])
    {
        let x = fp4(quantized(&uneven(shape, DType::F32, 4, device)?, form)?)?;
        let scales: Vec<E4M3> = bytes(Some(x.scale_inv()))?.into_iter().map(E4M3::from_bits).collect();
        let whole = TensorScale::from_encode(factors(x.tensor_scale())?[0]);
        let mut want = vec![0.0_f32; rows * cols];
        let codes = bytes(x.rowwise())?;
        Codec::new().dequantize_nvfp4(&codes, rows, cols, form.0, &scales, whole, &mut want)?;
        for dtype in FLOATS {
            let want = tensor(want.clone(), shape, dtype, device)?.to_f32_vec()?;
            same(&format!("{shape:?} {dtype}"), &x.dequantize(dtype)?.to_f32_vec()?, &want, cols)?;
        }
    }
    Ok(())
}

fn tiles_are_transposed_on_demand(device: &Device) -> Outcome {
    // A thread turns eight rows of eight columns: each count of those, in rows of whole words and others.
    let parts = (8..16).flat_map(|n| [[n, 32], [32, n], [n, 18], [18, n]]);
    for shape @ [rows, cols] in SHAPES.into_iter().chain(parts).chain([[130, 128]]) {
        let x = uneven(shape, DType::F32, 6, device)?;
        let rule = Nvfp4Rule { blocks: Blocks::B16x16, ..Nvfp4Rule::default() };
        let both = fp4(ops::quantize(&x, &slot(rule))?)?;
        let one = fp4(ops::quantize(&x, &slot(rule).rowwise_only())?)?;
        same_blocks(&format!("{shape:?}"), &one.clone().with_columnwise()?, &both)?;
        same_blocks(&format!("{shape:?} again"), &one.quantize_columnwise(&slot(rule))?, &both)?;
        // What a backward pass keeps can be turned back.
        let kept = both.for_backward();
        let (got, want) = (kept.dequantize(DType::F32)?, both.dequantize(DType::F32)?);
        same(&format!("{shape:?} back"), &got.to_vec::<f32>()?, &want.to_vec::<f32>()?, cols)?;
        equal("the transpose", both.transposed()?.matrix(), [cols, rows])?;
    }
    let many_rows = Tensor::zeros([1 << 40, 0], DType::F32, device)?;
    fp4(quantized(&many_rows, FORMS[2])?)?.without_columnwise().with_columnwise()?;
    let line = fp4(quantized(&uneven([32, 32], DType::F32, 6, device)?, FORMS[0])?)?;
    refused(line.without_columnwise().with_columnwise(), "other elements share a scale in the transpose")
}

/// A norm's or an activation's output is of the input's type, and then quantized.
fn what_is_computed_before_is_rounded_first(device: &Device, dtype: DType) -> Outcome {
    let (h, dy) = (normal([33, 48], dtype, 1, device)?, normal([33, 48], dtype, 2, device)?);
    let gamma = normal([48], dtype, 3, device)?;
    let rule = Nvfp4Rule { hadamard: true, ..Nvfp4Rule::default() };
    let (on, off) = (slot(rule), Slot::off(Encoding::E2M1));
    let again = |operand: Operand| -> Result<Fp8Tensor, Box<dyn std::error::Error>> {
        Ok(fp4(ops::quantize(&operand.dequantize(dtype)?, &on)?)?)
    };
    let options = ops::NormOptions::default();
    let (y, _) = ops::norm(&h, &gamma, None, &options, &on)?;
    same_blocks("norm", &fp4(y)?, &again(ops::norm(&h, &gamma, None, &options, &off)?.0)?)?;
    let gelu = ops::Activation::Gelu;
    let y = ops::activation(&h, gelu, &on)?;
    same_blocks("activation", &fp4(y)?, &again(ops::activation(&h, gelu, &off)?)?)?;
    let (dh, sums) = ops::activation_backward_quantize_dbias(&dy, &h, gelu, &on)?;
    let want = ops::activation_backward(&dy, &h, gelu)?;
    same_blocks("backward", &fp4(dh)?, &fp4(ops::quantize(&want, &on)?)?)?;
    let want = ops::quantize_dbias(&want, &off)?.1;
    same("dbias", &sums.to_vec::<f32>()?, &want.to_vec::<f32>()?, 48)
}

fn many_tensors(device: &Device) -> Outcome {
    let one = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let x = normal([33, 40], DType::BF16, 1, device)?;
    let w = normal([20, 70], DType::F32, 2, device)?;
    let four = slot(Nvfp4Rule { blocks: Blocks::B16x16, ..Nvfp4Rule::default() });
    let eight = Slot { scale: Scale::FromTensor(&one), ..Slot::off(Encoding::E4M3) };
    let all = ops::quantize_many(&[(&x, four), (&w, eight), (&w, four)])?;
    let [first, second, third] = &all[..] else { return Err("want three tensors".into()) };
    same_blocks("the first", &fp4(first.clone())?, &fp4(ops::quantize(&x, &four)?)?)?;
    same_blocks("the third", &fp4(third.clone())?, &fp4(ops::quantize(&w, &four)?)?)?;
    equal("the second", second.as_fp8().map(Fp8Tensor::encoding), Some(Encoding::E4M3))
}

/// A relative error that sums of such a length may have.
fn tolerance(device: &Device) -> f64 {
    if is_hardware(device) { 2f64.powi(-11) } else { 8.0 * 2f64.powi(-24) }
}

/// Compares a product with the sum in f64 over what both operands hold.
fn check_product(
    what: &str,
    y: &Tensor,
    [a, b]: [&[f32]; 2],
    [m, n, k]: [usize; 3],
    added: f64,
    tolerance: f64,
) -> Outcome {
    let y = y.to_f32_vec()?;
    for (i, &got) in y.iter().enumerate().take(m * n) {
        let (a, b) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
        let terms = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        let (want, bound) =
            terms.fold((added, added.abs()), |(sum, bound), term| (sum + term, bound + term.abs()));
        // Both decoding factors are rounded, and so is each product with them.
        let allowed = (tolerance + 4.0 * 2f64.powi(-24)) * bound;
        ensure((f64::from(got) - want).abs() <= allowed, || {
            format!("{what}: element {i} is {got:e}, want {want:e}, bound {bound:e}")
        })?;
    }
    Ok(())
}

const DIMS: [[usize; 3]; 6] =
    [[16, 16, 32], [1, 40, 50], [5, 3, 7], [33, 17, 129], [48, 130, 256], [130, 20, 600]];

fn products(device: &Device, dtype: DType) -> Outcome {
    let pairs = [(FORMS[0], FORMS[2]), (FORMS[2], FORMS[0]), (FORMS[0], FORMS[3])];
    with_every_library(device, |device| {
        for (turn, dims @ [m, n, k]) in DIMS.into_iter().enumerate() {
            for (left, right) in pairs {
                let a = fp4(quantized(&uneven([m, k], dtype, turn as u64, device)?, left)?)?;
                let b = fp4(quantized(&uneven([n, k], dtype, 77, device)?, right)?)?;
                let values = [a.dequantize(DType::F32)?.to_vec()?, b.dequantize(DType::F32)?.to_vec()?];
                let values = [&values[0][..], &values[1][..]];
                let y = ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Split)?;
                let what = format!("{dtype} {dims:?} {left:?} {right:?}");
                check_product(&what, &y, values, dims, 0.0, tolerance(device))?;
                let mut sum = Tensor::full(3.0, [m, n], DType::F32, device)?;
                ops::gemm_fp8_accumulate(&a, &b, &mut sum, "sum", Accumulation::Split)?;
                check_product(&what, &sum, values, dims, 3.0, tolerance(device))?;
            }
        }
        linear(device, dtype)
    })
}

/// The three products of a Linear from what a layer keeps, beside products of what the copies hold.
fn linear(device: &Device, dtype: DType) -> Outcome {
    for [tokens, inputs, outputs] in [[40, 130, 33], [128, 64, 48]] {
        let x = uneven([tokens, inputs], dtype, 1, device)?;
        let dy = uneven([tokens, outputs], dtype, 3, device)?;
        let x4 = quantized(&x, FORMS[1])?;
        let w4 = quantized(&uneven([outputs, inputs], dtype, 2, device)?, FORMS[2])?;
        let dy4 = quantized(&dy, FORMS[4])?;
        let dx = ops::dgrad(&dy4, &w4.for_backward(), DType::F32, Accumulation::Split)?;
        let w: Vec<f32> = w4.dequantize(DType::F32)?.to_vec()?;
        let turned = (0..inputs * outputs).map(|i| w[i % outputs * inputs + i / outputs]).collect();
        let values: [Vec<f32>; 2] = [dy4.dequantize(DType::F32)?.to_vec()?, turned];
        let dims = [tokens, inputs, outputs];
        check_product("dx", &dx, [&values[0], &values[1]], dims, 0.0, tolerance(device))?;
        let mut dw = Tensor::zeros([outputs, inputs], DType::F32, device)?;
        ops::wgrad(&dy4, &x4.for_backward(), &mut dw, "dw", Accumulation::Split)?;
        let columns = |operand: &Operand, rows: usize| -> Result<Vec<f32>, Box<dyn std::error::Error>> {
            let x = operand.as_fp8().ok_or("want NVFP4")?;
            let cols = tokens.next_multiple_of(16);
            let scales = bytes(x.columnwise_scale_inv())?.into_iter().map(E4M3::from_bits);
            let whole = TensorScale::from_encode(factors(x.columnwise_tensor_scale())?[0]);
            let (mut values, scales) = (vec![0.0f32; rows * cols], scales.collect::<Vec<_>>());
            let codes = bytes(x.columnwise())?;
            Codec::new().dequantize_nvfp4(&codes, rows, cols, Blocks::B1x16, &scales, whole, &mut values)?;
            Ok(values)
        };
        let values = [columns(&dy4, outputs)?, columns(&x4, inputs)?];
        let dims = [outputs, inputs, tokens.next_multiple_of(16)];
        check_product("dw", &dw, [&values[0], &values[1]], dims, 0.0, tolerance(device))?;
    }
    Ok(())
}

fn products_with_terms(device: &Device) -> Outcome {
    with_every_library(device, |device| {
        for (turn, dims @ [m, n, k]) in [[16, 16, 64], [5, 24, 40], [33, 7, 20]].into_iter().enumerate() {
            let a = fp4(quantized(&uneven([m, k], DType::F32, 1, device)?, FORMS[0])?)?;
            let b = fp4(quantized(&uneven([n, k], DType::F32, 2, device)?, FORMS[2])?)?;
            let plain = ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Fast)?.to_vec::<f32>()?;
            let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            for (dtype, other) in FLOATS.into_iter().zip([DType::F32, DType::BF16, DType::F32]) {
                let bias = normal([n], if turn == 1 { dtype } else { other }, 3, device)?;
                let addend = normal([m, n], dtype, 4, device)?;
                let y = ops::gemm_fp8_add(&a, &b, &addend, Some(&bias), dtype, Accumulation::Fast)?;
                let rounded = tensor(
                    bias.to_f32_vec()?,
                    [n],
                    if dtype == DType::F32 { DType::F32 } else { dtype },
                    device,
                )?;
                let (bias, addend) = (rounded.to_f32_vec()?, addend.to_f32_vec()?);
                let step = match dtype {
                    DType::F32 => 1e-5,
                    DType::BF16 => 2f32.powi(-8),
                    _ => 2f32.powi(-10),
                };
                equal("the type", (y.dtype(), y.shape().matrix()), (dtype, [m, n]))?;
                for (i, got) in y.to_f32_vec()?.into_iter().enumerate() {
                    let want = plain[i] + addend[i] + bias[i % n];
                    let allowed = step * (want.abs() + 1.0) + 1e-5 * largest;
                    ensure((got - want).abs() <= allowed, || {
                        format!("{dims:?} {dtype} {i}: {got}, want {want}")
                    })?;
                }
                let kept = ops::gemm_fp8_quantize(
                    &a,
                    &b,
                    None,
                    &slot(Nvfp4Rule::default()),
                    dtype,
                    Accumulation::Fast,
                )?;
                let want = ops::gemm_fp8(&a, &b, None, dtype, Accumulation::Fast)?;
                same_blocks("a product, quantized", &fp4(kept)?, &fp4(quantized(&want, FORMS[0])?)?)?;
            }
        }
        for (m, n, k) in [(0, 4, 16), (4, 0, 16), (3, 4, 0)] {
            let part = |rows| -> Result<Fp8Tensor, Box<dyn std::error::Error>> {
                Ok(fp4(quantized(&Tensor::zeros([rows, k], DType::F32, device)?, FORMS[0])?)?)
            };
            let y = ops::gemm_fp8(&part(m)?, &part(n)?, None, DType::F32, Accumulation::Fast)?;
            equal("nothing", y.to_vec::<f32>()?, vec![0.0; m * n])?;
        }
        Ok(())
    })
}

/// A tensor of these codes, scales and factors.
fn made(
    codes: &[u8],
    scales: &[u8],
    [rows, cols]: [usize; 2],
    whole: f32,
    device: &Device,
) -> Result<Fp8Tensor> {
    let codes = Tensor::from_vec(codes.to_vec(), [rows, cols.div_ceil(2)], device)?;
    let scales = Tensor::from_vec(scales.to_vec(), [rows, cols.div_ceil(16)], device)?;
    Fp8Tensor::from_nvfp4(codes, [rows, cols], Blocks::B1x16, scales, TensorScale::from_encode(whole))
}

/// The sum of each block is exact, and blocks are added in f32 in their order: the CPU's bits, which devices are near.
fn blocks_are_summed_exactly(device: &Device) -> Outcome {
    let mut random = Random::new(1);
    for [m, n, k] in [[3, 5, 16], [20, 33, 336], [7, 40, 1000], [1, 1, 4096]] {
        let (width, across) = (k / 2, usize::div_ceil(k, 16));
        let mut draw =
            |len: usize, most: u64| (0..len).map(|_| (random.bits() >> 20) % most).collect::<Vec<u64>>();
        let narrow = |all: Vec<u64>| all.into_iter().map(|x| x as u8).collect::<Vec<u8>>();
        let (a, a_scales) = (narrow(draw(m * width, 256)), narrow(draw(m * across, 0x7F)));
        let (b, b_scales) = (narrow(draw(n * width, 256)), narrow(draw(n * across, 0x7F)));
        let value = |codes: &[u8], row: usize, i: usize| {
            let byte = codes[row * width + i / 2];
            fp8_format::E2M1::from_bits(byte >> (i % 2 * 4) & 0xF).to_f32()
        };
        let scale =
            |scales: &[u8], row: usize, block: usize| E4M3::from_bits(scales[row * across + block]).to_f32();
        let (left, right) =
            (made(&a, &a_scales, [m, k], 3.0, device)?, made(&b, &b_scales, [n, k], 0.7, device)?);
        let got = ops::gemm_fp8(&left, &right, None, DType::F32, Accumulation::Split)?.to_vec::<f32>()?;
        for (i, got) in got.into_iter().enumerate() {
            let (row, col) = (i / n, i % n);
            let (mut sum, mut bound) = (0.0f32, 0.0f64);
            for block in 0..across {
                let ks = block * 16..k.min(block * 16 + 16);
                let codes: f32 = ks.clone().map(|i| value(&a, row, i) * value(&b, col, i)).sum();
                let factor = scale(&a_scales, row, block) * scale(&b_scales, col, block);
                sum += codes * factor;
                let all: f32 = ks.map(|i| (value(&a, row, i) * value(&b, col, i)).abs()).sum();
                bound += f64::from(all * factor);
            }
            let decode = [3.0, 0.7].map(|encode| TensorScale::from_encode(encode).decode());
            let want = sum * decode[0] * decode[1];
            let bound = bound * f64::from(decode[0]) * f64::from(decode[1]);
            let is_near = f64::from((got - want).abs()) <= 2.0 * tolerance(device) * bound;
            let is_cpu = device.is_same(&Device::cpu());
            ensure(if is_cpu { got == want } else { is_near }, || {
                format!("[{m}, {n}, {k}]: element {i} is {got:e}, want {want:e}, bound {bound:e}")
            })?;
        }
    }
    Ok(())
}

fn a_nan_stays_in_its_block(device: &Device) -> Outcome {
    with_every_library(device, |device| {
        let mut values = uneven([4, 64], DType::F32, 1, &Device::cpu())?.to_vec::<f32>()?;
        values[64 + 20] = f32::NAN;
        let x = fp4(quantized(&tensor(values, [4, 64], DType::F32, device)?, FORMS[0])?)?;
        let back = x.dequantize(DType::F32)?.to_vec::<f32>()?;
        for (i, value) in back.into_iter().enumerate() {
            let is_lost = (64 + 16..64 + 32).contains(&i);
            ensure(value.is_nan() == is_lost, || format!("element {i} is {value}"))?;
        }
        let w = fp4(quantized(&uneven([3, 64], DType::F32, 2, device)?, FORMS[2])?)?;
        let y = ops::gemm_fp8(&x, &w, None, DType::F32, Accumulation::Split)?.to_vec::<f32>()?;
        for (i, value) in y.into_iter().enumerate() {
            ensure(value.is_nan() == (i / 3 == 1), || format!("product {i} is {value}"))?;
        }
        Ok(())
    })
}

fn refuses(device: &Device) -> Outcome {
    let x = normal([32, 32], DType::F32, 1, device)?;
    let draw = DropoutDraw::from(KEY);
    let random = Some(StochasticRounding::new(&draw));
    let tiles = Nvfp4Rule { blocks: Blocks::B16x16, ..Nvfp4Rule::default() };
    let wrong = |rule: Nvfp4Rule<'_>, wording| refused(ops::quantize(&x, &slot(rule)), wording);
    wrong(
        Nvfp4Rule { blocks: Blocks::Mx32, ..Nvfp4Rule::default() },
        "NVFP4 has Blocks::B1x16 or Blocks::B16x16",
    )?;
    wrong(Nvfp4Rule { hadamard: true, ..tiles }, "a Hadamard transform needs Blocks::B1x16")?;
    wrong(Nvfp4Rule { random, ..tiles }, "stochastic rounding needs Blocks::B1x16")?;
    let moved = Some(StochasticRounding { origin: [16, 8], ..StochasticRounding::new(&draw) });
    wrong(
        Nvfp4Rule { random: moved, ..Nvfp4Rule::default() },
        "a part begins at a multiple of 16 rows and columns",
    )?;
    let one = Tensor::full(1.0, [1], DType::F32, device)?;
    wrong(
        Nvfp4Rule { amax: Some(&one), ..Nvfp4Rule::default() },
        "expected the amaxes of the rowwise and of the columnwise",
    )?;
    let half = Tensor::full(1.0, [2], DType::BF16, device)?;
    wrong(Nvfp4Rule { amax: Some(&half), ..Nvfp4Rule::default() }, "amax has dtype bf16: expected f32")?;
    let four = Slot { encoding: Encoding::E4M3, ..slot(Nvfp4Rule::default()) };
    refused(ops::quantize(&x, &four), "NVFP4 has codes of E2M1")?;
    let one = ScaleRule::Current { fp8_max: 6.0, epsilon: 0.0, power_2_scales: false };
    let plain = Slot { scale: Scale::FromTensor(&one), ..Slot::off(Encoding::E2M1) };
    refused(ops::quantize(&x, &plain), "E2M1 needs the scales of NVFP4")?;
    let rule = BlockRule::F32(BlockScaling::new(Blocks::B1x16));
    let blocks = Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E4M3) };
    refused(ops::quantize(&x, &blocks), "NVFP4 blocks have E4M3 scales and 4-bit elements")?;

    let bytes = |len: usize| Tensor::from_vec(vec![0u8; len], [len], device);
    let one = Tensor::full(1.0, [1], DType::F32, device)?;
    refused(Fp8Tensor::from_codes(bytes(4)?, [2, 2], Encoding::E2M1, one), "use Fp8Tensor::from_nvfp4")?;
    let made = |codes: usize, scales: usize, blocks| {
        Fp8Tensor::from_nvfp4(bytes(codes)?, [2, 20], blocks, bytes(scales)?, TensorScale::from_encode(1.0))
    };
    refused(made(20, 4, Blocks::Row), "expected Blocks::B1x16 or Blocks::B16x16")?;
    refused(made(19, 4, Blocks::B1x16), "reshape")?;
    refused(made(20, 3, Blocks::B1x16), "reshape")?;
    made(20, 4, Blocks::B1x16)?;
    refused(
        Fp8Tensor::from_blocks(bytes(20)?, [2, 20], Encoding::E4M3, Blocks::B1x16, bytes(4)?),
        "use Fp8Tensor::from_nvfp4",
    )?;

    let (line, hadamard, tile) = (
        fp4(quantized(&x, FORMS[0])?)?,
        fp4(quantized(&x, FORMS[1])?)?.transposed()?,
        fp4(quantized(&x, FORMS[2])?)?,
    );
    let product = |a: &Fp8Tensor, b: &Fp8Tensor| ops::gemm_fp8(a, b, None, DType::F32, Accumulation::Split);
    product(&hadamard, &hadamard)?;
    refused(product(&hadamard, &line), "Hadamard-transformed 1x16 × 1x16")?;
    refused(product(&tile, &tile), "16x16 × 16x16")?;
    let one = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
    let eight = ops::quantize(&x, &Slot { scale: Scale::FromTensor(&one), ..Slot::off(Encoding::E4M3) })?;
    let eight = eight.as_fp8().ok_or("want FP8")?;
    refused(product(eight, &line), "tensor × 1x16")?;
    refused(product(&line.for_backward(), &line), "quantized from the source")?;
    refused(hadamard.dequantize(DType::F32), "of a Hadamard transform")?;
    let factors = |len: usize| Tensor::full(1.0, [len], DType::F32, device);
    let rescaled = |x: &Fp8Tensor, one: usize, two: Option<usize>| {
        x.clone().with_tensor_scale(factors(one)?, two.map(factors).transpose()?)
    };
    rescaled(&line, 2, Some(2))?;
    refused(rescaled(&line, 2, None), "expected one for each copy of the codes")?;
    refused(rescaled(&line.without_columnwise(), 2, Some(2)), "the tensor has one copy of its codes")?;
    refused(rescaled(eight, 2, None), "expected a tensor in NVFP4")?;
    refused(rescaled(&line, 3, Some(2)), "reshape")?;
    let error: Result<Tensor, Error> = line.reshape([16, 64]).and_then(|x| x.dequantize(DType::F32));
    refused(error, "only tensors with one factor")
}
