//! `gemm` on a GPU, by cuBLASLt, and what surrounds its products.

use super::cublaslt::Type;
use super::product::{FactorLayout, Places, Product};
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{self, Layout, Terms, Update, output_shape};
use crate::{DType, Result, Tensor};

/// Rows of an output that begin at multiples of these many bytes get their addend and bias from cuBLASLt.
const ROW_BYTES: usize = 16;

pub(super) const fn type_of(dtype: DType) -> Type {
    match dtype {
        DType::BF16 => Type::Bf16,
        DType::F16 => Type::F16,
        DType::F32 | DType::I32 | DType::U8 => Type::F32,
    }
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_add`")]
pub(crate) fn gemm(
    gpu: &Gpu,
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
    terms: Terms<'_>,
    dtype: DType,
) -> Result<Tensor> {
    let shape = output_shape(a, layout, [m, n]);
    let y = if [m, n, k].contains(&0) {
        no_products(gpu, op, &terms, [m, n], dtype)?
    } else {
        new_product(gpu, op, one_type(a, b)?, layout, [m, n, k], terms, dtype)?
    };
    Ok(Tensor::from_cuda(y, shape, a.device()))
}

/// The product of operands of one type, none of whose extents is 0.
pub(super) fn new_product(
    gpu: &Gpu,
    op: &'static str,
    [a, b]: [Tensor; 2],
    layout: Layout,
    [m, n, k]: [usize; 3],
    terms: Terms<'_>,
    dtype: DType,
) -> Result<Buffer> {
    // The library adds terms of the output's type; its output is its operands' type, or f32. Where rows of a 16-bit output do
    // not begin at multiples of 16 bytes, cuBLASLt was seen on an H100 to round the product before it added the bias.
    let is_aligned = dtype == DType::F32 || (n * dtype.size()).is_multiple_of(ROW_BYTES);
    let adds = |term: &Tensor| term.dtype() == dtype && is_aligned;
    let is_direct = [DType::F32, a.dtype()].contains(&dtype)
        && terms.addend.is_none_or(adds)
        && terms.bias.is_none_or(adds);
    let out = if is_direct { dtype } else { DType::F32 };
    let own = if is_direct { terms } else { Terms::default() };
    let product = Product {
        addend: own.addend.is_some(),
        bias: own.bias.map(|bias| type_of(bias.dtype())),
        ..product(&a, &b, layout, [m, n, k], out)
    };
    let y = gpu.alloc(out, m * n)?;
    let places = Places {
        left: a.cuda(op)?.ptr(),
        right: b.cuda(op)?.ptr(),
        out: y.ptr(),
        addend: address(op, own.addend)?,
        bias: address(op, own.bias)?,
        ..Places::default()
    };
    // SAFETY: operands of these extents and one type (checked by `ops::gemm`), an output made for it, an addend of its type and
    // extents, a bias of n values.
    unsafe { gpu.matmul(op, &product, &places) }?;
    if is_direct { Ok(y) } else { finish(gpu, op, &y, n, &terms, [m, n], dtype) }
}

/// Returns the address of a term of a product, 0 for none.
pub(super) fn address(op: &'static str, term: Option<&Tensor>) -> Result<u64> {
    Ok(term.map(|term| term.cuda(op)).transpose()?.map_or(0, Buffer::ptr))
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_into`")]
pub(crate) fn gemm_into(
    gpu: &Gpu,
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    dims: [usize; 3],
    out: &mut Tensor,
    update: Update,
    name: &str,
) -> Result<()> {
    let out = out.cuda_mut(name)?;
    if dims.contains(&0) {
        return no_products_into(gpu, out, update);
    }
    store_product(gpu, op, one_type(a, b)?, layout, dims, out, update)
}

/// Adds sums of nothing to `out`, or writes them.
pub(super) fn no_products_into(gpu: &Gpu, out: &Buffer, update: Update) -> Result<()> {
    match update {
        Update::Add => Ok(()),
        Update::Write => gpu.clear_bytes(out.ptr(), out.bytes()),
    }
}

/// Stores the product of operands of one type, none of whose extents is 0, in `out`.
pub(super) fn store_product(
    gpu: &Gpu,
    op: &'static str,
    [a, b]: [Tensor; 2],
    layout: Layout,
    dims: [usize; 3],
    out: &Buffer,
    update: Update,
) -> Result<()> {
    let product = product(&a, &b, layout, dims, DType::F32);
    let (left, right) = (a.cuda(op)?.ptr(), b.cuda(op)?.ptr());
    let accumulate = update == Update::Add;
    let places = Places { left, right, out: out.ptr(), accumulate, ..Places::default() };
    // SAFETY: operands of these extents and one type, an f32 output of theirs that nobody else holds.
    unsafe { gpu.matmul(op, &product, &places) }
}

/// The operands as they are, or both in f32: the library multiplies equal types.
fn one_type(a: &Tensor, b: &Tensor) -> Result<[Tensor; 2]> {
    if a.dtype() == b.dtype() {
        return Ok([a.clone(), b.clone()]);
    }
    Ok([ops::cast(a, DType::F32)?, ops::cast(b, DType::F32)?])
}

fn product(a: &Tensor, b: &Tensor, layout: Layout, [m, n, k]: [usize; 3], out: DType) -> Product {
    Product {
        m,
        n,
        k,
        left_transposed: layout == Layout::Tn,
        right_transposed: layout == Layout::Nt,
        left: type_of(a.dtype()),
        right: type_of(b.dtype()),
        factors: [FactorLayout::Tensor; 2],
        out: type_of(out),
        bias: None,
        addend: false,
        fast: false,
        device_alpha: false,
    }
}

/// `[m, n]` sums of nothing, plus the terms.
pub(super) fn no_products(
    gpu: &Gpu,
    op: &'static str,
    terms: &Terms<'_>,
    [m, n]: [usize; 2],
    dtype: DType,
) -> Result<Buffer> {
    if terms.are_none() {
        return gpu.zeros(dtype, m * n);
    }
    finish(gpu, op, &gpu.zeros(DType::F32, m * n)?, n, terms, [m, n], dtype)
}

/// `[rows, cols]` of `x`, whose rows are `ld` apart, plus the terms, in `dtype`, rounded once.
pub(super) fn finish(
    gpu: &Gpu,
    op: &'static str,
    x: &Buffer,
    ld: usize,
    terms: &Terms<'_>,
    [rows, cols]: [usize; 2],
    dtype: DType,
) -> Result<Buffer> {
    let y = gpu.alloc(dtype, rows * cols)?;
    let terms = [terms.addend, terms.bias].map(|term| Term::new(op, term));
    let [addend, bias] = terms;
    launch_finish(gpu, x, ld, [addend?, bias?], &y, [rows, cols], false)?;
    Ok(y)
}

/// `y += x`, or `y = x`, both f32, of which `x` has rows `ld` apart.
pub(super) fn finish_into(
    gpu: &Gpu,
    x: &Buffer,
    ld: usize,
    y: &Buffer,
    dims: [usize; 2],
    update: Update,
) -> Result<()> {
    launch_finish(gpu, x, ld, [Term::default(); 2], y, dims, update == Update::Add)
}

/// A term of a product as a kernel takes it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Term<'a> {
    pub(super) buffer: Option<&'a Buffer>,
    /// The number of its dtype.
    pub(super) dtype: i32,
}

impl<'a> Term<'a> {
    pub(super) fn new(op: &'static str, term: Option<&'a Tensor>) -> Result<Self> {
        Ok(Self {
            buffer: term.map(|term| term.cuda(op)).transpose()?,
            dtype: term.map_or(0, |term| dtype_number(term.dtype())),
        })
    }
}

fn launch_finish(
    gpu: &Gpu,
    x: &Buffer,
    ld: usize,
    [addend, bias]: [Term<'_>; 2],
    y: &Buffer,
    [rows, cols]: [usize; 2],
    add: bool,
) -> Result<()> {
    let kernel = gpu.load(kernels::GEMM_FINISH)?;
    let n = rows * cols;
    let args = kernels::GemmFinish {
        x: In::f32(x),
        ld: ld as u64,
        addend: In::void(addend.buffer),
        bias: In::void(bias.buffer),
        y: Out::void(y),
        n: n as u64,
        cols: cols as u64,
        addend_type: addend.dtype,
        bias_type: bias.dtype,
        y_type: dtype_number(y.dtype()),
        add: i32::from(add),
    };
    // SAFETY: x has at least `rows` rows of ld f32, ld ≥ cols, y n elements of its type (f32 where it is added to), an
    // addend n, a bias cols.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, n), &args) }
}

/// Returns whether the library adds these terms to an FP8 product with an output of `dtype`: an addend of the output's type, and a
/// bias of it if it has 16 bits.
pub(super) fn adds_to_fp8(terms: &Terms<'_>, dtype: DType) -> bool {
    terms.addend.is_none_or(|addend| addend.dtype() == dtype)
        && terms.bias.is_none_or(|bias| bias.dtype() == dtype && dtype != DType::F32)
}
