//! A scale rule as kernels take it: `Rule` in their prelude.

use crate::{ScalePolicy, ScaleRule};

/// Five parameters of a kernel, in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RuleArgs {
    /// 0 exact, 1 power of two, 2 current, 3 current with a power of two.
    pub(super) kind: i32,
    pub(super) fp8_max: f32,
    /// `fp8_max · 2^−margin`, as the rule itself rounds it.
    pub(super) scaled_max: f32,
    pub(super) margin: i32,
    pub(super) epsilon: f32,
}

impl RuleArgs {
    /// None for a user's function, which kernels cannot call.
    pub(super) fn new(rule: &ScaleRule) -> Option<Self> {
        let fp8_max = match *rule {
            ScaleRule::Delayed { fp8_max, .. } | ScaleRule::Current { fp8_max, .. } => fp8_max,
        };
        let none = Self { kind: 0, fp8_max, scaled_max: 0.0, margin: 0, epsilon: 0.0 };
        match *rule {
            ScaleRule::Delayed { policy: ScalePolicy::Custom(_), .. } => None,
            ScaleRule::Delayed { margin, policy: ScalePolicy::PowerOfTwo, .. } => {
                Some(Self { kind: 1, margin, ..none })
            }
            ScaleRule::Delayed { margin, policy: ScalePolicy::Exact, .. } => {
                let scaled_max = (f64::from(fp8_max) * f64::powi(2.0, margin.saturating_neg())) as f32;
                Some(Self { scaled_max, ..none })
            }
            ScaleRule::Current { epsilon, power_2_scales, .. } => {
                Some(Self { kind: if power_2_scales { 3 } else { 2 }, epsilon, ..none })
            }
        }
    }
}
