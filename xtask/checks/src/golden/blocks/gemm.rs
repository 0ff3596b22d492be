//! The three products of a Linear.
//!
//! With bound = Σ |a · b| · s_a · s_b, the recorded one, a result may be off the f64 value by 32 · 2⁻²⁴ · bound on the CPU and by
//! 2⁻¹¹ · bound on a GPU, whose tensor cores add with fewer bits.

use fp8_kernels::{DType, Device, Encoding, Operand, Scale, Slot, Tensor, ops};
use safetensors::Dtype;
use serde::Deserialize;

use super::file::{Check, File, encoding, rule};
use crate::golden::tally::{Mismatches, Tally};

/// One recipe: the modes of `x`, `w` and `dy`. `x` and `w` are E4M3.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    recipe: String,
    grad_format: String,
    x: String,
    w: String,
    dy: String,
}

pub(super) fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    let input = |tensor| file.matrix(tensor).and_then(|matrix| matrix.tensor(device));
    let inputs = [input("x")?, input("w")?, input("dy")?];
    let is_cpu = device.is_same(&Device::cpu());
    let tolerance = if is_cpu { 32.0 * 2_f64.powi(-24) } else { 2_f64.powi(-11) };
    for case in file.cases::<Case>()? {
        let products = case.products(&inputs, device);
        for (product, index) in [("y", 0), ("dx", 1), ("dw", 2)] {
            let key = format!("{}.{product}", case.recipe);
            ["", ".bound", ".at"].iter().for_each(|part| file.name(&format!("{key}{part}")));
            let result =
                products.clone().and_then(|products| compare(file, &key, &products[index], tolerance));
            tally.record(&format!("blocks/{name} {} {product}", case.recipe), result);
        }
    }
    Ok(())
}

impl Case {
    /// y = x · wᵀ, dx = dy · w, dw = dyᵀ · x.
    fn products(&self, [x, w, dy]: &[Tensor; 3], device: &Device) -> Check<[Tensor; 3]> {
        let error = |error: fp8_kernels::Error| error.to_string();
        let quantized = |x: &Tensor, mode: &str, encoding: Encoding| -> Check<Operand> {
            let slot =
                Slot { scale: Scale::Blocks(rule(mode, 0.0)?), columnwise: true, ..Slot::off(encoding) };
            ops::quantize(x, &slot).map_err(error)
        };
        let x = quantized(x, &self.x, Encoding::E4M3)?;
        let w = quantized(w, &self.w, Encoding::E4M3)?;
        let dy = quantized(dy, &self.dy, encoding(&self.grad_format)?)?;
        let mut dw = Tensor::zeros(w.shape().matrix(), DType::F32, device).map_err(error)?;
        ops::wgrad(&dy, &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).map_err(error)?;
        let y = ops::fprop(&x, &w, None, DType::F32, ops::Accumulation::Split).map_err(error)?;
        let dx = ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split).map_err(error)?;
        Ok([y, dx, dw])
    }
}

/// Compares all elements, or those at the recorded places.
pub(in crate::golden) fn compare(file: &File<'_>, key: &str, got: &Tensor, tolerance: f64) -> Check {
    let want = file.elements(key, Dtype::F64, f64::from_le_bytes)?;
    let bounds = file.elements(&format!("{key}.bound"), Dtype::F32, f32::from_le_bytes)?;
    let [rows, cols] = got.shape().matrix();
    let places = if file.meta("sampled")? == "true" {
        let at = file.elements(&format!("{key}.at"), Dtype::U32, u32::from_le_bytes)?;
        at.as_chunks::<2>().0.iter().map(|[row, col]| [*row as usize, *col as usize]).collect()
    } else {
        (0..rows * cols).map(|place| [place / cols, place % cols]).collect::<Vec<_>>()
    };
    if want.is_empty() || want.len() != places.len() || bounds.len() != places.len() {
        let (want, bounds, places) = (want.len(), bounds.len(), places.len());
        return Err(format!("{want} values and {bounds} bounds of {places} places"));
    }
    let got = got.to_vec::<f32>().map_err(|error| error.to_string())?;
    let mut mismatches = Mismatches::default();
    for ((&[row, col], want), bound) in places.iter().zip(want).zip(bounds) {
        let here = got.get(row * cols + col).filter(|_| row < rows && col < cols);
        let here = here.ok_or_else(|| format!("no element [{row}, {col}] in [{rows}, {cols}]"))?;
        let (error, allowed) = ((f64::from(*here) - want).abs(), tolerance * f64::from(bound));
        mismatches.compare(error <= allowed, || {
            format!("[{row}, {col}] is {here:e}, expected {want:e}: off by {error:e}, allowed {allowed:e}")
        });
    }
    mismatches.finish()
}
