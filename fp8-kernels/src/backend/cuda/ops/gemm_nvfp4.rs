//! `gemm_fp8` of operands in NVFP4: by cuBLASLt's mode where a GPU has it, else by bf16 products of codes times block scales, which are
//! exact.

use super::cublaslt::Type;
use super::gemm;
use super::gemm_place::{NOT_SUPPORTED, Place, finish_rows, run};
use super::nvfp4::{factors, has_tiles};
use super::padding::{MULTIPLE, padded};
use super::product::{FactorLayout, Places, Product};
use super::{Buffer, Gpu, Grid, In, Out, kernels};
use crate::fp8_tensor::Layout;
use crate::ops::{self, Terms};
use crate::{DType, Error, Result, Tensor};

/// The product of two operands in NVFP4; all extents are greater than 0. Returns the new output.
pub(super) fn product(
    gpu: &Gpu,
    op: &'static str,
    layouts: [Layout; 2],
    dims: [usize; 3],
    is_native: bool,
    out: &Place<'_>,
) -> Result<Option<Buffer>> {
    let operands = Operands { op, layouts, dims };
    if is_native {
        match operands.native(gpu, out) {
            // The mode has fewer kernels than the library says: extents decide, too.
            Err(Error::Gemm { code: NOT_SUPPORTED, .. }) => {}
            done => return done,
        }
    }
    operands.scaled_codes(gpu, out)
}

/// Both operands along k.
struct Operands {
    op: &'static str,
    layouts: [Layout; 2],
    dims: [usize; 3],
}

impl Operands {
    /// By the library's mode, with the product of both tensors' factors as alpha.
    fn native(&self, gpu: &Gpu, out: &Place<'_>) -> Result<Option<Buffer>> {
        let Self { op, layouts: [a, b], dims: [m, n, _] } = self;
        let codes = [self.codes(gpu, a, *m)?, self.codes(gpu, b, *n)?];
        let [[rows, bytes], [cols, _]] = codes.each_ref().map(|codes| codes.shape().matrix());
        let scales = [self.factors(gpu, a, *m, rows)?, self.factors(gpu, b, *n, cols)?];
        let alpha = gpu.alloc(DType::F32, 3)?;
        let args = kernels::Nvfp4Alpha {
            a: In::f32(factors(op, a)?),
            b: In::f32(factors(op, b)?),
            out: Out::f32(&alpha),
        };
        let one = Grid { blocks: 1, threads: 32, shared: 0 };
        // SAFETY: two factors of each operand, room for three f32.
        unsafe { gpu.load(kernels::NVFP4_ALPHA)?.launch(gpu, one, &args) }?;
        let product = Product {
            m: rows,
            n: cols,
            k: 2 * bytes,
            left_transposed: false,
            right_transposed: true,
            left: Type::E2m1,
            right: Type::E2m1,
            factors: [FactorLayout::Vec16; 2],
            out: Type::F32,
            bias: None,
            addend: false,
            fast: false,
            device_alpha: true,
        };
        let places = Places {
            left: codes[0].cuda(op)?.ptr(),
            right: codes[1].cuda(op)?.ptr(),
            left_scale: scales[0].ptr(),
            right_scale: scales[1].ptr(),
            alpha: alpha.ptr(),
            ..Places::default()
        };
        run(gpu, op, product, places, [*m, *n], out)
    }

    /// The codes with zeros behind them: rows up to a multiple of 16, k up to one of 32.
    fn codes(&self, gpu: &Gpu, layout: &Layout, rows: usize) -> Result<Tensor> {
        let width = layout.codes.numel() / rows;
        padded(gpu, self.op, layout.codes.reshape([rows, width])?, [MULTIPLE; 2])
    }

    /// The scales as the library wants them, for as many rows as there are with their padding.
    fn factors(&self, gpu: &Gpu, layout: &Layout, rows: usize, padded_rows: usize) -> Result<Buffer> {
        let [_, _, k] = self.dims;
        let (dtype, n) = FactorLayout::Vec16.size(padded_rows, k);
        let out = gpu.alloc(dtype, n)?;
        let args = kernels::Nvfp4Factors {
            scales: In::u8(layout.scale_inv.cuda(self.op)?),
            tiles: has_tiles(layout),
            rows: rows as u64,
            depth: k as u64,
            y: Out::u8(&out),
            n: n as u64,
        };
        // SAFETY: the scales of such an operand, room for n bytes.
        unsafe { gpu.load(kernels::NVFP4_FACTORS)?.launch(gpu, Grid::strided(gpu, n as u64 / 4), &args) }?;
        Ok(out)
    }

    /// In bf16, with the factors of the tensors applied to the sums, one after the other.
    fn scaled_codes(&self, gpu: &Gpu, out: &Place<'_>) -> Result<Option<Buffer>> {
        let Self { op, layouts: [a, b], dims: [m, n, k] } = self;
        let depth = k.next_multiple_of(MULTIPLE);
        let operands = [self.values(gpu, a, *m, depth)?, self.values(gpu, b, *n, depth)?];
        let (layout, none) = (ops::Layout::Nt, Terms::default());
        let sums = gemm::new_product(gpu, op, operands, layout, [*m, *n, depth], none, DType::F32)?;
        let decode = |layout: &Layout| Ok::<_, Error>(In::new(factors(op, layout)?.ptr() + 4));
        finish_rows(gpu, op, (&sums, *n), [(decode(a)?, true), (decode(b)?, true)], [*m, *n], out)
    }

    /// Codes times scales, `[rows, depth]` with zeros behind k.
    fn values(&self, gpu: &Gpu, layout: &Layout, rows: usize, depth: usize) -> Result<Tensor> {
        let [_, _, k] = self.dims;
        let out = gpu.alloc(DType::BF16, rows * depth)?;
        // A transformed copy has codes, zeros, up to the end of its last block.
        let cols = if layout.sharing.has_hadamard() { k.next_multiple_of(16) } else { k };
        let args = kernels::Nvfp4ScaledCodes {
            codes: In::u8(layout.codes.cuda(self.op)?),
            scales: In::u8(layout.scale_inv.cuda(self.op)?),
            tiles: has_tiles(layout),
            rows: rows as u64,
            cols: cols as u64,
            width: depth as u64,
            out: Out::void(&out),
        };
        let items = (rows * depth / 8) as u64;
        // SAFETY: packed codes and scales of such an operand, room for its values in rows of depth.
        unsafe { gpu.load(kernels::NVFP4_SCALED_CODES)?.launch(gpu, Grid::strided(gpu, items), &args) }?;
        Ok(Tensor::from_cuda(out, [rows, depth].into(), layout.codes.device()))
    }
}
