use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{FLOATS, f64s, normal, tolerance};
use super::threads::same_bits;
use crate::oracle;
use fp8_kernels::{DType, Device, Result, Tensor, ops};
use ops::Layout;

cases![
    against_three_loops,
    bias_and_output_types,
    an_f32_bias_is_rounded_to_a_16_bit_outputs_type,
    accumulates,
    leading_dimensions_are_rows,
    same_for_any_threads,
    refuses,
];

const LAYOUTS: [Layout; 3] = [Layout::Nn, Layout::Nt, Layout::Tn];
pub(super) const DIMS: [[usize; 3]; 13] = [
    [0, 4, 4],
    [4, 0, 4],
    [4, 4, 0],
    [1, 1, 1],
    [1, 16, 33],
    [15, 1, 17],
    [16, 16, 16],
    [17, 31, 15],
    [33, 17, 64],
    [63, 65, 97],
    [1, 129, 257],
    [128, 1, 127],
    [127, 129, 101],
];

/// Both operands as `layout` reads them, small enough that f32 sums stay within their tolerance.
fn operands(
    layout: Layout,
    [m, n, k]: [usize; 3],
    [a, b]: [DType; 2],
    device: &Device,
) -> Result<[Tensor; 2]> {
    let a_shape = if layout == Layout::Tn { [k, m] } else { [m, k] };
    let b_shape = if layout == Layout::Nt { [n, k] } else { [k, n] };
    Ok([ops::scale(&normal(a_shape, a, 1, device)?, 0.25)?, normal(b_shape, b, 2, device)?])
}

fn against_three_loops(device: &Device) -> Outcome {
    for (layout, dims) in LAYOUTS.into_iter().flat_map(|l| DIMS.map(|d| (l, d))) {
        for dtypes in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| [a, b])) {
            let [a, b] = operands(layout, dims, dtypes, device)?;
            let got = ops::gemm(&a, &b, layout, None, DType::F32)?;
            let want = oracle::gemm::gemm(&f64s(&a)?, &f64s(&b)?, layout, dims, None);
            let what = format!("{layout:?} {dims:?} {dtypes:?}");
            equal(&what, got.shape().to_vec(), dims[..2].to_vec())?;
            close(&what, &got.to_f32_vec()?, &want, dims[1], tolerance(DType::F32))?;
        }
    }
    Ok(())
}

/// Results of every count modulo eight besides.
fn bias_and_output_types(device: &Device) -> Outcome {
    let all = (1..=9).map(|cols| [1, cols, 8]).chain([[33, 17, 64], [3, 5, 8]]);
    let types = FLOATS.into_iter().flat_map(|d| FLOATS.map(|b| (d, b)));
    for (dims, (dtype, bias_dtype)) in all.flat_map(|dims| types.clone().map(move |types| (dims, types))) {
        let [a, b] = operands(Layout::Nt, dims, [DType::BF16; 2], device)?;
        let cols = dims[1];
        let given = normal([cols], bias_dtype, 3, device)?;
        let got = ops::gemm(&a, &b, Layout::Nt, Some(&given), dtype)?;
        // What such an output gets.
        let bias = if bias_dtype == DType::F32 { ops::cast(&given, dtype)? } else { given };
        equal("dtype", got.dtype(), dtype)?;
        let want = oracle::gemm::gemm(&f64s(&a)?, &f64s(&b)?, Layout::Nt, dims, Some(&f64s(&bias)?));
        close(&format!("{dtype}, bias {bias_dtype}"), &got.to_f32_vec()?, &want, cols, tolerance(dtype))?;
        // One rounding: the f32 result, cast.
        let wide = ops::gemm(&a, &b, Layout::Nt, Some(&bias), DType::F32)?;
        same("one rounding", &got.to_f32_vec()?, &ops::cast(&wide, dtype)?.to_f32_vec()?, cols)?;
        let got = ops::gemm(&a, &b, Layout::Nt, None, dtype)?;
        let want = oracle::gemm::gemm(&f64s(&a)?, &f64s(&b)?, Layout::Nt, dims, None);
        close(&format!("{dtype}, no bias"), &got.to_f32_vec()?, &want, cols, tolerance(dtype))?;
    }
    Ok(())
}

/// Biases a little above half a step of the output at 1: 1 + bias is nearer to the next value, and 1 + the rounded bias is a
/// tie that goes back to 1. `product` adds a bias of `n` values to products that are all 1.
pub(super) fn check_rounded_bias(
    device: &Device,
    n: usize,
    product: impl Fn(&Tensor, DType) -> Result<Tensor>,
) -> Outcome {
    for (dtype, step) in [(DType::BF16, f32::powi(2.0, -7)), (DType::F16, f32::powi(2.0, -10))] {
        let bias = step * (0.5 + f32::powi(2.0, -13));
        let as_given = Tensor::full(bias, [n], DType::F32, device)?;
        let got = product(&as_given, dtype)?;
        let what = format!("{dtype}, n = {n}");
        same(&what, &got.to_f32_vec()?, &vec![1.0; got.numel()], n)?;
        let rounded = product(&ops::cast(&as_given, dtype)?, dtype)?;
        same(&format!("{what}: rounded before"), &got.to_f32_vec()?, &rounded.to_f32_vec()?, n)?;
        // In f32 the bias is added as it is.
        let wide = product(&as_given, DType::F32)?.to_f32_vec()?;
        same(&format!("{what}: f32"), &wide, &vec![1.0 + bias; wide.len()], n)?;
    }
    Ok(())
}

fn an_f32_bias_is_rounded_to_a_16_bit_outputs_type(device: &Device) -> Outcome {
    for (n, dtype) in [1, 5, 16, 33].into_iter().flat_map(|n| FLOATS.map(|dtype| (n, dtype))) {
        let a = Tensor::full(0.5, [3, 2], dtype, device)?;
        let b = Tensor::full(1.0, [n, 2], dtype, device)?;
        check_rounded_bias(device, n, |bias, out| ops::gemm(&a, &b, Layout::Nt, Some(bias), out))?;
    }
    Ok(())
}

fn accumulates(device: &Device) -> Outcome {
    for (layout, dims) in LAYOUTS.into_iter().flat_map(|l| DIMS.map(|d| (l, d))) {
        let [a, b] = operands(layout, dims, [DType::F32; 2], device)?;
        let mut out = normal([dims[0], dims[1]], DType::F32, 5, device)?;
        let before = f64s(&out)?;
        ops::gemm_accumulate(&a, &b, layout, &mut out, "out")?;
        let product = oracle::gemm::gemm(&f64s(&a)?, &f64s(&b)?, layout, dims, None);
        let want: Vec<f64> = product.iter().zip(before).map(|(p, b)| p + b).collect();
        let what = format!("{layout:?} {dims:?}");
        close(&what, &out.to_f32_vec()?, &want, dims[1], tolerance(DType::F32))?;
    }
    Ok(())
}

fn leading_dimensions_are_rows(device: &Device) -> Outcome {
    let (x, w) = (normal([2, 3, 8], DType::F32, 1, device)?, normal([5, 8], DType::F32, 2, device)?);
    let y = ops::gemm(&x, &w, Layout::Nt, None, DType::F32)?;
    equal("shape", y.shape().to_vec(), vec![2, 3, 5])?;
    let dy = normal([2, 3, 5], DType::F32, 3, device)?;
    let dw = ops::gemm(&dy, &x, Layout::Tn, None, DType::F32)?;
    equal("shape", dw.shape().to_vec(), vec![5, 8])
}

fn same_for_any_threads(device: &Device) -> Outcome {
    for (layout, dims) in LAYOUTS.into_iter().zip([[257, 511, 1000], [1, 4096, 300], [1000, 3, 2000]]) {
        let [a, b] = operands(layout, dims, [DType::F32; 2], device)?;
        same_bits(&format!("{layout:?} {dims:?}"), || {
            Ok(vec![ops::gemm(&a, &b, layout, None, DType::F32)?])
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    let (nn, nt, tn) = (Layout::Nn, Layout::Nt, Layout::Tn);
    refused(
        ops::gemm(&x([2, 3])?, &x([4, 5])?, nt, None, DType::F32),
        "gemm: a and b: got [2, 3] and [4, 5]: a · bᵀ needs equal last dimensions",
    )?;
    refused(
        ops::gemm(&x([2, 3])?, &x([4, 5])?, nn, None, DType::F32),
        "needs a's last dimension to equal b's first",
    )?;
    refused(
        ops::gemm(&x([2, 3])?, &x([4, 5])?, tn, None, DType::F32),
        "aᵀ · b needs equal first dimensions",
    )?;
    refused(ops::gemm(&x([2, 3])?, &x([4, 3])?, nt, None, DType::U8), "gemm: the output has dtype u8")?;
    let bias = Tensor::zeros([3], DType::F32, device)?;
    refused(
        ops::gemm(&x([2, 3])?, &x([4, 3])?, nt, Some(&bias), DType::F32),
        "got [3] and [4]: a bias has one value per column",
    )?;
    let mut out = Tensor::zeros([2, 5], DType::F32, device)?;
    refused(
        ops::gemm_accumulate(&x([2, 3])?, &x([4, 3])?, nt, &mut out, "dw"),
        "gemm_accumulate: out and the product: got [2, 5] and [2, 4]",
    )?;
    let mut out = Tensor::zeros([2, 4], DType::BF16, device)?;
    refused(
        ops::gemm_accumulate(&x([2, 3])?, &x([4, 3])?, nt, &mut out, "dw"),
        "gemm_accumulate: out has dtype bf16: expected f32",
    )?;
    let mut out = Tensor::zeros([2, 4], DType::F32, device)?;
    let _holder = out.clone();
    refused(
        ops::gemm_accumulate(&x([2, 3])?, &x([4, 3])?, nt, &mut out, "fc1.weight"),
        "fc1.weight: cannot be changed in place",
    )
}
