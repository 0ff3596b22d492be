//! `gemm_fp8` on the CPU: the product of [`matmul`](super::matmul) on codes.

use super::gemm::product;
use super::matmul::{Elements, Epilogue, Matrix, Out, matmul};
use crate::ops::{Accumulation, product_then_quantize};
use crate::{DType, Fp8Tensor, Operand, Result, Slot, Tensor};

pub(crate) fn gemm_fp8(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    [m, n, k]: [usize; 3],
    bias: Option<&Tensor>,
    dtype: DType,
    _: Accumulation, // sums are f32 either way
) -> Result<Tensor> {
    let op = "gemm_fp8";
    let bias = bias.map(|bias| bias.cpu_f32(op)).transpose()?;
    // Without products there is nothing to multiply, whatever the factors are.
    let factors = if k == 0 { None } else { Some(factors(a, b)?) };
    let epilogue = Epilogue { factors, bias: bias.as_deref(), accumulate: false };
    let buffer = product(op, [m, n, k], [matrix(a)?, matrix(b)?], &epilogue, dtype)?;
    Ok(Tensor::from_buffer(buffer, a.shape().with_last(n), a.device()))
}

pub(crate) fn gemm_fp8_accumulate(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    dims: [usize; 3],
    out: &mut Tensor,
    name: &str,
) -> Result<()> {
    let out = out.as_mut_slice::<f32>(name)?;
    if dims.contains(&0) {
        return Ok(());
    }
    let epilogue = Epilogue { factors: Some(factors(a, b)?), bias: None, accumulate: true };
    matmul("gemm_fp8_accumulate", dims, matrix(a)?, matrix(b)?, &epilogue, Out::f32(out))
}

fn factors(a: &Fp8Tensor, b: &Fp8Tensor) -> Result<[f32; 2]> {
    Ok([a.scale_inv().item()?, b.scale_inv().item()?])
}

/// The codes of whichever layout exists, the rowwise one if both do.
fn matrix(x: &Fp8Tensor) -> Result<Matrix<'_>> {
    let [rows, cols] = x.matrix();
    match x.rowwise() {
        Some(codes) => Ok(Matrix::along_k(Elements::Codes(codes.as_slice()?, x.encoding()), cols)),
        None => {
            let codes = x.columnwise().map_or(Ok(&[][..]), Tensor::as_slice::<u8>)?;
            Ok(Matrix::across_k(Elements::Codes(codes, x.encoding()), rows))
        }
    }
}

pub(crate) fn gemm_fp8_quantize(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    _: [usize; 3],
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
) -> Result<Operand> {
    product_then_quantize(a, b, bias, slot, dtype)
}
