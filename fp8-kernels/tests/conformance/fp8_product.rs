//! The error that an FP8 product may have.
//!
//! The CPU and the simulated GPU add in f32. The tensor cores of Ada and Hopper align the products of a step to the largest
//! of them and keep some 13 bits below it, in fast accumulation and in split: on them a sum is judged by its terms.

use super::case::Outcome;
use super::compare::{close, ensure};
use super::data::tolerance;
use crate::oracle;
use fp8_kernels::ops::Layout;
use fp8_kernels::{DType, Device};

/// The error allowed on hardware, relative to the sum of a product's terms by magnitude. With 13 bits, sums of normal
/// numbers stay below half of it.
const OF_TERMS: f64 = 1.0 / 512.0;

/// A GPU that is not simulated, or that adds as if it were not.
pub(super) fn is_hardware(device: &Device) -> bool {
    let adds_alike = || std::env::var_os("FP8_SIM_FP8_SUM_BITS").is_some();
    device.to_string() != "cpu" && (!device.is_simulated() || adds_alike())
}

/// The expected values of a product, and the sums of its terms' magnitudes.
pub(super) struct Expected {
    pub(super) values: Vec<f64>,
    terms: Vec<f64>,
}

impl Expected {
    /// `a · b` as `layout` reads them, plus `added` to each element.
    pub(super) fn new(a: &[f64], b: &[f64], layout: Layout, dims: [usize; 3], added: Option<&[f64]>) -> Self {
        let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
        let mut values = oracle::gemm::gemm(a, b, layout, dims, None);
        let mut terms = oracle::gemm::gemm(&magnitudes(a), &magnitudes(b), layout, dims, None);
        for (i, added) in added.unwrap_or_default().iter().enumerate() {
            values[i] += added;
            terms[i] += added.abs();
        }
        Self { values, terms }
    }

    /// Whether `got`, of type `dtype`, is near enough.
    pub(super) fn check(
        &self,
        what: &str,
        got: &[f32],
        cols: usize,
        dtype: DType,
        device: &Device,
    ) -> Outcome {
        let [rtol, atol] = tolerance(dtype);
        if !is_hardware(device) {
            return close(what, got, &self.values, cols, [rtol, atol]);
        }
        ensure(got.len() == self.values.len(), || format!("{what}: {} values", got.len()))?;
        for (i, (&got, (want, terms))) in got.iter().zip(self.values.iter().zip(&self.terms)).enumerate() {
            let (off, most) = ((f64::from(got) - want).abs(), atol + rtol * want.abs() + OF_TERMS * terms);
            let at = [i / cols, i % cols];
            ensure(off <= most, || {
                format!("{what}: at {at:?}: got {got:?}, want {want:?}, {off:e} beyond {most:e}")
            })?;
        }
        Ok(())
    }
}
