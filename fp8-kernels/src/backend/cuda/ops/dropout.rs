//! `dropout` on a GPU.

use super::kernels::DropoutOnParameters;
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels};
use crate::cells::Counts;
use crate::dropout_state;
use crate::ops::{Dropout, Part};
use crate::{DType, Device, DropoutDraw, Result, Tensor};

/// A mask as kernels take it: they read the key from device memory.
pub(super) struct Mask {
    key: Buffer,
    first: u64,
    threshold: u32,
    factor: f32,
}

impl Mask {
    pub(super) fn new(gpu: &Gpu, op: &'static str, dropout: &Dropout) -> Result<Self> {
        let key = key(gpu, op, &dropout.draw)?;
        let (threshold, factor) = (dropout.threshold(), dropout.factor());
        Ok(Self { key, first: dropout.draw.first, threshold, factor })
    }

    /// The parameters of a kernel that drops, with the heads of the mask that its call has, which fit into 32 bits.
    pub(super) fn parameters(&self, heads: Part) -> DropoutOnParameters {
        DropoutOnParameters {
            dropout_key: In::dropout_key(&self.key),
            dropout_first: self.first,
            dropout_threshold: self.threshold,
            dropout_factor: self.factor,
            dropout_first_head: heads.first as u32,
            dropout_heads: heads.total as u32,
        }
    }

    /// The parameters of a kernel that drops only where it is given a key.
    pub(super) fn optional(mask: Option<&Self>, heads: Part) -> DropoutOnParameters {
        const NONE: DropoutOnParameters = DropoutOnParameters {
            dropout_key: In::new(0),
            dropout_first: 0,
            dropout_threshold: 0,
            dropout_factor: 1.0,
            dropout_first_head: 0,
            dropout_heads: 0,
        };
        mask.map_or(NONE, |mask| mask.parameters(heads))
    }
}

/// The key of a draw, in device memory: a seed and an offset. One on the host is uploaded.
pub(super) fn key(gpu: &Gpu, op: &'static str, draw: &DropoutDraw) -> Result<Buffer> {
    match &draw.key {
        dropout_state::Source::Host(key) => gpu.upload(&[key.seed, key.offset]),
        dropout_state::Source::Device(counts) => Ok(counts.buffer(op)?.clone()),
    }
}

pub(crate) fn dropout(gpu: &Gpu, op: &'static str, x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    let (values, len) = (x.cuda(op)?, x.numel());
    let y = gpu.alloc(x.dtype(), len)?;
    let mask = Mask::new(gpu, op, dropout)?;
    let kernel = gpu.load(kernels::DROPOUT)?;
    let args = kernels::Dropout {
        x: In::void(values),
        y: Out::void(&y),
        n: len as u64,
        dtype: dtype_number(x.dtype()),
        key: In::dropout_key(&mask.key),
        first: mask.first,
        threshold: mask.threshold,
        factor: mask.factor,
    };
    // SAFETY: x and y have n elements of that type, the key is two u64 and freed behind the launch.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

pub(crate) fn dropout_add(
    gpu: &Gpu,
    op: &'static str,
    residual: Option<&Tensor>,
    x: &Tensor,
    hidden: Option<&Dropout>,
    path: Option<&Dropout>,
) -> Result<Tensor> {
    let (values, len) = (x.cuda(op)?, x.numel());
    let added = residual.map(|residual| residual.cuda(op)).transpose()?;
    let dtype = residual.unwrap_or(x).dtype();
    let y = gpu.alloc(dtype, len)?;
    let masks = [hidden, path].map(|dropout| dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose());
    let [hidden_mask, path_mask] = masks;
    let (hidden_mask, path_mask) = (hidden_mask?, path_mask?);
    let [hidden, path] = [&hidden_mask, &path_mask].map(|mask| Mask::optional(mask.as_ref(), Part::whole(1)));
    let entry = x.shape().iter().skip(1).product::<usize>().max(1) as u64;
    let kernel = gpu.load(kernels::DROPOUT_ADD)?;
    let args = kernels::DropoutAdd {
        residual: In::void(added),
        x: In::void(values),
        y: Out::void(&y),
        n: len as u64,
        entry,
        residual_type: dtype_number(dtype),
        x_type: dtype_number(x.dtype()),
        y_type: dtype_number(dtype),
        hidden_key: hidden.dropout_key,
        hidden_first: hidden.dropout_first,
        hidden_threshold: hidden.dropout_threshold,
        hidden_factor: hidden.dropout_factor,
        path_key: path.dropout_key,
        path_first: path.dropout_first,
        path_threshold: path.dropout_threshold,
        path_factor: path.dropout_factor,
    };
    // SAFETY: the tensors have n elements of those types, checked by `ops::dropout_add` or made above; the residual
    // is null or such a tensor; a key is null or two u64, freed behind the launch.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

/// The next key of a state, which has one key fewer then.
pub(crate) fn advance(gpu: &Gpu, state: &Counts, device: &Device) -> Result<Counts> {
    let key = gpu.alloc(DType::U8, 16)?;
    let kernel = gpu.load(kernels::DROPOUT_ADVANCE)?;
    let grid = Grid { blocks: 1, threads: 32, shared: 0 };
    // SAFETY: two u64 each.
    unsafe {
        kernel.launch(
            gpu,
            grid,
            &kernels::DropoutAdvance {
                state: Out::u64(state.cuda("dropout state")?),
                key: Out::dropout_key(&key),
            },
        )
    }?;
    Ok(Counts::from_cuda(key, device))
}
