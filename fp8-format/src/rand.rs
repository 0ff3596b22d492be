//! The distributions of the `rand` crate (feature `rand`), which of these types `half` has for its own.
//!
//! A real number is drawn, with 32 bits or as `f64` does it, and rounded so that it stays where the distribution says: never
//! to the nearest where that could be an excluded bound. So every value of the type in the range comes up, each as often as
//! the gap beside it is wide.
//!
//! | distribution | range | rounded | probability of a value |
//! |---|---|---|---|
//! | `StandardUniform` | [0, 1) | down | the gap to the next value, exactly |
//! | `OpenClosed01` | (0, 1] | up | the gap to the value before, exactly |
//! | `Uniform`, `random_range(a..b)` | [a, b) | down | the gap to the next value over b − a |
//! | `Uniform`, `random_range(a..=b)` | [a, b] | to nearest | half the gaps on both sides, as far as in the range, over b − a |
//!
//! Rounding down lowers the mean: that of `StandardUniform` is 23/48 in E4M3 and 11/24 in E5M2, to within 2⁻¹⁶. For a mean
//! without bias round a wider number stochastically. To nearest, what is just below 0 becomes −0.

use crate::{E4M3, E5M2};
use rand::Rng;
use rand::distr::uniform::{Error, SampleBorrow, SampleUniform, UniformFloat, UniformSampler};
use rand::distr::{Distribution, OpenClosed01, StandardUniform};

/// `n` · 2⁻³², exact.
fn fraction(n: u64) -> f64 {
    const STEP: f64 = 1.0 / (1_u64 << 32) as f64;
    n as f64 * STEP
}

/// The sampler of `Uniform`: a range of numbers, and whether its upper bound is drawn, too.
#[expect(unnameable_types, reason = "the sampler of `Uniform`, which names it for everyone")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UniformFp8<T> {
    numbers: UniformFloat<f64>,
    is_inclusive: bool,
    fp8: core::marker::PhantomData<T>,
}

impl<T> UniformFp8<T> {
    fn over(low: f64, high: f64, is_inclusive: bool) -> Result<Self, Error> {
        if !low.is_finite() || !high.is_finite() {
            return Err(Error::NonFinite);
        }
        let numbers =
            if is_inclusive { UniformFloat::new_inclusive(low, high) } else { UniformFloat::new(low, high) };
        Ok(Self { numbers: numbers?, is_inclusive, fp8: core::marker::PhantomData })
    }
}

macro_rules! impl_rand {
    ($($fp8:ident),*) => {$(
        /// A real number in [0, 1), rounded down: never 1. From 32 random bits; each value is as likely as the gap between it
        /// and the next one is wide.
        impl Distribution<$fp8> for StandardUniform {
            fn sample<R: Rng + ?Sized>(&self, rng: &mut R) -> $fp8 {
                // Stochastic rounding with 0 cuts off.
                $fp8::from_f64_stochastic(fraction(rng.next_u32().into()), 0)
            }
        }

        /// A real number in (0, 1], rounded up: never 0. From 32 random bits; each value is as likely as the gap between it and
        /// the one before is wide.
        impl Distribution<$fp8> for OpenClosed01 {
            fn sample<R: Rng + ?Sized>(&self, rng: &mut R) -> $fp8 {
                // Stochastic rounding with all ones takes the larger neighbour of all but exact values.
                $fp8::from_f64_stochastic(fraction(u64::from(rng.next_u32()) + 1), u32::MAX)
            }
        }

        impl SampleUniform for $fp8 {
            type Sampler = UniformFp8<$fp8>;
        }

        /// A real number of the range, rounded down where the upper bound is excluded, else to the nearest value.
        impl UniformSampler for UniformFp8<$fp8> {
            type X = $fp8;

            fn new<B1, B2>(low: B1, high: B2) -> Result<Self, Error>
            where
                B1: SampleBorrow<$fp8> + Sized,
                B2: SampleBorrow<$fp8> + Sized,
            {
                Self::over(low.borrow().to_f64(), high.borrow().to_f64(), false)
            }

            fn new_inclusive<B1, B2>(low: B1, high: B2) -> Result<Self, Error>
            where
                B1: SampleBorrow<$fp8> + Sized,
                B2: SampleBorrow<$fp8> + Sized,
            {
                Self::over(low.borrow().to_f64(), high.borrow().to_f64(), true)
            }

            fn sample<R: Rng + ?Sized>(&self, rng: &mut R) -> $fp8 {
                let x = self.numbers.sample(rng);
                // Both bounds are values of the type: to nearest stays between them, and down not below the lower one.
                let nearest = $fp8::from_f64_saturating(x);
                if self.is_inclusive || nearest.to_f64() <= x {
                    return nearest;
                }
                let code = nearest.to_bits();
                $fp8::from_bits(match code & 0x7F {
                    0 => $fp8::MIN_POSITIVE_SUBNORMAL.to_bits() | 0x80,
                    _ if nearest.is_sign_negative() => code + 1,
                    _ => code - 1,
                })
            }
        }
    )*};
}

impl_rand!(E4M3, E5M2);
