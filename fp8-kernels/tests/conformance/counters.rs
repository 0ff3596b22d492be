//! Values at the borders of each count of saturated, underflowed and NaN values, and what should be counted. Each operation
//! that counts has cases of its own: `quantize_counters.rs`, `activation_counters.rs`, `norm_counters.rs`, `adamw_counters.rs`.

use super::data::tensor;
use crate::oracle::fp8;
use fp8_kernels::{CounterValues, DType, Device, Encoding, Result, Tensor};

/// Vectors and tiles, whole and cut.
pub(super) const SHAPES: [[usize; 2]; 7] =
    [[1, 1], [5, 13], [3, 32], [128, 64], [130, 72], [129, 66], [2, 8200]];

/// Values on both sides of every border, each with both signs. `ulp` is the f32's.
fn borders() -> Vec<f32> {
    let positive = [
        448.0,
        448.0f32.next_up(),
        464.0f32.next_down(),
        464.0,
        464.0f32.next_up(),
        57344.0,
        61440.0f32.next_down(),
        61440.0,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        0.0,
        1.0,
        f32::powi(2.0, -10),
        f32::powi(2.0, -10).next_up(),
        f32::powi(2.0, -17),
        f32::powi(2.0, -17).next_up(),
        f32::from_bits(1),
    ];
    positive.into_iter().flat_map(|v| [v, -v]).collect()
}

/// The borders and a one, over and over, until the shape is full: an odd number, so that each comes to every place of a thread's.
pub(super) fn filled([rows, cols]: [usize; 2], dtype: DType, device: &Device) -> Result<Tensor> {
    tensor(
        borders().into_iter().chain([1.0]).cycle().take(rows * cols).collect(),
        [rows, cols],
        dtype,
        device,
    )
}

/// Returns the counts that `values` should give.
pub(super) fn wanted(values: &[f32], encoding: Encoding, scale: f32) -> CounterValues {
    let want = fp8::quantize(values, encoding, scale);
    let (saturated, underflowed) = (want.saturated, want.underflowed);
    CounterValues { saturated, underflowed, elements: values.len() as u64, nan: want.nan }
}
