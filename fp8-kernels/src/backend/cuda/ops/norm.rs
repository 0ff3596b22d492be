//! `norm`; its gradients are in `norm_backward`.
//!
//! Statistics and values are one kernel, which holds a row in registers. The order of a row's sums depends on the number of
//! columns alone, so that statistics never depend on what becomes of the values. The transpose is made from the codes by a second
//! launch: a block that held enough rows for both would need more shared memory than there is.

use super::blocks::{self, Values};
use super::norm_backward::WARP_COLUMNS;
pub(crate) use super::norm_backward::{norm_backward, norm_backward_into};
use super::slot::{self, AmaxRequest, Output};
use super::{Buffer, Entry, Gpu, Grid, In, Out, dtype_number, format_number, kernels, transpose};
use crate::ops::{Norm, NormOptions, NormStats};
use crate::{BlockRule, DType, Encoding, Operand, Result, Shape, Slot, Tensor};

/// Columns that a thread holds.
const HELD: u64 = 32;
/// The most columns that a block holds.
const BLOCK_COLUMNS: u64 = 16 * 1024;
/// The most columns and rows of the kernels that load rows ahead.
const AHEAD_COLUMNS: u64 = 8 * 1024;
const AHEAD_ROWS: u64 = 1 << 30;

pub(crate) fn norm(
    gpu: &Gpu,
    x: &Tensor,
    gamma: &Tensor,
    beta: Option<&Tensor>,
    options: &NormOptions,
    slot: &Slot<'_>,
) -> Result<(Operand, NormStats)> {
    let [rows, cols] = x.shape().matrix();
    let stats = Stats::new(gpu, rows, cols, options)?;
    let forward = Forward {
        gpu,
        x: x.cuda("norm")?,
        gamma: gamma.cuda("norm")?,
        beta: beta.map(|beta| beta.cuda("norm")).transpose()?,
        options,
        rows: rows as u64,
        cols: cols as u64,
    };
    let operand = if let Some(rule) = slot.block_rule() {
        forward.blocks(&stats, x, slot, &rule)?
    } else {
        forward.quantize(&stats, x, slot)?
    };
    let vector = |buffer: Buffer| Tensor::from_cuda(buffer, Shape::from([rows]), x.device());
    Ok((operand, NormStats { mean: stats.mean.map(vector), rsigma: vector(stats.rsigma) }))
}

struct Stats {
    mean: Option<Buffer>,
    rsigma: Buffer,
}

impl Stats {
    /// Room for those of `rows` rows; zeros if there are no columns.
    fn new(gpu: &Gpu, rows: usize, cols: usize, options: &NormOptions) -> Result<Self> {
        let vector = || match cols {
            0 => gpu.zeros(DType::F32, rows),
            _ => gpu.alloc(DType::F32, rows),
        };
        let centered = options.normalization == Norm::LayerNorm;
        Ok(Self { mean: centered.then(vector).transpose()?, rsigma: vector()? })
    }

    fn addresses(&self) -> [u64; 2] {
        [self.mean.as_ref().map_or(0, Buffer::ptr), self.rsigma.ptr()]
    }
}

/// The inputs of a norm.
struct Forward<'a> {
    gpu: &'a Gpu,
    x: &'a Buffer,
    gamma: &'a Buffer,
    beta: Option<&'a Buffer>,
    options: &'a NormOptions,
    rows: u64,
    cols: u64,
}

/// Addresses of what the launch over rows writes; 0: not written.
#[derive(Default)]
struct Rows {
    /// Means and rsigmas.
    stats: [u64; 2],
    y: u64,
    codes: u64,
    format: i32,
    scale: u64,
    scale_inv: u64,
    amax: u64,
    counters: u64,
    /// A scale cell: nothing is done where it is set.
    unset: u64,
}

impl Forward<'_> {
    /// With one scale, or in high precision.
    fn quantize(&self, stats: &Stats, x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        let scale = slot::resolve(self.gpu, "norm", slot, |request| self.amax(&request))?;
        let output = Output::new(self.gpu, slot, *x.shape(), x.device(), scale, x.dtype())?;
        if x.numel() == 0 {
            return output.finish_inverse(self.gpu);
        }
        self.rows(&Rows {
            stats: stats.addresses(),
            y: output.high().map_or(0, Buffer::ptr),
            codes: output.rowwise().map_or(0, Buffer::ptr),
            format: output.format(),
            scale: output.scale(),
            scale_inv: output.scale_inv().map_or(0, Buffer::ptr),
            amax: output.amax("norm")?,
            counters: output.counters("norm")?,
            unset: 0,
        })?;
        if let (Some(codes), Some(columnwise)) = (output.rowwise(), output.columnwise()) {
            transpose::bytes(self.gpu, codes, x.shape().matrix(), columnwise)?;
        }
        Ok(output.finish())
    }

    /// With a scale for each row or block: statistics first, then tiles that read the rows again.
    fn blocks(&self, stats: &Stats, x: &Tensor, slot: &Slot<'_>, rule: &BlockRule) -> Result<Operand> {
        let op = "norm";
        self.rows(&Rows { stats: stats.addresses(), ..Rows::default() })?;
        let values =
            Values { op, shape: *x.shape(), dtype: DType::F32, device: x.device(), partial_sums: None };
        blocks::quantize(self.gpu, &values, slot, rule, |grid, block| {
            let kernel = self.gpu.load(kernels::NORM_BLOCKS)?;
            let args = kernels::NormBlocks {
                x: In::void(self.x),
                dtype: dtype_number(self.x.dtype()),
                gamma: In::void(self.gamma),
                gamma_dtype: dtype_number(self.gamma.dtype()),
                beta: In::void(self.beta),
                beta_dtype: self.beta_dtype(),
                around_one: self.options.zero_centered_gamma.into(),
                rows: self.rows,
                cols: self.cols,
                means: In::f32(stats.mean.as_ref()),
                rsigmas: In::f32(&stats.rsigma),
                block,
            };
            // SAFETY: x holds [rows, cols], γ and β `cols`, statistics `rows`, written by the launch before; the rest is what
            // `blocks` made for such a matrix.
            unsafe { kernel.launch(self.gpu, grid, &args) }
        })
    }

    /// The number of β's type, which means nothing where there is no β.
    fn beta_dtype(&self) -> i32 {
        self.beta.map_or(0, |beta| dtype_number(beta.dtype()))
    }

    /// The amax alone.
    fn amax(&self, request: &AmaxRequest) -> Result<()> {
        self.rows(&Rows { amax: request.cell, unset: request.unset, ..Rows::default() })
    }

    /// The kernel that loads rows ahead, if there is one for these rows, and the warps of it that a multiprocessor holds.
    fn ahead(&self, rows: &Rows) -> Option<(Entry<kernels::Norm>, u32)> {
        let centered = self.options.normalization == Norm::LayerNorm;
        let parameters = self.gamma.dtype();
        let is_plain = self.x.dtype() == DType::BF16
            && self.cols.is_multiple_of(8)
            && self.cols <= AHEAD_COLUMNS
            && self.rows <= AHEAD_ROWS
            && !self.options.zero_centered_gamma
            && self.beta.map(Buffer::dtype) == centered.then_some(parameters);
        let is_codes = rows.codes != 0;
        if !is_plain || (is_codes && (rows.format != format_number(Encoding::E4M3) || rows.counters != 0)) {
            return None;
        }
        Some(match (centered, parameters, is_codes) {
            (true, DType::F32, true) => (kernels::NORM_ROWS_LAYER_F32_CODES, 20),
            (true, DType::F32, false) => (kernels::NORM_ROWS_LAYER_F32_VALUES, 20),
            (true, DType::BF16, true) => (kernels::NORM_ROWS_LAYER_BF16_CODES, 20),
            (true, DType::BF16, false) => (kernels::NORM_ROWS_LAYER_BF16_VALUES, 20),
            (false, DType::F32, true) => (kernels::NORM_ROWS_RMS_F32_CODES, 28),
            (false, DType::F32, false) => (kernels::NORM_ROWS_RMS_F32_VALUES, 28),
            (false, DType::BF16, true) => (kernels::NORM_ROWS_RMS_BF16_CODES, 28),
            (false, DType::BF16, false) => (kernels::NORM_ROWS_RMS_BF16_VALUES, 28),
            _ => return None,
        })
    }

    fn rows(&self, rows: &Rows) -> Result<()> {
        if self.rows == 0 || self.cols == 0 {
            return Ok(());
        }
        let ahead = self.ahead(rows);
        let threads = match self.cols {
            ..=WARP_COLUMNS if ahead.is_some() => 128,
            ..=BLOCK_COLUMNS if self.cols > WARP_COLUMNS && self.cols.is_multiple_of(8) => {
                self.cols.div_ceil(HELD).next_multiple_of(32) as u32
            }
            _ => 256,
        };
        let (kernel, per_sm) = match (self.cols, ahead) {
            // As many as are resident, since each of them loads one row ahead.
            (_, Some((kernel, warps))) => (kernel, warps * 32 / threads),
            (..=WARP_COLUMNS, None) if self.cols.is_multiple_of(8) => {
                (kernels::NORM_HELD_WARP, 2048 / threads)
            }
            (..=BLOCK_COLUMNS, None) if self.cols.is_multiple_of(8) => {
                (kernels::NORM_HELD_BLOCK, 2048 / threads)
            }
            (..=WARP_COLUMNS, None) => (kernels::NORM_READ_WARP, 2048 / threads),
            _ => (kernels::NORM_READ_BLOCK, 2048 / threads),
        };
        let at_once = if self.cols <= WARP_COLUMNS { u64::from(threads / 32) } else { 1 };
        let kernel = self.gpu.load(kernel)?;
        let blocks = self.gpu.blocks(self.rows, at_once, per_sm);
        let [means, rsigmas] = rows.stats;
        let args = kernels::Norm {
            x: In::void(self.x),
            dtype: dtype_number(self.x.dtype()),
            gamma: In::void(self.gamma),
            gamma_dtype: dtype_number(self.gamma.dtype()),
            beta: In::void(self.beta),
            beta_dtype: self.beta_dtype(),
            centered: (self.options.normalization == Norm::LayerNorm).into(),
            around_one: self.options.zero_centered_gamma.into(),
            eps: self.options.eps,
            rows: self.rows,
            cols: self.cols,
            means: Out::f32(means),
            rsigmas: Out::f32(rsigmas),
            y: Out::void(rows.y),
            codes: Out::u8(rows.codes),
            format: rows.format,
            scale: In::f32(rows.scale),
            scale_inv: Out::f32(rows.scale_inv),
            amax: Out::i32(rows.amax),
            counters: Out::u64(rows.counters),
            unset: In::f32(rows.unset),
        };
        // SAFETY: x holds [rows, cols], γ and β `cols`, checked by ops::norm; statistics have one f32 a row; y and codes
        // have x's extents; cells are alive: their slot is borrowed.
        // The kernel takes this number of columns with these threads.
        unsafe { kernel.launch(self.gpu, Grid { blocks, threads, shared: 0 }, &args) }
    }
}
