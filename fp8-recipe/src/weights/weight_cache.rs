//! The cache of FP8 weights, through which microbatches and evaluations quantize each version of a weight once.
//!
//! Under a recipe with state, a weight's amax is recorded once for each version: by the first committed scope that uses the
//! version. From then on the weight has a *record*, until it changes: the scale that its FP8 copy is made with. Copies are
//! memory only. While a weight does not change, a commit keeps the copies that its scope used and the [`KEPT`] most recently
//! used ones; a copy that is needed again is made from the record and has the same codes.
//!
//! The scale of the record is the one that the recording scope quantized with, if a recorded amax had determined it.
//! Otherwise that scope used a first scale: 1, or one from the tensor alone. The record then has the scale that the scope's
//! commit computes, and the copy is made again with it: in the next scope, or under Transformer Engine's rules in the next
//! optimizer step. Which of the two it is, the device decides ([`Arena::cast_scales`](fp8_kernels::Arena::cast_scales)), so
//! the host never waits for it.
//!
//! Evaluations use the same scales. They have separate copies if they come first, which have recorded no amax and have no
//! transpose. They never remove a training copy.

use crate::weights::weight_state::Bound;
use crate::{WeightState, WeightVersion};
use fp8_kernels::{Cell, Device, Operand, Result, UNSET};
use std::collections::HashMap;
use std::sync::Arc;

/// The number of copies of one version that a commit keeps even if its scope did not use them.
const KEPT: usize = 2;

/// The weights of all slots.
#[derive(Debug, Default)]
pub(crate) struct WeightCache {
    by_slot: HashMap<usize, Vec<Weight>>,
    /// The scales that recorded steps read, which loading a state replaces in place.
    captured: Vec<Captured>,
    /// Loaded records whose weights are not known yet, with their domains.
    unbound: Vec<(usize, WeightState)>,
    uses: u64,
}

/// The weight that a layer asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) slot: usize,
    pub(crate) domain: usize,
    pub(crate) version: u64,
    /// The parameter's own version, unless the caller gave a number.
    pub(crate) of: Option<&'a Arc<WeightVersion>>,
    /// The capture that is under way. A recorded step quantizes its weights again at each replay, and reads only operands that
    /// the replay writes.
    pub(crate) capture: Option<u64>,
    /// Whether no step changes the weight.
    pub(crate) is_constant: bool,
    /// Whether the slot has a scale, as far as the host knows.
    pub(crate) is_determined: bool,
}

impl Wanted<'_> {
    fn key(&self) -> Key {
        Key { domain: self.domain, capture: self.capture }
    }

    /// The optimizer step that is under way.
    fn step(&self) -> Option<u64> {
        self.of.map(|version| version.steps())
    }
}

/// The result of looking up a weight in the cache: a copy, or the scale to quantize it with.
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack")]
#[derive(Debug)]
pub(crate) enum Found {
    /// A copy that exists.
    Copy(Operand),
    /// Quantized with the scale of its record. Nothing is recorded.
    Again(Cell, Basis),
    /// Quantized with the slot's scale. A scope that records does so.
    New,
}

/// The source of a copy's scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    /// The record.
    Record,
    /// The record, for the rest of the optimizer step in which it was made.
    Step,
    /// The slot's scale after this many updates of its arena.
    Live(u64),
}

/// The recipe that a weight is quantized for, and the capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    domain: usize,
    capture: Option<u64>,
}

#[derive(Debug, Clone)]
struct Weight {
    key: Key,
    version: u64,
    of: Option<Arc<WeightVersion>>,
    /// The optimizer step in which it was recorded.
    step: Option<u64>,
    /// `None` before its scope is committed, under a recipe without state, and if only evaluations have used it.
    record: Option<Record>,
    training: Option<Copy>,
    evaluation: Option<(Operand, Basis, u64)>,
}

/// A scale that a recorded step reads at each replay.
#[derive(Debug)]
struct Captured {
    slot: usize,
    domain: usize,
    version: u64,
    scale: Cell,
}

/// A version of a weight has one record under a domain.
impl PartialEq for Captured {
    fn eq(&self, other: &Self) -> bool {
        (self.slot, self.domain, self.version) == (other.slot, other.domain, other.version)
    }
}

/// The scales of a recorded weight. Together with its value, they determine its codes.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) scale: Cell,
    /// The scale for the rest of the optimizer step, under Transformer Engine's rules.
    pub(crate) step_scale: Option<Cell>,
}

#[derive(Debug, Clone)]
struct Copy {
    operand: Operand,
    /// Whether it was made with the scale of the record.
    is_settled: bool,
    /// The number of the scope that made it.
    scope: u64,
    last_use: u64,
}

/// A weight that an open scope has added, and what it replaced.
#[derive(Debug)]
pub(crate) struct Added {
    pub(crate) slot: usize,
    pub(crate) domain: usize,
    capture: Option<u64>,
    replaced: Option<Weight>,
}

impl Weight {
    fn new(wanted: &Wanted<'_>) -> Self {
        Self {
            key: wanted.key(),
            version: wanted.version,
            of: wanted.of.cloned(),
            step: wanted.step(),
            record: None,
            training: None,
            evaluation: None,
        }
    }

    /// Returns the scale that the record asks for in this optimizer step.
    fn scale(&self, wanted: &Wanted<'_>) -> Option<(&Cell, Basis)> {
        let record = self.record.as_ref()?;
        let is_same_step = self.step.is_some() && self.step == wanted.step();
        let step_scale = record.step_scale.as_ref().filter(|_| is_same_step);
        Some(step_scale.map_or((&record.scale, Basis::Record), |cell| (cell, Basis::Step)))
    }

    /// Returns whether its training copy is the one that scopes use now.
    fn serves(&self, wanted: &Wanted<'_>) -> bool {
        let basis = self.scale(wanted).map(|(_, basis)| basis);
        self.training.as_ref().is_some_and(|copy| copy.is_settled || basis != Some(Basis::Record))
    }

    fn is_empty(&self) -> bool {
        self.record.is_none() && self.training.is_none() && self.evaluation.is_none()
    }
}

impl WeightCache {
    /// Returns the number of FP8 copies.
    pub(crate) fn len(&self) -> usize {
        let copies = |weight: &Weight| {
            usize::from(weight.training.is_some()) + usize::from(weight.evaluation.is_some())
        };
        self.by_slot.values().flatten().map(copies).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.by_slot.clear();
        self.unbound.clear();
    }

    /// Returns the number of uses of copies so far, from which [`trim`](Self::trim) later knows what was used since.
    pub(crate) fn uses(&self) -> u64 {
        self.uses
    }

    fn get(&mut self, wanted: &Wanted<'_>) -> Option<&mut Weight> {
        let key = wanted.key();
        let weights = self.by_slot.get_mut(&wanted.slot)?;
        weights.iter_mut().find(|weight| weight.key == key && weight.version == wanted.version)
    }

    /// Finds a weight for a scope that records.
    pub(crate) fn for_training(&mut self, wanted: &Wanted<'_>) -> Found {
        self.uses += 1;
        let uses = self.uses;
        self.take_into_capture(wanted);
        let Some(weight) = self.get(wanted) else { return Found::New };
        if weight.serves(wanted)
            && let Some(copy) = &mut weight.training
        {
            copy.last_use = uses;
            return Found::Copy(copy.operand.clone());
        }
        weight.scale(wanted).map_or(Found::New, |(cell, basis)| Found::Again(cell.clone(), basis))
    }

    /// A recorded step quantizes a weight that no step changes with the scale of its record, as other steps do.
    fn take_into_capture(&mut self, wanted: &Wanted<'_>) {
        if !wanted.is_constant || wanted.capture.is_none() || self.get(wanted).is_some() {
            return;
        }
        let eager = Wanted { capture: None, ..*wanted };
        let weight = self.get(&eager).filter(|weight| weight.record.is_some());
        let Some(mut weight) = weight.cloned() else { return };
        (weight.key, weight.training, weight.evaluation) = (wanted.key(), None, None);
        // A replay is another step.
        weight.step = None;
        if let Some(record) = &weight.record {
            if wanted.is_determined {
                record.scale.assume_determined();
            }
            let Wanted { slot, domain, version, .. } = *wanted;
            let captured = Captured { slot, domain, version, scale: record.scale.clone() };
            if !self.captured.contains(&captured) {
                self.captured.push(captured);
            }
        }
        let weights = self.by_slot.entry(wanted.slot).or_default();
        weights.retain(|other| other.key.capture.is_none() || other.key.capture == wanted.capture);
        weights.push(weight);
    }

    /// Finds a weight for an evaluation. `live` is the number of updates of the slot's arena.
    pub(crate) fn for_evaluation(&mut self, wanted: &Wanted<'_>, live: u64) -> Found {
        self.uses += 1;
        let uses = self.uses;
        self.take_into_capture(wanted);
        let Some(weight) = self.get(wanted) else { return Found::New };
        if weight.serves(wanted)
            && let Some(copy) = &mut weight.training
        {
            copy.last_use = uses;
            return Found::Copy(copy.operand.clone());
        }
        let (cell, basis) = match weight.scale(wanted) {
            Some((cell, basis)) => (Some(cell.clone()), basis),
            None => (None, Basis::Live(live)),
        };
        if let Some((operand, made, last_use)) = &mut weight.evaluation
            && *made == basis
        {
            *last_use = uses;
            return Found::Copy(operand.clone());
        }
        cell.map_or(Found::New, |cell| Found::Again(cell, basis))
    }

    /// Returns the copy that the scope of this number used, for a layer that runs its forward again.
    pub(crate) fn for_replay(&mut self, wanted: &Wanted<'_>, scope: u64) -> Option<Operand> {
        let copy = self.get(wanted)?.training.as_ref().filter(|copy| copy.scope <= scope)?;
        Some(copy.operand.clone())
    }

    /// Adds the first copy of a version and removes those of other versions, to which a weight never returns.
    pub(crate) fn insert(
        &mut self,
        wanted: &Wanted<'_>,
        operand: Operand,
        is_settled: bool,
        scope: u64,
    ) -> Added {
        let (key, last_use) = (wanted.key(), self.uses);
        let weights = self.by_slot.entry(wanted.slot).or_default();
        weights.retain(|other| {
            let capture = other.key.capture;
            other.version == wanted.version && (capture.is_none() || capture == wanted.capture)
        });
        let position = weights.iter().position(|other| other.key == key);
        let replaced = position.map(|position| weights.swap_remove(position));
        let training = Some(Copy { operand, is_settled, scope, last_use });
        weights.push(Weight { training, ..Weight::new(wanted) });
        Added { slot: wanted.slot, domain: wanted.domain, capture: wanted.capture, replaced }
    }

    /// Adds a copy that was made from the record.
    pub(crate) fn insert_again(&mut self, wanted: &Wanted<'_>, operand: Operand, basis: Basis, scope: u64) {
        let last_use = self.uses;
        if let Some(weight) = self.get(wanted) {
            weight.training = Some(Copy { operand, is_settled: basis == Basis::Record, scope, last_use });
            weight.evaluation = None;
        }
    }

    /// Replaces the training copy by one that has columnwise codes in addition.
    pub(crate) fn complete(&mut self, wanted: &Wanted<'_>, whole: &Operand) {
        if let Some(copy) = self.get(wanted).and_then(|weight| weight.training.as_mut()) {
            copy.operand = whole.clone();
        }
    }

    /// Adds the copy of an evaluation.
    pub(crate) fn insert_evaluation(&mut self, wanted: &Wanted<'_>, operand: Operand, basis: Basis) {
        let last_use = self.uses;
        if self.get(wanted).is_none() {
            let weights = self.by_slot.entry(wanted.slot).or_default();
            weights.retain(|other| other.version == wanted.version);
            weights.push(Weight::new(wanted));
        }
        if let Some(weight) = self.get(wanted) {
            weight.evaluation = Some((operand, basis, last_use));
        }
        let Some(weights) = self.by_slot.get_mut(&wanted.slot) else { return };
        let oldest = nth_newest(weights.iter().filter_map(|weight| Some(weight.evaluation.as_ref()?.2)));
        for weight in weights.iter_mut() {
            weight.evaluation.take_if(|(_, _, last_use)| *last_use < oldest);
        }
        weights.retain(|weight| !weight.is_empty());
    }

    /// Removes the weights that a scope has added and restores those that they replaced.
    pub(crate) fn undo(&mut self, added: Vec<Added>) {
        for Added { slot, domain, capture, replaced } in added.into_iter().rev() {
            let weights = self.by_slot.entry(slot).or_default();
            weights.retain(|weight| weight.key != Key { domain, capture });
            weights.extend(replaced);
        }
    }

    /// Called by a commit for a weight that its scope has added.
    pub(crate) fn record(&mut self, added: &Added, record: Record) {
        let key = Key { domain: added.domain, capture: added.capture };
        let weights = self.by_slot.get_mut(&added.slot).into_iter().flatten();
        if let Some(weight) = weights.into_iter().find(|weight| weight.key == key) {
            weight.record = Some(record);
        }
    }

    /// Called by a commit: removes the copies that were not used after the first `since` uses, except for the [`KEPT`] most
    /// recently used.
    pub(crate) fn trim(&mut self, since: u64) {
        for weights in self.by_slot.values_mut() {
            let uses = weights.iter().filter_map(|weight| Some(weight.training.as_ref()?.last_use));
            let oldest = nth_newest(uses);
            for weight in weights.iter_mut() {
                weight.training.take_if(|copy| copy.last_use < oldest && copy.last_use <= since);
            }
            weights.retain(|weight| !weight.is_empty());
        }
    }

    /// Replaces the scales that recorded steps read of a domain whose state was loaded, so that they continue from it. `loaded`
    /// returns the scale of a slot's weight, if there is one.
    pub(crate) fn reload(&self, domain: usize, loaded: impl Fn(usize) -> Option<f32>) -> Result<()> {
        let captured = self.captured.iter().filter(|captured| captured.domain == domain);
        let scales = captured.filter_map(|captured| Some((&captured.scale, loaded(captured.slot)?)));
        scales.into_iter().try_for_each(|(cell, scale)| cell.write(scale))
    }

    /// Removes the copies that evaluations have made with the slots' scales under a domain, which starts again.
    pub(crate) fn forget_evaluations(&mut self, domain: usize) {
        for weights in self.by_slot.values_mut() {
            for weight in weights.iter_mut().filter(|weight| weight.key.domain == domain) {
                weight.evaluation = None;
            }
            weights.retain(|weight| !weight.is_empty());
        }
    }

    /// Returns the scales of the copies that an open scope has used and not added, by slot: what a replay of it quantizes
    /// with.
    pub(crate) fn scales_in_use(
        &self,
        domain: usize,
        capture: Option<u64>,
    ) -> impl Iterator<Item = (usize, &Cell)> {
        let key = Key { domain, capture };
        let weights =
            self.by_slot.iter().flat_map(|(&slot, weights)| weights.iter().map(move |of| (slot, of)));
        weights.filter(move |(_, weight)| weight.key == key).filter_map(|(slot, weight)| {
            let (record, copy) = (weight.record.as_ref()?, weight.training.as_ref()?);
            let step_scale = record.step_scale.as_ref().filter(|_| !copy.is_settled);
            Some((slot, step_scale.unwrap_or(&record.scale)))
        })
    }

    /// Returns the records under a domain of parameters that have not changed since, by slot.
    pub(crate) fn state(&self, domain: usize, names: &[Arc<str>]) -> Result<Vec<WeightState>> {
        let mut states = Vec::new();
        for (&slot, weights) in &self.by_slot {
            for weight in weights.iter().filter(|of| of.key == (Key { domain, capture: None })) {
                let (Some(record), Some(of), Some(name)) = (&weight.record, &weight.of, names.get(slot))
                else {
                    continue;
                };
                let steps = weight.step.unwrap_or(of.steps());
                let state = WeightState {
                    slot: name.clone(),
                    scale: record.scale.read()?,
                    step_scale: record.step_scale.as_ref().map(Cell::read).transpose()?,
                    bound: Some(Bound { version: weight.version, steps, of: of.clone() }),
                };
                states.extend(state.now());
            }
        }
        states.sort_by(|a, b| a.slot.cmp(&b.slot));
        Ok(states)
    }

    /// Tells which weights the loaded records describe, and adds those that are known now.
    pub(crate) fn bind(
        &mut self,
        version: &mut dyn FnMut(&str) -> Option<Arc<WeightVersion>>,
        slot: impl Fn(&str) -> Option<usize>,
        device: &Device,
    ) -> Result<()> {
        let mut unbound = std::mem::take(&mut self.unbound);
        for (_, weight) in &mut unbound {
            if let Some(version) = version(&weight.slot) {
                weight.bind(&version);
            }
        }
        self.restore_all(unbound, slot, device)
    }

    /// Adds records of loaded weights, each with its domain; those that are not bound wait. `slot` returns the index of a slot.
    pub(crate) fn restore_all(
        &mut self,
        weights: Vec<(usize, WeightState)>,
        slot: impl Fn(&str) -> Option<usize>,
        device: &Device,
    ) -> Result<()> {
        let (bound, unbound): (Vec<_>, Vec<_>) =
            weights.into_iter().partition(|(_, weight)| weight.is_bound());
        self.unbound.extend(unbound);
        let scales = bound.iter().map(|(_, weight)| weight.scale);
        let step_scales = bound.iter().map(|(_, weight)| weight.step_scale.unwrap_or(UNSET));
        let cells = Cell::block(&scales.chain(step_scales).collect::<Vec<_>>(), device)?;
        let (scales, step_scales) = cells.split_at(bound.len());
        for (((domain, weight), scale), step_scale) in bound.iter().zip(scales).zip(step_scales) {
            let Some(slot) = slot(&weight.slot) else { continue };
            let step_scale = weight.step_scale.map(|_| step_scale.clone());
            self.restore(slot, *domain, weight, Record { scale: scale.clone(), step_scale });
        }
        Ok(())
    }

    /// Adds a record that was loaded.
    fn restore(&mut self, slot: usize, domain: usize, state: &WeightState, record: Record) {
        let Some(Bound { version, steps, of }) = &state.bound else { return };
        let weights = self.by_slot.entry(slot).or_default();
        weights.push(Weight {
            key: Key { domain, capture: None },
            version: *version,
            of: Some(of.clone()),
            step: state.step_scale.map(|_| *steps),
            record: Some(record),
            training: None,
            evaluation: None,
        });
    }
}

/// Returns the use that is the [`KEPT`]-th from the newest; 0 if there are fewer.
fn nth_newest(uses: impl Iterator<Item = u64>) -> u64 {
    let mut uses: Vec<u64> = uses.collect();
    uses.sort_unstable_by(|a, b| b.cmp(a));
    uses.get(KEPT - 1).copied().unwrap_or(0)
}
