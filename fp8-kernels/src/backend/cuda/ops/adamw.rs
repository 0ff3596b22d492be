//! `adamw` and `adamw_many`: all tensors in one launch, with the FP8 codes of the new parameters.
//!
//! The table of tensors, their first tiles and the step's factors are uploaded together, so a launch itself holds nothing
//! of a step. Codes whose scale stands in its cell are written by the update. A slot without a scale, or with the tensor's
//! own, needs the new parameter's amax first: the device decides that, in two more launches. Rules that run on the host
//! are left to `quantize`, and so are slots that share a cell: the first of them may set it.
//!
//! The kernels read the gradients' norm from the device and leave everything as it is where that is not finite; codes are
//! then those of the parameters that stay. The first launch of a step counts it.

use super::launch::{self, TypedKernel};
use super::quantize;
use super::rule::RuleArgs;
use super::{Buffer, Gpu, Grid, In, Out, dtype_number, format_number, kernels};
use crate::Error;
use crate::ops::{AdamWGroup, AdamWStep, AdamWTensor, Factors, NormCheck};
use crate::{DType, Fp8Tensor, Result, Scale, Shape, Slot, Tensor, TransposePolicy};
use std::collections::HashSet;

const THREADS: u32 = 256;
/// Blocks a multiprocessor: as many as can run at once, twice.
const PER_SM: u32 = 4;
/// Elements of a tile without a transpose.
const FLAT: u64 = 8192;
/// Rows and columns of a tile with one.
const TILE: [u64; 2] = [128, 64];

/// `Record` of adamw.cu, member by member.
type Record = [u64; 18];

/// The kernels' numbers for the sources of scales.
const SLOT_OFF: u64 = 1;
const SLOT_CELL: u64 = 2;
const SLOT_OWN: u64 = 3;
const SLOT_FIXED: u64 = 4;

pub(crate) fn adamw(gpu: &Gpu, tensor: AdamWTensor<'_>, step: &AdamWStep) -> Result<()> {
    adamw_many(gpu, &mut [tensor], step).map(drop)
}

pub(crate) fn adamw_many(
    gpu: &Gpu,
    tensors: &mut [AdamWTensor<'_>],
    step: &AdamWStep,
) -> Result<Vec<Option<Fp8Tensor>>> {
    let (plan, outputs) = Plan::of(gpu, tensors)?;
    if let Some(update) = plan.prepare(gpu, Numbers::Given(step), Check::default())? {
        update.run(gpu)?;
    }
    finish(gpu, outputs, tensors)
}

pub(crate) fn adamw_groups(
    gpu: &Gpu,
    groups: &mut [AdamWGroup<'_, '_>],
    check: Option<NormCheck<'_>>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let check = check.map_or_else(|| Ok(Check::default()), |check| Check::new(&check))?;
    let at = groups.iter().map(|(_, factors)| factors.cuda("adamw")).collect::<Result<Vec<_>>>()?;
    update_groups(gpu, groups, at, check, || Ok(()))
}

/// Updates each group with the eight factors at its address. Everything that may fail without harm comes first; then
/// `decide`, which may queue work that writes the factors and the norm, and the updates.
pub(super) fn update_groups(
    gpu: &Gpu,
    groups: &mut [AdamWGroup<'_, '_>],
    factors: Vec<u64>,
    mut check: Check,
    decide: impl FnOnce() -> Result<()>,
) -> Result<Vec<Vec<Option<Fp8Tensor>>>> {
    let plans = groups.iter_mut().map(|(tensors, _)| Plan::of(gpu, tensors)).collect::<Result<Vec<_>>>()?;
    let prepare = |((plan, _), at): (&(Plan, _), u64)| {
        let update = plan.prepare(gpu, Numbers::At(at), check).transpose();
        if update.is_some() {
            check.skipped = 0; // one launch counts for all
        }
        update
    };
    let updates = plans.iter().zip(factors).filter_map(prepare).collect::<Result<Vec<_>>>()?;
    decide()?;
    updates.iter().try_for_each(|update| update.run(gpu))?;
    let finish =
        |((_, outputs), (tensors, _)): ((Plan, _), &AdamWGroup<'_, '_>)| finish(gpu, outputs, tensors);
    plans.into_iter().zip(&*groups).map(finish).collect()
}

/// The numbers of an update: uploaded with its table, or eight factors at an address.
#[derive(Clone, Copy)]
enum Numbers<'a> {
    Given(&'a AdamWStep),
    At(u64),
}

/// Addresses of a step's norm and of the count of skipped steps; 0 for none.
#[derive(Clone, Copy, Default)]
pub(super) struct Check {
    pub(super) norm: u64,
    pub(super) skipped: u64,
}

impl Check {
    pub(super) fn new(check: &NormCheck<'_>) -> Result<Self> {
        Ok(Self { norm: check.norm.cuda("adamw")?.ptr(), skipped: check.skipped.cuda("adamw")? })
    }
}

/// The codes of each tensor, whose update has been queued.
fn finish(gpu: &Gpu, outputs: Vec<Output>, tensors: &[AdamWTensor<'_>]) -> Result<Vec<Option<Fp8Tensor>>> {
    let finish = |(output, tensor): (Output, &AdamWTensor<'_>)| match (output, &tensor.slot) {
        (Output::Codes(codes), _) => Ok(Some(codes)),
        (Output::Later, Some(slot)) => Ok(quantize::quantize(gpu, tensor.param, slot)?.as_fp8().cloned()),
        (Output::Later | Output::None, _) => Ok(None),
    };
    let all: Result<Vec<_>> = outputs.into_iter().zip(tensors).map(finish).collect();
    all.inspect_err(|error| distrust(gpu, error))
}

/// After an error on the way: done again, the step would be one too many for some parameters.
pub(super) fn distrust(gpu: &Gpu, error: &Error) {
    // What is only recorded has not run, and never will.
    if !gpu.is_capturing() {
        gpu.poison(format!("adamw: parameters may be half updated: {error}"));
    }
}

/// The quantization of one tensor's new value.
#[expect(clippy::large_enum_variant, reason = "one a parameter, for the time of a call")]
enum Output {
    None,
    Codes(Fp8Tensor),
    /// Quantized after the update, on its own.
    Later,
}

/// The launches of one call.
#[derive(Default)]
struct Plan {
    records: Vec<Record>,
    /// The number of each tensor's first tile, but of the first; so the last is the number of tiles.
    ends: Vec<u64>,
    /// Scale cells that these launches may set.
    cells: HashSet<u64>,
    /// Whether any tensor has a slot, and whether codes of any may have to wait for its amax.
    slots: bool,
    late: bool,
}

/// A plan with all it needs: kernels, its table and room on the device. Only the launches are left.
struct Update {
    update: TypedKernel<kernels::AdamwUpdate>,
    scales: Option<TypedKernel<kernels::AdamwScales>>,
    codes: Option<TypedKernel<kernels::AdamwCodes>>,
    count: usize,
    table: Buffer,
    tiles_at: u64,
    factors_at: u64,
    check: Check,
    amaxes: Buffer,
    late: Buffer,
    grid: Grid,
}

impl Plan {
    /// Creates the plan of all tensors. Also returns the output of each.
    fn of(gpu: &Gpu, tensors: &mut [AdamWTensor<'_>]) -> Result<(Self, Vec<Output>)> {
        let mut plan = Self::default();
        let outputs = tensors.iter_mut().map(|tensor| plan.take(gpu, tensor)).collect::<Result<Vec<_>>>()?;
        Ok((plan, outputs))
    }

    /// Adds a tensor.
    fn take(&mut self, gpu: &Gpu, tensor: &mut AdamWTensor<'_>) -> Result<Output> {
        let name = tensor.name;
        let [rows, cols] = tensor.param.shape().matrix().map(|extent| extent as u64);
        let dtype = dtype_number(tensor.param.dtype()) as u64;
        let mut record: Record = [0; 18];
        record[0] = tensor.param.cuda_mut(name)?.ptr();
        record[1] = match &mut tensor.main_param {
            Some(main) => main.cuda_mut(name)?.ptr(),
            None => 0,
        };
        record[2] = tensor.main_grad.cuda("adamw")?.ptr();
        record[3] = tensor.exp_avg.cuda_mut(name)?.ptr();
        record[4] = tensor.exp_avg_sq.cuda_mut(name)?.ptr();
        record[11..15].copy_from_slice(&[rows * cols, rows, cols, dtype]);
        let output = match &tensor.slot {
            Some(slot) => self.quantize(gpu, tensor.param, slot, &mut record)?,
            None => Output::None,
        };
        let tiles = match record[6] {
            0 => (rows * cols).div_ceil(FLAT),
            _ => rows.div_ceil(TILE[0]) * cols.div_ceil(TILE[1]),
        };
        self.ends.push(self.ends.last().copied().unwrap_or(0) + tiles);
        self.records.push(record);
        Ok(output)
    }

    /// Puts a slot and memory for codes into the record.
    fn quantize(
        &mut self,
        gpu: &Gpu,
        param: &Tensor,
        slot: &Slot<'_>,
        record: &mut Record,
    ) -> Result<Output> {
        let (mut keeps, mut fixed, mut rule) = (false, 0.0, None);
        let kind = match slot.scale {
            Scale::Off => SLOT_OFF,
            Scale::Blocks(_) | Scale::Nvfp4(_) => return Ok(Output::Later),
            Scale::FromAmax { amax, rule } => {
                fixed = rule.scale(amax, 1.0)?;
                SLOT_FIXED
            }
            Scale::FromTensor(own) => {
                rule = Some(own);
                SLOT_OWN
            }
            Scale::Cell { cell, first, keep } => {
                let address = cell.cuda("adamw")?;
                record[7] = address;
                keeps = keep;
                if !cell.is_known_set() {
                    gpu.expect_eager("adamw", "a slot has no scale yet: run and commit a few steps before")?;
                    if !self.cells.insert(address) {
                        return Ok(Output::Later);
                    }
                    rule = Some(first);
                }
                SLOT_CELL
            }
        };
        if let Some(rule) = rule {
            let Some(rule) = RuleArgs::new(rule) else { return Ok(Output::Later) };
            self.late = true;
            record[15] = u64::from(rule.kind as u32) << 32;
            record[16] = bits(rule.fp8_max) | bits(rule.scaled_max) << 32;
            record[17] = u64::from(rule.margin as u32) | bits(rule.epsilon) << 32;
        }
        self.slots = true;
        record[9] = slot.amax.map_or(Ok(0), |cell| cell.cuda("adamw"))?;
        record[14] |= (format_number(slot.encoding) as u64) << 8 | kind << 16 | u64::from(keeps) << 24;
        record[15] |= bits(fixed);
        if kind == SLOT_OFF {
            return Ok(Output::None);
        }
        record[10] = slot.counters.map_or(Ok(0), |counters| counters.cuda("adamw"))?;
        let (codes, pointers) = codes(gpu, param, slot)?;
        [record[5], record[6], record[8]] = pointers;
        Ok(Output::Codes(codes))
    }

    /// All that may fail without harm; None for no tensors.
    fn prepare(&self, gpu: &Gpu, numbers: Numbers<'_>, check: Check) -> Result<Option<Update>> {
        let count = self.records.len();
        launch::count("adamw", count)?;
        let Some(&tiles) = self.ends.last() else { return Ok(None) };
        let update = gpu.load(kernels::ADAMW_UPDATE)?;
        let scales = self.slots.then(|| gpu.load(kernels::ADAMW_SCALES)).transpose()?;
        let codes = self.late.then(|| gpu.load(kernels::ADAMW_CODES)).transpose()?;
        let mut table: Vec<u64> = self.records.concat();
        table.push(0);
        table.extend_from_slice(&self.ends);
        if let Numbers::Given(step) = numbers {
            table.extend_from_slice(&bytemuck::cast::<Factors, [u64; 4]>(Factors::new(step)));
        }
        let table = gpu.upload(&table)?;
        let tiles_at = table.ptr() + (size_of::<Record>() * count) as u64;
        let factors_at = match numbers {
            Numbers::Given(_) => tiles_at + 8 * (count as u64 + 1),
            Numbers::At(address) => address,
        };
        let (amaxes, late) = match &scales {
            Some(_) => (gpu.filled_f32(crate::REST, count)?, gpu.alloc(DType::F32, count)?),
            None => (gpu.alloc(DType::F32, 0)?, gpu.alloc(DType::F32, 0)?),
        };
        // One block at least: without any element a skipped step is counted, too.
        let grid = Grid { blocks: gpu.blocks(tiles, 1, PER_SM).max(1), threads: THREADS, shared: 0 };
        Ok(Some(Update {
            update,
            scales,
            codes,
            count,
            table,
            tiles_at,
            factors_at,
            check,
            amaxes,
            late,
            grid,
        }))
    }
}

impl Update {
    fn run(&self, gpu: &Gpu) -> Result<()> {
        let Self { count, ref table, tiles_at, factors_at, check, ref amaxes, ref late, grid, .. } = *self;
        let Check { norm, skipped } = check;
        let each = Grid { blocks: (count as u32).div_ceil(THREADS), threads: THREADS, shared: 0 };
        let launched = || -> Result<()> {
            let tensors = count as i32;
            let (records, first_tiles) = (In::record(table), In::u64(tiles_at));
            let args = kernels::AdamwUpdate {
                records,
                first_tiles,
                tensors,
                factors: In::f32(factors_at),
                amaxes: Out::i32(amaxes),
                norm: In::f32(norm),
                skipped: Out::u64(skipped),
            };
            // SAFETY: the table holds `count` records, `count + 1` numbers of tiles and eight factors; its
            // addresses are of tensors of the record's extents, alike by ops::adamw_many's checks, each held by the caller,
            // and of codes made for them; `amaxes` has `count` f32 wherever a record names a slot. The norm is null or one
            // f32, the count of skipped steps null or one u64, both held by the caller.
            unsafe { self.update.launch(gpu, grid, &args) }?;
            if let Some(scales) = &self.scales {
                let (amaxes, late) = (In::i32(amaxes), Out::f32(late));
                let args = kernels::AdamwScales { records, tensors, amaxes, late };
                // SAFETY: both workspaces have `count` f32, and cells named by records are alive: the slots that lent them
                // are.
                unsafe { scales.launch(gpu, each, &args) }?;
            }
            if let Some(codes) = &self.codes {
                let args = kernels::AdamwCodes { records, first_tiles, tensors, late: In::f32(late) };
                // SAFETY: the same table; `late` has `count` f32, all written by the launch before.
                unsafe { codes.launch(gpu, grid, &args) }?;
            }
            Ok(())
        };
        launched().inspect_err(|error| distrust(gpu, error))
    }
}

/// Memory for the codes of `param`, and the addresses of codes, transposed codes and scale_inv.
fn codes(gpu: &Gpu, param: &Tensor, slot: &Slot<'_>) -> Result<(Fp8Tensor, [u64; 3])> {
    let (device, shape) = (param.device(), *param.shape());
    let tensor = |buffer: Buffer, shape: Shape| Tensor::from_cuda(buffer, shape, device);
    let codes = gpu.alloc(DType::U8, shape.numel())?;
    let with_cast = slot.columnwise && device.transpose_policy() == TransposePolicy::WithCast;
    let transposed = with_cast.then(|| gpu.alloc(DType::U8, shape.numel())).transpose()?;
    let scale_inv = gpu.alloc(DType::F32, 1)?;
    let pointers = [codes.ptr(), transposed.as_ref().map_or(0, Buffer::ptr), scale_inv.ptr()];
    let [rows, cols] = shape.matrix();
    let transposed = transposed.map(|codes| tensor(codes, Shape::from([cols, rows])));
    let scale_inv = tensor(scale_inv, Shape::from([]));
    Ok((Fp8Tensor::from_parts(shape, tensor(codes, shape), transposed, slot.encoding, scale_inv), pointers))
}

fn bits(value: f32) -> u64 {
    value.to_bits().into()
}
