//! Reference of `gemm`: f32 sums by the `gemm` crate, then the epilogue row by row.

use super::dispatch::{Strided, gemm_f32};
use super::{Buffer, parallel};
use crate::host::Array;
use crate::ops::{Layout, output_shape};
use crate::{DType, Result, Tensor};

pub(crate) fn gemm(
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    let (op, shape) = ("gemm", output_shape(a, layout, [m, n]));
    let buffer = if k == 0 && bias.is_none() {
        Buffer::zeros(op, dtype, shape.numel())?
    } else {
        let mut out = Array::for_overwrite(op, shape.numel())?;
        product(a, b, layout, [m, n, k], &mut out, false)?;
        epilogue(&mut out, n, [1.0, 1.0], bias)?;
        Buffer::from_f32(out, dtype, op)?
    };
    Ok(Tensor::from_buffer(buffer, shape, a.device()))
}

pub(crate) fn gemm_accumulate(
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    dims: [usize; 3],
    out: &mut Tensor,
    name: &str,
) -> Result<()> {
    product(a, b, layout, dims, out.as_mut_slice(name)?, true)
}

fn product(
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
    out: &mut [f32],
    accumulate: bool,
) -> Result<()> {
    let (a, b) = (a.cpu_f32("gemm")?, b.cpu_f32("gemm")?);
    let straight = |data, cols| Strided { data, row_stride: cols, col_stride: 1 };
    let flipped = |data, rows| Strided { data, row_stride: 1, col_stride: rows };
    let a = if layout == Layout::Tn { flipped(&*a, m) } else { straight(&*a, k) };
    let b = if layout == Layout::Nt { flipped(&*b, k) } else { straight(&*b, n) };
    gemm_f32([m, n, k], a, b, out, accumulate);
    Ok(())
}

/// `(v · factors[0]) · factors[1] + bias`, in this order, in place.
pub(crate) fn epilogue(out: &mut [f32], n: usize, factors: [f32; 2], bias: Option<&Tensor>) -> Result<()> {
    let bias = bias.map(|bias| bias.cpu_f32("gemm")).transpose()?;
    let [first, second] = factors;
    match bias {
        None if factors == [1.0, 1.0] => {}
        None => parallel::rows(out, n, |_, out| out.iter_mut().for_each(|v| *v = *v * first * second)),
        Some(bias) => parallel::rows(out, n, |_, out| {
            for row in out.chunks_exact_mut(n) {
                row.iter_mut().zip(&*bias).for_each(|(v, b)| *v = *v * first * second + b);
            }
        }),
    }
    Ok(())
}
