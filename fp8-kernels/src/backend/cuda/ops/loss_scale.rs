//! The operations of a loss scale on a GPU. Decisions and factors are made by one thread or one warp, in device memory.

use super::launch::TypedKernel;
use super::{Buffer, Gpu, Grid, In, Out, adamw, dtype_number, kernels};
use crate::ops::{AdamWGroup, Factors, LossScale, LossScaleRule, ScaledStep};
use crate::{Arena, Cell, DType, Fp8Tensor, Result, Tensor};

/// A warp.
const ONE_BLOCK: Grid = Grid { blocks: 1, threads: 32, shared: 0 };

pub(crate) fn apply_loss_scale(gpu: &Gpu, x: &Tensor, scale: &LossScale) -> Result<Tensor> {
    let op = "apply_loss_scale";
    let (values, len) = (x.cuda(op)?.ptr(), x.numel());
    let y = gpu.alloc(x.dtype(), len)?;
    launch_multiply(gpu, x.dtype(), [values, y.ptr()], len, scale.cell().cuda(op)?, 0)?;
    Ok(Tensor::from_cuda(y, *x.shape(), x.device()))
}

pub(crate) fn undo_loss_scale(gpu: &Gpu, x: &mut Tensor, scale: &LossScale, name: &str) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.numel());
    let values = x.cuda_mut(name)?.ptr();
    launch_multiply(gpu, dtype, [values, values], len, scale.cell().cuda("undo_loss_scale")?, 1)
}

/// `[x, y]`: addresses of `len` elements, which may be the same.
fn launch_multiply(
    gpu: &Gpu,
    dtype: DType,
    [x, y]: [u64; 2],
    len: usize,
    scale: u64,
    inverse: i32,
) -> Result<()> {
    let kernel = gpu.load(kernels::LOSS_SCALE_MULTIPLY)?;
    let args = kernels::LossScaleMultiply {
        x: In::void(x),
        y: Out::void(y),
        n: len as u64,
        dtype: dtype_number(dtype),
        scale: In::f32(scale),
        inverse,
    };
    // SAFETY: x and y have n elements of that type and may be equal, since each thread reads an element before it
    // writes it; the scale is one f32.
    unsafe { kernel.launch(gpu, Grid::flat(gpu, len), &args) }
}

pub(crate) fn check_finite(gpu: &Gpu, norm: &Tensor, overflow: &Cell) -> Result<()> {
    let op = "check_finite";
    let kernel = gpu.load(kernels::LOSS_SCALE_CHECK)?;
    let args =
        kernels::LossScaleCheck { norm: In::f32(norm.cuda(op)?), overflow: Out::f32(overflow.cuda(op)?) };
    // SAFETY: one f32 each (checked by `ops::check_finite`).
    unsafe { kernel.launch(gpu, ONE_BLOCK, &args) }
}

pub(crate) fn check_amaxes(gpu: &Gpu, arena: &Arena, overflow: &Cell) -> Result<()> {
    let op = "check_amaxes";
    let kernel = gpu.load(kernels::LOSS_SCALE_CHECK_AMAXES)?;
    let args = kernels::LossScaleCheckAmaxes {
        row: In::f32(arena.cuda_history(op)?),
        n: arena.slots() as u64,
        overflow: Out::f32(overflow.cuda(op)?),
    };
    // SAFETY: row 0 of the arena has a f32 for each slot, the cell is one f32.
    unsafe { kernel.launch(gpu, Grid { threads: 256, ..ONE_BLOCK }, &args) }
}

pub(crate) fn update_loss_scale(gpu: &Gpu, scale: &LossScale, rule: Option<&LossScaleRule>) -> Result<()> {
    let op = "update_loss_scale";
    let kernel = gpu.load(kernels::LOSS_SCALE_UPDATE)?;
    let LossScaleRule { growth_factor, backoff_factor, growth_interval } = rule.copied().unwrap_or_default();
    let args = kernels::LossScaleUpdate {
        scale: Out::f32(scale.cell().cuda(op)?),
        overflow: Out::f32(scale.overflow().cuda(op)?),
        counts: Out::u64(scale.counts().cuda(op)?),
        growth_factor,
        backoff_factor,
        growth_interval,
        is_dynamic: i32::from(rule.is_some()),
    };
    // SAFETY: two cells of one f32 and a block of two u64.
    unsafe { kernel.launch(gpu, ONE_BLOCK, &args) }
}

pub(crate) fn adamw_groups_scaled(
    gpu: &Gpu,
    groups: &mut [AdamWGroup<'_, '_>],
    step: &ScaledStep<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let op = "adamw_groups_scaled";
    let addresses = groups.iter().map(|(_, factors)| factors.cuda(op)).collect::<Result<Vec<_>>>()?;
    let decision = Decision::prepare(gpu, op, &addresses, step)?;
    let (at, check) = (decision.factors_at(), decision.check(step)?);
    adamw::update_groups(gpu, groups, at, check, || decision.run(gpu, step))
}

/// The launch that decides on a step and computes its factors.
pub(super) struct Decision {
    kernel: TypedKernel<kernels::LossScaleFactors>,
    op: &'static str,
    table: Buffer,
    groups: u64,
    computed: Buffer,
    verdict: Buffer,
}

impl Decision {
    /// Prepares it for groups whose numbers are at these addresses.
    pub(super) fn prepare(
        gpu: &Gpu,
        op: &'static str,
        addresses: &[u64],
        step: &ScaledStep<'_>,
    ) -> Result<Self> {
        step.skipped.cuda(op)?;
        let (computed, verdict) = (gpu.alloc(DType::F32, 8 * addresses.len())?, gpu.alloc(DType::F32, 1)?);
        let kernel = gpu.load(kernels::LOSS_SCALE_FACTORS)?;
        let table = gpu.upload(addresses)?;
        Ok(Self { kernel, op, table, groups: addresses.len() as u64, computed, verdict })
    }

    /// Returns the address of the eight factors of each group, which [`run`](Self::run) writes.
    pub(super) fn factors_at(&self) -> Vec<u64> {
        (0..self.groups).map(|group| self.computed.ptr() + group * size_of::<Factors>() as u64).collect()
    }

    /// Returns the addresses that tell the updates whether they are skipped.
    pub(super) fn check(&self, step: &ScaledStep<'_>) -> Result<adamw::Check> {
        Ok(adamw::Check { norm: self.verdict.ptr(), skipped: step.skipped.cuda(self.op)? })
    }

    pub(super) fn run(&self, gpu: &Gpu, step: &ScaledStep<'_>) -> Result<()> {
        let op = self.op;
        let (scale, overflow) = match step.loss_scale {
            Some(scale) => (scale.cell().cuda(op)?, scale.overflow().cuda(op)?),
            None => (0, 0),
        };
        let args = kernels::LossScaleFactors {
            groups: In::addresses(&self.table),
            count: self.groups,
            scale: In::f32(if step.gradients_are_scaled { scale } else { 0 }),
            overflow: Out::f32(overflow),
            norm: In::f32(step.norm.map(|norm| norm.cuda(op)).transpose()?.map_or(0, Buffer::ptr)),
            updates: Out::u64(step.updates.counts().cuda(op)?),
            counts_skipped: i32::from(step.loss_scale.is_none()),
            factors: Out::f32(&self.computed),
            verdict: Out::f32(&self.verdict),
        };
        // SAFETY: the table has the address of ten f32 for each group, `computed` holds eight a group; scale,
        // overflow and norm are null or one f32, updates one u64, all held by the caller.
        unsafe { self.kernel.launch(gpu, ONE_BLOCK, &args) }
    }
}
