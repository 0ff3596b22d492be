//! `norm` and its gradients.
//!
//! Statistics and values are one kernel, which holds a row in registers; which kernel it is depends on the number of columns
//! alone, so that statistics never depend on what becomes of the values. With the transpose, statistics come first, then
//! tiles that read the rows again: band by band, so that the second read finds them in L2.

use super::blocks::{self, Values};
use super::slot::{self, AmaxRequest, Output};
use super::{Arg, Buffer, Gpu, Grid, Joined, Source, args, dtype_number};
use crate::ops::{Norm, NormOptions, NormStats};
use crate::{BlockRule, DType, Operand, Result, Shape, Slot, Tensor};

/// Columns that a thread holds.
const HELD: u64 = 32;
/// The most columns that a warp holds, or reads without a block's help.
const WARP_COLUMNS: u64 = 1024;
/// The most columns that a block holds.
const BLOCK_COLUMNS: u64 = 16 * 1024;
/// Rows and columns of a tile with a transpose.
const TILE: [u64; 2] = [128, 64];
/// Bytes of x that stay in L2 from its statistics to its tiles.
const BAND: u64 = 16 << 20;
/// The most columns whose sums over rows a block holds.
const SUMMED_COLUMNS: u64 = 8 * 1024;
/// Rows, at least, of one part of a column's sum.
const PART_ROWS: u64 = 64;

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
        let centered = options.norm == Norm::LayerNorm;
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

/// Addresses of what one launch over rows writes, and which rows; 0: not written.
#[derive(Default)]
struct Rows {
    first: u64,
    count: u64,
    /// Means and rsigmas, of all rows.
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
        match output.columnwise() {
            Some(columnwise) => self.tiles(stats, &output, columnwise)?,
            None => self.rows(&Rows {
                stats: stats.addresses(),
                y: output.high().map_or(0, Buffer::ptr),
                codes: output.rowwise().map_or(0, Buffer::ptr),
                format: output.format(),
                scale: output.scale(),
                scale_inv: output.scale_inv().map_or(0, Buffer::ptr),
                amax: output.amax("norm")?,
                counters: output.counters("norm")?,
                ..self.all()
            })?,
        }
        Ok(output.finish())
    }

    /// With a scale for each row or block: statistics first, then tiles that read the rows again.
    fn blocks(&self, stats: &Stats, x: &Tensor, slot: &Slot<'_>, rule: &BlockRule) -> Result<Operand> {
        let op = "norm";
        self.rows(&Rows { stats: stats.addresses(), ..self.all() })?;
        let values =
            Values { op, shape: *x.shape(), dtype: DType::F32, device: x.device(), partial_sums: None };
        blocks::quantize(self.gpu, &values, slot, rule, |grid, sink| {
            let kernel = self.gpu.kernel(Source::Norm, "norm_blocks")?;
            let [x, x_type, gamma, gamma_type, beta, beta_type, around_one] = self.inputs();
            let [rows, cols, mean, rsigma] = args![self.rows, self.cols, stats.mean.as_ref(), &stats.rsigma];
            let own = [x, x_type, gamma, gamma_type, beta, beta_type, around_one, rows, cols, mean, rsigma];
            // SAFETY: the kernel's parameters (x, dtype, gamma, gamma_dtype, beta, beta_dtype, around_one, rows, cols, means,
            // rsigmas, BLOCK_PARAMS). x holds [rows, cols], γ and β `cols`, statistics `rows`, written by the launch before; the
            // rest is what `blocks` made for such a matrix.
            unsafe { kernel.launch(self.gpu, grid, &Joined::new(own, *sink)) }
        })
    }

    /// The parameters with which kernels of tiles begin.
    fn inputs(&self) -> [Arg; 7] {
        args![
            self.x,
            dtype_number(self.x.dtype()),
            self.gamma,
            dtype_number(self.gamma.dtype()),
            self.beta,
            self.beta.map_or(0, |beta| dtype_number(beta.dtype())),
            i32::from(self.options.zero_centered_gamma),
        ]
    }

    /// Every row, with nothing to write.
    fn all(&self) -> Rows {
        Rows { count: self.rows, ..Rows::default() }
    }

    /// The amax alone.
    fn amax(&self, request: &AmaxRequest) -> Result<()> {
        self.rows(&Rows { amax: request.cell, unset: request.unset, ..self.all() })
    }

    fn rows(&self, rows: &Rows) -> Result<()> {
        if rows.count == 0 || self.cols == 0 {
            return Ok(());
        }
        let (name, [threads, at_once]) = match self.cols {
            ..=WARP_COLUMNS if self.cols.is_multiple_of(8) => ("norm_held_warp", [256, 8]),
            ..=BLOCK_COLUMNS if self.cols.is_multiple_of(8) => {
                ("norm_held_block", [self.cols.div_ceil(HELD).next_multiple_of(32), 1])
            }
            ..=WARP_COLUMNS => ("norm_read_warp", [256, 8]),
            _ => ("norm_read_block", [256, 1]),
        };
        let kernel = self.gpu.kernel(Source::Norm, name)?;
        let threads = threads as u32;
        let blocks = self.gpu.blocks(rows.count, at_once, 2048 / threads);
        let skipped = rows.first * self.cols;
        let x = self.x.ptr() + skipped * self.x.dtype().size() as u64;
        let [means, rsigmas] = rows.stats.map(|stats| if stats == 0 { 0 } else { stats + 4 * rows.first });
        let arguments = args![
            x,
            dtype_number(self.x.dtype()),
            self.gamma,
            dtype_number(self.gamma.dtype()),
            self.beta,
            self.beta.map_or(0, |beta| dtype_number(beta.dtype())),
            i32::from(self.options.norm == Norm::LayerNorm),
            i32::from(self.options.zero_centered_gamma),
            self.options.eps,
            rows.count,
            self.cols,
            means,
            rsigmas,
            rows.y,
            rows.codes,
            rows.format,
            rows.scale,
            rows.scale_inv,
            rows.amax,
            rows.counters,
            rows.unset,
        ];
        // SAFETY: parameters are those of ROWS in kernels/norm.cu. x holds `first + count` rows of `cols`, of which the
        // kernel gets the address of row `first`; γ and β hold `cols`, checked by ops::norm; statistics have one f32 a row
        // from there on; y and codes, given with all rows only, have x's extents; cells are alive: their slot is borrowed.
        // The named kernel takes this number of columns with these threads.
        unsafe { kernel.launch(self.gpu, Grid { blocks, threads, shared: 0 }, &arguments) }
    }

    /// Codes as stored and transposed.
    fn tiles(&self, stats: &Stats, output: &Output<'_>, columnwise: &Buffer) -> Result<()> {
        let row_bytes = self.cols * self.x.dtype().size() as u64;
        let kernel = self.gpu.kernel(Source::Norm, "norm_tiles")?;
        let step = (BAND / row_bytes / TILE[0]).max(1) * TILE[0];
        let mut first = 0;
        while first < self.rows {
            let count = step.min(self.rows - first);
            self.rows(&Rows { first, count, stats: stats.addresses(), ..Rows::default() })?;
            let tiles = count.div_ceil(TILE[0]) * self.cols.div_ceil(TILE[1]);
            let grid = Grid { blocks: self.gpu.blocks(tiles, 1, 8), threads: 256, shared: 0 };
            let rest = args![
                self.rows,
                self.cols,
                first,
                count,
                stats.mean.as_ref(),
                &stats.rsigma,
                output.rowwise(),
                columnwise,
                output.format(),
                output.scale(),
                output.scale_inv(),
                output.amax("norm")?,
                output.counters("norm")?,
            ];
            let arguments = Joined::new(self.inputs(), rest);
            // SAFETY: parameters are those of norm_tiles in kernels/norm.cu. x and both codes hold [rows, cols], γ and β
            // `cols`, statistics `rows`, those of this band written by the launch before; `first` is a multiple of a
            // tile's rows; cells are alive: their slot is borrowed.
            unsafe { kernel.launch(self.gpu, grid, &arguments) }?;
            first += count;
        }
        Ok(())
    }
}

pub(crate) fn norm_backward(
    gpu: &Gpu,
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "norm_backward";
    let [rows, cols] = x.shape().matrix();
    let backward = Backward {
        gpu,
        dy: dy.cuda(op)?,
        x: x.cuda(op)?,
        gamma: gamma.cuda(op)?,
        mean: stats.mean.as_ref().map(|mean| mean.cuda(op)).transpose()?,
        rsigma: stats.rsigma.cuda(op)?,
        residual: residual.map(|residual| residual.cuda(op)).transpose()?,
        around_one: i32::from(options.zero_centered_gamma),
        rows: rows as u64,
        cols: cols as u64,
    };
    let dx = gpu.alloc(x.dtype(), x.numel())?;
    let sums = || if rows == 0 { gpu.zeros(DType::F32, cols) } else { gpu.alloc(DType::F32, cols) };
    let dgamma = sums()?;
    let dbeta = stats.mean.is_some().then(sums).transpose()?;
    if rows * cols > 0 {
        backward.run(&dx, &dgamma, dbeta.as_ref())?;
    }
    let tensor = |buffer: Buffer, shape: Shape| Tensor::from_cuda(buffer, shape, x.device());
    let vector = |buffer: Buffer| tensor(buffer, Shape::from([cols]));
    Ok((tensor(dx, *x.shape()), vector(dgamma), dbeta.map(vector)))
}

/// The inputs from which the gradients are computed.
struct Backward<'a> {
    gpu: &'a Gpu,
    dy: &'a Buffer,
    x: &'a Buffer,
    gamma: &'a Buffer,
    mean: Option<&'a Buffer>,
    rsigma: &'a Buffer,
    residual: Option<&'a Buffer>,
    around_one: i32,
    rows: u64,
    cols: u64,
}

impl Backward<'_> {
    fn run(&self, dx: &Buffer, dgamma: &Buffer, dbeta: Option<&Buffer>) -> Result<()> {
        let held = self.cols.is_multiple_of(8) && self.cols <= SUMMED_COLUMNS;
        let strips = self.cols.div_ceil(32);
        let (parts, threads) = if held {
            let threads = self.cols.div_ceil(8).next_multiple_of(32) as u32;
            (u64::from(self.gpu.blocks(self.rows, 1, (1024 / threads).clamp(1, 16))), threads)
        } else {
            let most = (u64::from(self.gpu.sms()) * 8).div_ceil(strips);
            (self.rows.div_ceil(PART_ROWS).min(most), 256)
        };
        let partial = || self.gpu.alloc(DType::F32, (parts * self.cols) as usize);
        let partial_gamma = partial()?;
        let partial_beta = dbeta.map(|_| partial()).transpose()?;
        if held {
            let grid = Grid::new("norm_backward", parts, threads)?;
            self.launch("norm_backward_held", grid, dx, Some([Some(&partial_gamma), partial_beta.as_ref()]))?;
        } else {
            let (name, at_once) = if self.cols <= WARP_COLUMNS {
                ("norm_backward_warp", 8)
            } else {
                ("norm_backward_block", 1)
            };
            let grid = Grid { blocks: self.gpu.blocks(self.rows, at_once, 8), threads, shared: 0 };
            self.launch(name, grid, dx, None)?;
            self.columns(parts, strips, &partial_gamma, partial_beta.as_ref())?;
        }
        let kernel = self.gpu.kernel(Source::Norm, "norm_backward_sums")?;
        let blocks = strips * if dbeta.is_some() { 2 } else { 1 };
        let grid = Grid::new("norm_backward", blocks, 1024)?;
        let arguments = args![&partial_gamma, partial_beta.as_ref(), parts, self.cols, dgamma, dbeta];
        // SAFETY: parameters are those of norm_backward_sums in kernels/norm.cu: partial sums hold [parts, cols], written by
        // the launches before, results `cols`; the second half of the blocks exists only where there is a dβ.
        unsafe { kernel.launch(self.gpu, grid, &arguments) }
    }

    /// A kernel that takes BACKWARD_PARAMS, and partial sums behind them if they are given.
    fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        dx: &Buffer,
        partial: Option<[Option<&Buffer>; 2]>,
    ) -> Result<()> {
        let kernel = self.gpu.kernel(Source::Norm, name)?;
        let arguments = args![
            self.dy,
            dtype_number(self.dy.dtype()),
            self.x,
            dtype_number(self.x.dtype()),
            self.gamma,
            dtype_number(self.gamma.dtype()),
            self.around_one,
            self.mean,
            self.rsigma,
            self.residual,
            self.residual.map_or(0, |residual| dtype_number(residual.dtype())),
            dx,
            self.rows,
            self.cols,
            partial.and_then(|[gamma, _]| gamma),
            partial.and_then(|[_, beta]| beta),
        ];
        let count = if partial.is_some() { arguments.len() } else { arguments.len() - 2 };
        // SAFETY: parameters are those of BACKWARD_PARAMS in kernels/norm.cu, and partial sums of [blocks, cols] for the
        // kernel that has them. dy, x, residual and dx hold [rows, cols], γ `cols`, statistics `rows`: checked by
        // ops::norm_backward. dx is new, so nothing that is read is written.
        unsafe { kernel.launch(self.gpu, grid, &arguments[..count]) }
    }

    /// Partial sums over rows, `parts` for each column.
    fn columns(&self, parts: u64, strips: u64, gamma: &Buffer, beta: Option<&Buffer>) -> Result<()> {
        let kernel = self.gpu.kernel(Source::Norm, "norm_backward_columns")?;
        let grid = Grid::new("norm_backward", strips * parts, 256)?;
        let arguments = args![
            self.dy,
            dtype_number(self.dy.dtype()),
            self.x,
            dtype_number(self.x.dtype()),
            self.mean,
            self.rsigma,
            self.rows,
            self.cols,
            parts,
            self.rows.div_ceil(parts),
            gamma,
            beta,
        ];
        // SAFETY: parameters are those of norm_backward_columns in kernels/norm.cu: dy and x hold [rows, cols], statistics
        // `rows`, partial sums [parts, cols]; there is a block for each strip of 32 columns and each part.
        unsafe { kernel.launch(self.gpu, grid, &arguments) }
    }
}
