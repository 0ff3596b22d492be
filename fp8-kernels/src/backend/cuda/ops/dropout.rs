//! `dropout` on a GPU.

use super::{Arg, Buffer, Gpu, Grid, Out, Source, args, dtype_number, kernels};
use crate::cells::Counts;
use crate::dropout_state;
use crate::ops::Dropout;
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

    /// The parameters key, first, threshold, factor.
    pub(super) fn args(&self) -> [Arg; 4] {
        args![&self.key, self.first, self.threshold, self.factor]
    }

    /// The same where nothing is dropped, for kernels that take both: no key, and the factor 1.
    pub(super) fn none() -> [Arg; 4] {
        args![None::<&Buffer>, 0u64, 0u32, 1.0f32]
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
    let kernel = gpu.kernel(Source::Dropout, "dropout")?;
    let [key, first, threshold, factor] = mask.args();
    let args = [args![values, &y, len as u64, dtype_number(x.dtype())], [key, first, threshold, factor]];
    // SAFETY: x and y have n elements of that type, the key is two u64 and freed behind the launch.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), args.as_flattened()) }?;
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
    let [hidden, path] =
        [hidden, path].map(|dropout| dropout.map(|dropout| Mask::new(gpu, op, dropout)).transpose());
    let (hidden, path) = (hidden?, path?);
    let of = |mask: &Option<Mask>| {
        mask.as_ref().map_or_else(|| args![None::<&Buffer>, 0u64, 0u32, 1f32], Mask::args)
    };
    let entry = x.shape().iter().skip(1).product::<usize>().max(1) as u64;
    let kernel = gpu.kernel(Source::Dropout, "dropout_add")?;
    let types = [dtype, x.dtype(), dtype].map(dtype_number);
    let args = [
        args![added, values, &y, len as u64],
        args![entry, types[0], types[1], types[2]],
        of(&hidden),
        of(&path),
    ];
    // SAFETY: the tensors have n elements of those types, checked by `ops::dropout_add` or made above; the residual
    // is null or such a tensor; a key is null or two u64, freed behind the launch.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), args.as_flattened()) }?;
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
