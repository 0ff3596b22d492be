//! `optimizer_step`: all tensors of a group in one launch; tensors with a slot are quantized afterwards, one by one.
//!
//! The table of tensors and the numbers of their first blocks are uploaded together. The step's factors, its number and the
//! norm of its gradients are read from the device, so a recorded step uses those of its replay.

use super::adamw::{Check, distrust};
use super::launch::{self, TypedKernel};
use super::loss_scale::Decision;
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, kernels, quantize};
use crate::ops::{
    MOMENT_BLOCK, Moment, OptimizerGroup, OptimizerTensor, StepCheck, UpdateRule, moment_scales,
};
use crate::{DType, Fp8Tensor, Result};

const THREADS: u32 = 256;
/// Blocks of elements that a block of threads takes at a time.
const WARPS: u64 = 8;
/// Blocks a multiprocessor: as many as can run at once, twice.
const PER_SM: u32 = 4;
/// The kernel's number for a moment in FP8.
const FP8: u64 = 3;

/// `OptimizerRecord` of optimizer.cu, member by member.
type Record = [u64; 11];

pub(crate) fn optimizer_step(
    gpu: &Gpu,
    groups: &mut [OptimizerGroup<'_, '_>],
    check: StepCheck<'_>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let op = "optimizer";
    let given = groups.iter().map(|(_, factors)| factors.cuda(op)).collect::<Result<Vec<_>>>()?;
    let decision = match check {
        StepCheck::Scaled(step) => Some((Decision::prepare(gpu, op, &given, &step)?, step)),
        StepCheck::Never | StepCheck::Norm(_) => None,
    };
    let numbers = given.clone();
    let (factors, mut reads) = match (&decision, check) {
        (Some((decision, step)), _) => (decision.factors_at(), decision.check(step)?),
        (None, StepCheck::Norm(check)) => (given, Check::new(&check)?),
        (None, _) => (given, Check::default()),
    };
    let mut updates = Vec::new();
    for (((tensors, _), numbers), factors) in groups.iter_mut().zip(numbers).zip(factors) {
        if let Some(update) = Update::prepare(gpu, tensors, numbers, factors, reads)? {
            updates.push(update);
            reads.skipped = 0; // one launch counts for all
        }
    }
    if let Some((decision, step)) = &decision {
        decision.run(gpu, step)?;
    }
    // From here on an error leaves some parameters updated and others not.
    let run = || {
        updates.iter().try_for_each(|update| update.run(gpu))?;
        let quantized = |tensor: &OptimizerTensor<'_>| -> Result<Option<Fp8Tensor>> {
            let Some(slot) = tensor.slot else { return Ok(None) };
            Ok(quantize::quantize(gpu, tensor.param, &slot)?.as_fp8().cloned())
        };
        groups.iter().map(|(tensors, _)| tensors.iter().map(quantized).collect()).collect()
    };
    let result: Result<Vec<Vec<_>>> = run();
    result.inspect_err(|error| distrust(gpu, error))
}

/// The launch of a group, with all it needs.
struct Update {
    kernel: TypedKernel<kernels::Optimizer>,
    table: Buffer,
    count: i32,
    first_blocks_at: u64,
    numbers_at: u64,
    factors_at: u64,
    check: Check,
    grid: Grid,
}

impl Update {
    /// Everything that may fail without harm; `None` for no tensors.
    fn prepare(
        gpu: &Gpu,
        tensors: &mut [OptimizerTensor<'_>],
        numbers_at: u64,
        factors_at: u64,
        check: Check,
    ) -> Result<Option<Self>> {
        if tensors.is_empty() {
            return Ok(None);
        }
        let count = launch::count("optimizer", tensors.len())?;
        let (mut records, mut ends, mut blocks) = (Vec::new(), Vec::new(), 0);
        for tensor in tensors {
            ends.push(blocks);
            blocks += moment_scales(tensor.param.shape()).numel() as u64;
            records.extend_from_slice(&record(tensor)?);
        }
        ends.push(blocks);
        let first_blocks = (records.len() * size_of::<u64>()) as u64;
        records.extend_from_slice(&ends);
        let kernel = gpu.load(kernels::OPTIMIZER)?;
        let table = gpu.upload(&records)?;
        // One block at least: without any element a skipped step is counted, too.
        let grid = Grid { blocks: gpu.blocks(blocks, WARPS, PER_SM).max(1), threads: THREADS, shared: 0 };
        let first_blocks_at = table.ptr() + first_blocks;
        Ok(Some(Self { kernel, table, count, first_blocks_at, numbers_at, factors_at, check, grid }))
    }

    fn run(&self, gpu: &Gpu) -> Result<()> {
        let args = kernels::Optimizer {
            records: In::optimizer_record(&self.table),
            first_blocks: In::u64(self.first_blocks_at),
            tensors: self.count,
            factors: In::f32(self.factors_at),
            numbers: In::f32(self.numbers_at),
            norm: In::f32(self.check.norm),
            skipped: Out::u64(self.check.skipped),
        };
        // SAFETY: the table holds `count` records and `count + 1` numbers of blocks; its addresses are of tensors of the
        // record's extents, alike by the checks of ops::optimizer_step, each held by the caller, with a scale for each
        // block where a moment is in FP8. Factors and number are those of the group, on the device; the norm is null or one f32,
        // the count of skipped steps null or one u64, both held by the caller.
        unsafe { self.kernel.launch(gpu, self.grid, &args) }
    }
}

fn record(tensor: &mut OptimizerTensor<'_>) -> Result<Record> {
    let (op, name) = ("optimizer", tensor.name);
    let cols = tensor.param.shape().last_dim();
    let dtype = tensor.param.dtype();
    let param = tensor.param.cuda_mut(name)?.ptr();
    let main = match &mut tensor.main_param {
        Some(main) => main.cuda_mut(name)?.ptr(),
        None => 0,
    };
    let grad = tensor.main_grad.cuda(op)?.ptr();
    let (first, first_scales, first_kind) = addresses(&mut tensor.exp_avg, name)?;
    let ((second, second_scales, second_kind), rule) = match &mut tensor.rule {
        UpdateRule::AdamW { exp_avg_sq } => (addresses(exp_avg_sq, name)?, 0),
        UpdateRule::Lion => ((0, 0, 0), 1),
        UpdateRule::Sgd { nesterov } => ((0, 0, 0), 2 + u64::from(*nesterov)),
    };
    let is_stochastic = u64::from(tensor.is_rounded_stochastically);
    let kinds =
        dtype_number(dtype) as u64 | first_kind << 8 | second_kind << 16 | is_stochastic << 24 | rule << 32;
    let across = cols.div_ceil(MOMENT_BLOCK) as u64;
    Ok([
        param,
        main,
        grad,
        first,
        second,
        first_scales,
        second_scales,
        cols as u64,
        across,
        tensor.seed,
        kinds,
    ])
}

/// The addresses of a moment and of its scales, and the number of its format.
fn addresses(moment: &mut Moment<'_>, name: &str) -> Result<(u64, u64, u64)> {
    let dtype = moment.values.dtype();
    let values = moment.values.cuda_mut(name)?.ptr();
    Ok(match &mut moment.scale_inv {
        Some(scale_inv) => (values, scale_inv.cuda_mut(name)?.ptr(), FP8),
        None => (values, 0, dtype_number(if dtype == DType::BF16 { dtype } else { DType::F32 }) as u64),
    })
}
