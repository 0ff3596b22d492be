//! `norm_backward`: dx and partial sums over rows, then one launch that adds those up.
//!
//! Which kernel it is, and in which parts a sum over rows is made, depends on the shape alone.

use super::reduce::Place;
use super::{Buffer, Entry, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::ops::{GradientMut, NormOptions, NormStats};
use crate::{DType, Result, Shape, Tensor};

/// The most columns that a warp holds, or reads without a block's help.
pub(super) const WARP_COLUMNS: u64 = 1024;
/// The most columns whose sums over rows a block holds.
const SUMMED_COLUMNS: u64 = 8 * 1024;
/// Rows, at least, of one part of a column's sum.
const PART_ROWS: u64 = 64;
/// The most rows of the kernels that load rows ahead.
const AHEAD_ROWS: u64 = 1 << 30;

pub(crate) fn norm_backward(
    gpu: &Gpu,
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let cols = x.shape().last_dim();
    let sums = || gpu.alloc(DType::F32, cols);
    let (dgamma, dbeta) = (sums()?, stats.mean.is_some().then(sums).transpose()?);
    let places = [Some(Place::new(&dgamma)), dbeta.as_ref().map(Place::new)];
    let backward = Backward::new(gpu, "norm_backward", [dy, x, gamma], stats, options, residual)?;
    let dx = backward.run(places)?;
    let vector = |buffer: Buffer| Tensor::from_cuda(buffer, Shape::from([cols]), x.device());
    Ok((Tensor::from_cuda(dx, *x.shape(), x.device()), vector(dgamma), dbeta.map(vector)))
}

#[expect(clippy::too_many_arguments, reason = "those of the operation")]
pub(crate) fn norm_backward_into(
    gpu: &Gpu,
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
    dgamma: Option<&mut GradientMut<'_>>,
    dbeta: Option<&mut GradientMut<'_>>,
) -> Result<Tensor> {
    let places = [dgamma.map(Place::of).transpose()?, dbeta.map(Place::of).transpose()?];
    let backward = Backward::new(gpu, "norm_backward_into", [dy, x, gamma], stats, options, residual)?;
    Ok(Tensor::from_cuda(backward.run(places)?, *x.shape(), x.device()))
}

/// The inputs from which the gradients are computed.
struct Backward<'a> {
    gpu: &'a Gpu,
    op: &'static str,
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

impl<'a> Backward<'a> {
    fn new(
        gpu: &'a Gpu,
        op: &'static str,
        [dy, x, gamma]: [&'a Tensor; 3],
        stats: &'a NormStats,
        options: &NormOptions,
        residual: Option<&'a Tensor>,
    ) -> Result<Self> {
        let [rows, cols] = x.shape().matrix();
        Ok(Self {
            gpu,
            op,
            dy: dy.cuda(op)?,
            x: x.cuda(op)?,
            gamma: gamma.cuda(op)?,
            mean: stats.mean.as_ref().map(|mean| mean.cuda(op)).transpose()?,
            rsigma: stats.rsigma.cuda(op)?,
            residual: residual.map(|residual| residual.cuda(op)).transpose()?,
            around_one: i32::from(options.zero_centered_gamma),
            rows: rows as u64,
            cols: cols as u64,
        })
    }

    /// Returns dx, and puts dγ and dβ at their places.
    fn run(&self, places: [Option<Place>; 2]) -> Result<Buffer> {
        let dx = self.gpu.alloc(self.x.dtype(), self.x.len())?;
        if self.rows * self.cols == 0 {
            for place in places.into_iter().flatten() {
                place.put_zeros(self.gpu, self.cols as usize)?;
            }
            return Ok(dx);
        }
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
        let partial_beta = self.mean.map(|_| partial()).transpose()?;
        if held {
            let grid = Grid::new(self.op, parts, threads)?;
            let kernel = self.gpu.load(self.held())?;
            let args = kernels::NormBackwardHeld {
                backward: self.params(&dx),
                partial_gamma: Out::f32(&partial_gamma),
                partial_beta: Out::f32(partial_beta.as_ref()),
            };
            // SAFETY: tensors are as `params` says; partial sums hold [blocks, cols].
            unsafe { kernel.launch(self.gpu, grid, &args) }?;
        } else {
            let (kernel, at_once) = if self.cols <= WARP_COLUMNS {
                (kernels::NORM_BACKWARD_WARP, 8)
            } else {
                (kernels::NORM_BACKWARD_BLOCK, 1)
            };
            let grid = Grid { blocks: self.gpu.blocks(self.rows, at_once, 8), threads, shared: 0 };
            let args = kernels::NormBackward { backward: self.params(&dx) };
            // SAFETY: tensors are as `params` says.
            unsafe { self.gpu.load(kernel)?.launch(self.gpu, grid, &args) }?;
            self.columns(parts, strips, &partial_gamma, partial_beta.as_ref())?;
        }
        let [gamma, beta] = places;
        self.finish(
            parts,
            strips,
            [gamma.map(|place| (&partial_gamma, place)), partial_beta.as_ref().zip(beta)],
        )?;
        Ok(dx)
    }

    /// The kernel of a block that holds a row and its sums. Which it is changes no bit.
    fn held(&self) -> Entry<kernels::NormBackwardHeld> {
        let is_bf16 = |buffer: &Buffer| buffer.dtype() == DType::BF16;
        let is_ahead = is_bf16(self.x) && is_bf16(self.dy) && self.residual.is_none_or(is_bf16);
        match (self.mean, self.residual) {
            _ if !is_ahead || self.rows > AHEAD_ROWS => kernels::NORM_BACKWARD_HELD,
            (Some(_), None) => kernels::NORM_BACKWARD_HELD_LAYER,
            (Some(_), Some(_)) => kernels::NORM_BACKWARD_HELD_LAYER_ADD,
            (None, None) => kernels::NORM_BACKWARD_HELD_RMS,
            (None, Some(_)) => kernels::NORM_BACKWARD_HELD_RMS_ADD,
        }
    }

    /// Adds up the partial sums that have a place: those of one or of both parameters.
    fn finish(&self, parts: u64, strips: u64, sums: [Option<(&Buffer, Place)>; 2]) -> Result<()> {
        let mut sums = sums.into_iter().flatten();
        let Some((partial_gamma, gamma)) = sums.next() else { return Ok(()) };
        let second = sums.next();
        let kernel = self.gpu.load(kernels::NORM_BACKWARD_SUMS)?;
        let grid = Grid::new(self.op, strips * if second.is_some() { 2 } else { 1 }, 1024)?;
        let args = kernels::NormBackwardSums {
            partial_gamma: In::f32(partial_gamma),
            partial_beta: In::f32(second.map(|(partial, _)| partial)),
            parts,
            cols: self.cols,
            dgamma: Out::f32(gamma.address),
            dbeta: Out::f32(second.map_or(0, |(_, place)| place.address)),
            add_gamma: gamma.is_added.into(),
            add_beta: second.is_some_and(|(_, place)| place.is_added).into(),
        };
        // SAFETY: partial sums hold [parts, cols], written by the launches before, places `cols`; the second half of the
        // blocks exists only where there are two.
        unsafe { kernel.launch(self.gpu, grid, &args) }
    }

    /// The parameters with which the kernels of dx begin. dy, x, the residual and dx hold [rows, cols], γ `cols`, statistics
    /// `rows`, as `ops::norm_backward` has checked; dx is new, so nothing that is read is written.
    fn params(&self, dx: &Buffer) -> kernels::BackwardParams {
        kernels::BackwardParams {
            dy: In::void(self.dy),
            dy_dtype: dtype_number(self.dy.dtype()),
            x: In::void(self.x),
            dtype: dtype_number(self.x.dtype()),
            gamma: In::void(self.gamma),
            gamma_dtype: dtype_number(self.gamma.dtype()),
            around_one: self.around_one,
            means: In::f32(self.mean),
            rsigmas: In::f32(self.rsigma),
            residual: In::void(self.residual),
            residual_dtype: self.residual.map_or(0, |residual| dtype_number(residual.dtype())),
            dx: Out::void(dx),
            rows: self.rows,
            cols: self.cols,
        }
    }

    /// Partial sums over rows, `parts` for each column.
    fn columns(&self, parts: u64, strips: u64, gamma: &Buffer, beta: Option<&Buffer>) -> Result<()> {
        let kernel = self.gpu.load(kernels::NORM_BACKWARD_COLUMNS)?;
        let grid = Grid::new(self.op, strips * parts, 256)?;
        let args = kernels::NormBackwardColumns {
            dy: In::void(self.dy),
            dy_dtype: dtype_number(self.dy.dtype()),
            x: In::void(self.x),
            dtype: dtype_number(self.x.dtype()),
            means: In::f32(self.mean),
            rsigmas: In::f32(self.rsigma),
            rows: self.rows,
            cols: self.cols,
            parts,
            part_rows: self.rows.div_ceil(parts),
            partial_gamma: Out::f32(gamma),
            partial_beta: Out::f32(beta),
        };
        // SAFETY: dy and x hold [rows, cols], statistics
        // `rows`, partial sums [parts, cols]; there is a block for each strip of 32 columns and each part.
        unsafe { kernel.launch(self.gpu, grid, &args) }
    }
}
