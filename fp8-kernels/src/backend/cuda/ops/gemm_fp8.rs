//! `gemm_fp8` on a GPU, by cuBLASLt: codes and factors where they lie, padded where no kernel takes their extents.

use super::cublaslt::Type;
use super::gemm::{address, adds_to_fp8, finish, finish_into, no_products, no_products_into, type_of};
use super::padding::{MULTIPLE, padded};
use super::product::{FactorLayout, Places, Product};
use super::slot::{self, DeviceScale, Output};
use super::{Buffer, Gpu, Grid, In, Out, kernels};
use super::{gemm_blocks, gemm_place};
use crate::ops::{self, Accumulation, Terms, Update, product_then_quantize};
use crate::{DType, Encoding, Fp8Tensor, Operand, Result, Scale, Slot, Tensor, TransposePolicy};

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_fp8_add`")]
pub(crate) fn gemm_fp8(
    gpu: &Gpu,
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    [m, n, k]: [usize; 3],
    terms: Terms<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    let shape = a.shape().with_last(n);
    let tensor = |y| Tensor::from_cuda(y, shape, a.device());
    if [m, n, k].contains(&0) {
        return no_products(gpu, op, &terms, [m, n], dtype).map(tensor);
    }
    if has_blocks(a, b) {
        let out = gemm_place::Place::New { terms, dtype };
        // A new output was asked for, so there is one.
        return gemm_blocks::product(gpu, op, [a, b], [m, n, k], &out)?
            .map_or_else(|| Tensor::zeros(shape, dtype, a.device()), |y| Ok(tensor(y)));
    }
    let is_padded = [m, n].iter().any(|extent| !extent.is_multiple_of(MULTIPLE));
    let is_direct = !is_padded && adds_to_fp8(&terms, dtype);
    let out = if is_direct { dtype } else { DType::F32 };
    let own = if is_direct { terms } else { Terms::default() };
    let operands = Operands::new(gpu, op, a, b)?;
    let product = Product {
        out: type_of(out),
        addend: own.addend.is_some(),
        bias: own.bias.map(|bias| type_of(bias.dtype())),
        fast: accumulation == Accumulation::Fast,
        ..operands.product
    };
    let y = gpu.alloc(out, product.m.saturating_mul(product.n))?;
    let (addend, bias) = (address(op, own.addend)?, address(op, own.bias)?);
    let places = Places { out: y.ptr(), addend, bias, ..operands.places };
    // SAFETY: operands of the product's extents and types, an output made for it, an addend of its type and extents, a bias of n
    // values.
    unsafe { gpu.matmul(op, &product, &places) }?;
    if is_direct {
        return Ok(tensor(y));
    }
    finish(gpu, op, &y, product.n, &terms, [m, n], dtype).map(tensor)
}

#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_fp8_into`")]
pub(crate) fn gemm_fp8_into(
    gpu: &Gpu,
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    [m, n, k]: [usize; 3],
    out: &mut Tensor,
    update: Update,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    let out = out.cuda_mut(name)?;
    if [m, n, k].contains(&0) {
        return no_products_into(gpu, out, update);
    }
    if has_blocks(a, b) {
        let out = gemm_place::Place::Into(out, update);
        return gemm_blocks::product(gpu, op, [a, b], [m, n, k], &out).map(|_| ());
    }
    let operands = Operands::new(gpu, op, a, b)?;
    let is_padded = [m, n].iter().any(|extent| !extent.is_multiple_of(MULTIPLE));
    let fast = accumulation == Accumulation::Fast;
    let product = Product { fast, ..operands.product };
    let padded = is_padded.then(|| gpu.alloc(DType::F32, product.m.saturating_mul(product.n))).transpose()?;
    let accumulate = !is_padded && update == Update::Add;
    let places = Places { out: padded.as_ref().unwrap_or(out).ptr(), accumulate, ..operands.places };
    // SAFETY: operands of the product's extents and types, an f32 output of the same extents.
    unsafe { gpu.matmul(op, &product, &places) }?;
    match padded {
        Some(padded) => finish_into(gpu, &padded, product.n, out, [m, n], update),
        None => Ok(()),
    }
}

/// In one kernel of the library's where it can: a scale that stands in its cell, nothing counted, no padding, and a bias
/// that it need not round. It overwrites its amax, which is then merged into the slot's.
#[expect(clippy::too_many_arguments, reason = "the arguments of `ops::gemm_fp8_quantize`")]
pub(crate) fn gemm_fp8_quantize(
    gpu: &Gpu,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    dims @ [m, n, _]: [usize; 3],
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let op = "gemm_fp8_quantize";
    let is_set = matches!(slot.scale, Scale::Cell { cell, .. } if cell.is_known_set());
    let fits = !dims.contains(&0) && [m, n].iter().all(|extent| extent.is_multiple_of(MULTIPLE));
    let adds = bias.is_none_or(|bias| bias.dtype() != DType::F32);
    // An output in E5M2 needs an operand in E5M2.
    let e5m2 = |encoding| encoding == Encoding::E5M2;
    let writes = !e5m2(slot.encoding) || e5m2(a.encoding()) || e5m2(b.encoding());
    if has_blocks(a, b) || !(is_set && fits && adds && writes && slot.counters.is_none()) {
        return product_then_quantize(a, b, bias, slot, dtype, accumulation);
    }
    let scale = slot::resolve(gpu, op, slot, |_| Ok(()))?;
    let scale_address = scale.as_ref().map_or(0, DeviceScale::address);
    let rowwise = slot.rowwise_only();
    let output = Output::new(gpu, &rowwise, a.shape().with_last(n), a.device(), scale, dtype)?;
    let amax = gpu.filled_f32(0.0, 1)?;
    let operands = Operands::new(gpu, op, a, b)?;
    let product = Product {
        out: Type::from(slot.encoding),
        bias: bias.map(|bias| type_of(bias.dtype())),
        fast: accumulation == Accumulation::Fast,
        ..operands.product
    };
    let places = Places {
        out: output.rowwise().map_or(0, Buffer::ptr),
        bias: bias.map(|bias| bias.cuda(op)).transpose()?.map_or(0, Buffer::ptr),
        out_scale: scale_address,
        out_amax: amax.ptr(),
        ..operands.places
    };
    // SAFETY: operands of the product's extents and types, codes and a scale for its output, one f32 for the amax, a bias of
    // n values.
    unsafe { gpu.matmul(op, &product, &places) }?;
    if let Some(cell) = slot.amax {
        let kernel = gpu.load(kernels::CELLS_MERGE_MAX)?;
        // SAFETY: the slot's cell and the amax, one f32 each.
        unsafe {
            kernel.launch(
                gpu,
                Grid::strided(gpu, 1),
                &kernels::CellsMergeMax { cells: Out::i32(cell.cuda(op)?), values: In::i32(&amax), n: 1 },
            )
        }?;
    }
    let operand = output.finish_inverse(gpu)?;
    match operand {
        Operand::Fp8(codes)
            if slot.columnwise && codes.device().transpose_policy() == TransposePolicy::WithCast =>
        {
            codes.with_columnwise().map(Operand::Fp8)
        }
        operand => Ok(operand),
    }
}

/// Whether an operand has factors for rows or blocks.
fn has_blocks(a: &Fp8Tensor, b: &Fp8Tensor) -> bool {
    a.blocks().is_some() || b.blocks().is_some()
}

/// Both sides of a product, in a layout and with extents that the GPU's kernels take. The output is f32 until said otherwise.
struct Operands {
    product: Product,
    places: Places,
    /// The tensors at the addresses, kept alive.
    _codes: [Tensor; 2],
}

impl Operands {
    fn new(gpu: &Gpu, op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<Self> {
        let (left, right) = (Side::new(gpu, op, a)?, Side::new(gpu, op, b)?);
        let product = Product {
            m: left.rows,
            n: right.rows,
            k: left.depth,
            left_transposed: left.is_transposed,
            right_transposed: !right.is_transposed,
            left: Type::from(a.encoding()),
            right: Type::from(b.encoding()),
            factors: [FactorLayout::Tensor; 2],
            out: Type::F32,
            bias: None,
            addend: false,
            fast: false,
            device_alpha: false,
        };
        let places = Places {
            left: left.codes.cuda(op)?.ptr(),
            right: right.codes.cuda(op)?.ptr(),
            left_scale: a.scale_inv().cuda(op)?.ptr(),
            right_scale: b.scale_inv().cuda(op)?.ptr(),
            ..Places::default()
        };
        Ok(Self { product, places, _codes: [left.codes, right.codes] })
    }
}

/// One operand: `[rows, depth]`, or its transpose.
struct Side {
    codes: Tensor,
    is_transposed: bool,
    rows: usize,
    depth: usize,
}

impl Side {
    fn new(gpu: &Gpu, op: &'static str, x: &Fp8Tensor) -> Result<Self> {
        let (codes, is_transposed) = match (x.rowwise(), x.columnwise()) {
            (Some(codes), _) => (codes.reshape(x.matrix())?, false),
            (None, Some(codes)) if gpu.needs_transposes() => (ops::transpose(codes)?, false),
            (None, Some(codes)) => (codes.clone(), true),
            // A tensor has at least one of them.
            (None, None) => (Tensor::zeros(x.matrix(), DType::U8, x.device())?, false),
        };
        let codes = padded(gpu, op, codes, [MULTIPLE; 2])?;
        let [first, second] = codes.shape().matrix();
        let (rows, depth) = if is_transposed { (second, first) } else { (first, second) };
        Ok(Self { codes, is_transposed, rows, depth })
    }
}
