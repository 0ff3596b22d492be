//! `gemm_fp8` on the CPU: the product of [`matmul`](super::matmul) on codes.

use super::gemm::{addend, product};
use super::matmul::{Elements, Epilogue, Factors, Matrix, Out, matmul};
use crate::host::Array;
use crate::ops::{Accumulation, Terms, Update, product_then_quantize};
use crate::{DType, Fp8Tensor, Operand, Result, Slot, Tensor};
use fp8_format::{Blocks, E8M0};

pub(crate) fn gemm_fp8(
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    [m, n, k]: [usize; 3],
    terms: Terms<'_>,
    dtype: DType,
    _: Accumulation, // sums are f32 either way
) -> Result<Tensor> {
    let bias = terms.bias.map(|bias| bias.cpu_f32(op)).transpose()?;
    let vectors = Vectors::new(op, a, b)?;
    // Without products there is nothing to multiply, whatever the factors are.
    let factors = if k == 0 { Factors::None } else { vectors.factors(a, b)? };
    let epilogue =
        Epilogue { factors, addend: addend(op, &terms, n)?, bias: bias.as_deref(), accumulate: false };
    let buffer = product(op, [m, n, k], [matrix(a)?, matrix(b)?], &epilogue, dtype)?;
    Ok(Tensor::from_buffer(buffer, a.shape().with_last(n), a.device()))
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_fp8_into`")]
pub(crate) fn gemm_fp8_into(
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    dims: [usize; 3],
    out: &mut Tensor,
    update: Update,
    name: &str,
    _: Accumulation,
) -> Result<()> {
    let out = out.as_mut_slice::<f32>(name)?;
    if dims.contains(&0) {
        if update == Update::Write {
            out.fill(0.0);
        }
        return Ok(());
    }
    let vectors = Vectors::new(op, a, b)?;
    let accumulate = update == Update::Add;
    let epilogue = Epilogue { factors: vectors.factors(a, b)?, accumulate, ..Epilogue::default() };
    matmul(op, dims, matrix(a)?, matrix(b)?, &epilogue, Out::f32(out))
}

/// The factors of both operands for each block of k, unless each has one factor.
struct Vectors {
    /// Values of k in a block; `None` if there is one block, of any length.
    length: Option<usize>,
    factors: Option<[Array<f32>; 2]>,
}

impl Vectors {
    fn new(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<Self> {
        let length = match (a.blocks(), b.blocks()) {
            (None, None) => return Ok(Self { length: None, factors: None }),
            (None | Some(Blocks::Row), None | Some(Blocks::Row)) => None,
            (Some(Blocks::Mx32), _) | (_, Some(Blocks::Mx32)) => Some(32),
            _ => Some(128),
        };
        let [a, b] = [by_block(op, a, length)?, by_block(op, b, length)?];
        Ok(Self { length, factors: Some([a, b]) })
    }

    fn factors(&self, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<Factors<'_>> {
        Ok(match (&self.factors, self.length) {
            (None, _) => Factors::Tensors([a.scale_inv().item()?, b.scale_inv().item()?]),
            (Some([a, b]), None) => Factors::Rows { a, b },
            (Some([a, b]), Some(length)) => Factors::Blocks { a, b, length },
        })
    }
}

/// The factors of all rows of `[rows, k]` for the first block of k, then for the second, …
fn by_block(op: &'static str, x: &Fp8Tensor, length: Option<usize>) -> Result<Array<f32>> {
    let [rows, k] = x.matrix();
    let count = length.map_or(1, |length| k.div_ceil(length));
    let mut out = Array::for_overwrite(op, rows * count)?;
    let places = || (0..count).flat_map(|block| (0..rows).map(move |row| (row, block)));
    match x.blocks() {
        None => out.fill(x.scale_inv().item()?),
        Some(Blocks::Mx32) => {
            let bytes = x.scale_inv().as_slice::<u8>()?;
            let factors = places().map(|(row, block)| E8M0::from_bits(bytes[row * count + block]).to_f32());
            out.iter_mut().zip(factors).for_each(|(out, factor)| *out = factor);
        }
        Some(blocks) => {
            let factors = x.scale_inv().as_slice::<f32>()?;
            let at = |(row, block): (usize, usize)| match blocks {
                // The columnwise codes alone: their factors are those of the transpose.
                Blocks::B128x128 if x.rowwise().is_none() => block * rows.div_ceil(128) + row / 128,
                Blocks::B128x128 => row / 128 * count + block,
                _ => row * count + block,
            };
            out.iter_mut().zip(places()).for_each(|(out, place)| *out = factors[at(place)]);
        }
    }
    Ok(out)
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
    accumulation: Accumulation,
) -> Result<Operand> {
    product_then_quantize(a, b, bias, slot, dtype, accumulation)
}
