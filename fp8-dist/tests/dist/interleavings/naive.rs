//! A model of how scopes change scales, written from the rules alone: one state for all ranks, plain vectors, no arena.

use super::plan::{Frame, Policy, RECIPES, Run, SLOTS};

/// One recipe's knowledge of one pass.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pass {
    pub(crate) updates: u64,
    pub(crate) slots: Vec<Slot>,
}

#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// Oldest first.
    pub(crate) window: Vec<f32>,
    /// None until it is calibrated.
    pub(crate) scale: Option<f32>,
    /// The number of its last update, counted for the slot over all recipes; 0 if it was never updated.
    pub(crate) last: u64,
}

/// The state that all ranks share. `[recipe][pass]`; none before a recipe's first scope.
#[derive(Debug, Clone, Default)]
pub(crate) struct Naive {
    pub(crate) recipes: [Option<[Pass; 2]>; RECIPES],
    clocks: [[u64; SLOTS]; 2],
}

/// The results of one rank in an open scope: amaxes, and first scales that hold until the scope ends. `[recipe][slot]`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Staged {
    amax: [[Option<f32>; SLOTS]; RECIPES],
    first: [[Option<f32>; SLOTS]; RECIPES],
}

/// `fp8_max · 2^−margin / amax`, of amaxes that say something.
pub(crate) fn scale_of(policy: &Policy, pass: usize, amax: f32) -> Option<f32> {
    let largest = [448.0f32, 57344.0][pass] * f32::powi(2.0, -policy.margin);
    (amax.is_finite() && amax > 0.0).then(|| (largest / amax).clamp(f32::MIN_POSITIVE, f32::MAX))
}

fn max(amaxes: impl Iterator<Item = f32>) -> f32 {
    amaxes.fold(0.0, f32::max)
}

/// The newest `len`, behind zeros.
fn newest(amaxes: &[f32], len: usize) -> Vec<f32> {
    let mut padded = vec![0.0; len];
    padded.extend(amaxes);
    padded.split_off(padded.len() - len)
}

impl Naive {
    /// A recording scope of a recipe begins: until the first update of one of its passes, that begins from the newest
    /// amaxes of the others.
    pub(crate) fn open(&mut self, recipe: usize) {
        for pass in 0..2 {
            if self.recipes[recipe].as_ref().is_some_and(|passes| passes[pass].updates > 0) {
                continue;
            }
            let slots = (0..SLOTS).map(|slot| self.begin(recipe, pass, slot)).collect();
            self.recipes[recipe].get_or_insert_default()[pass] = Pass { updates: 0, slots };
        }
    }

    fn begin(&self, recipe: usize, pass: usize, slot: usize) -> Slot {
        let policy = Policy::of(recipe);
        let others = (0..RECIPES).filter(|&other| other != recipe);
        let source = others
            .filter_map(|other| Some(&self.recipes[other].as_ref()?[pass].slots[slot]))
            .filter(|source| source.last > 0)
            .max_by_key(|source| (source.last, source.window.len()));
        let blank = Slot { window: vec![0.0; policy.len - 1], scale: None, last: 0 };
        match source {
            Some(source) if !source.window.is_empty() => Slot {
                window: newest(&source.window, policy.len - 1),
                scale: scale_of(&policy, pass, max(newest(&source.window, policy.len).into_iter())),
                last: source.last,
            },
            _ => blank,
        }
    }

    /// The scale that a rank quantizes with; notes its amax and first scale.
    pub(crate) fn run(&self, staged: &mut Staged, frame: &Frame, pass: usize, run: &Run) -> Option<f32> {
        let amax = if run.value.is_nan() { 0.0 } else { run.value.abs() };
        let recipe = match *frame {
            Frame::Disabled => return None,
            Frame::Current => {
                let usable = amax.is_finite() && amax > 0.0;
                return Some(if usable { ([448.0f32, 57344.0][pass] / amax).min(f32::MAX) } else { 1.0 });
            }
            Frame::Delayed(recipe) => recipe,
        };
        let staging = &mut staged.amax[recipe][run.slot];
        *staging = Some(staging.unwrap_or(0.0).max(amax));
        let known = self.recipes[recipe].as_ref().and_then(|passes| passes[pass].slots[run.slot].scale);
        let first = &mut staged.first[recipe][run.slot];
        Some(known.or(*first).unwrap_or_else(|| {
            *first = scale_of(&Policy::of(recipe), pass, amax);
            first.unwrap_or(1.0)
        }))
    }

    /// The scale of an evaluation, which notes nothing.
    pub(crate) fn evaluate(&self, recipe: usize, run: &Run) -> f32 {
        let mut none = Staged::default();
        self.run(&mut none, &Frame::Delayed(recipe), 0, run).unwrap_or(1.0)
    }

    /// All ranks commit a scope that touched these recipes.
    pub(crate) fn commit(&mut self, touched: &[usize], pass: usize, ranks: &[Staged]) {
        for &recipe in touched {
            let policy = Policy::of(recipe);
            let Some(passes) = &mut self.recipes[recipe] else { continue };
            let Pass { updates, slots } = &mut passes[pass];
            *updates += 1;
            for (index, slot) in slots.iter_mut().enumerate() {
                let amaxes = ranks.iter().filter_map(|rank| rank.amax[recipe][index]);
                let Some(amax) = amaxes.reduce(f32::max).filter(|amax| amax.is_finite()) else { continue };
                self.clocks[pass][index] += 1;
                slot.last = self.clocks[pass][index];
                let largest = max(slot.window.iter().copied().chain([amax]));
                slot.window = newest(&[&slot.window[..], &[amax]].concat(), policy.len - 1);
                if slot.scale.is_none() || updates.is_multiple_of(policy.interval) {
                    slot.scale = scale_of(&policy, pass, largest).or(slot.scale);
                }
            }
        }
    }
}
