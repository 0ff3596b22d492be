//! The state of a loss scaler in a checkpoint, and the count of updates that goes with it.

use super::reader::Reader;
use super::writer::Writer;
use crate::Result;
use fp8_kernels::ops::LossScaleState;
use fp8_kernels::{DType, Device, Shape, Tensor};

/// The names of all tensors that this file writes.
pub(super) const NAMES: [&str; 4] = [SCALE, GROWTH_TRACKER, SKIPPED_STEPS, UPDATES];
const SCALE: &str = "loss_scaler.scale";
/// Counts are two i32 each: the low and the high half of 64 bits.
const GROWTH_TRACKER: &str = "loss_scaler.growth_tracker";
const SKIPPED_STEPS: &str = "loss_scaler.skipped_steps";
/// No parameter's name: those of the optimizer begin with `optimizer.`.
const UPDATES: &str = "optimizer_updates";

pub(super) fn write(updates: Option<u64>, state: Option<LossScaleState>, writer: &mut Writer) -> Result<()> {
    if let Some(updates) = updates {
        writer.tensor(UPDATES, &halves(updates)?)?;
    }
    let Some(LossScaleState { scale, growth_tracker, skipped_steps }) = state else { return Ok(()) };
    writer.floats(SCALE, &[1], &[scale]);
    writer.tensor(GROWTH_TRACKER, &halves(growth_tracker)?)?;
    writer.tensor(SKIPPED_STEPS, &halves(skipped_steps)?)
}

/// Returns the state of the scaler, if the file has one.
pub(super) fn read(reader: &Reader<'_>) -> Result<Option<LossScaleState>> {
    if !reader.has(SCALE, &Shape::from([1]), DType::F32)? {
        return Ok(None);
    }
    let scale = reader.floats(SCALE)?.1.first().copied().unwrap_or_default();
    if !(scale.is_finite() && scale >= f32::MIN_POSITIVE) {
        return Err(reader.problem(format!("`{SCALE}` is {scale}: expected finite and at least 2⁻¹²⁶")));
    }
    let (growth_tracker, skipped_steps) = (count(reader, GROWTH_TRACKER)?, count(reader, SKIPPED_STEPS)?);
    Ok(Some(LossScaleState { scale, growth_tracker, skipped_steps }))
}

/// Returns the number of updates, if the file has one.
pub(super) fn read_updates(reader: &Reader<'_>, steps: u64) -> Result<Option<u64>> {
    if !reader.has(UPDATES, &Shape::from([2]), DType::I32)? {
        return Ok(None);
    }
    let updates = count(reader, UPDATES)?;
    if updates > steps {
        return Err(reader.problem(format!("`{UPDATES}` is {updates}: expected at most {steps}, the steps")));
    }
    Ok(Some(updates))
}

fn halves(count: u64) -> Result<Tensor> {
    let halves = [count as u32 as i32, (count >> 32) as u32 as i32];
    Ok(Tensor::from_vec(halves.to_vec(), [2], &Device::cpu())?)
}

fn count(reader: &Reader<'_>, name: &str) -> Result<u64> {
    let tensor = reader.tensor(name, &Shape::from([2]), DType::I32, &Device::cpu())?;
    let halves = tensor.to_vec::<i32>()?;
    Ok(halves.iter().rev().fold(0, |count, &half| count << 32 | u64::from(half as u32)))
}
