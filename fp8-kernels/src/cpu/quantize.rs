//! Reference of `quantize`, and the last step of every operation that ends in a slot.

use super::{Buffer, parallel, transpose};
use crate::dtype::Float;
use crate::{
    Counters, DType, Device, Encoding, Fp8Tensor, Operand, Result, Shape, Slot, Tensor, TransposePolicy,
};
use fp8_format::{E4M3, E5M2, slice};
use half::{bf16, f16};
use rayon::prelude::*;

pub(crate) fn quantize(x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    match x.buffer() {
        Buffer::F32(data) => quantize_elements(x, data, slot),
        Buffer::BF16(data) => quantize_elements::<bf16>(x, data, slot),
        Buffer::F16(data) => quantize_elements::<f16>(x, data, slot),
        _ => x.expect_float("quantize", "x").map(|()| Operand::High(x.clone())),
    }
}

fn quantize_elements<T: Float>(x: &Tensor, data: &[T], slot: &Slot<'_>) -> Result<Operand> {
    let Some(scale) = slot.resolve(|| amax(data))? else {
        if slot.amax.is_some() && !data.is_empty() {
            slot.record(amax(data));
        }
        return Ok(Operand::High(x.clone()));
    };
    let mut codes = vec![0; data.len()];
    let amaxes = codes
        .par_chunks_mut(parallel::CHUNK)
        .zip(data.par_chunks(parallel::CHUNK))
        .map(|(codes, data)| encode(data, scale, slot, codes));
    record(slot, amaxes.collect::<Result<Vec<_>>>()?);
    finish(codes, *x.shape(), x.device(), slot, scale)
}

/// What an operation that computes its values row by row hands to its slot.
pub(crate) struct Rows<'a, F: Fn(usize, &mut [f32]) + Sync> {
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
    dbias: bool,
) -> Result<(Operand, Option<Tensor>)> {
    let [count, cols] = rows.shape.matrix();
    let mut whole = None;
    let compute = || {
        let mut values = vec![0.0; count * cols];
        parallel::rows(&mut values, cols, |first, out| (rows.produce)(first, out));
        values
    };
    let scale = slot.resolve(|| amax(whole.insert(compute())))?;
    let sums = |values: &[f32]| {
        let mut sums = vec![0.0; if dbias { cols } else { 0 }];
        if dbias && cols > 0 {
            for row in values.chunks_exact(cols) {
                sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
            }
        }
        sums
    };
    let step = parallel::rows_per_chunk(cols) * cols.max(1);
    let (operand, parts) = if let Some(scale) = scale {
        let mut codes = vec![0; count * cols];
        let chunk = |(index, codes): (usize, &mut [u8])| {
            let mut scratch = Vec::new();
            let values = match &whole {
                Some(values) => &values[index * step..index * step + codes.len()],
                None => {
                    scratch.resize(codes.len(), 0.0);
                    super::dispatch::vectorized(|| (rows.produce)(index * step / cols.max(1), &mut scratch));
                    &scratch
                }
            };
            let partial = super::dispatch::vectorized(|| sums(values));
            encode(values, scale, slot, codes).map(|amax| (amax, partial))
        };
        let done = codes.par_chunks_mut(step).enumerate().map(chunk).collect::<Result<Vec<_>>>()?;
        let (amaxes, parts): (Vec<f32>, Vec<Vec<f32>>) = done.into_iter().unzip();
        record(slot, amaxes);
        (finish(codes, rows.shape, rows.device, slot, scale)?, parts)
    } else {
        let values = whole.take().unwrap_or_else(compute);
        if slot.amax.is_some() && !values.is_empty() {
            slot.record(amax(&values));
        }
        let parts = values.par_chunks(step).map(|values| super::dispatch::vectorized(|| sums(values)));
        let parts = parts.collect();
        let buffer = Buffer::from_f32(values, rows.dtype, "quantize")?;
        (Operand::High(Tensor::from_buffer(buffer, rows.shape, rows.device)), parts)
    };
    let dbias =
        dbias.then(|| Tensor::on_cpu(parallel::sum_in_order(parts, cols), Shape::from([cols]), rows.device));
    Ok((operand, dbias))
}

/// `max |x|`, NaN skipped; 0 for no elements.
pub(crate) fn amax<T: Float>(data: &[T]) -> f32 {
    let chunks = data.par_chunks(parallel::CHUNK);
    chunks.map(|chunk| super::dispatch::vectorized(|| slice::amax(chunk))).reduce(|| 0.0, f32::max)
}

pub(crate) fn dequantize(x: &Fp8Tensor, dtype: DType) -> Result<Tensor> {
    let codes = x.codes()?;
    let factor = x.scale_inv().item()?;
    let mut values = vec![0.0; codes.len()];
    let encoding = x.encoding();
    values.par_chunks_mut(parallel::CHUNK).zip(codes.par_chunks(parallel::CHUNK)).try_for_each(
        |(values, codes)| match encoding {
            Encoding::E4M3 => slice::dequantize::<E4M3, _>(bytemuck::cast_slice(codes), factor, values),
            Encoding::E5M2 => slice::dequantize::<E5M2, _>(bytemuck::cast_slice(codes), factor, values),
        },
    )?;
    let buffer = Buffer::from_f32(values, dtype, "dequantize")?;
    Ok(Tensor::from_buffer(buffer, *x.shape(), x.device()))
}

/// The values of codes, without their factor.
pub(crate) fn decode(codes: &[u8], encoding: Encoding) -> Result<Vec<f32>> {
    let mut values = vec![0.0; codes.len()];
    values.par_chunks_mut(parallel::CHUNK).zip(codes.par_chunks(parallel::CHUNK)).try_for_each(
        |(values, codes)| match encoding {
            Encoding::E4M3 => slice::to_f32::<E4M3>(bytemuck::cast_slice(codes), values),
            Encoding::E5M2 => slice::to_f32::<E5M2>(bytemuck::cast_slice(codes), values),
        },
    )?;
    Ok(values)
}

/// Codes of one chunk; returns its amax and adds to the slot's counters.
fn encode<T: Float>(data: &[T], scale: f32, slot: &Slot<'_>, codes: &mut [u8]) -> Result<f32> {
    let amax = super::dispatch::vectorized(|| match slot.encoding {
        Encoding::E4M3 => slice::quantize::<E4M3, T>(data, scale, bytemuck::cast_slice_mut(codes)),
        Encoding::E5M2 => slice::quantize::<E5M2, T>(data, scale, bytemuck::cast_slice_mut(codes)),
    })?;
    if let Some(counters) = slot.counters {
        super::dispatch::vectorized(|| count(data, scale, slot.encoding.max(), codes, counters));
    }
    Ok(amax)
}

fn count<T: Float>(data: &[T], scale: f32, max: f32, codes: &[u8], counters: &Counters) {
    let (mut saturated, mut underflowed) = (0, 0);
    for (&x, &code) in data.iter().zip(codes) {
        let v = x.to_f32();
        saturated += u32::from(v.abs() < f32::INFINITY && (v * scale).abs() > max);
        underflowed += u32::from(v != 0.0 && code & 0x7F == 0);
    }
    counters.add(saturated.into(), underflowed.into(), data.len() as u64);
}

fn record(slot: &Slot<'_>, amaxes: Vec<f32>) {
    if let Some(amax) = amaxes.into_iter().reduce(f32::max) {
        slot.record(amax);
    }
}

fn finish(codes: Vec<u8>, shape: Shape, device: &Device, slot: &Slot<'_>, scale: f32) -> Result<Operand> {
    let with_cast = slot.columnwise && device.transpose_policy() == TransposePolicy::WithCast;
    let columnwise = with_cast.then(|| {
        let [rows, cols] = shape.matrix();
        Tensor::on_cpu(transpose::transpose_slice(&codes, rows, cols), Shape::from([cols, rows]), device)
    });
    let rowwise = Tensor::on_cpu(codes, shape, device);
    Ok(Operand::Fp8(Fp8Tensor::new(rowwise, columnwise, slot.encoding, scale)))
}
