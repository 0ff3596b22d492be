//! The signal-to-quantization-noise ratio of what one slot quantizes in one scope:
//! `10 · log₁₀(Σ x² / Σ (x − code · scale_inv)²)` decibels, with the sums in f64.

use crate::Direction;

/// The sums of one slot in one scope.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Squares {
    values: f64,
    errors: f64,
}

impl Squares {
    /// Adds the values that are finite, with their errors. A NaN makes a whole block of MXFP8 and NVFP4 NaN: it is left out.
    pub(crate) fn add(&mut self, values: &[f32], quantized: &[f32]) {
        let is_left = |(value, quantized): &(&f32, &f32)| value.is_finite() && !quantized.is_nan();
        for (value, quantized) in values.iter().zip(quantized).filter(is_left) {
            let (value, quantized) = (f64::from(*value), f64::from(*quantized));
            self.values += value * value;
            self.errors += (value - quantized) * (value - quantized);
        }
    }

    /// Returns the ratio in decibels. `None` if no finite value differs from 0.
    pub(crate) fn decibels(self) -> Option<f64> {
        (self.values > 0.0).then(|| 10.0 * (self.values / self.errors).log10())
    }
}

/// A slot under a recipe: the domain, the pass and the slot's index.
pub(crate) type Measured = (usize, Direction, usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decibels_are_those_of_the_sums() {
        let mut squares = Squares::default();
        assert_eq!(squares.decibels(), None);
        squares.add(&[0.0, f32::NAN, f32::INFINITY, 1.0], &[0.0, f32::NAN, 448.0, f32::NAN]);
        assert_eq!(squares.decibels(), None);
        squares.add(&[10.0], &[9.0]);
        assert_eq!(squares.decibels(), Some(20.0)); // 100 / 1
        squares.add(&[30.0], &[30.0]);
        assert_eq!(squares.decibels(), Some(30.0)); // 1000 / 1
        let mut exact = Squares::default();
        exact.add(&[2.0], &[2.0]);
        assert_eq!(exact.decibels(), Some(f64::INFINITY));
    }
}
