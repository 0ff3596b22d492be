//! The destination of sums whose operands have factors for rows or blocks, and what a product needs besides the library's call.

use super::cublaslt::Type;
use super::gemm::{Term, address, adds_to_fp8, finish, finish_into, type_of};
use super::product::{Places, Product};
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{Terms, Update};
use crate::{DType, Error, Result};

/// `CUBLAS_STATUS_NOT_SUPPORTED`: no kernel for a product.
pub(super) const NOT_SUPPORTED: i32 = 15;

/// The destination of the sums.
pub(super) enum Place<'a> {
    New { terms: Terms<'a>, dtype: DType },
    Into(&'a Buffer, Update),
}

/// The library's product and what it cannot do: terms that it would round or refuses, the output without padding. `product` has an output in
/// f32, which may be another one in the end; `[m, n]` are the extents without padding.
pub(super) fn run(
    gpu: &Gpu,
    op: &'static str,
    product: Product,
    places: Places,
    [m, n]: [usize; 2],
    out: &Place<'_>,
) -> Result<Option<Buffer>> {
    let is_padded = [product.m, product.n] != [m, n];
    match out {
        Place::Into(y, update) => {
            let sums =
                is_padded.then(|| gpu.alloc(DType::F32, product.m.saturating_mul(product.n))).transpose()?;
            let accumulate = !is_padded && *update == Update::Add;
            let places = Places { out: sums.as_ref().unwrap_or(y).ptr(), accumulate, ..places };
            // SAFETY: operands and factors of the product's extents, types and layouts, an f32 output of them.
            unsafe { gpu.matmul(op, &product, &places) }?;
            if let Some(sums) = sums {
                finish_into(gpu, &sums, product.n, y, [m, n], *update)?;
            }
            Ok(None)
        }
        Place::New { terms, dtype } => {
            // Products of FP4 have outputs in bf16 and f32.
            let has_output = product.left != Type::E2m1 || *dtype != DType::F16;
            if !is_padded && has_output && adds_to_fp8(terms, *dtype) {
                match new_output(gpu, op, product, places, *terms, *dtype) {
                    // Some GPUs multiply FP4 operands but refuse the bias: NVIDIA/CUDALibrarySamples issue 303.
                    Err(Error::Gemm { code: NOT_SUPPORTED, .. }) if !terms.are_none() => {}
                    done => return done.map(Some),
                }
            }
            let y = new_output(gpu, op, product, places, Terms::default(), DType::F32)?;
            finish(gpu, op, &y, product.n, terms, [m, n], *dtype).map(Some)
        }
    }
}

/// Returns the output of the library's product, in `dtype`, with terms that the library adds.
fn new_output(
    gpu: &Gpu,
    op: &'static str,
    product: Product,
    places: Places,
    terms: Terms<'_>,
    dtype: DType,
) -> Result<Buffer> {
    let product = Product {
        out: type_of(dtype),
        addend: terms.addend.is_some(),
        bias: terms.bias.map(|bias| type_of(bias.dtype())),
        ..product
    };
    let y = gpu.alloc(dtype, product.m.saturating_mul(product.n))?;
    let (addend, bias) = (address(op, terms.addend)?, address(op, terms.bias)?);
    let places = Places { out: y.ptr(), addend, bias, ..places };
    // SAFETY: operands and factors of the product's extents, types and layouts, an output made for it, an addend of its type and
    // extents, a bias of n values.
    unsafe { gpu.matmul(op, &product, &places) }?;
    Ok(y)
}

/// Multiplies sums, in rows `ld` apart, by a factor for each row of the left operand and for each of the right one, or by the only
/// one, and adds the terms.
pub(super) fn finish_rows(
    gpu: &Gpu,
    op: &'static str,
    (sums, ld): (&Buffer, usize),
    [(a, one_a), (b, one_b)]: [(In<f32>, bool); 2],
    [m, n]: [usize; 2],
    out: &Place<'_>,
) -> Result<Option<Buffer>> {
    let (new, terms, add) = match out {
        Place::New { terms, dtype } => (Some(gpu.alloc(*dtype, m * n)?), *terms, false),
        Place::Into(_, update) => (None, Terms::default(), *update == Update::Add),
    };
    let y = match (&new, out) {
        (Some(new), _) => new,
        (None, Place::Into(y, _)) => y,
        (None, Place::New { .. }) => sums,
    };
    let (addend, bias) = (Term::new(op, terms.addend)?, Term::new(op, terms.bias)?);
    let kernel = gpu.load(kernels::GEMM_FINISH_ROWS)?;
    let args = kernels::GemmFinishRows {
        x: In::f32(sums),
        ld: ld as u64,
        a,
        one_a: one_a.into(),
        b,
        one_b: one_b.into(),
        addend: In::void(addend.buffer),
        bias: In::void(bias.buffer),
        y: Out::void(y),
        n: (m * n) as u64,
        cols: n as u64,
        addend_type: addend.dtype,
        bias_type: bias.dtype,
        y_type: dtype_number(y.dtype()),
        add: add.into(),
    };
    // SAFETY: the sums have at least m rows of ld ≥ n f32, a and b a factor for each row and column or one, y m · n
    // elements of its type, f32 where it is added to, an addend m · n, the bias n.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, (m * n) as u64), &args) }?;
    Ok(new)
}
