//! `softmax` on a GPU: a warp for a row of up to 1024 keys, a block for a longer one.

use super::kernels::MaskParameters;
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::{Error, Result, Shape, Tensor};

/// The longest row that a warp holds in its registers, as the kernels have it.
const WARP_KEYS: u32 = 1024;
const WARP_THREADS: u32 = 128;
const BLOCK_THREADS: u32 = 512;

pub(crate) fn softmax(
    gpu: &Gpu,
    x: &Tensor,
    scale: f32,
    causal: bool,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "softmax";
    let (scores, y) = (x.cuda(op)?, gpu.alloc(x.dtype(), x.numel())?);
    if x.numel() == 0 {
        return Ok(Tensor::from_cuda(y, *x.shape(), x.device()));
    }
    let (rows, keys) = rows(op, x)?;
    let queries = x.shape().iter().rev().nth(1).copied().unwrap_or(1) as u64;
    let (bytes, layout) = match mask {
        Some(mask) => (Some(mask.cuda(op)?), MaskLayout::new(mask.shape(), x.shape())),
        None => (None, MaskLayout::default()),
    };
    let (kernel, grid) = match keys {
        0..=WARP_KEYS => (kernels::SOFTMAX_WARP, warps(gpu, rows)),
        _ if keys.is_multiple_of(8) => (kernels::SOFTMAX_BLOCK, row_blocks(gpu, rows)),
        _ => (kernels::SOFTMAX_BLOCK_RAGGED, row_blocks(gpu, rows)),
    };
    let args = kernels::Softmax {
        x: In::void(scores),
        y: Out::void(&y),
        dtype: dtype_number(x.dtype()),
        rows,
        keys,
        queries,
        scale,
        causal: causal.into(),
        mask: layout.parameters(bytes),
    };
    // SAFETY: x and y hold rows · keys elements of that type, rows a multiple of queries, and the mask's strides stay within
    // it since its extents are those of x or 1 (checked by `ops::softmax`).
    unsafe { gpu.load(kernel)?.launch(gpu, grid, &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

pub(crate) fn softmax_backward(gpu: &Gpu, dy: &Tensor, y: &Tensor, scale: f32) -> Result<Tensor> {
    let op = "softmax_backward";
    let dx = gpu.alloc(y.dtype(), y.numel())?;
    if y.numel() == 0 {
        return Ok(Tensor::from_cuda(dx, *y.shape(), y.device()));
    }
    let (rows, keys) = rows(op, y)?;
    let (kernel, grid) = match keys {
        0..=WARP_KEYS => (kernels::SOFTMAX_BACKWARD_WARP, warps(gpu, rows)),
        _ => (kernels::SOFTMAX_BACKWARD_BLOCK, row_blocks(gpu, rows)),
    };
    let args = kernels::SoftmaxBackward {
        dy: In::void(dy.cuda(op)?),
        y: In::void(y.cuda(op)?),
        dx: Out::void(&dx),
        dy_dtype: dtype_number(dy.dtype()),
        dtype: dtype_number(y.dtype()),
        rows,
        keys,
        scale,
    };
    // SAFETY: all three hold rows · keys elements (checked by `ops::softmax_backward`; dx made above), of those types.
    unsafe { gpu.load(kernel)?.launch(gpu, grid, &args) }?;
    Ok(Tensor::from_cuda(dx, *y.shape(), y.device()))
}

/// Rows, and keys of one, which the kernels count in 32 bits.
fn rows(op: &'static str, x: &Tensor) -> Result<(u64, u32)> {
    let [rows, keys] = x.shape().matrix();
    let too_long = |_| {
        let remedy = format!("a row of a GPU's softmax has at most {} keys", i32::MAX);
        Error::Shape { op, shape: *x.shape(), remedy }
    };
    // Half the range: the kernels look a little beyond the end.
    let keys = i32::try_from(keys).map_err(too_long)?;
    Ok((rows as u64, keys.unsigned_abs()))
}

fn warps(gpu: &Gpu, rows: u64) -> Grid {
    Grid { blocks: gpu.blocks(rows, (WARP_THREADS / 32).into(), 32), threads: WARP_THREADS, shared: 0 }
}

fn row_blocks(gpu: &Gpu, rows: u64) -> Grid {
    Grid { blocks: gpu.blocks(rows, 1, 16), threads: BLOCK_THREADS, shared: 0 }
}

/// The repetition of a mask along the scores: the extents of the leading dimensions, innermost first, and the mask's strides.
struct MaskLayout {
    extents: [u64; Shape::MAX_RANK - 1],
    strides: [u64; Shape::MAX_RANK - 1],
    /// 0 where one byte stands for a whole row.
    step: u64,
}

impl Default for MaskLayout {
    fn default() -> Self {
        Self { extents: [1; Shape::MAX_RANK - 1], strides: [0; Shape::MAX_RANK - 1], step: 0 }
    }
}

impl MaskLayout {
    /// The mask's parameters of a kernel, with its address, or null where there is none.
    fn parameters(&self, mask: Option<&Buffer>) -> MaskParameters {
        let [extent0, extent1, extent2, extent3, extent4] = self.extents;
        let [stride0, stride1, stride2, stride3, stride4] = self.strides;
        MaskParameters {
            mask: In::u8(mask),
            extent0,
            extent1,
            extent2,
            extent3,
            extent4,
            stride0,
            stride1,
            stride2,
            stride3,
            stride4,
            step: self.step,
        }
    }

    fn new(mask: &Shape, scores: &Shape) -> Self {
        let mut layout = Self::default();
        let mut stride = 1;
        let mut places = layout.extents.iter_mut().zip(&mut layout.strides);
        for (inner, (&extent, &own)) in scores.iter().zip(mask.iter()).rev().enumerate() {
            let moves = if own == 1 { 0 } else { stride };
            match inner {
                0 => layout.step = moves,
                _ => {
                    if let Some((to, by)) = places.next() {
                        (*to, *by) = (extent as u64, moves);
                    }
                }
            }
            stride *= own as u64;
        }
        layout
    }
}
