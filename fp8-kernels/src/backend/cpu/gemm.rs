//! `gemm` on the CPU: the product of [`matmul`](super::matmul) with the layouts of the operation.

use super::matmul::{Addend, Elements, Epilogue, Matrix, Out, matmul};
use super::{Buffer, Floats};
use crate::host::Array;
use crate::ops::{Layout, Terms, Update, output_shape};
use crate::{DType, Error, Result, Tensor};
use std::sync::Arc;

pub(crate) fn gemm(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
    terms: Terms<'_>,
    dtype: DType,
) -> Result<Tensor> {
    let shape = output_shape(a, layout, [m, n]);
    let bias = terms.bias.map(|bias| bias.cpu_f32(op)).transpose()?;
    let epilogue = Epilogue { addend: addend(op, &terms, n)?, bias: bias.as_deref(), ..Epilogue::default() };
    let operands = operands(a, b, layout, [m, n, k])?;
    let buffer = product(op, [m, n, k], operands, &epilogue, dtype)?;
    Ok(Tensor::from_buffer(buffer, shape, a.device()))
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_into`")]
pub(crate) fn gemm_into(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    dims: [usize; 3],
    out: &mut Tensor,
    update: Update,
    name: &str,
) -> Result<()> {
    let [a, b] = operands(a, b, layout, dims)?;
    let epilogue = Epilogue { accumulate: update == Update::Add, ..Epilogue::default() };
    matmul(op, dims, a, b, &epilogue, Out::f32(out.as_mut_slice(name)?))
}

/// The matrix that is added to a product with `cols` columns.
pub(super) fn addend<'a>(op: &'static str, terms: &Terms<'a>, cols: usize) -> Result<Option<Addend<'a>>> {
    terms.addend.map(|addend| Ok(Addend { values: Floats::of(addend, op, "addend")?, cols })).transpose()
}

/// The matrices of `a` and `b` as `[m, k]` and `[n, k]`.
fn operands<'a>(
    a: &'a Tensor,
    b: &'a Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
) -> Result<[Matrix<'a>; 2]> {
    let a_elements = Elements::Floats(Floats::of(a, "gemm", "a")?);
    let b_elements = Elements::Floats(Floats::of(b, "gemm", "b")?);
    let a =
        if layout == Layout::Tn { Matrix::across_k(a_elements, m) } else { Matrix::along_k(a_elements, k) };
    let b =
        if layout == Layout::Nt { Matrix::along_k(b_elements, k) } else { Matrix::across_k(b_elements, n) };
    Ok([a, b])
}

/// Computes a product into a new buffer of `dtype`.
pub(crate) fn product(
    op: &'static str,
    dims: [usize; 3],
    [a, b]: [Matrix<'_>; 2],
    epilogue: &Epilogue<'_>,
    dtype: DType,
) -> Result<Buffer> {
    let len = dims[0] * dims[1]; // checked by `ops`
    if dims[2] == 0 && epilogue.addend.is_none() && epilogue.bias.is_none() {
        // The system supplies zeros when they are first read.
        return Buffer::zeros(op, dtype, len);
    }
    Ok(match dtype {
        DType::F32 => {
            let mut out = Array::for_overwrite(op, len)?;
            matmul(op, dims, a, b, epilogue, Out::f32(&mut out))?;
            Buffer::F32(Arc::new(out))
        }
        DType::BF16 => {
            let mut out = Array::for_overwrite(op, len)?;
            matmul(op, dims, a, b, epilogue, Out::bf16(&mut out))?;
            Buffer::BF16(Arc::new(out))
        }
        DType::F16 => {
            let mut out = Array::for_overwrite(op, len)?;
            matmul(op, dims, a, b, epilogue, Out::f16(&mut out))?;
            Buffer::F16(Arc::new(out))
        }
        found => return Err(Error::DType { op, what: "the output", found, expected: "f32, bf16 or f16" }),
    })
}
