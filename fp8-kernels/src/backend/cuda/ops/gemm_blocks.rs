//! `gemm_fp8` of operands with factors for rows or blocks: by the library's scale modes where a GPU has them, else emulated.
//!
//! Rows without a mode are multiplied with factors of 1, and a kernel applies the factors to the sums. Blocks without a mode are
//! dequantized to bf16: that is exact for powers of two, since a code has at most four significant bits.

use super::blocks::blocks_number;
use super::cublaslt::Type;
use super::emulation::Way;
use super::gemm;
use super::gemm_nvfp4;
use super::gemm_place::{NOT_SUPPORTED, Place, finish_rows, run};
use super::padding::{MULTIPLE, padded};
use super::product::{FactorLayout, Places, Product};
use super::{Buffer, Gpu, Grid, In, Out, kernels};
use crate::fp8_tensor::{Layout, Sharing};
use crate::ops::{self, Emulation};
use crate::{DType, Error, Fp8Tensor, Result, Tensor};

/// The product of operands of which at least one has factors for rows or blocks; all extents are greater than 0. Returns the
/// new output.
pub(super) fn product(
    gpu: &Gpu,
    op: &'static str,
    [a, b]: [&Fp8Tensor; 2],
    dims: [usize; 3],
    out: &Place<'_>,
) -> Result<Option<Buffer>> {
    let layouts = [a.rowwise_layout(op)?, b.rowwise_layout(op)?];
    let sharing = layouts.each_ref().map(|layout| layout.sharing);
    if sharing.iter().all(|sharing| matches!(sharing, Sharing::Nvfp4 { .. })) {
        let is_native = matches!(Way::of(gpu, sharing), Way::Native(_));
        return gemm_nvfp4::product(gpu, op, layouts, dims, is_native, out);
    }
    let operands = Operands { op, types: [a, b].map(|x| Type::from(x.encoding())), layouts, dims };
    let emulated = match Way::of(gpu, sharing) {
        Way::Native(factors) => match operands.native(gpu, factors, out) {
            // A mode has fewer kernels than the library says: extents decide, too.
            Err(Error::Gemm { code: NOT_SUPPORTED, .. }) => Way::instead(sharing),
            done => return done,
        },
        emulated => emulated,
    };
    match emulated {
        Way::Emulated(Emulation::FactorsAfter) => operands.factors_after(gpu, out),
        // Scaled codes are those of NVFP4 alone.
        Way::Emulated(Emulation::Dequantized | Emulation::Rounded | Emulation::ScaledCodes)
        | Way::Native(_) => dequantized(gpu, op, [a, b], dims, out),
    }
}

/// Both operands in bf16.
fn dequantized(
    gpu: &Gpu,
    op: &'static str,
    [a, b]: [&Fp8Tensor; 2],
    dims @ [m, n, k]: [usize; 3],
    out: &Place<'_>,
) -> Result<Option<Buffer>> {
    let [a, b] = [a.dequantize(DType::BF16)?.reshape([m, k])?, b.dequantize(DType::BF16)?.reshape([n, k])?];
    match out {
        Place::New { terms, dtype } => {
            gemm::new_product(gpu, op, [a, b], ops::Layout::Nt, dims, *terms, *dtype).map(Some)
        }
        Place::Into(out, update) => {
            gemm::store_product(gpu, op, [a, b], ops::Layout::Nt, dims, out, *update).map(|()| None)
        }
    }
}

/// Both operands along k.
struct Operands {
    op: &'static str,
    types: [Type; 2],
    layouts: [Layout; 2],
    dims: [usize; 3],
}

impl Operands {
    /// By a scale mode of the library's.
    fn native(&self, gpu: &Gpu, factors: [FactorLayout; 2], out: &Place<'_>) -> Result<Option<Buffer>> {
        let Self { op, layouts: [a, b], dims: [m, n, k], .. } = self;
        // Zeros up to the end of a block: its factor exists.
        let depth = if factors[0] == FactorLayout::Outer { MULTIPLE } else { BLOCK };
        let codes = self.codes(gpu, depth)?;
        let [left, right] = [(a, *m, factors[0], &codes[0]), (b, *n, factors[1], &codes[1])].map(
            |(layout, rows, factors, codes)| {
                arranged(gpu, op, layout, [rows, *k], codes.shape().matrix()[0], factors)
            },
        );
        let (left, right) = (left?, right?);
        let scales = [left.ptr(), right.ptr()];
        let places = Places {
            left: codes[0].cuda(op)?.ptr(),
            right: codes[1].cuda(op)?.ptr(),
            left_scale: scales[0],
            right_scale: scales[1],
            ..Places::default()
        };
        run(gpu, op, self.product(&codes, factors), places, [*m, *n], out)
    }

    /// With factors of 1, and the rows' factors applied to the sums.
    fn factors_after(&self, gpu: &Gpu, out: &Place<'_>) -> Result<Option<Buffer>> {
        let Self { op, layouts: [a, b], dims: [m, n, _], .. } = self;
        let codes = self.codes(gpu, MULTIPLE)?;
        let one = gpu.filled_f32(1.0, 1)?;
        let product = self.product(&codes, [FactorLayout::Tensor; 2]);
        let sums = gpu.alloc(DType::F32, product.m.saturating_mul(product.n))?;
        let [left, right] = [codes[0].cuda(op)?.ptr(), codes[1].cuda(op)?.ptr()];
        let (left_scale, right_scale) = (one.ptr(), one.ptr());
        let places = Places { left, right, left_scale, right_scale, out: sums.ptr(), ..Places::default() };
        // SAFETY: operands of the product's extents and types, an output made for it, one factor for both.
        unsafe { gpu.matmul(op, &product, &places) }?;
        let factor = |layout: &Layout| {
            let is_one = layout.sharing.blocks().is_none();
            Ok::<_, Error>((In::f32(layout.scale_inv.cuda(op)?), is_one))
        };
        finish_rows(gpu, op, (&sums, product.n), [factor(a)?, factor(b)?], [*m, *n], out)
    }

    /// The codes with zeros behind them: rows up to a multiple of 16, k up to one of `depth`.
    fn codes(&self, gpu: &Gpu, depth: usize) -> Result<[Tensor; 2]> {
        let [m, n, k] = self.dims;
        let [a, b] = &self.layouts;
        Ok([
            padded(gpu, self.op, a.codes.reshape([m, k])?, [MULTIPLE, depth])?,
            padded(gpu, self.op, b.codes.reshape([n, k])?, [MULTIPLE, depth])?,
        ])
    }

    fn product(&self, codes: &[Tensor; 2], factors: [FactorLayout; 2]) -> Product {
        let [[m, k], [n, _]] = codes.each_ref().map(|codes| codes.shape().matrix());
        Product {
            m,
            n,
            k,
            left_transposed: false,
            right_transposed: true,
            left: self.types[0],
            right: self.types[1],
            factors,
            out: Type::F32,
            bias: None,
            addend: false,
            fast: false,
            device_alpha: false,
        }
    }
}

/// Values of k in a block of factors, as codes are padded for the library.
const BLOCK: usize = 128;

/// The factors of a `[rows, k]` operand in a layout of the library's, for as many rows as its codes have with their padding.
fn arranged(
    gpu: &Gpu,
    op: &'static str,
    layout: &Layout,
    [rows, k]: [usize; 2],
    padded_rows: usize,
    factors: FactorLayout,
) -> Result<Buffer> {
    let (dtype, n) = factors.size(padded_rows, k);
    let out = gpu.alloc(dtype, n)?;
    let kernel = gpu.load(kernels::GEMM_FACTORS)?;
    let blocks = layout.sharing.blocks().map_or(-1, blocks_number);
    let args = kernels::GemmFactors {
        scale_inv: In::void(layout.scale_inv.cuda(op)?),
        blocks,
        rows: rows as u64,
        depth: k as u64,
        padded_rows: padded_rows as u64,
        layout: factors as i32,
        y: Out::void(&out),
        n: n as u64,
    };
    // SAFETY: the factors of such an operand, room for n of the layout's type.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, n as u64), &args) }?;
    Ok(out)
}
