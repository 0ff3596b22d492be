//! The rules that compute a scale from an amax.

use crate::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// The formula by which delayed scaling computes a scale: see [`ScaleRule::Delayed`].
///
/// ```
/// use fp8_kernels::{ScalePolicy, ScaleRule};
/// let scale = |policy| ScaleRule::Delayed { fp8_max: 448.0, margin: 1, policy }.scale(3.0, 1.0);
/// assert_eq!(scale(ScalePolicy::Exact)?, 448.0 / 2.0 / 3.0); // 74.67
/// assert_eq!(scale(ScalePolicy::PowerOfTwo)?, 64.0); // 2⁷ ≤ 448 / 3 = 149.3, halved by the margin
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum ScalePolicy {
    /// `(fp8_max · 2^−margin) / amax` in f32.
    Exact,
    /// The largest power of two that is at most `fp8_max / amax`, divided by `2^margin`; between 2⁻¹²⁶ and 2¹²⁷.
    PowerOfTwo,
    /// A function of yours.
    Custom(CustomPolicy),
}

/// A scale policy of your own: a name and a function `(amax, old_scale, fp8_max) → scale`.
///
/// The function is called with finite amaxes greater than 0 only; any other amax leaves the old scale. The scale must be finite
/// and at least 2⁻¹²⁶. The name identifies the policy: two policies of one name are taken to be the
/// same. The function runs on the host, so on a GPU operations that need it wait for the device and cannot be recorded in a
/// graph.
///
/// ```
/// use fp8_kernels::{CustomPolicy, ScalePolicy, ScaleRule};
/// use std::sync::Arc;
/// let half = CustomPolicy { name: "half".into(), function: Arc::new(|amax, _old, fp8_max| fp8_max / amax / 2.0) };
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Custom(half) };
/// assert_eq!(rule.scale(3.5, 1.0)?, 64.0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct CustomPolicy {
    /// The name in reports, errors and checkpoints.
    pub name: Arc<str>,
    /// The function `(amax, old_scale, fp8_max) → scale`. The amax is finite and greater than 0.
    pub function: Arc<dyn Fn(f32, f32, f32) -> f32 + Send + Sync>,
}

impl fmt::Debug for CustomPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Custom({})", self.name)
    }
}

/// The rule that computes a tensor's scale from an amax.
///
/// | amax | [`Delayed`](Self::Delayed) | [`Current`](Self::Current) |
/// |---|---|---|
/// | finite and greater than 0 | `(fp8_max · 2^−margin) / amax` | `fp8_max / max(amax, epsilon)` |
/// | 0 | the old scale | `fp8_max / epsilon`, or 1 if epsilon is 0 |
/// | infinite or NaN | the old scale | 1 |
///
/// Computed in f32. An infinite quotient becomes `f32::MAX` and one below 2⁻¹²⁶ becomes 2⁻¹²⁶, so that a scale and its
/// inverse are finite. A [`ScalePolicy`] replaces the formula of `Delayed`.
#[derive(Debug, Clone)]
pub enum ScaleRule {
    /// Delayed scaling: the amax comes from a window of past amaxes.
    Delayed {
        /// Largest finite value of the format.
        fp8_max: f32,
        /// Bits of headroom: the scale is divided by `2^margin`. May be negative.
        margin: i32,
        /// The formula.
        policy: ScalePolicy,
    },
    /// Current scaling: the amax is that of the tensor itself.
    Current {
        /// Largest finite value of the format.
        fp8_max: f32,
        /// The smallest amax: smaller ones are raised to it.
        epsilon: f32,
        /// Whether the scale is rounded down to a power of two.
        power_2_scales: bool,
    },
}

impl ScaleRule {
    /// Returns whether every scale that the rule gives is a power of two: 2⁻¹²⁶ … 2¹²⁷. Nothing is rounded when codes are
    /// dequantized to f32 with such a scale, unless the value is beyond the range of f32.
    ///
    /// ```
    /// use fp8_kernels::{ScalePolicy, ScaleRule};
    /// let rule = |policy| ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy };
    /// assert!(rule(ScalePolicy::PowerOfTwo).has_powers_of_two());
    /// assert!(!rule(ScalePolicy::Exact).has_powers_of_two());
    /// ```
    pub const fn has_powers_of_two(&self) -> bool {
        match self {
            Self::Delayed { policy, .. } => matches!(policy, ScalePolicy::PowerOfTwo),
            Self::Current { power_2_scales, .. } => *power_2_scales,
        }
    }

    /// Returns the scale for `amax`. `old` is the scale that delayed scaling keeps if the amax is 0, infinite or NaN.
    ///
    /// # Errors
    /// A custom policy that returns a scale that is not finite or is below 2⁻¹²⁶ (`f32::MIN_POSITIVE`).
    ///
    /// ```
    /// use fp8_kernels::{ScalePolicy, ScaleRule};
    /// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    /// assert_eq!(rule.scale(3.5, 1.0)?, 128.0);
    /// assert_eq!(rule.scale(f32::INFINITY, 7.0)?, 7.0);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn scale(&self, amax: f32, old: f32) -> Result<f32> {
        let usable = amax.is_finite() && amax > 0.0;
        match self {
            Self::Delayed { .. } if !usable => Ok(old),
            Self::Delayed { policy: ScalePolicy::Custom(custom), fp8_max, .. } => {
                let scale = (custom.function)(amax, old, *fp8_max);
                if scale.is_finite() && scale >= f32::MIN_POSITIVE {
                    return Ok(scale);
                }
                Err(Error::CustomScale { policy: custom.name.to_string(), amax, scale })
            }
            Self::Delayed { fp8_max, margin, policy: ScalePolicy::PowerOfTwo } => {
                let quotient = *fp8_max / amax;
                let floor = if quotient.is_infinite() { 128 } else { floor_log2(quotient) };
                Ok(f32::powi(2.0, floor.saturating_sub(*margin).clamp(-126, 127)))
            }
            Self::Delayed { fp8_max, margin, .. } => {
                let scaled_max = (f64::from(*fp8_max) * f64::powi(2.0, margin.saturating_neg())) as f32;
                Ok(finite(scaled_max / amax))
            }
            Self::Current { fp8_max, epsilon, power_2_scales } => {
                let amax = if amax < *epsilon { *epsilon } else { amax };
                if !(amax.is_finite() && amax > 0.0) {
                    return Ok(1.0);
                }
                let scale = finite(*fp8_max / amax);
                Ok(if *power_2_scales { f32::from_bits(scale.to_bits() & 0x7F80_0000) } else { scale })
            }
        }
    }
}

fn finite(scale: f32) -> f32 {
    scale.clamp(f32::MIN_POSITIVE, f32::MAX)
}

/// ⌊log₂ v⌋ for finite v > 0, exactly: every f32 is a normal f64.
fn floor_log2(v: f32) -> i32 {
    (f64::from(v).to_bits() >> 52) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delayed(margin: i32, policy: ScalePolicy) -> ScaleRule {
        ScaleRule::Delayed { fp8_max: 448.0, margin, policy }
    }

    #[test]
    fn exact() {
        let rule = delayed(0, ScalePolicy::Exact);
        for (amax, scale) in [
            (0.0, 1.0),
            (f32::INFINITY, 1.0),
            (f32::NAN, 1.0),
            (448.0 / f32::MAX / 2.0, f32::MAX),
            (3.5, 128.0),
            (f32::MAX, 448.0 / f32::MAX),
        ] {
            assert_eq!(rule.scale(amax, 1.0).unwrap(), scale.max(f32::MIN_POSITIVE), "amax {amax}");
        }
        assert_eq!(delayed(2, ScalePolicy::Exact).scale(0.25, 1.0).unwrap(), 448.0);
        assert_eq!(delayed(-1, ScalePolicy::Exact).scale(3.5, 1.0).unwrap(), 256.0);
        for margin in [i32::MIN, -300, 300, i32::MAX] {
            let scale = delayed(margin, ScalePolicy::Exact).scale(1.0, 1.0).unwrap();
            assert!(scale.is_finite() && scale.recip().is_finite(), "margin {margin}: {scale}");
        }
    }

    #[test]
    fn power_of_two_is_the_exact_floor() {
        let rule = delayed(0, ScalePolicy::PowerOfTwo);
        assert_eq!(rule.scale(3.5, 1.0).unwrap(), 128.0);
        assert_eq!(rule.scale(3.500_000_2, 1.0).unwrap(), 64.0); // one ulp below 2⁷
        assert_eq!(rule.scale(f32::INFINITY, 8.0).unwrap(), 8.0);
        assert_eq!(rule.scale(1e-45, 1.0).unwrap(), f32::powi(2.0, 127));
        assert_eq!(delayed(1, ScalePolicy::PowerOfTwo).scale(1e-45, 1.0).unwrap(), f32::powi(2.0, 127));
        assert_eq!(delayed(200, ScalePolicy::PowerOfTwo).scale(1.0, 1.0).unwrap(), f32::MIN_POSITIVE);
    }

    #[test]
    fn current() {
        let rule = |epsilon, power_2_scales| ScaleRule::Current { fp8_max: 448.0, epsilon, power_2_scales };
        for amax in [0.0, f32::INFINITY, f32::NAN] {
            assert_eq!(rule(0.0, false).scale(amax, 9.0).unwrap(), 1.0);
        }
        assert_eq!(rule(1.0, false).scale(0.0, 9.0).unwrap(), 448.0);
        assert_eq!(rule(0.0, true).scale(1.0, 9.0).unwrap(), 256.0);
        assert_eq!(rule(0.0, false).scale(1e-45, 9.0).unwrap(), f32::MAX);
    }

    #[test]
    fn a_custom_policy_sees_only_finite_amaxes_above_zero() {
        let function = Arc::new(|amax: f32, _: f32, fp8_max: f32| 0.5 * fp8_max / amax);
        let rule = delayed(0, ScalePolicy::Custom(CustomPolicy { name: "half".into(), function }));
        for amax in [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(rule.scale(amax, 3.0).unwrap(), 3.0, "amax {amax}");
        }
        assert_eq!(rule.scale(3.5, 3.0).unwrap(), 64.0);
    }

    #[test]
    fn a_custom_scale_is_checked() {
        let custom = |scale: f32| {
            let function = Arc::new(move |_: f32, _: f32, _: f32| scale);
            delayed(0, ScalePolicy::Custom(CustomPolicy { name: "mine".into(), function }))
        };
        assert_eq!(custom(2.0).scale(1.0, 1.0).unwrap(), 2.0);
        let error = custom(f32::NAN).scale(1.0, 1.0).unwrap_err().to_string();
        assert_eq!(
            error,
            "scale policy `mine` returned NaN for amax 1: expected a finite scale of at least 2^-126, so that its \
             inverse is finite, too"
        );
        assert_eq!(custom(f32::MIN_POSITIVE).scale(1.0, 1.0).unwrap(), f32::MIN_POSITIVE);
        assert!(custom(f32::MIN_POSITIVE.next_down()).scale(1.0, 1.0).is_err());
    }
}
