//! Reference of `gemm_fp8`: both operands decoded to f32 once, exactly; one f32 product; epilogue.

use super::dispatch::{Strided, gemm_f32};
use super::gemm::epilogue;
use super::{Buffer, parallel, quantize, scratch};
use crate::host::Array;
use crate::ops::{Accumulation, product_then_quantize};
use crate::{DType, Fp8Tensor, Operand, Result, Slot, Tensor};

pub(crate) fn gemm_fp8(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    [m, n, k]: [usize; 3],
    bias: Option<&Tensor>,
    dtype: DType,
    _: Accumulation, // f32 sums are both
) -> Result<Tensor> {
    let (op, shape) = ("gemm_fp8", a.shape().with_last(n));
    let buffer = if k == 0 && bias.is_none() {
        Buffer::zeros(op, dtype, shape.numel())?
    } else {
        let mut out = product(op, a, b, [m, n, k])?;
        // Without products there is nothing to multiply, whatever the factors are.
        let factors = if k == 0 { [1.0, 1.0] } else { factors(a, b)? };
        epilogue(&mut out, n, factors, bias)?;
        Buffer::from_f32(out, dtype, op)?
    };
    Ok(Tensor::from_buffer(buffer, shape, a.device()))
}

pub(crate) fn gemm_fp8_accumulate(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    dims: [usize; 3],
    out: &mut Tensor,
    name: &str,
) -> Result<()> {
    if dims.contains(&0) {
        return out.as_mut_slice::<f32>(name).map(drop);
    }
    let [first, second] = factors(a, b)?;
    let product = product("gemm_fp8_accumulate", a, b, dims)?;
    parallel::zip(out.as_mut_slice::<f32>(name)?, &product, |out, product| {
        out.iter_mut().zip(product).for_each(|(o, v)| *o += v * first * second);
    });
    Ok(())
}

fn factors(a: &Fp8Tensor, b: &Fp8Tensor) -> Result<[f32; 2]> {
    Ok([a.scale_inv().item()?, b.scale_inv().item()?])
}

/// `[m, n]`, whose number of elements `ops` has checked.
fn product(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor, [m, n, k]: [usize; 3]) -> Result<Array<f32>> {
    let mut out = Array::for_overwrite(op, m * n)?;
    with_values(op, a, |a| {
        with_values(op, b, |b| {
            let b = Strided { row_stride: b.col_stride, col_stride: b.row_stride, ..b };
            gemm_f32([m, n, k], a, b, &mut out, false);
        })
    })??;
    Ok(out)
}

/// Lends the decoded elements, with the strides of rows and columns, from whichever layout is there.
fn with_values<R>(op: &'static str, x: &Fp8Tensor, f: impl FnOnce(Strided<'_>) -> R) -> Result<R> {
    let [rows, cols] = x.matrix();
    let (codes, [row_stride, col_stride]) = match (x.rowwise(), x.columnwise()) {
        (Some(codes), _) => (Some(codes), [cols, 1]),
        (None, codes) => (codes, [1, rows]),
    };
    let codes = codes.map_or(Ok(&[][..]), |codes| codes.as_slice::<u8>())?;
    scratch::with(op, codes.len(), |data| {
        quantize::decode(codes, x.encoding(), data)?;
        Ok(f(Strided { data, row_stride, col_stride }))
    })?
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
