//! The operands of a layer's three GEMMs, and which of them can be multiplied.

use crate::SlotRole;
use crate::policy::Policy;
use fp8_kernels::Encoding;

/// One of the three GEMMs of a Linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gemm {
    Fprop,
    Dgrad,
    Wgrad,
}

/// A slot, and the policy that quantizes it. `None` is high precision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) role: SlotRole,
    pub(crate) policy: Option<&'a dyn Policy>,
}

impl Gemm {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        }
    }

    /// Returns the slots that it reads.
    pub(crate) const fn roles(self) -> [SlotRole; 2] {
        match self {
            Self::Fprop => [SlotRole::Input, SlotRole::Weight],
            Self::Dgrad => [SlotRole::GradOutput, SlotRole::Weight],
            Self::Wgrad => [SlotRole::GradOutput, SlotRole::Input],
        }
    }

    /// Returns whether the operand is quantized and its recipe runs this GEMM in FP8.
    pub(crate) fn takes(self, operand: &Operand<'_>) -> bool {
        operand.policy.is_some_and(|policy| {
            let (fprop, dgrad, wgrad) = policy.override_linear_precision();
            !match self {
                Self::Fprop => fprop,
                Self::Dgrad => dgrad,
                Self::Wgrad => wgrad,
            }
        })
    }
}

/// Returns why two quantized operands cannot be multiplied, if they cannot.
pub(crate) fn pair_problem(a: &Operand<'_>, b: &Operand<'_>) -> Option<String> {
    let encoding = |operand: &Operand<'_>| {
        operand.policy.map(|policy| policy.format().encoding(operand.role.direction()))
    };
    let is_e5m2 = |operand| encoding(operand) == Some(Encoding::E5M2);
    (is_e5m2(a) && is_e5m2(b)).then(|| {
        let (a, b) = (a.role.name(), b.role.name());
        format!("{a} and {b} are both E5M2, which no FP8 GEMM multiplies: use E4M3 or HYBRID for one of them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CurrentScaling, DelayedScaling, Format};

    #[test]
    fn two_operands_in_e5m2_are_refused() {
        let policy = |fp8_format| CurrentScaling { fp8_format, ..Default::default() };
        let [e4m3, e5m2, hybrid] = [Format::E4M3, Format::E5M2, Format::Hybrid].map(policy);
        let problem = |dy: &dyn Policy, x: &dyn Policy| {
            let [dy, x] = [(SlotRole::GradOutput, dy), (SlotRole::Input, x)]
                .map(|(role, policy)| Operand { role, policy: Some(policy) });
            pair_problem(&dy, &x)
        };
        assert_eq!(
            problem(&hybrid, &e5m2).unwrap(),
            "grad_output and input are both E5M2, which no FP8 GEMM multiplies: use E4M3 or HYBRID for one of them"
        );
        for (dy, x) in [(&hybrid, &hybrid), (&hybrid, &e4m3), (&e4m3, &e5m2), (&e4m3, &e4m3)] {
            assert_eq!(problem(dy, x), None);
        }
    }

    #[test]
    fn a_gemm_reads_two_slots_and_can_be_overridden() {
        let overrides = [(true, false, false), (false, true, false), (false, false, true)];
        for (gemm, precision) in [Gemm::Fprop, Gemm::Dgrad, Gemm::Wgrad].into_iter().zip(overrides) {
            let policy = DelayedScaling { override_linear_precision: precision, ..Default::default() };
            let operand = Operand { role: SlotRole::Input, policy: Some(&policy) };
            for other in [Gemm::Fprop, Gemm::Dgrad, Gemm::Wgrad] {
                assert_eq!(other.takes(&operand), other != gemm, "{} {}", gemm.name(), other.name());
            }
            assert!(!gemm.takes(&Operand { policy: None, ..operand }));
        }
        assert_eq!(Gemm::Fprop.roles(), [SlotRole::Input, SlotRole::Weight]);
        assert_eq!(Gemm::Dgrad.roles(), [SlotRole::GradOutput, SlotRole::Weight]);
        assert_eq!(Gemm::Wgrad.roles(), [SlotRole::GradOutput, SlotRole::Input]);
    }
}
