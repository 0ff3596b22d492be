//! Quantization, one element after the other.

use fp8_kernels::Encoding;

pub(crate) struct Quantized {
    pub(crate) codes: Vec<u8>,
    pub(crate) amax: f32,
    pub(crate) saturated: u64,
    pub(crate) underflowed: u64,
    pub(crate) nan: u64,
}

pub(crate) fn quantize(values: &[f32], encoding: Encoding, scale: f32) -> Quantized {
    let mut out = Quantized { codes: Vec::new(), amax: 0.0, saturated: 0, underflowed: 0, nan: 0 };
    for &v in values {
        let code = encoding.from_f32_saturating(v * scale);
        if !v.is_nan() && v.abs() > out.amax {
            out.amax = v.abs();
        }
        // Where there is a choice, what is too large becomes an infinity, or NaN.
        if v.is_finite() && !(v * scale).is_nan() && !encoding.is_finite(encoding.from_f32(v * scale)) {
            out.saturated += 1;
        }
        if v.is_nan() {
            out.nan += 1;
        }
        if v != 0.0 && code & 0x7F == 0 {
            out.underflowed += 1;
        }
        out.codes.push(code);
    }
    out
}

/// `[rows, cols]` → `[cols, rows]`.
pub(crate) fn transpose<T: Copy>(values: &[T], rows: usize, cols: usize) -> Vec<T> {
    let mut out = Vec::new();
    for col in 0..cols {
        for row in 0..rows {
            out.push(values[row * cols + col]);
        }
    }
    out
}
