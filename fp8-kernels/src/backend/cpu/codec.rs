//! The codec on one chunk: the run-time format chosen once, what it saturates and flushes counted.

use super::dispatch::{Kernel, vectorized};
use crate::dtype::Float;
use crate::host::Array;
use crate::{CounterValues, Counters, Encoding, Result};
use fp8_format::{E4M3, E5M2, slice};

/// Codes of `data · scale`; returns `max |data|`.
pub(crate) fn encode<T: Float>(data: &[T], scale: f32, encoding: Encoding, codes: &mut [u8]) -> Result<f32> {
    Ok(match encoding {
        Encoding::E4M3 => slice::quantize::<E4M3, T>(data, scale, bytemuck::cast_slice_mut(codes))?,
        Encoding::E5M2 => slice::quantize::<E5M2, T>(data, scale, bytemuck::cast_slice_mut(codes))?,
    })
}

/// The values of codes.
pub(crate) fn decode(codes: &[u8], encoding: Encoding, values: &mut [f32]) -> Result<()> {
    match encoding {
        Encoding::E4M3 => slice::to_f32::<E4M3>(bytemuck::cast_slice(codes), values)?,
        Encoding::E5M2 => slice::to_f32::<E5M2>(bytemuck::cast_slice(codes), values)?,
    }
    Ok(())
}

/// The values of codes, each multiplied by `factor` in f32 and rounded once.
pub(crate) fn dequantize<T: Float>(
    codes: &[u8],
    encoding: Encoding,
    factor: f32,
    values: &mut [T],
) -> Result<()> {
    match encoding {
        Encoding::E4M3 => slice::dequantize::<E4M3, T>(bytemuck::cast_slice(codes), factor, values)?,
        Encoding::E5M2 => slice::dequantize::<E5M2, T>(bytemuck::cast_slice(codes), factor, values)?,
    }
    Ok(())
}

/// `max |data|`, NaN skipped; 0 for no elements.
pub(crate) fn amax<T: Float>(data: &[T]) -> f32 {
    slice::amax(data)
}

/// Adds to `counters` what quantizing `data` into `codes` saturated and flushed to zero, and the NaNs in it.
pub(crate) fn count<T: Float>(
    data: &[T],
    scale: f32,
    encoding: Encoding,
    codes: &[u8],
    counters: &Counters,
) -> Result<()> {
    struct Count<'a, T> {
        data: &'a [T],
        scale: f32,
        limit: f32,
        codes: &'a [u8],
    }
    impl<T: Float> Kernel for Count<'_, T> {
        type Output = [u32; 3];

        #[inline(always)]
        fn run(self) -> [u32; 3] {
            let [mut saturated, mut underflowed, mut nan] = [0; 3];
            for (&x, &code) in self.data.iter().zip(self.codes) {
                let v = x.to_f32();
                saturated += u32::from((v.abs() < f32::INFINITY) & ((v * self.scale).abs() > self.limit));
                underflowed += u32::from((v != 0.0) & (code & 0x7F == 0));
                nan += u32::from(v.is_nan());
            }
            [saturated, underflowed, nan]
        }
    }
    let limit = encoding.saturation_limit();
    let [saturated, underflowed, nan] = vectorized(Count { data, scale, limit, codes });
    counters.add(CounterValues {
        saturated: saturated.into(),
        underflowed: underflowed.into(),
        elements: data.len() as u64,
        nan: nan.into(),
    })
}

/// Sums of the columns of whole rows, row after row.
pub(crate) fn column_sums(op: &'static str, rows: &[f32], cols: usize) -> Result<Array<f32>> {
    struct Sums<'a> {
        rows: &'a [f32],
        sums: &'a mut [f32],
    }
    impl Kernel for Sums<'_> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            for row in self.rows.chunks_exact(self.sums.len()) {
                self.sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
            }
        }
    }
    let mut sums = Array::zeroed(op, cols)?;
    if cols > 0 {
        vectorized(Sums { rows, sums: &mut sums });
    }
    Ok(sums)
}
