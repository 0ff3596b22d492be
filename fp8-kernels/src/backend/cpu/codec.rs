//! The codec on one chunk: the run-time format chosen once, what it saturates and flushes counted.

use super::dispatch::{Kernel, vectorized};
use crate::element::Float;
use crate::host::Array;
use crate::{CounterValues, Encoding, Error, Result};
use fp8_format::{E4M3, E5M2, slice};

/// Codes of `data · scale`; returns `max |data|`.
pub(crate) fn encode<T: Float>(data: &[T], scale: f32, encoding: Encoding, codes: &mut [u8]) -> Result<f32> {
    Ok(match encoding {
        Encoding::E4M3 => slice::quantize::<E4M3, T>(data, scale, bytemuck::cast_slice_mut(codes))?,
        Encoding::E5M2 => slice::quantize::<E5M2, T>(data, scale, bytemuck::cast_slice_mut(codes))?,
        Encoding::E2M1 => return Err(packed("encode")),
    })
}

/// The values of codes.
pub(crate) fn decode(codes: &[u8], encoding: Encoding, values: &mut [f32]) -> Result<()> {
    match encoding {
        Encoding::E4M3 => slice::to_f32::<E4M3>(bytemuck::cast_slice(codes), values)?,
        Encoding::E5M2 => slice::to_f32::<E5M2>(bytemuck::cast_slice(codes), values)?,
        Encoding::E2M1 => return Err(packed("decode")),
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
        Encoding::E2M1 => return Err(packed("dequantize")),
    }
    Ok(())
}

/// The error for codes of 4 bits where codes have a byte each. Slots and tensors refuse them before.
pub(super) fn packed(op: &'static str) -> Error {
    let remedy = "its codes have 4 bits and are quantized to NVFP4 alone".to_owned();
    Error::Option { op, option: "encoding", value: Encoding::E2M1.to_string(), remedy }
}

/// `max |data|`, NaN skipped; 0 for no elements.
pub(crate) fn amax<T: Float>(data: &[T]) -> f32 {
    slice::amax(data)
}

/// Returns what quantizing `data` into `codes` saturated and flushed to zero, and the NaNs in it. `amax` is that of `data`.
pub(crate) fn count<T: Float>(
    data: &[T],
    scale: f32,
    amax: f32,
    encoding: Encoding,
    codes: &[u8],
) -> CounterValues {
    CounterValues { saturated: saturated(data, scale, amax, encoding), ..count_codes(data, codes) }
}

/// Returns how many finite values of `data`, times `scale`, round beyond the largest code. `amax` is that of `data`.
///
/// Rounding is monotonic, so a product of `amax` within the limit means that there are none.
pub(crate) fn saturated<T: Float>(data: &[T], scale: f32, amax: f32, encoding: Encoding) -> u64 {
    struct Saturated<'a, T> {
        data: &'a [T],
        scale: f32,
        limit: f32,
    }
    impl<T: Float> Kernel for Saturated<'_, T> {
        type Output = u32;

        #[inline(always)]
        fn run(self) -> u32 {
            let is_saturated = |v: f32| (v.abs() < f32::INFINITY) & ((v * self.scale).abs() > self.limit);
            self.data.iter().map(|x| u32::from(is_saturated(x.to_f32()))).sum()
        }
    }
    let limit = encoding.saturation_limit();
    if amax * scale <= limit { 0 } else { vectorized(Saturated { data, scale, limit }).into() }
}

/// Counts the values of `data` that were flushed to zero in `codes`, and the NaNs. `saturated` is 0.
///
/// Only where there are codes of zero, `data` is read, to tell the zeros in it from values that were flushed; and only where
/// there are codes of NaN, to tell its NaNs from infinities whose product with a scale of 0 is NaN.
pub(crate) fn count_codes<T: Float>(data: &[T], codes: &[u8]) -> CounterValues {
    struct Codes<'a>(&'a [u8]);
    impl Kernel for Codes<'_> {
        type Output = [u32; 2];

        #[inline(always)]
        fn run(self) -> [u32; 2] {
            // Counters of a byte for groups that cannot overflow them: a vector then holds as many counters as codes.
            let [mut zeros, mut nan] = [0; 2];
            for group in self.0.chunks(255) {
                let count = |is: fn(u8) -> bool| group.iter().map(|&code| u8::from(is(code))).sum::<u8>();
                zeros += u32::from(count(|code| code & 0x7F == 0));
                nan += u32::from(count(|code| code == 0x7F));
            }
            [zeros, nan]
        }
    }
    struct Zeros<'a, T>(&'a [T]);
    impl<T: Float> Kernel for Zeros<'_, T> {
        type Output = u32;

        #[inline(always)]
        fn run(self) -> u32 {
            self.0.iter().map(|x| u32::from(x.to_f32() == 0.0)).sum()
        }
    }
    struct Nans<'a, T>(&'a [T]);
    impl<T: Float> Kernel for Nans<'_, T> {
        type Output = u32;

        #[inline(always)]
        fn run(self) -> u32 {
            self.0.iter().map(|x| u32::from(x.to_f32().is_nan())).sum()
        }
    }
    let [zeros, nan] = vectorized(Codes(codes));
    let underflowed = if zeros == 0 { 0 } else { zeros.saturating_sub(vectorized(Zeros(data))) };
    let nan = if nan == 0 { 0 } else { vectorized(Nans(data)) };
    CounterValues {
        saturated: 0,
        underflowed: underflowed.into(),
        elements: data.len() as u64,
        nan: nan.into(),
    }
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
