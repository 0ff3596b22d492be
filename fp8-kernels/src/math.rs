//! `exp`, `tanh` and the logistic function in f32, with the same bits on every backend.
//!
//! The CPU and the CUDA kernels use these instead of their libraries' functions, so that an activation is quantized to the
//! same FP8 codes everywhere. Each function is a fixed sequence of correctly rounded additions, multiplications, divisions
//! and fused multiply-adds without branches, which compilers can vectorize. The results are within 2 ulp for all inputs
//! (`cargo xtask exhaustive --math` checks all of them). The coefficients are minimax fits rounded to f32, computed by Lawson's
//! iteration on Chebyshev nodes.

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

/// Returns the logistic function of x, σ(x) = `1 / (1 + e⁻ˣ)`.
///
/// ```
/// assert_eq!(fp8_kernels::math::sigmoid(0.0), 0.5);
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
    }
}
