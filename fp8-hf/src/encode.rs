//! The arithmetic of quantized files, which is that of the peers byte for byte.
//!
//! In f32, for all elements x that share a scale: scale = amax / 448, code = E4M3(clamp(x / scale + 0, −448, 448)). Both
//! divisions are rounded once. `x · (1 / scale)` or `x · (448 / amax)` give other codes for one element in ten thousand.

use fp8_format::slice::{Codec, Nvfp4Options, Nvfp4Output};
use fp8_format::{E4M3, Source, TensorScale};
use half::{bf16, f16};
use safetensors::Dtype;

/// The largest value of E4M3.
const MAX: f32 = 448.0;
/// Elements that are converted at a time; a multiple of the side of a block.
const PIECE: usize = 4096;

/// The choices in which the writers of the formats differ.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Whether −0 becomes 0x00: compressed-tensors adds a zero point of 0.
    pub(super) adds_zero: bool,
    /// The scale where all elements are zero.
    pub(super) scale_of_zeros: f32,
}

impl Rule {
    /// The rule of compressed-tensors.
    pub(super) const COMPRESSED_TENSORS: Self = Self { adds_zero: true, scale_of_zeros: f32::EPSILON };
    /// The rule of transformers and DeepSeek.
    pub(super) const FP8: Self = Self { adds_zero: false, scale_of_zeros: 1.0 };

    /// Returns the scale for elements of this largest magnitude.
    pub(super) fn divisor(self, amax: f32) -> Divisor {
        let scale = amax / MAX;
        // Below 448 · 2⁻¹⁵⁰, the scale is rounded to zero, too.
        let scale = if scale == 0.0 { self.scale_of_zeros } else { scale };
        // Adding −0 changes nothing. Where all elements are zero, the codes are 0x00 by both rules.
        Divisor { scale, zero: if self.adds_zero || amax == 0.0 { 0.0 } else { -0.0 } }
    }
}

/// The scale of some elements, and the zero that is added to the quotients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Divisor {
    pub(super) scale: f32,
    zero: f32,
}

/// Converts rows of a matrix, with a buffer of its own.
pub(super) struct Encoder {
    codec: Codec,
    wide: Vec<f32>,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Self { codec: Codec::new(), wide: vec![0.0; PIECE] }
    }

    /// Converts a row, or several with one divisor. Each `width` elements have a divisor of their own.
    pub(super) fn row(
        &mut self,
        bytes: &[u8],
        dtype: Dtype,
        divisors: &[Divisor],
        width: usize,
        codes: &mut [u8],
    ) {
        let size = dtype.bitsize() / 8;
        let pieces = bytes.chunks(PIECE * size).zip(codes.chunks_mut(PIECE));
        for (piece, (bytes, codes)) in pieces.enumerate() {
            let wide = &mut self.wide[..codes.len()];
            if divisors.len() == 1 {
                divide(bytes, dtype, divisors[0], wide);
            } else {
                let first = piece * PIECE / width;
                let segments = bytes.chunks(width * size).zip(wide.chunks_mut(width));
                for ((bytes, wide), divisor) in segments.zip(divisors.iter().skip(first)) {
                    divide(bytes, dtype, *divisor, wide);
                }
            }
            // The lengths are equal, which is all that this checks.
            let _ = self.codec.from_f32_saturating::<E4M3>(wide, bytemuck::cast_slice_mut(codes));
        }
    }
}

/// Rows in NVFP4: packed codes, the bytes of the scales of blocks, and the factors of the whole.
pub(super) struct Fp4Rows<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: Vec<u8>,
    pub(super) tensor: TensorScale,
}

/// Converts rows of `cols` elements to NVFP4, blocks of 16 in each row. `amax` is that of the whole.
pub(super) fn nvfp4_rows<'a>(
    bytes: &[u8],
    dtype: Dtype,
    cols: usize,
    amax: f32,
    codes: &'a mut Vec<u8>,
) -> fp8_format::Result<Fp4Rows<'a>> {
    fn convert<const N: usize, T: Source>(
        bytes: &[u8],
        cols: usize,
        amax: f32,
        codes: &mut Vec<u8>,
        value: impl Fn([u8; N]) -> T,
    ) -> fp8_format::Result<(Vec<E4M3>, TensorScale)> {
        let values: Vec<T> = bytes.as_chunks::<N>().0.iter().map(|&element| value(element)).collect();
        let rows = values.len() / cols.max(1);
        codes.clear();
        codes.resize(rows * cols.div_ceil(2), 0);
        let mut scales = vec![E4M3::ZERO; rows * cols.div_ceil(16)];
        let out = Nvfp4Output::new(codes, &mut scales);
        let options = Nvfp4Options::default();
        let tensor = Codec::new().quantize_nvfp4(&values, rows, cols, amax, &options, out)?;
        Ok((scales, tensor))
    }
    let (scales, tensor) = match dtype {
        Dtype::F32 => convert(bytes, cols, amax, codes, f32::from_le_bytes)?,
        Dtype::BF16 => convert(bytes, cols, amax, codes, bf16::from_le_bytes)?,
        _ => convert(bytes, cols, amax, codes, f16::from_le_bytes)?,
    };
    Ok(Fp4Rows { codes, scales: scales.into_iter().map(E4M3::to_bits).collect(), tensor })
}

fn divide(bytes: &[u8], dtype: Dtype, divisor: Divisor, quotients: &mut [f32]) {
    fn each<const N: usize>(
        bytes: &[u8],
        by: Divisor,
        quotients: &mut [f32],
        value: impl Fn([u8; N]) -> f32,
    ) {
        for (quotient, &element) in quotients.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *quotient = value(element) / by.scale + by.zero;
        }
    }
    match dtype {
        Dtype::F32 => each(bytes, divisor, quotients, f32::from_le_bytes),
        Dtype::BF16 => each(bytes, divisor, quotients, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => each(bytes, divisor, quotients, |bytes| f16::from_le_bytes(bytes).to_f32()),
    }
}

/// Returns true for the dtypes that [`Encoder`] converts.
pub(super) fn is_source(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Returns the largest magnitude, or the place of the first element that is infinite or NaN.
pub(super) fn amax(bytes: &[u8], dtype: Dtype) -> Result<f32, usize> {
    // As integers, the magnitudes of floating-point numbers are ordered as the numbers are; infinity and NaN are the largest.
    fn largest<const N: usize, T: Ord + Default>(bytes: &[u8], bits: impl Fn([u8; N]) -> T) -> T {
        bytes.as_chunks::<N>().0.iter().fold(T::default(), |most, &element| most.max(bits(element)))
    }
    let half_bits = |bytes| (u16::from_le_bytes(bytes) & 0x7FFF).cast_signed();
    let most = match dtype {
        Dtype::F32 => {
            let bits = largest(bytes, |bytes| (u32::from_le_bytes(bytes) & 0x7FFF_FFFF).cast_signed());
            f32::from_bits(bits.cast_unsigned())
        }
        Dtype::BF16 => bf16::from_bits(largest(bytes, half_bits).cast_unsigned()).to_f32(),
        _ => f16::from_bits(largest(bytes, half_bits).cast_unsigned()).to_f32(),
    };
    if most.is_finite() {
        return Ok(most);
    }
    let size = dtype.bitsize() / 8;
    let is_finite = |element: &[u8]| amax(element, dtype).is_ok();
    // With one element, this is its own place.
    Err(if bytes.len() <= size {
        0
    } else {
        bytes.chunks(size).position(|element| !is_finite(element)).unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn elements_that_are_not_finite_are_found() {
        let mut values = vec![1.0; 300];
        assert_eq!(amax(&bytes(&values), Dtype::F32), Ok(1.0));
        values[217] = f32::NAN;
        values[250] = f32::INFINITY;
        assert_eq!(amax(&bytes(&values), Dtype::F32), Err(217));
        let halves: Vec<u8> = [1.0, -3.5, f32::NEG_INFINITY]
            .iter()
            .flat_map(|&value| f16::from_f32(value).to_le_bytes())
            .collect();
        assert_eq!(amax(&halves[..4], Dtype::F16), Ok(3.5));
        assert_eq!(amax(&halves, Dtype::F16), Err(2));
        assert_eq!(amax(&[], Dtype::BF16), Ok(0.0));
    }

    #[test]
    fn zeros_and_the_smallest_numbers_have_a_scale() {
        let (peer, deepseek) = (Rule::COMPRESSED_TENSORS, Rule::FP8);
        assert_eq!(peer.divisor(0.0).scale, 2f32.powi(-23));
        assert_eq!(deepseek.divisor(0.0).scale, 1.0);
        assert_eq!(deepseek.divisor(1e-45).scale, 1.0);
        assert_eq!(peer.divisor(448.0).scale, 1.0);
        let mut codes = [9; 3];
        let values = bytes(&[-0.0, 0.0, -1e-45]);
        for (rule, amax, expected) in [
            (peer, 0.0, [0x00, 0x00]),
            (deepseek, 0.0, [0x00, 0x00]),
            (peer, 448.0, [0x00, 0x00]),
            (deepseek, 448.0, [0x80, 0x00]),
        ] {
            Encoder::new().row(&values, Dtype::F32, &[rule.divisor(amax)], usize::MAX, &mut codes);
            assert_eq!(codes[..2], expected, "{rule:?} {amax}");
            // A negative number that is rounded to zero keeps its sign.
            assert_eq!(codes[2], 0x80, "{rule:?} {amax}");
        }
    }
}
