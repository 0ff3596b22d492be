//! FP8 copies of weights, so that microbatches and evaluations quantize each version of a weight once.
//!
//! A copy can be used again as long as its weight has the version that it was made from and its recipe is used again. So a
//! copy of a newer version removes all older ones of its slot, whatever recipe they were made for. While a weight does not
//! change, a commit leaves the copies that its scope used, and of all others those among the [`KEPT`] used last: recipes that
//! are nested at each step keep theirs, and so do two that take turns. A recipe beyond that quantizes the weight again, and
//! records its amax again.
//!
//! Evaluations keep copies of their own, which have recorded no amax and have no transpose. They remove none of training's.

use fp8_kernels::Operand;
use std::collections::HashMap;

/// How many copies of one version of a weight stay although the last scope did not use them all.
const KEPT: usize = 2;

/// The copies of all slots.
#[derive(Debug, Default)]
pub(crate) struct WeightCache {
    by_slot: HashMap<usize, Vec<CachedWeight>>,
    uses: u64,
}

#[derive(Debug)]
pub(crate) struct CachedWeight {
    pub(crate) domain: usize,
    pub(crate) version: u64,
    /// False for an evaluation's.
    pub(crate) recorded: bool,
    /// The capture in which it was quantized: a recorded step quantizes its weights anew at each replay, and reads no
    /// operand that replays do not.
    pub(crate) capture: Option<u64>,
    pub(crate) operand: Operand,
    last_use: u64,
}

/// A copy that an open scope has added, and the evaluation's that it replaced.
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

    /// How often copies have been used: tells later what was used since.
    pub(crate) fn uses(&self) -> u64 {
        self.uses
    }

    /// The copy of this version for a domain. Codes of a recording are written when it is replayed, which may never be: a
    /// copy serves the capture in which it was made. Only evaluations take one that has recorded nothing.
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

    /// Adds a copy, and removes those of other versions: a weight never returns to one.
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

    /// Takes back what a scope has added.
    pub(crate) fn undo(&mut self, added: Vec<Added>) {
        for Added { slot, domain, replaced } in added.into_iter().rev() {
            let weights = self.by_slot.entry(slot).or_default();
            weights.retain(|weight| weight.domain != domain);
            weights.extend(replaced);
        }
    }

    /// At a commit: removes the copies that were not used since there were `since` uses, but for the last ones.
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
