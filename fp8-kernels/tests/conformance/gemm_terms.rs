//! The terms that products add to their sums, an addend and a bias, and how they are stored in tensors that exist.
//!
//! The product alone, in f32, is the starting point: the terms are added to it here, in the order that the operations promise.

use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{FLOATS, f64s, normal, tolerance};
use super::fp8_product::is_hardware;
use super::gemm_blocks::{fp8, pairs, quantized as in_blocks, small, with_every_library};
use super::gemm_fp8::quantized;
use fp8_kernels::{DType, Device, Encoding, Operand, Result, Tensor, ops};
use ops::{Accumulation, Layout, Update};

cases![
    an_addend_then_a_bias,
    an_addend_then_a_bias_in_fp8,
    an_addend_then_a_bias_of_blocks,
    an_addend_of_its_own_layer,
    no_products,
    written_over_what_was_there,
    written_over_what_was_there_by_blocks,
    refuses,
];

/// `None`, and tensors of all dtypes.
fn biases(n: usize, device: &Device) -> Result<Vec<Option<Tensor>>> {
    FLOATS.into_iter().map(|dtype| normal([n], dtype, 4, device).map(Some)).chain([Ok(None)]).collect()
}

/// Compares with `product` plus the terms; `got` computes the sums with an addend, a bias and an output type.
fn check(
    what: &str,
    product: &Tensor,
    got: impl Fn(&Tensor, Option<&Tensor>, DType) -> Result<Tensor>,
) -> Outcome {
    let ([m, n], device) = (product.shape().matrix(), product.device());
    let sums = product.to_f32_vec()?;
    for (dtype, addend_type) in FLOATS.into_iter().flat_map(|d| FLOATS.map(|a| (d, a))) {
        let addend = normal([m, n], addend_type, 3, device)?;
        for bias in biases(n, device)? {
            let y = got(&addend, bias.as_ref(), dtype)?;
            equal(what, (y.dtype(), y.shape().matrix()), (dtype, [m, n]))?;
            let bias_type = bias.as_ref().map(Tensor::dtype);
            // As for a product without an addend.
            let bias = match bias {
                Some(bias) if bias.dtype() == DType::F32 => Some(ops::cast(&bias, dtype)?.to_f32_vec()?),
                Some(bias) => Some(bias.to_f32_vec()?),
                None => None,
            };
            let addend = addend.to_f32_vec()?;
            let want: Vec<f32> = (0..m * n)
                .map(|i| (sums[i] + addend[i]) + bias.as_ref().map_or(0.0, |bias| bias[i % n]))
                .collect();
            let what = format!("{what}: {dtype}, addend {addend_type}, bias {bias_type:?}");
            let rounded = ops::cast(&Tensor::from_vec(want, [m, n], device)?, dtype)?;
            if is_hardware(device) {
                close(&what, &y.to_f32_vec()?, &f64s(&rounded)?, n, tolerance(dtype))?;
            } else {
                same(&what, &y.to_f32_vec()?, &rounded.to_f32_vec()?, n)?;
            }
        }
    }
    Ok(())
}

fn an_addend_then_a_bias(device: &Device) -> Outcome {
    // Rows that a library adds the terms of, and others; many rows, few rows; sums over several blocks of k.
    for dims in [[16, 16, 16], [3, 8, 24], [17, 31, 15], [1, 5, 700], [70, 40, 600]] {
        let [m, n, k] = dims;
        for (a_type, b_type) in [DType::F32, DType::BF16, DType::F16].map(|dtype| (dtype, dtype)) {
            let a = ops::scale(&normal([m, k], a_type, 1, device)?, 0.25)?;
            let (b, bt) = (normal([n, k], b_type, 2, device)?, normal([k, n], b_type, 2, device)?);
            let product = ops::gemm(&a, &b, Layout::Nt, None, DType::F32)?;
            check(&format!("{dims:?} {a_type}"), &product, |addend, bias, dtype| {
                ops::gemm_add(&a, &b, Layout::Nt, addend, bias, dtype)
            })?;
            if dims == [16, 16, 16] {
                let product = ops::gemm(&a, &bt, Layout::Nn, None, DType::F32)?;
                check(&format!("{dims:?} {a_type}, b not transposed"), &product, |addend, bias, dtype| {
                    ops::gemm_add(&a, &bt, Layout::Nn, addend, bias, dtype)
                })?;
            }
        }
    }
    Ok(())
}

fn an_addend_then_a_bias_in_fp8(device: &Device) -> Outcome {
    for dims in [[16, 32, 16], [17, 31, 33], [1, 5, 5], [48, 16, 700]] {
        let [m, n, k] = dims;
        let a = quantized([m, k], Encoding::E4M3, 30.0, 1, device)?;
        let b = quantized([n, k], Encoding::E4M3, 100.0, 2, device)?;
        let product = ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Fast)?;
        check(&format!("{dims:?}"), &product, |addend, bias, dtype| {
            ops::gemm_fp8_add(&a, &b, addend, bias, dtype, Accumulation::Fast)
        })?;
    }
    Ok(())
}

fn an_addend_then_a_bias_of_blocks(device: &Device) -> Outcome {
    with_every_library(device, terms_of_blocks)
}

fn terms_of_blocks(device: &Device) -> Outcome {
    for (turn, [a_rule, b_rule]) in pairs().into_iter().enumerate() {
        let dims @ [m, n, k] = [[16, 16, 32], [5, 3, 40], [33, 17, 129]][turn % 3];
        let a = in_blocks(&small([m, k], 1, device)?, a_rule, Encoding::E4M3)?;
        let b = in_blocks(&small([n, k], 2, device)?, b_rule, Encoding::E4M3)?;
        let product = ops::gemm_fp8(fp8(&a)?, fp8(&b)?, None, DType::F32, Accumulation::Split)?;
        let (a, b) = (&a, &b);
        check(&format!("{a_rule:?} {b_rule:?} {dims:?}"), &product, |addend, bias, dtype| {
            ops::fprop_add(a, b, addend, bias, dtype, Accumulation::Split)
        })?;
    }
    Ok(())
}

/// With the input as addend, as a block with a residual connection has it, and leading dimensions.
fn an_addend_of_its_own_layer(device: &Device) -> Outcome {
    let x = normal([2, 8, 16], DType::BF16, 1, device)?;
    let w = ops::scale(&normal([16, 16], DType::BF16, 2, device)?, 0.25)?;
    let [x_operand, w] = [&x, &w].map(|tensor| Operand::High(tensor.clone()));
    let y = ops::fprop_add(&x_operand, &w, &x, None, DType::BF16, Accumulation::Fast)?;
    equal("shape", y.shape().to_vec(), vec![2, 8, 16])?;
    let product = ops::fprop(&x_operand, &w, None, DType::F32, Accumulation::Fast)?;
    let want = ops::cast(&ops::add(&product, &ops::cast(&x, DType::F32)?)?, DType::BF16)?;
    if is_hardware(device) {
        return close("y", &y.to_f32_vec()?, &f64s(&want)?, 16, tolerance(DType::BF16));
    }
    same("y", &y.to_f32_vec()?, &want.to_f32_vec()?, 16)
}

fn no_products(device: &Device) -> Outcome {
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    let (addend, bias) =
        (Tensor::full(2.0, [3, 4], DType::BF16, device)?, normal([4], DType::F32, 1, device)?);
    let y = ops::gemm_add(&x([3, 0])?, &x([4, 0])?, Layout::Nt, &addend, Some(&bias), DType::F32)?;
    let want: Vec<f32> = bias.to_f32_vec()?.iter().map(|bias| 2.0 + bias).collect();
    same("k = 0", &y.to_f32_vec()?, &want.repeat(3), 4)?;
    let y = ops::gemm_add(&x([3, 0])?, &x([4, 0])?, Layout::Nt, &addend, None, DType::BF16)?;
    same("k = 0, no bias", &y.to_f32_vec()?, &[2.0; 12], 4)?;
    let nothing = Tensor::zeros([0, 4], DType::F32, device)?;
    let y = ops::gemm_add(&x([0, 5])?, &x([4, 5])?, Layout::Nt, &nothing, Some(&bias), DType::F32)?;
    equal("m = 0", y.shape().to_vec(), vec![0, 4])?;
    let codes = |rows| in_blocks(&Tensor::zeros([rows, 0], DType::F32, device)?, None, Encoding::E4M3);
    let mut out = Tensor::full(f32::NAN, [3, 4], DType::F32, device)?;
    let (a, b) = (codes(3)?, codes(4)?);
    ops::gemm_fp8_into(fp8(&a)?, fp8(&b)?, &mut out, Update::Write, "out", Accumulation::Split)?;
    same("written, FP8", &out.to_f32_vec()?, &[0.0; 12], 4)?;
    let mut out = Tensor::full(f32::NAN, [3, 4], DType::F32, device)?;
    ops::gemm_into(&x([3, 0])?, &x([4, 0])?, Layout::Nt, &mut out, Update::Write, "out")?;
    same("written", &out.to_f32_vec()?, &[0.0; 12], 4)
}

/// Compares what `store` makes of NaN with `product`, and of numbers with their sum with it.
fn check_stored(what: &str, product: &Tensor, store: impl Fn(&mut Tensor, Update) -> Result<()>) -> Outcome {
    let ([m, n], device) = (product.shape().matrix(), product.device());
    let mut out = Tensor::full(f32::NAN, [m, n], DType::F32, device)?;
    store(&mut out, Update::Write)?;
    let near = tolerance(DType::F32);
    close(what, &out.to_f32_vec()?, &f64s(product)?, n, near)?;
    if !is_hardware(device) {
        same(what, &out.to_f32_vec()?, &product.to_f32_vec()?, n)?;
    }
    let mut sum = normal([m, n], DType::F32, 3, device)?;
    let want: Vec<f64> = f64s(&sum)?.into_iter().zip(f64s(product)?).map(|(a, b)| a + b).collect();
    store(&mut sum, Update::Add)?;
    close(&format!("{what}, added"), &sum.to_f32_vec()?, &want, n, near)
}

fn written_over_what_was_there(device: &Device) -> Outcome {
    for dims in [[16, 16, 16], [17, 31, 15], [1, 5, 700], [70, 40, 600]] {
        let [m, n, k] = dims;
        for dtypes in [[DType::F32; 2], [DType::BF16; 2], [DType::F16, DType::BF16]] {
            let a = ops::scale(&normal([k, m], dtypes[0], 1, device)?, 0.25)?;
            let b = normal([k, n], dtypes[1], 2, device)?;
            let product = ops::gemm(&a, &b, Layout::Tn, None, DType::F32)?;
            check_stored(&format!("{dims:?} {dtypes:?}"), &product, |out, update| {
                ops::gemm_into(&a, &b, Layout::Tn, out, update, "dw")
            })?;
        }
        let a = quantized([m, k], Encoding::E5M2, 30.0, 1, device)?;
        let b = quantized([n, k], Encoding::E4M3, 100.0, 2, device)?;
        let product = ops::gemm_fp8(&a, &b, None, DType::F32, Accumulation::Split)?;
        check_stored(&format!("{dims:?} FP8"), &product, |out, update| {
            ops::gemm_fp8_into(&a, &b, out, update, "dw", Accumulation::Split)
        })?;
    }
    Ok(())
}

fn written_over_what_was_there_by_blocks(device: &Device) -> Outcome {
    with_every_library(device, stored_blocks)
}

fn stored_blocks(device: &Device) -> Outcome {
    for (turn, [a_rule, b_rule]) in pairs().into_iter().enumerate() {
        let dims @ [m, n, k] = [[16, 16, 32], [5, 3, 40], [33, 17, 129]][turn % 3];
        let a = in_blocks(&small([m, k], 1, device)?, a_rule, Encoding::E4M3)?;
        let b = in_blocks(&small([n, k], 2, device)?, b_rule, Encoding::E4M3)?;
        let product = ops::gemm_fp8(fp8(&a)?, fp8(&b)?, None, DType::F32, Accumulation::Split)?;
        let (a, b) = (fp8(&a)?, fp8(&b)?);
        check_stored(&format!("{a_rule:?} {b_rule:?} {dims:?}"), &product, |out, update| {
            ops::gemm_fp8_into(a, b, out, update, "dw", Accumulation::Split)
        })?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    let add = |addend: &Tensor| ops::gemm_add(&x([2, 3])?, &x([4, 3])?, Layout::Nt, addend, None, DType::F32);
    refused(
        add(&x([2, 5])?),
        "gemm_add: addend and the product: got [2, 5] and [2, 4]: an addend has the product's rows and columns",
    )?;
    refused(
        add(&Tensor::zeros([2, 4], DType::I32, device)?),
        "gemm_add: addend has dtype i32: expected f32, bf16 or f16",
    )?;
    if !device.is_same(&Device::cpu()) {
        refused(add(&Tensor::zeros([2, 4], DType::F32, &Device::cpu())?), "gemm_add")?;
    }
    let codes = quantized([2, 3], Encoding::E4M3, 1.0, 1, device)?;
    refused(
        ops::gemm_fp8_add(&codes, &codes, &x([2, 3])?, None, DType::F32, Accumulation::Fast),
        "gemm_fp8_add: addend and the product: got [2, 3] and [2, 2]",
    )?;
    let mixed = [Operand::Fp8(codes.clone()), Operand::High(x([2, 3])?)];
    refused(
        ops::fprop_add(&mixed[0], &mixed[1], &x([2, 2])?, None, DType::F32, Accumulation::Fast),
        "fprop_add",
    )?;
    let mut out = x([2, 5])?;
    refused(
        ops::gemm_into(&x([2, 3])?, &x([4, 3])?, Layout::Nt, &mut out, Update::Write, "dw"),
        "gemm_into: out and the product: got [2, 5] and [2, 4]",
    )?;
    let _holder = out.clone();
    let mut shared = out.clone();
    refused(
        ops::gemm_fp8_into(&codes, &codes, &mut shared, Update::Write, "dw", Accumulation::Split),
        "gemm_fp8_into: out and the product",
    )?;
    let mut out = x([2, 2])?;
    let _holder = out.clone();
    refused(
        ops::gemm_fp8_into(&codes, &codes, &mut out, Update::Write, "fc1.weight", Accumulation::Split),
        "fc1.weight: cannot be changed in place",
    )
}
