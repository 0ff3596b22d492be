//! `gemm_fp8` on the CPU: the product of [`matmul`](super::matmul) on codes.

use super::gemm::{addend, product};
use super::matmul::{Elements, Epilogue, Factors, Matrix, Out, Packed, matmul};
use super::nvfp4;
use crate::fp8_tensor::{Layout, packed_width};
use crate::host::Array;
use crate::ops::{Accumulation, Terms, Update, product_then_quantize};
use crate::{DType, Fp8Tensor, Operand, Result, Slot, Tensor};
use fp8_format::{Blocks, E4M3, E8M0};

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
    let operands = Operands::new(op, [a, b])?;
    // Without products there is nothing to multiply, whatever the factors are.
    let factors = if k == 0 { Factors::None } else { operands.factors()? };
    let dims = [m, n, operands.depth(k)];
    let epilogue =
        Epilogue { factors, addend: addend(op, &terms, n)?, bias: bias.as_deref(), accumulate: false };
    let buffer = product(op, dims, operands.matrices()?, &epilogue, dtype)?;
    Ok(Tensor::from_buffer(buffer, a.shape().with_last(n), a.device()))
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_fp8_into`")]
pub(crate) fn gemm_fp8_into(
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    dims @ [m, n, k]: [usize; 3],
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
    let operands = Operands::new(op, [a, b])?;
    let accumulate = update == Update::Add;
    let epilogue = Epilogue { factors: operands.factors()?, accumulate, ..Epilogue::default() };
    let [left, right] = operands.matrices()?;
    matmul(op, [m, n, operands.depth(k)], left, right, &epilogue, Out::f32(out))
}

/// Both operands as the product reads them.
#[expect(clippy::large_enum_variant, reason = "one a product, and a box would cost an allocation")]
enum Operands<'t> {
    Fp8([&'t Fp8Tensor; 2], Vectors),
    /// Their layouts along k, and k.
    Nvfp4([Layout; 2], usize),
}

impl<'t> Operands<'t> {
    fn new(op: &'static str, [a, b]: [&'t Fp8Tensor; 2]) -> Result<Self> {
        if a.blocks().is_some_and(Blocks::is_fp4) {
            let [_, k] = a.matrix();
            return Ok(Self::Nvfp4([a.rowwise_layout(op)?, b.rowwise_layout(op)?], k));
        }
        Ok(Self::Fp8([a, b], Vectors::new(op, a, b)?))
    }

    /// The number of products in a sum of `k` of them: a Hadamard transform spreads the last ones over a whole block.
    fn depth(&self, k: usize) -> usize {
        match self {
            Self::Nvfp4([a, _], _) if a.sharing.has_hadamard() => k.next_multiple_of(16),
            _ => k,
        }
    }

    fn factors(&self) -> Result<Factors<'_>> {
        match self {
            Self::Fp8([a, b], vectors) => vectors.factors(a, b),
            Self::Nvfp4([a, b], _) => Ok(Factors::Segments([nvfp4::decode(a)?, nvfp4::decode(b)?])),
        }
    }

    fn matrices(&self) -> Result<[Matrix<'_>; 2]> {
        match self {
            Self::Fp8([a, b], _) => Ok([matrix(a)?, matrix(b)?]),
            Self::Nvfp4([a, b], k) => Ok([packed(a, *k)?, packed(b, *k)?]),
        }
    }
}

/// Packed codes with `k` values a row.
fn packed(layout: &Layout, k: usize) -> Result<Matrix<'_>> {
    let height = if layout.sharing.blocks() == Some(Blocks::B16x16) { 16 } else { 1 };
    let packed = Packed {
        codes: layout.codes.as_slice()?,
        scales: bytemuck::cast_slice::<u8, E4M3>(layout.scale_inv.as_slice()?),
        width: packed_width(k, layout.sharing.has_hadamard()),
        across: k.div_ceil(16),
        height,
    };
    Ok(Matrix::along_k(Elements::Packed(packed), k))
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
