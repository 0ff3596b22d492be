//! The operands of a layer's three GEMMs, and which of them can be multiplied.

use crate::SlotRole;
use crate::recipes::policy::Policy;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::ops::Emulation;
use fp8_kernels::{BlockRule, Device, Encoding, Scale, ops};

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

    /// Returns whether it reads the transpose of an operand, which has scales of its own.
    const fn reads_columnwise(self, role: SlotRole) -> bool {
        match self {
            Self::Fprop => false,
            Self::Dgrad => matches!(role, SlotRole::Weight),
            Self::Wgrad => true,
        }
    }

    /// Returns what the device does if it does not multiply two quantized operands itself.
    pub(crate) fn emulation(self, device: &Device, operands: &[Operand<'_>; 2]) -> Option<Emulation> {
        let rules = operands.each_ref().map(Operand::block_rule);
        let [a, b] = operands.each_ref().map(|operand| operand.blocks(self));
        let powers_of_two = rules.iter().flatten().all(BlockRule::has_powers_of_two);
        ops::emulation(device, a, b, powers_of_two)
    }

    /// Returns whether the operand is quantized and its recipe runs this GEMM in FP8.
    pub(crate) fn takes(self, operand: &Operand<'_>) -> bool {
        operand.policy.is_some_and(|policy| !self.of(policy.override_linear_precision()))
    }

    /// Returns whether the operand's recipe asks for split accumulation in this GEMM.
    pub(crate) fn splits(self, operand: &Operand<'_>) -> bool {
        operand.policy.is_some_and(|policy| self.of(policy.use_split_accumulator()))
    }

    /// Picks this GEMM's of three values.
    const fn of(self, (fprop, dgrad, wgrad): (bool, bool, bool)) -> bool {
        match self {
            Self::Fprop => fprop,
            Self::Dgrad => dgrad,
            Self::Wgrad => wgrad,
        }
    }
}

/// Returns why a GEMM cannot multiply two quantized operands, if it cannot.
pub(crate) fn pair_problem(gemm: Gemm, a: &Operand<'_>, b: &Operand<'_>) -> Option<String> {
    let (Some(_), Some(_)) = (a.policy, b.policy) else { return None };
    let is_e5m2 = |operand: &Operand<'_>| operand.encoding() == Some(Encoding::E5M2);
    if is_e5m2(a) && is_e5m2(b) {
        let (a, b) = (a.role.name(), b.role.name());
        return Some(format!(
            "{a} and {b} are both E5M2, which no FP8 GEMM multiplies: use E4M3 or HYBRID for one of them"
        ));
    }
    let (a_blocks, b_blocks) = (a.blocks(gemm), b.blocks(gemm));
    if gemm == Gemm::Wgrad
        && a.has_hadamard() != b.has_hadamard()
        && [a_blocks, b_blocks] == [Some(Blocks::B1x16); 2]
    {
        let with = if a.has_hadamard() { a } else { b };
        return Some(format!(
            "{} alone has a Hadamard transform: disable_rht must be the same for both",
            with.role.name()
        ));
    }
    (!ops::can_multiply(a_blocks, b_blocks)).then(|| {
        let name = |blocks: Option<Blocks>| blocks.map_or("tensor", Blocks::name);
        let ((a, b), (a_name, b_name)) = ((a.role.name(), b.role.name()), (name(a_blocks), name(b_blocks)));
        format!(
            "{a} has scales of {a_name} and {b} of {b_name}: FP8 GEMMs take tensor or row with tensor or row, 1x128 with 1x128 or \
             128x128, mx32 with mx32, and 1x16 with 1x16 or 16x16"
        )
    })
}

impl Operand<'_> {
    fn encoding(&self) -> Option<Encoding> {
        self.policy.map(|policy| policy.format().encoding(self.role.direction()))
    }

    /// Returns the blocks that share a scale in the codes that a GEMM reads, or `None` if the operand has one scale.
    fn blocks(&self, gemm: Gemm) -> Option<Blocks> {
        if let Some(rule) = self.block_rule() {
            let is_turned = gemm.reads_columnwise(self.role);
            return if is_turned { rule.columnwise_blocks() } else { Some(rule.blocks()) };
        }
        self.nvfp4().map(|(blocks, _)| blocks)
    }

    /// Returns whether the codes that wgrad reads are of a Hadamard transform.
    fn has_hadamard(&self) -> bool {
        self.nvfp4().is_some_and(|(_, hadamard)| hadamard)
    }

    /// The blocks of NVFP4, and whether wgrad's copy is transformed.
    fn nvfp4(&self) -> Option<(Blocks, bool)> {
        let policy = self.policy?;
        let rule = policy.rule(self.role);
        match policy.scale(self.role, &rule) {
            Scale::Nvfp4(rule) => Some((rule.blocks, rule.hadamard)),
            _ => None,
        }
    }

    /// The rule of scales for rows or blocks; `None` for one scale.
    fn block_rule(&self) -> Option<BlockRule> {
        let policy = self.policy.filter(|policy| policy.state().is_none())?;
        let rule = policy.rule(self.role);
        match policy.scale(self.role, &rule) {
            Scale::Blocks(rule) => Some(rule),
            Scale::Off
            | Scale::Cell { .. }
            | Scale::FromTensor(_)
            | Scale::FromAmax { .. }
            | Scale::Nvfp4(_) => None,
        }
    }
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
            pair_problem(Gemm::Wgrad, &dy, &x)
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
