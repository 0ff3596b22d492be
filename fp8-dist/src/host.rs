//! Copies, concatenation and reduction of tensors on the host.

use crate::{ReduceOp, Result};
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16, f16};
use std::ops::Range;

/// Copies the elements of `x` to host memory.
pub(crate) fn copy(x: &Tensor) -> Result<Tensor> {
    concatenate(&[x], *x.shape(), &Device::cpu())
}

/// Copies elements `range` of `x`, in row-major order, to a tensor of `shape` on `device`.
pub(crate) fn cut(x: &Tensor, range: Range<usize>, shape: Shape, device: &Device) -> Result<Tensor> {
    fn part<T: Element>(x: &Tensor, range: Range<usize>, shape: Shape, device: &Device) -> Result<Tensor> {
        let data = x.as_slice::<T>()?.get(range).unwrap_or_default().to_vec();
        Ok(Tensor::from_vec(data, shape, device)?)
    }
    match x.dtype() {
        DType::F32 => part::<f32>(x, range, shape, device),
        DType::BF16 => part::<bf16>(x, range, shape, device),
        DType::F16 => part::<f16>(x, range, shape, device),
        DType::I32 => part::<i32>(x, range, shape, device),
        DType::U8 => part::<u8>(x, range, shape, device),
    }
}

/// Returns `x`, which is in host memory, on `device`.
pub(crate) fn placed(x: Tensor, device: &Device) -> Result<Tensor> {
    if *device == Device::cpu() { Ok(x) } else { Ok(x.to_device(device)?) }
}

/// A tensor of zeros in host memory.
pub(crate) fn zeros(dtype: DType, shape: Shape) -> Result<Tensor> {
    Ok(Tensor::zeros(shape, dtype, &Device::cpu())?)
}

/// Stores `result` in `x`, which has its shape and dtype and shares its storage with nothing. `name` is that of `x` in errors.
pub(crate) fn store(result: &Tensor, x: &mut Tensor, name: &str) -> Result<()> {
    fn values<T: Element>(result: &Tensor, x: &mut Tensor, name: &str) -> Result<()> {
        Ok(x.write(result.as_slice::<T>()?, name)?)
    }
    match x.dtype() {
        DType::F32 => values::<f32>(result, x, name),
        DType::BF16 => values::<bf16>(result, x, name),
        DType::F16 => values::<f16>(result, x, name),
        DType::I32 => values::<i32>(result, x, name),
        DType::U8 => values::<u8>(result, x, name),
    }
}

/// Returns the bytes of the elements of `x`, which is in host memory and shared with nothing.
pub(crate) fn bytes_mut(x: &mut Tensor) -> Result<&mut [u8]> {
    const NAME: &str = "a tensor of the host";
    Ok(match x.dtype() {
        DType::F32 => bytemuck::cast_slice_mut(x.as_mut_slice::<f32>(NAME)?),
        DType::BF16 => bytemuck::cast_slice_mut(x.as_mut_slice::<bf16>(NAME)?),
        DType::F16 => bytemuck::cast_slice_mut(x.as_mut_slice::<f16>(NAME)?),
        DType::I32 => bytemuck::cast_slice_mut(x.as_mut_slice::<i32>(NAME)?),
        DType::U8 => x.as_mut_slice::<u8>(NAME)?,
    })
}

/// Returns the bytes of the elements of `x`, which is in host memory.
pub(crate) fn bytes(x: &Tensor) -> Result<&[u8]> {
    Ok(match x.dtype() {
        DType::F32 => bytemuck::cast_slice(x.as_slice::<f32>()?),
        DType::BF16 => bytemuck::cast_slice(x.as_slice::<bf16>()?),
        DType::F16 => bytemuck::cast_slice(x.as_slice::<f16>()?),
        DType::I32 => bytemuck::cast_slice(x.as_slice::<i32>()?),
        DType::U8 => x.as_slice::<u8>()?,
    })
}

/// Copies the bytes of the elements of `x`, which is in host memory, to `room`, which has their size.
pub(crate) fn store_bytes(x: &Tensor, room: &mut [u8]) -> Result<()> {
    let bytes = bytes(x)?;
    let len = room.len().min(bytes.len());
    room[..len].copy_from_slice(&bytes[..len]);
    Ok(())
}

/// Concatenates the elements of `parts`, which have the same dtype and together fill `shape`.
pub(crate) fn concatenate(parts: &[&Tensor], shape: Shape, device: &Device) -> Result<Tensor> {
    match parts.first().map_or(DType::F32, |part| part.dtype()) {
        DType::F32 => join::<f32>(parts, shape, device),
        DType::BF16 => join::<bf16>(parts, shape, device),
        DType::F16 => join::<f16>(parts, shape, device),
        DType::I32 => join::<i32>(parts, shape, device),
        DType::U8 => join::<u8>(parts, shape, device),
    }
}

fn join<T: Element>(parts: &[&Tensor], shape: Shape, device: &Device) -> Result<Tensor> {
    let mut data = match parts {
        [first, ..] => first.to_vec::<T>()?,
        [] => Vec::new(),
    };
    for part in parts.iter().skip(1) {
        data.extend_from_slice(part.as_slice::<T>()?);
    }
    Ok(Tensor::from_vec(data, shape, device)?)
}

/// A rank's elements in f32 while they are combined: a piece that stays in the cache.
const PIECE: usize = 1 << 12;

/// Returns the reduction over `parts`, which have one shape and dtype, in the order of the parts. `None` if the dtype does not have
/// the operation, or a sum does not fit.
pub(crate) fn reduce(parts: &[&Tensor], op: ReduceOp) -> Result<Option<Tensor>> {
    let Some(first) = parts.first().filter(|first| is_reducible(first.dtype(), op)) else { return Ok(None) };
    let shape = *first.shape();
    match first.dtype() {
        DType::F32 => floats::<f32>(parts, shape, op).map(Some),
        DType::BF16 => floats::<bf16>(parts, shape, op).map(Some),
        DType::F16 => floats::<f16>(parts, shape, op).map(Some),
        DType::I32 | DType::U8 => integers(parts, shape, op),
    }
}

/// Whether a dtype has an operation.
pub(crate) const fn is_reducible(dtype: DType, op: ReduceOp) -> bool {
    match (dtype, op) {
        (DType::F32 | DType::BF16 | DType::F16, _) | (DType::I32, ReduceOp::Sum | ReduceOp::Max) => true,
        (DType::I32, ReduceOp::Avg) | (DType::U8, _) => false,
    }
}

/// An element of reductions in f32.
pub(crate) trait Reducible: Element {
    /// Combines `parts`, which have the length of `out`, in their order.
    fn combine(parts: &[&[Self]], op: ReduceOp, out: &mut [Self]);
}

impl Reducible for f32 {
    fn combine(parts: &[&[Self]], op: ReduceOp, out: &mut [Self]) {
        combine_floats(parts, op, out, |x| x, |x| x);
    }
}

impl Reducible for bf16 {
    fn combine(parts: &[&[Self]], op: ReduceOp, out: &mut [Self]) {
        combine_floats(parts, op, out, Self::to_f32, Self::from_f32);
    }
}

impl Reducible for f16 {
    fn combine(parts: &[&[Self]], op: ReduceOp, out: &mut [Self]) {
        combine_floats(parts, op, out, Self::to_f32, Self::from_f32);
    }
}

fn floats<T: Reducible>(parts: &[&Tensor], shape: Shape, op: ReduceOp) -> Result<Tensor> {
    let slices = parts.iter().map(|part| part.as_slice::<T>()).collect::<fp8_kernels::Result<Vec<_>>>()?;
    let mut out = vec![T::default(); shape.numel()];
    T::combine(&slices, op, &mut out);
    Ok(Tensor::from_vec(out, shape, &Device::cpu())?)
}

fn combine_floats<T: Element>(
    parts: &[&[T]],
    op: ReduceOp,
    out: &mut [T],
    widen: impl Fn(T) -> f32,
    round: impl Fn(f32) -> T,
) {
    let (ranks, mut piece) = (parts.len() as f32, [0.0; PIECE]);
    for (start, out) in (0..).step_by(PIECE).zip(out.chunks_mut(PIECE)) {
        let piece = &mut piece[..out.len()];
        for (index, part) in parts.iter().enumerate() {
            // The shapes were checked when the ranks compared them.
            let values = part.get(start..).unwrap_or_default().iter().map(|&value| widen(value));
            let pairs = piece.iter_mut().zip(values);
            match op {
                // Not 0 + …, which would lose the sign of −0.
                _ if index == 0 => pairs.for_each(|(sum, value)| *sum = value),
                ReduceOp::Sum | ReduceOp::Avg => pairs.for_each(|(sum, value)| *sum += value),
                ReduceOp::Max => pairs.for_each(|(largest, value)| *largest = max(*largest, value)),
            }
        }
        if op == ReduceOp::Avg {
            piece.iter_mut().for_each(|sum| *sum /= ranks);
        }
        out.iter_mut().zip(&*piece).for_each(|(out, &value)| *out = round(value));
    }
}

fn integers(parts: &[&Tensor], shape: Shape, op: ReduceOp) -> Result<Option<Tensor>> {
    let slices = parts.iter().map(|part| part.as_slice::<i32>()).collect::<fp8_kernels::Result<Vec<_>>>()?;
    let combined = (0..shape.numel()).map(|index| {
        let values = slices.iter().filter_map(|slice| slice.get(index)).copied();
        match op {
            ReduceOp::Max => values.max(),
            _ => i32::try_from(values.map(i64::from).sum::<i64>()).ok(),
        }
    });
    let Some(combined) = combined.collect::<Option<Vec<i32>>>() else { return Ok(None) };
    Ok(Some(Tensor::from_vec(combined, shape, &Device::cpu())?))
}

/// Returns the maximum as a staging cell computes it: of values ≥ 0 and −1 ("did not run"), the one with the larger bits.
fn max(a: f32, b: f32) -> f32 {
    let nan_largest = |value: f32| if value.is_nan() { value.abs() } else { value };
    let (a, b) = (nan_largest(a), nan_largest(b));
    if a.total_cmp(&b).is_lt() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_kernels::{Cell, REST};

    #[test]
    fn max_is_what_a_staging_cell_keeps() {
        let nan = f32::from_bits(0x7FC0_0001);
        let values = [REST, 0.0, f32::MIN_POSITIVE / 2.0, 1.0, f32::MAX, f32::INFINITY, f32::NAN, nan];
        for a in values {
            for b in values {
                let cell = Cell::new(a, &Device::cpu()).unwrap();
                cell.merge_max(b).unwrap();
                assert_eq!(max(a, b).to_bits(), cell.read().unwrap().to_bits(), "{a} and {b}");
            }
        }
    }

    #[test]
    fn max_orders_all_numbers() {
        for (a, b, larger) in [(-2.0, -1.0, -1.0), (-0.0, 0.0, 0.0), (f32::NEG_INFINITY, -3.0, -3.0)] {
            assert_eq!([max(a, b).to_bits(), max(b, a).to_bits()], [f32::to_bits(larger); 2], "{a} and {b}");
        }
        assert!(max(-f32::NAN, 1.0).is_nan() && max(1.0, -f32::NAN).is_nan());
    }
}
