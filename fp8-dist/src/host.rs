//! Copies, concatenation and reduction of tensors on the host.

use crate::{ReduceOp, Result};
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16, f16};
use std::ops::Range;

/// Copies the elements of `x` to host memory.
pub(crate) fn copy(x: &Tensor) -> Result<Tensor> {
    concatenate(&[x], *x.shape(), &Device::cpu())
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

/// Stores elements `range` of the reduction over `parts`, which have the same shape, in `out`. Reduces in the order of the parts.
pub(crate) fn reduce(out: &mut [f32], parts: &[&Tensor], range: Range<usize>, op: ReduceOp) -> Result<()> {
    for (index, part) in parts.iter().enumerate() {
        // Checked when the ranks compared their shapes.
        let part = part.as_slice::<f32>()?.get(range.clone()).unwrap_or_default();
        let pairs = out.iter_mut().zip(part);
        match op {
            // Not 0 + …, which would lose the sign of −0.
            _ if index == 0 => pairs.for_each(|(out, &value)| *out = value),
            ReduceOp::Sum => pairs.for_each(|(out, &value)| *out += value),
            ReduceOp::Max => pairs.for_each(|(out, &value)| *out = max(*out, value)),
        }
    }
    Ok(())
}

/// Returns the reduction over f32 `parts` of one shape.
pub(crate) fn reduce_all(parts: &[&Tensor], shape: Shape, op: ReduceOp) -> Result<Tensor> {
    let mut out = vec![0.0; shape.numel()];
    let range = 0..out.len();
    reduce(&mut out, parts, range, op)?;
    Ok(Tensor::from_vec(out, shape, &Device::cpu())?)
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
