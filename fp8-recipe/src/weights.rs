//! The cache of FP8 weights, through which microbatches and evaluations quantize each version of a weight once.
//!
//! A copy can be reused while its weight still has the version that was quantized. A copy of a newer version therefore
//! removes all older copies of its slot, for every recipe. While a weight does not change, a commit keeps the copies that its
//! scope used and the [`KEPT`] most recently used ones. Recipes that are nested in each step thus keep their copies, and so
//! do two recipes that alternate. With more recipes than that, a weight is quantized again and its amax is recorded again.
//!
//! Evaluations have separate copies, which have recorded no amax and have no transpose. They never remove a training copy.

use fp8_kernels::Operand;
use std::collections::HashMap;

/// The number of copies of one version that a commit keeps even if its scope did not use them.
const KEPT: usize = 2;

/// The FP8 copies of the weights of all slots.
#[derive(Debug, Default)]
pub(crate) struct WeightCache {
    by_slot: HashMap<usize, Vec<CachedWeight>>,
    uses: u64,
}

#[derive(Debug)]
pub(crate) struct CachedWeight {
    pub(crate) domain: usize,
    pub(crate) version: u64,
    /// Whether its amax was recorded. False for a copy made by an evaluation.
    pub(crate) recorded: bool,
    /// The capture in which it was quantized. A recorded step quantizes its weights again at each replay, and reads only
    /// operands that the replay writes.
    pub(crate) capture: Option<u64>,
    pub(crate) operand: Operand,
    last_use: u64,
}

/// A copy that an open scope has added, and the copy of an evaluation that it replaced.
#[derive(Debug)]
pub(crate) struct Added {
    slot: usize,
    domain: usize,
    replaced: Option<CachedWeight>,
}

impl CachedWeight {
    pub(crate) fn new(
        domain: usize,
        version: u64,
        recorded: bool,
        capture: Option<u64>,
        operand: Operand,
    ) -> Self {
        Self { domain, version, recorded, capture, operand, last_use: 0 }
    }
}

impl WeightCache {
    pub(crate) fn len(&self) -> usize {
        self.by_slot.values().map(Vec::len).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.by_slot.clear();
    }

    /// Returns the number of uses of copies so far, from which [`trim`](Self::trim) later knows what was used since.
    pub(crate) fn uses(&self) -> u64 {
        self.uses
    }

    /// Returns the copy of this version for a domain. A copy that was made in a capture is used only in that capture, because
    /// its codes are not written before a replay. A copy that has recorded no amax is used only by evaluations.
    pub(crate) fn find(
        &mut self,
        slot: usize,
        domain: usize,
        version: u64,
        capture: Option<u64>,
        evaluates: bool,
    ) -> Option<Operand> {
        let serves = |weight: &&mut CachedWeight| {
            weight.domain == domain
                && weight.version == version
                && weight.capture == capture
                && (weight.recorded || evaluates)
        };
        let weight = self.by_slot.get_mut(&slot)?.iter_mut().find(serves)?;
        self.uses += 1;
        weight.last_use = self.uses;
        Some(weight.operand.clone())
    }

    /// Adds a copy and removes those of other versions, to which a weight never returns.
    pub(crate) fn insert(&mut self, slot: usize, mut weight: CachedWeight) -> Added {
        self.uses += 1;
        weight.last_use = self.uses;
        let (domain, recorded) = (weight.domain, weight.recorded);
        let weights = self.by_slot.entry(slot).or_default();
        weights.retain(|other| other.version == weight.version);
        let position = weights.iter().position(|other| other.domain == domain);
        let replaced = position.map(|position| weights.swap_remove(position));
        weights.push(weight);
        if !recorded {
            trim(weights, false, self.uses);
        }
        Added { slot, domain, replaced }
    }

    /// Removes the copies that a scope has added and restores those that they replaced.
    pub(crate) fn undo(&mut self, added: Vec<Added>) {
        for Added { slot, domain, replaced } in added.into_iter().rev() {
            let weights = self.by_slot.entry(slot).or_default();
            weights.retain(|weight| weight.domain != domain);
            weights.extend(replaced);
        }
    }

    /// Called by a commit: removes the copies that were not used after the first `since` uses, except for the [`KEPT`] most
    /// recently used.
    pub(crate) fn trim(&mut self, since: u64) {
        for weights in self.by_slot.values_mut() {
            trim(weights, true, since);
        }
    }
}

fn trim(weights: &mut Vec<CachedWeight>, recorded: bool, since: u64) {
    let of_kind = weights.iter().filter(|weight| weight.recorded == recorded);
    let mut uses: Vec<u64> = of_kind.map(|weight| weight.last_use).collect();
    uses.sort_unstable_by(|a, b| b.cmp(a));
    let Some(&oldest) = uses.get(KEPT - 1) else { return };
    weights
        .retain(|weight| weight.recorded != recorded || weight.last_use >= oldest || weight.last_use > since);
}
