//! The state that is saved: histories, scales and update counts, by name.

use crate::recipes::delayed_scaling::MAX_HISTORY_LEN;
use crate::recipes::recipe_key::with_history_len;
use crate::state::state_terms::{SavedRows, StateTerms};
use crate::{Direction, DropoutProgress, RecipeLabel, StateDigest, WeightState};
use fp8_kernels::UNSET;
use std::sync::Arc;

/// The largest count of updates that is loaded. No training reaches it, and counting on from it does not overflow.
const MAX_UPDATES: u64 = 1 << 62;

/// The state of a [`Scaling`](crate::Scaling) between two scopes: the scales and histories of all recipes that have been
/// used. [`Scaling::state`](crate::Scaling::state) returns it, and [`Scaling::load_state`](crate::Scaling::load_state) takes
/// it.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{ArenaState, DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut trained = Scaling::new(&fc, &device)?;
/// let mut cx = trained.autocast(&DelayedScaling { amax_history_len: 3, ..Default::default() }.into())?;
/// ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
///
/// let state = trained.state()?;
/// let forward: &ArenaState = &state.arenas[0];
/// assert_eq!(forward.scale, [128.0, -1.0]); // fc.input; fc.weight has not run
/// assert_eq!(forward.amax_history, [[0.0, 0.0], [3.5, 0.0]]);
///
/// let mut resumed = Scaling::new(&fc, &device)?;
/// resumed.load_state(&state)?;
/// assert_eq!(resumed.state()?, state);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScalingState {
    /// Two arenas for each recipe and group: forward and backward.
    pub arenas: Vec<ArenaState>,
    /// The progress of dropout's random numbers. `None` if no scope has drawn any and no seed was set. Loading a state
    /// without it leaves the random numbers of the `Scaling` unchanged.
    pub dropout: Option<DropoutProgress>,
}

/// The scales and histories of the slots of one pass, under one recipe and group.
///
/// It is a part of a [`ScalingState`], which has an example. [`Scaling::load_state`](crate::Scaling::load_state) says what
/// may differ in the model that loads it.
#[derive(Debug, Clone, PartialEq)]
pub struct ArenaState {
    /// The key of the recipe: all of its options except the length of the history.
    pub recipe: String,
    /// The id of the group that amaxes are reduced over.
    pub group: Option<String>,
    /// The pass.
    pub direction: Direction,
    /// The number of committed scopes that have updated it.
    pub updates: u64,
    /// Slot names, sorted.
    pub slots: Vec<Arc<str>>,
    /// One scale per slot; −1 for a slot that is not calibrated yet.
    pub scale: Vec<f32>,
    /// Past amaxes, `[rows][slots]`, oldest row first. The staging row is not part of it. Under a
    /// [`CustomRecipe`](crate::CustomRecipe): a row for each number of its state, in their order, then the newest amaxes.
    pub amax_history: Vec<Vec<f32>>,
    /// For each slot, the number of its last update in this arena, counted over its updates under all recipes. Of two
    /// arenas, the one with the larger number has the newer history of the slot; 0 means that the slot was never
    /// updated. Versions before this field saved none. It is then empty, and the last arena in the list counts as the
    /// one that was updated last.
    pub last_updates: Vec<u64>,
    /// The slots whose scale of 1 no recorded amax has determined yet, sorted. Only under recipes whose first scale is 1: others
    /// have a scale of −1 there. Slots that were never updated are among them, listed or not.
    pub undetermined: Vec<Arc<str>>,
    /// The weights that have not changed since they were quantized and recorded, sorted by slot. Only for parameters that
    /// share their version: see [`Forward::quantize_parameter`](crate::Forward::quantize_parameter).
    pub weights: Vec<WeightState>,
    /// For a backward arena: whether a forward scope of its recipe was committed after the last backward scope. The next
    /// backward scope then updates it, whether or not a layer runs in it.
    pub awaits_backward: bool,
}

impl ArenaState {
    /// Returns the label that reports show for its recipe and group.
    pub(crate) fn label(&self) -> RecipeLabel {
        let group = self.group.as_deref();
        match StateTerms::parse(&self.recipe) {
            Some(StateTerms { rows: SavedRows::Custom, .. }) => RecipeLabel::new(&self.recipe, group),
            _ => {
                let key = with_history_len(&self.recipe, self.amax_history.len() + 1);
                RecipeLabel::new(&key, group)
            }
        }
    }

    /// Returns why this arena cannot be loaded into a model with the slots `names`: the field, its value, and the expected
    /// value.
    pub(crate) fn problem(&self, names: &[Arc<str>]) -> Option<String> {
        let slots = names.len();
        let model = "load it into the model that it was saved from";
        if let Some((theirs, ours)) = self.slots.iter().zip(names).find(|(a, b)| a != b) {
            return Some(format!("slots: it has `{theirs}` where this model has `{ours}`: {model}"));
        }
        if self.slots.len() != slots {
            return Some(format!("slots: it has {}, this model {slots}: {model}", self.slots.len()));
        }
        if self.scale.len() != slots {
            return Some(format!("scale: it has {} values for {slots} slots", self.scale.len()));
        }
        if let Some((row, values)) = self.amax_history.iter().enumerate().find(|(_, row)| row.len() != slots)
        {
            return Some(format!("amax_history: row {row} has {} values for {slots} slots", values.len()));
        }
        if self.amax_history.len() >= MAX_HISTORY_LEN {
            let rows = self.amax_history.len();
            return Some(format!(
                "amax_history: it has {rows} rows: expected at most {}",
                MAX_HISTORY_LEN - 1
            ));
        }
        if !self.last_updates.is_empty() && self.last_updates.len() != slots {
            return Some(format!(
                "last_updates: it has {} values for {slots} slots",
                self.last_updates.len()
            ));
        }
        if let Some(problem) = self.weights.iter().find_map(|weight| weight.problem(names)) {
            return Some(problem);
        }
        let counts = [("updates", Some(&self.updates)), ("last_updates", self.last_updates.iter().max())];
        for (field, count) in counts {
            if let Some(count) = count.filter(|&&count| count > MAX_UPDATES) {
                return Some(format!("{field}: {count}: expected at most 2^62, which no training reaches"));
            }
        }
        let is_scale = |scale: f32| scale == UNSET || scale.is_finite() && scale >= f32::MIN_POSITIVE;
        if let Some((name, scale)) = names.iter().zip(&self.scale).find(|(_, scale)| !is_scale(**scale)) {
            return Some(format!(
                "scale: {scale:e} for `{name}`: expected -1 (not calibrated) or a finite number of at least 2^-126"
            ));
        }
        let rows = StateTerms::parse(&self.recipe).map(|terms| terms.rows);
        for row in &self.amax_history {
            if let Some((name, value)) = names.iter().zip(row).find(|(_, value)| !is_valid(rows, **value)) {
                let expected = match rows {
                    Some(SavedRows::Custom) => "a finite number",
                    Some(SavedRows::Amaxes { record_non_finite: true }) => {
                        "a finite number of at least 0 or infinity"
                    }
                    _ => "a finite number of at least 0",
                };
                return Some(format!("amax_history: {value:e} for `{name}`: expected {expected}"));
            }
        }
        None
    }

    /// Returns whether a recorded amax has determined the scale of a slot.
    pub(crate) fn is_determined(&self, slot: usize) -> bool {
        let never_updated = self.scale[slot] == 1.0 && self.last_updates[slot] == 0;
        self.scale[slot] > 0.0 && !never_updated && !self.undetermined.contains(&self.slots[slot])
    }

    /// Returns a copy with the last update of every slot. If none were saved, slots with a history count as updated at
    /// `default`.
    pub(crate) fn with_last_updates(&self, default: u64) -> Self {
        let mut arena = self.clone();
        if arena.last_updates.is_empty() {
            let has_past = |slot: usize| {
                arena.scale[slot] != arena.first_scale()
                    || arena.amax_history.iter().any(|row| row[slot] != 0.0)
            };
            arena.last_updates =
                (0..arena.slots.len()).map(|slot| if has_past(slot) { default } else { 0 }).collect();
        }
        arena
    }

    /// Returns a digest of the scale and of the history of each slot, and one of the number of updates. Their names end in
    /// `of`.
    pub(crate) fn digests(&self, of: &str) -> Vec<StateDigest> {
        let mut all = Vec::new();
        for (index, (slot, scale)) in self.slots.iter().zip(&self.scale).enumerate() {
            all.push(StateDigest::new(format!("the scale of `{slot}`{of}"), [scale.to_le_bytes()]));
            let history =
                self.amax_history.iter().filter_map(|row| row.get(index)).map(|amax| amax.to_le_bytes());
            all.push(StateDigest::new(format!("the amax history of `{slot}`{of}"), history));
        }
        let name = format!("the number of {} updates{of}", self.direction);
        all.push(StateDigest::new(name, [self.updates.to_le_bytes()]));
        all
    }

    /// Returns whether all ranks of a group must have the same arena: it has been updated with reduced amaxes. An arena that
    /// was never updated has no state of its own, because it starts again whenever the others change.
    pub(crate) fn is_common(&self) -> bool {
        self.updates > 0 && StateTerms::parse(&self.recipe).is_none_or(|terms| terms.reduce_amax)
    }
}

/// Returns whether saved rows may contain a value. NaN is refused under every recipe: quantizing leaves it out of the amax.
fn is_valid(rows: Option<SavedRows>, value: f32) -> bool {
    match rows {
        Some(SavedRows::Custom) => value.is_finite(),
        Some(SavedRows::Amaxes { record_non_finite: true }) if value == f32::INFINITY => true,
        _ => value.is_finite() && !value.is_sign_negative(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_of_1_is_determined_once_an_update_has_found_it() {
        let slots: Vec<Arc<str>> = ["new", "found", "other", "listed", "unset"].map(Into::into).to_vec();
        let arena = ArenaState {
            recipe: String::new(),
            group: None,
            direction: Direction::Forward,
            updates: 3,
            scale: vec![1.0, 1.0, 2.0, 1.0, UNSET],
            amax_history: Vec::new(),
            last_updates: vec![0, 3, 0, 3, 3],
            undetermined: vec![slots[3].clone()],
            slots,
            weights: Vec::new(),
            awaits_backward: false,
        };
        let determined: Vec<bool> = (0..5).map(|slot| arena.is_determined(slot)).collect();
        assert_eq!(determined, [false, true, true, false, false]);
    }
}
