//! `gemm` on a GPU, by cuBLASLt, and what surrounds its products.

use super::cublaslt::Type;
use super::product::{FactorLayout, Places, Product};
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{self, Layout, output_shape};
use crate::{DType, Result, Tensor};

/// Rows of an output that begin at multiples of these many bytes get their bias from cuBLASLt.
const ROW_BYTES: usize = 16;

pub(super) const fn type_of(dtype: DType) -> Type {
    match dtype {
        DType::BF16 => Type::Bf16,
        DType::F16 => Type::F16,
        DType::F32 | DType::I32 | DType::U8 => Type::F32,
    }
}

pub(crate) fn gemm(
    gpu: &Gpu,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    [m, n, k]: [usize; 3],
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    let shape = output_shape(a, layout, [m, n]);
    let y = if [m, n, k].contains(&0) {
        no_products(gpu, "gemm", bias, [m, n], dtype)?
    } else {
        new_product(gpu, one_type(a, b)?, layout, [m, n, k], bias, dtype)?
    };
    Ok(Tensor::from_cuda(y, shape, a.device()))
}

/// The product of operands of one type, none of whose extents is 0.
pub(super) fn new_product(
    gpu: &Gpu,
    [a, b]: [Tensor; 2],
    layout: Layout,
    [m, n, k]: [usize; 3],
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Buffer> {
    let op = "gemm";
    // The library adds a bias of the output's type; its output is its operands' type, or f32. Where rows of a 16-bit output do
    // not begin at multiples of 16 bytes, cuBLASLt was seen on an H100 to round the product before it added the bias.
    let is_aligned = dtype == DType::F32 || (n * dtype.size()).is_multiple_of(ROW_BYTES);
    let adds_bias = |bias: &Tensor| bias.dtype() == dtype && is_aligned;
    let is_direct = [DType::F32, a.dtype()].contains(&dtype) && bias.is_none_or(adds_bias);
    let out = if is_direct { dtype } else { DType::F32 };
    let own_bias = bias.filter(|_| is_direct);
    let product = Product {
        bias: own_bias.map(|bias| type_of(bias.dtype())),
        ..product(&a, &b, layout, [m, n, k], out)
    };
    let y = gpu.alloc(out, m * n)?;
    let places = Places {
        left: a.cuda(op)?.ptr(),
        right: b.cuda(op)?.ptr(),
        out: y.ptr(),
        bias: own_bias.map(|bias| bias.cuda(op)).transpose()?.map_or(0, Buffer::ptr),
        ..Places::default()
    };
    // SAFETY: operands of these extents and one type (checked by `ops::gemm`), an output made for it, a bias of n values.
    unsafe { gpu.matmul(op, &product, &places) }?;
    if is_direct { Ok(y) } else { finish(gpu, op, &y, n, bias, [m, n], dtype) }
}

pub(crate) fn gemm_accumulate(
    gpu: &Gpu,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    dims: [usize; 3],
    out: &mut Tensor,
    name: &str,
) -> Result<()> {
    let out = out.cuda_mut(name)?;
    if dims.contains(&0) {
        return Ok(());
    }
    add_product(gpu, one_type(a, b)?, layout, dims, out)
}

/// `out +=` the product of operands of one type, none of whose extents is 0.
pub(super) fn add_product(
    gpu: &Gpu,
    [a, b]: [Tensor; 2],
    layout: Layout,
    dims: [usize; 3],
    out: &Buffer,
) -> Result<()> {
    let op = "gemm_accumulate";
    let product = Product { accumulate: true, ..product(&a, &b, layout, dims, DType::F32) };
    let (left, right) = (a.cuda(op)?.ptr(), b.cuda(op)?.ptr());
    let places = Places { left, right, out: out.ptr(), ..Places::default() };
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
        accumulate: false,
        fast: false,
    }
}

/// `[m, n]` sums of nothing, plus the bias.
pub(super) fn no_products(
    gpu: &Gpu,
    op: &'static str,
    bias: Option<&Tensor>,
    [m, n]: [usize; 2],
    dtype: DType,
) -> Result<Buffer> {
    match bias {
        None => gpu.zeros(dtype, m * n),
        Some(_) => finish(gpu, op, &gpu.zeros(DType::F32, m * n)?, n, bias, [m, n], dtype),
    }
}

/// `[rows, cols]` of `x`, whose rows are `ld` apart, plus the bias, in `dtype`, rounded once.
pub(super) fn finish(
    gpu: &Gpu,
    op: &'static str,
    x: &Buffer,
    ld: usize,
    bias: Option<&Tensor>,
    [rows, cols]: [usize; 2],
    dtype: DType,
) -> Result<Buffer> {
    let y = gpu.alloc(dtype, rows * cols)?;
    let bias_type = bias.map_or(0, |bias| dtype_number(bias.dtype()));
    let bias = bias.map(|bias| bias.cuda(op)).transpose()?;
    launch_finish(gpu, x, ld, (bias, bias_type), &y, [rows, cols], false)?;
    Ok(y)
}

/// `y += x`, both f32, of which `x` has rows `ld` apart.
pub(super) fn finish_accumulate(
    gpu: &Gpu,
    x: &Buffer,
    ld: usize,
    y: &Buffer,
    dims: [usize; 2],
) -> Result<()> {
    launch_finish(gpu, x, ld, (None, 0), y, dims, true)
}

fn launch_finish(
    gpu: &Gpu,
    x: &Buffer,
    ld: usize,
    (bias, bias_type): (Option<&Buffer>, i32),
    y: &Buffer,
    [rows, cols]: [usize; 2],
    add: bool,
) -> Result<()> {
    let kernel = gpu.load(kernels::GEMM_FINISH)?;
    let n = rows * cols;
    let args = kernels::GemmFinish {
        x: In::f32(x),
        ld: ld as u64,
        bias: In::void(bias),
        y: Out::void(y),
        n: n as u64,
        cols: cols as u64,
        bias_type,
        y_type: dtype_number(y.dtype()),
        add: i32::from(add),
    };
    // SAFETY: x has at least `rows` rows of ld f32, ld ≥ cols, y n elements of its type (f32 where it is added to), a
    // bias cols.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, n), &args) }
}
