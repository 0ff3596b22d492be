//! Reference of `quantize`, and the last step of every operation that ends in a slot.

use super::quantize_blocks::{dequantize_blocks, quantize_blocks};
use super::{Buffer, accumulate, codec, nvfp4, parallel, reduce, transpose};
use crate::element::Float;
use crate::host::Array;
use crate::ops::GradientMut;
use crate::{DType, Device, Error, Fp8Tensor, Operand, Result, Shape, Slot, Tensor, TransposePolicy};
use half::{bf16, f16};
use std::sync::Arc;

pub(crate) fn quantize(x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    match x.cpu_buffer("quantize")? {
        Buffer::F32(data) => quantize_elements(x, data, slot),
        Buffer::BF16(data) => quantize_elements::<bf16>(x, data, slot),
        Buffer::F16(data) => quantize_elements::<f16>(x, data, slot),
        _ => x.expect_float("quantize", "x").map(|()| Operand::High(x.clone())),
    }
}

pub(crate) fn quantize_dbias(dy: &Tensor, slot: &Slot<'_>) -> Result<(Operand, Tensor)> {
    Ok((quantize(dy, slot)?, reduce::column_sums(dy)?))
}

pub(crate) fn quantize_dbias_into(
    dy: &Tensor,
    slot: &Slot<'_>,
    dbias: &mut GradientMut<'_>,
) -> Result<Operand> {
    let (operand, sums) = quantize_dbias(dy, slot)?;
    accumulate::fill(dbias, &sums)?;
    Ok(operand)
}

pub(crate) fn quantize_many(tensors: &[(&Tensor, Slot<'_>)]) -> Result<Vec<Operand>> {
    tensors.iter().map(|(x, slot)| quantize(x, slot)).collect()
}

fn quantize_elements<T: Float>(x: &Tensor, data: &[T], slot: &Slot<'_>) -> Result<Operand> {
    if let Some(rule) = slot.nvfp4() {
        return nvfp4::quantize("quantize", data, *x.shape(), x.device(), slot, rule);
    }
    if let Some(rule) = slot.block_rule() {
        return quantize_blocks("quantize", data, *x.shape(), x.device(), slot, &rule);
    }
    let Some(scale) = slot.resolve(|| Ok(amax(data)))? else {
        if slot.amax.is_some() && !data.is_empty() {
            slot.record(amax(data))?;
        }
        return Ok(Operand::High(x.clone()));
    };
    let mut codes = Array::for_overwrite("quantize", data.len())?;
    let chunks = codes.chunks_mut(parallel::CHUNK).zip(data.chunks(parallel::CHUNK));
    let amaxes = parallel::map(chunks, |(codes, data)| encode(data, scale, slot, codes));
    record(slot, amaxes.into_iter().collect::<Result<Vec<_>>>()?)?;
    finish(codes, *x.shape(), x.device(), slot, scale)
}

/// An operation that computes its values row by row, as `quantize_rows` takes it.
pub(crate) struct Rows<'a, F: Fn(usize, &mut [f32]) + Sync> {
    /// The operation.
    pub(crate) op: &'static str,
    /// The output's extents.
    pub(crate) shape: Shape,
    pub(crate) device: &'a Device,
    /// The type of the output where the slot is off.
    pub(crate) dtype: DType,
    /// Writes whole rows, from the first row's index on, in f32.
    pub(crate) produce: F,
}

/// Computes rows and quantizes them as `slot` says, never rounded in between; with their column sums if asked.
pub(crate) fn quantize_rows<F: Fn(usize, &mut [f32]) + Sync>(
    rows: &Rows<'_, F>,
    slot: &Slot<'_>,
    is_summed: bool,
) -> Result<(Operand, Option<Tensor>)> {
    let (op, len, cols) = (rows.op, rows.shape.numel(), rows.shape.last_dim());
    let compute = || -> Result<Array<f32>> {
        let mut values = Array::for_overwrite(op, len)?;
        parallel::rows(&mut values, cols, |first, out| (rows.produce)(first, out));
        Ok(values)
    };
    if let Some(rule) = slot.block_rule() {
        let values = compute()?;
        let operand = quantize_blocks(op, &values, rows.shape, rows.device, slot, &rule)?;
        let dbias = || -> Result<Tensor> {
            let step = parallel::rows_per_chunk(cols) * cols.max(1);
            let parts = parallel::map(values.chunks(step), |values| codec::column_sums(op, values, cols));
            Ok(Tensor::on_cpu(parallel::sum_in_order(op, parts, cols)?, Shape::from([cols]), rows.device))
        };
        return Ok((operand, is_summed.then(dbias).transpose()?));
    }
    let mut whole = None;
    let scale = slot.resolve(|| Ok(amax(whole.insert(compute()?))))?;
    let sums =
        |values: &[f32]| if is_summed { codec::column_sums(op, values, cols) } else { Array::zeroed(op, 0) };
    let step = parallel::rows_per_chunk(cols) * cols.max(1);
    let (operand, parts) = if let Some(scale) = scale {
        let mut codes = Array::for_overwrite(op, len)?;
        let chunk = |(index, codes): (usize, &mut [u8])| {
            let computed;
            let values = match &whole {
                Some(values) => &values[index * step..index * step + codes.len()],
                None => {
                    let mut values = Array::for_overwrite(op, codes.len())?;
                    (rows.produce)(index * step / cols.max(1), &mut values);
                    computed = values;
                    &computed[..]
                }
            };
            encode(values, scale, slot, codes).map(|amax| (amax, sums(values)))
        };
        let done = parallel::map(codes.chunks_mut(step).enumerate(), chunk);
        let done = done.into_iter().collect::<Result<Vec<_>>>()?;
        let (amaxes, parts): (Vec<f32>, Vec<Result<Array<f32>>>) = done.into_iter().unzip();
        record(slot, amaxes)?;
        (finish(codes, rows.shape, rows.device, slot, scale)?, parts)
    } else {
        let values = whole.map_or_else(compute, Ok)?;
        if slot.amax.is_some() && !values.is_empty() {
            slot.record(amax(&values))?;
        }
        let parts = parallel::map(values.chunks(step), sums);
        let buffer = Buffer::from_f32(values, rows.dtype, op)?;
        (Operand::High(Tensor::from_buffer(buffer, rows.shape, rows.device)), parts)
    };
    let dbias = || -> Result<Tensor> {
        Ok(Tensor::on_cpu(parallel::sum_in_order(op, parts, cols)?, Shape::from([cols]), rows.device))
    };
    Ok((operand, is_summed.then(dbias).transpose()?))
}

/// `max |x|`, NaN skipped; 0 for no elements.
pub(crate) fn amax<T: Float>(data: &[T]) -> f32 {
    parallel::map(data.chunks(parallel::CHUNK), codec::amax).into_iter().fold(0.0, f32::max)
}

pub(crate) fn dequantize(x: &Fp8Tensor, dtype: DType) -> Result<Tensor> {
    fn of<T: Float>(x: &Fp8Tensor) -> Result<Buffer> {
        if let Some(blocks) = x.blocks().filter(|blocks| blocks.is_fp4()) {
            return Ok(T::wrap(Arc::new(nvfp4::dequantize::<T>(x, blocks)?)));
        }
        if let Some(blocks) = x.blocks() {
            return Ok(T::wrap(Arc::new(dequantize_blocks::<T>(x, blocks)?)));
        }
        let codes = x.codes()?;
        let factor = x.scale_inv().item()?;
        let mut values = Array::<T>::for_overwrite("dequantize", codes.len())?;
        let chunks = values.chunks_mut(parallel::CHUNK).zip(codes.chunks(parallel::CHUNK));
        parallel::try_for_each(chunks, |(values, codes)| {
            codec::dequantize(codes, x.encoding(), factor, values)
        })?;
        Ok(T::wrap(Arc::new(values)))
    }
    let buffer = match dtype {
        DType::F32 => of::<f32>(x)?,
        DType::BF16 => of::<bf16>(x)?,
        DType::F16 => of::<f16>(x)?,
        found => {
            let expected = "f32, bf16 or f16";
            return Err(Error::DType { op: "dequantize", what: "the output", found, expected });
        }
    };
    Ok(Tensor::from_buffer(buffer, *x.shape(), x.device()))
}

/// Codes of one chunk; returns its amax and adds to the slot's counters.
fn encode<T: Float>(data: &[T], scale: f32, slot: &Slot<'_>, codes: &mut [u8]) -> Result<f32> {
    let amax = codec::encode(data, scale, slot.encoding, codes)?;
    if let Some(counters) = slot.counters {
        counters.add(codec::count(data, scale, amax, slot.encoding, codes))?;
    }
    Ok(amax)
}

fn record(slot: &Slot<'_>, amaxes: Vec<f32>) -> Result<()> {
    amaxes.into_iter().reduce(f32::max).map_or(Ok(()), |amax| slot.record(amax))
}

fn finish(codes: Array<u8>, shape: Shape, device: &Device, slot: &Slot<'_>, scale: f32) -> Result<Operand> {
    let with_cast = slot.columnwise && device.transpose_policy() == TransposePolicy::WithCast;
    let columnwise = if with_cast {
        let [rows, cols] = shape.matrix();
        let columns = transpose::transpose_codes(&codes, rows, cols)?;
        Some(Tensor::on_cpu(columns, Shape::from([cols, rows]), device))
    } else {
        None
    };
    let rowwise = Tensor::on_cpu(codes, shape, device);
    Ok(Operand::Fp8(Fp8Tensor::on_cpu(rowwise, columnwise, slot.encoding, scale)))
}
