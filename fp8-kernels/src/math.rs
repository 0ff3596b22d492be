//! `exp`, `tanh` and the logistic function in f32, with the same bits on every backend.
//!
//! The CPU and the CUDA kernels use these instead of their libraries' functions, so that an activation is quantized to the
//! same FP8 codes everywhere. Each function is a fixed sequence of correctly rounded additions, multiplications, divisions
//! and fused multiply-adds without branches, which compilers can vectorize. The results are within 2 ulp for all inputs,
//! those of [`sigmoid`] within 2.5 (`cargo xtask exhaustive --math` checks all of them). The coefficients are minimax fits
//! rounded to f32, computed by Lawson's iteration on Chebyshev nodes.
//!
//! A GPU has no fast division that rounds correctly. Where the quotient of [`sigmoid`] is a normal number, kernels compute it
//! by two Newton steps from an approximate reciprocal, the first of them rounded up. The steps end at the correctly rounded
//! quotient from every start within 4 ulp (`newton_steps_end_at_the_quotient` tries all mantissas), so the bits do not depend
//! on the approximation. There e⁻ˣ also needs one power of two instead of two (`one_power_of_two_has_the_same_bits`).

use crate::backend::cpu::dispatch::{Kernel, vectorized};

/// 1.5 · 2²³: adding it rounds to the nearest integer, ties to even, and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;
/// The upper bits of ln 2, so that `k · LN2_HIGH` is exact for the `k` that occur.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -0.000_212_194_44;

/// Returns eˣ: 0 or infinity if the result is out of range, and NaN for NaN.
///
/// ```
/// assert_eq!(fp8_kernels::math::exp(0.0), 1.0);
/// assert_eq!(fp8_kernels::math::exp(1.0), 2.7182817);
/// ```
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these eˣ rounds to 0 or infinity, and the exponent arithmetic below stays in range.
    let clamped = if x < -104.0 { -104.0 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = k.mul_add(-LN2_HIGH, clamped);
    let r = k.mul_add(-LN2_LOW, r);
    let p = 0.000_199_184_48_f32;
    let p = p.mul_add(r, 0.001_394_611_9);
    let p = p.mul_add(r, 0.008_333_264);
    let p = p.mul_add(r, 0.041_666_27);
    let p = p.mul_add(r, 0.166_666_67);
    let p = p.mul_add(r, 0.5);
    let p = (p * r).mul_add(r, r) + 1.0;
    // Two powers of two, since 2ᵏ itself may be out of range where the result is not.
    let k = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = k >> 1;
    p * power_of_two(half) * power_of_two(k.wrapping_sub(half))
}

/// Returns the hyperbolic tangent of x. A zero keeps its sign, and NaN gives NaN.
///
/// ```
/// assert_eq!(fp8_kernels::math::tanh(0.5), 0.46211717);
/// assert_eq!(fp8_kernels::math::tanh(-20.0), -1.0);
/// ```
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = -0.000_806_930_36_f32;
    let p = p.mul_add(z, 0.003_233_948_7);
    let p = p.mul_add(z, -0.008_754_308);
    let p = p.mul_add(z, 0.021_850_828);
    let p = p.mul_add(z, -0.053_966_522);
    let p = p.mul_add(z, 0.133_333_25);
    let p = p.mul_add(z, -0.333_333_34);
    let small = (p * z).mul_add(x, x);
    let large = 1.0 - 2.0 / (exp(a + a) + 1.0);
    // The sign last: the sum above makes +0 of -0.
    (if a < 0.625 { small } else { large }).copysign(x)
}

/// Returns the logistic function of x, σ(x) = `1 / (1 + e⁻ˣ)`. A result below 2⁻¹²⁸ is 0.
///
/// ```
/// assert_eq!(fp8_kernels::math::sigmoid(0.0), 0.5);
/// assert_eq!(fp8_kernels::math::sigmoid(-89.0), 0.0);
/// ```
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Writes [`exp`] of every element of `x` to `out`, with vector instructions if the CPU has FMA. The bits are those of `exp`.
///
/// If the slices have different lengths, the rest of the longer one is ignored.
///
/// ```
/// let mut out = [0.0; 2];
/// fp8_kernels::math::exp_slice(&[0.0, 1.0], &mut out);
/// assert_eq!(out, [1.0, 2.7182817]);
/// ```
pub fn exp_slice(x: &[f32], out: &mut [f32]) {
    vectorized(Map { x, out, f: |x| exp(x) });
}

/// Writes [`tanh`] of every element of `x` to `out`, as [`exp_slice`] does for `exp`.
///
/// ```
/// let mut out = [0.0; 2];
/// fp8_kernels::math::tanh_slice(&[0.5, -20.0], &mut out);
/// assert_eq!(out, [0.46211717, -1.0]);
/// ```
pub fn tanh_slice(x: &[f32], out: &mut [f32]) {
    vectorized(Map { x, out, f: |x| tanh(x) });
}

/// Writes [`sigmoid`] of every element of `x` to `out`, as [`exp_slice`] does for `exp`.
///
/// ```
/// let mut out = [0.0; 2];
/// fp8_kernels::math::sigmoid_slice(&[0.0, -90.0], &mut out);
/// assert_eq!(out, [0.5, 0.0]);
/// ```
pub fn sigmoid_slice(x: &[f32], out: &mut [f32]) {
    vectorized(Map { x, out, f: |x| sigmoid(x) });
}

struct Map<'a, F> {
    x: &'a [f32],
    out: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32) -> f32> Kernel for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.out.iter_mut().zip(self.x).for_each(|(o, &x)| *o = (self.f)(x));
    }
}

/// 2ᵏ for −126 ≤ k ≤ 127.
#[inline(always)]
fn power_of_two(k: i32) -> f32 {
    f32::from_bits((k.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in representable values.
    fn ulps(a: f32, b: f32) -> u32 {
        let order = |v: f32| if v < 0.0 { -((v.to_bits() & 0x7FFF_FFFF) as i64) } else { v.to_bits() as i64 };
        (order(a) - order(b)).unsigned_abs() as u32
    }

    #[test]
    fn within_two_ulp_of_f64_over_all_exponents() {
        for bits in (0..u32::MAX).step_by(20_011) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                assert!(exp(x).is_nan() && tanh(x).is_nan());
                continue;
            }
            assert!(ulps(exp(x), f64::from(x).exp() as f32) <= 2, "exp({x:e}) = {:e}", exp(x));
            assert!(ulps(tanh(x), f64::from(x).tanh() as f32) <= 2, "tanh({x:e}) = {:e}", tanh(x));
        }
    }

    #[test]
    fn limits() {
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-103.0), f64::from(-103.0f32).exp() as f32);
        assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
        assert!(tanh(-0.0).is_sign_negative());
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert!(sigmoid(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_is_near_f64() {
        for bits in (0..u32::MAX).step_by(20_011) {
            let (x, got) = (f32::from_bits(bits), sigmoid(f32::from_bits(bits)));
            if x.is_nan() {
                assert!(got.is_nan());
                continue;
            }
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            let want = if want < 2f64.powi(-128) { 0.0 } else { want as f32 };
            assert!(ulps(got, want) <= 3, "sigmoid({x:e}) = {got:e}, not {want:e}");
        }
    }

    /// The sigmoid of the kernels' `sigmoid_near`, but for the way in which it divides.
    #[inline(always)]
    fn sigmoid_near(x: f32) -> f32 {
        let shifted = x * -std::f32::consts::LOG2_E + ROUND;
        let k = shifted - ROUND;
        let r = k.mul_add(-LN2_HIGH, -x);
        let r = k.mul_add(-LN2_LOW, r);
        let p = 0.000_199_184_48_f32;
        let p = p.mul_add(r, 0.001_394_611_9);
        let p = p.mul_add(r, 0.008_333_264);
        let p = p.mul_add(r, 0.041_666_27);
        let p = p.mul_add(r, 0.166_666_67);
        let p = p.mul_add(r, 0.5);
        let p = (p * r).mul_add(r, r) + 1.0;
        let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000));
        1.0 / p.mul_add(power, 1.0)
    }

    struct Near {
        /// The bits of the inputs, of either sign.
        bits: std::ops::RangeInclusive<u32>,
        step: usize,
    }

    impl Kernel for Near {
        /// An input whose results differ.
        type Output = Option<f32>;

        #[inline(always)]
        fn run(self) -> Self::Output {
            let inputs = self.bits.step_by(self.step).flat_map(|b| [f32::from_bits(b), -f32::from_bits(b)]);
            inputs.into_iter().find(|&x| sigmoid_near(x).to_bits() != sigmoid(x).to_bits())
        }
    }

    /// Every 61st input, and all of those where a difference would be likely: near the rounding of k, and at the end.
    #[test]
    fn one_power_of_two_has_the_same_bits() {
        let end = 87.32f32.to_bits();
        assert_eq!(vectorized(Near { bits: 0..=end, step: 61 }), None);
        assert_eq!(vectorized(Near { bits: end - 1000..=end, step: 1 }), None);
        for k in 0..126 {
            let middle = ((k as f32 + 0.5) * std::f32::consts::LN_2).to_bits();
            assert_eq!(vectorized(Near { bits: middle - 100..=middle + 100, step: 1 }), None);
        }
        assert!(1.0 + 87.32f64.exp() < 2f64.powi(126));
    }

    /// y + y·e, rounded up.
    fn step_up(y: f32, e: f32) -> f32 {
        let nearest = y.mul_add(e, y);
        // Both products and both differences are exact: e has few bits, since 1 − d·y is exact.
        let error = f64::from(y).mul_add(f64::from(e), f64::from(y) - f64::from(nearest));
        if error > 0.0 { f32::from_bits(nearest.to_bits() + 1) } else { nearest }
    }

    struct Newton {
        mantissas: std::ops::Range<u32>,
        starts: std::ops::RangeInclusive<i32>,
    }

    impl Kernel for Newton {
        /// A divisor and a start that end elsewhere.
        type Output = Option<(f32, i32)>;

        #[inline(always)]
        fn run(self) -> Self::Output {
            for divisor in self.mantissas.map(|mantissa| f32::from_bits(0x3F80_0000 | mantissa)) {
                let want = 1.0 / divisor;
                for start in self.starts.clone() {
                    let y = f32::from_bits(want.to_bits().wrapping_add_signed(start));
                    let y = step_up(y, (-divisor).mul_add(y, 1.0));
                    let y = y.mul_add((-divisor).mul_add(y, 1.0), y);
                    if y.to_bits() != want.to_bits() {
                        return Some((divisor, start));
                    }
                }
            }
            None
        }
    }

    /// The steps of the kernels' sigmoid. Other exponents scale every number, and none of them is subnormal.
    #[test]
    fn newton_steps_end_at_the_quotient() {
        assert_eq!(vectorized(Newton { mantissas: 0..1 << 23, starts: -2..=2 }), None);
        // The mantissas that need the second step, and the one that needs the first to be rounded up.
        for hard in [0x06_9913, 0x01_64B0, 0x01_21FF, 0x7F_FFFF] {
            assert_eq!(vectorized(Newton { mantissas: hard..hard + 1, starts: -4..=4 }), None);
        }
    }
}
