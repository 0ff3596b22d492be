//! The slots of a model that each kind of recipe uses.

use crate::SlotName;
use crate::names::fp8_attention::Fp8Attention;
use std::ops::Range;

/// For each kind of recipe, the range of slots that it uses.
#[derive(Debug, Clone, Default)]
pub(crate) struct UsedSlots([Range<usize>; 3]);

impl UsedSlots {
    /// Returns the ranges in `slots`, which are sorted by their use.
    pub(crate) fn new(slots: &[SlotName]) -> Self {
        Self(Fp8Attention::ALL.map(|attention| {
            let is_used = |slot: &SlotName| slot.used_by().is_by(attention);
            let start = slots.iter().position(is_used).unwrap_or(0);
            start..slots.iter().rposition(is_used).map_or(start, |last| last + 1)
        }))
    }

    pub(crate) fn of(&self, attention: Fp8Attention) -> Range<usize> {
        self.0[attention.index()].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SlotRole, SlotUse};

    #[test]
    fn the_slots_of_each_kind_of_recipe_are_contiguous() {
        let all = [SlotUse::Dpa, SlotUse::Always, SlotUse::DpaOrMha, SlotUse::Mha];
        assert!(all.is_sorted());
        for left_out in 0..1 << all.len() {
            let uses = all.iter().enumerate().filter(|(index, _)| left_out & (1 << index) == 0);
            let slot = |(_, used): (usize, &SlotUse)| {
                [1, 2].map(|i| SlotName::of_attention(&format!("{i}"), SlotRole::Input, *used))
            };
            let slots: Vec<SlotName> = uses.flat_map(slot).collect();
            for attention in Fp8Attention::ALL {
                let range = UsedSlots::new(&slots).of(attention);
                for (index, slot) in slots.iter().enumerate() {
                    assert_eq!(
                        range.contains(&index),
                        slot.used_by().is_by(attention),
                        "{left_out}, {index}"
                    );
                }
            }
        }
    }
}
