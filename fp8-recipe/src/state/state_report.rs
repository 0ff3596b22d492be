//! Reports of how a saved state, and the amaxes of earlier recipes, were used.

use crate::{Direction, RecipeLabel};
use std::fmt;
use std::sync::Arc;

/// Reports from which state the slots of a [`Scaling`](crate::Scaling) started: what
/// [`load_state`](crate::Scaling::load_state) did with a saved state, and what new recipes took over from earlier ones.
///
/// Recipes are shown by short names; [`RecipeLabel`] also has all of their options. `Display` writes one line: "scaling
/// state: 12 slots taken over, 6 slots recomputed (margin=0 → margin=1)".
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, LoadedSlot, NewSlot, Recipe, Scaling, StartsNew};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// for margin in [0, 1] {
///     let recipe = Recipe::from(DelayedScaling { margin, ..Default::default() });
///     let mut cx = scaling.autocast(&recipe)?;
///     ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
///     cx.commit()?;
/// }
/// let report = scaling.state_report();
/// let LoadedSlot { slot, from, recipe, .. } = &report.recomputed[0];
/// assert_eq!(&**slot, "fc.input");
/// assert_eq!((from.to_string(), recipe.to_string()), ("delayed".to_owned(), "delayed (margin=1)".to_owned()));
/// let NewSlot { slot, reason, .. } = &report.new[0];
/// assert_eq!((&**slot, *reason), ("fc.weight", StartsNew::NeverRan));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StateReport {
    /// Slots that continue with their history and scale unchanged: the recipe is the same, or differs only in the history's
    /// length or in the group.
    pub taken_over: Vec<LoadedSlot>,
    /// Slots that continue with the amaxes of another recipe. Their own recipe has computed new scales from them.
    pub recomputed: Vec<LoadedSlot>,
    /// Slots that start without a history: their next tensor gives the scale, or the scale is 1 under Transformer Engine's
    /// first-step rule.
    pub new: Vec<NewSlot>,
    /// Saved arenas with a history that no recipe has used so far. They are kept: the first scope of their recipe continues
    /// them, other new recipes take amaxes from them, and [`state`](crate::Scaling::state) saves them again.
    pub unused: Vec<UnusedArena>,
}

/// A slot that continues from a history, as listed in a [`StateReport`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedSlot {
    /// The slot's name.
    pub slot: Arc<str>,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The recipe and group that it runs under.
    pub recipe: RecipeLabel,
    /// The recipe and group that recorded the history.
    pub from: RecipeLabel,
}

/// A slot without a history, as listed in a [`StateReport`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSlot {
    /// The slot's name.
    pub slot: Arc<str>,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The recipe and group that it runs under.
    pub recipe: RecipeLabel,
    /// Why no scale could be computed from the history of an earlier recipe.
    pub reason: StartsNew,
}

/// Why a slot starts without a history: see [`StateReport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StartsNew {
    /// It has not run under any recipe of the group whose amaxes the new recipe can take.
    NeverRan,
    /// It ran last under a recipe with a history of length 1, which keeps no amaxes.
    NoWindow,
    /// Its history has no finite amax greater than 0.
    NoAmax,
    /// It ran under another recipe, and starts under a [`CustomRecipe`](crate::CustomRecipe), which continues only its own
    /// state.
    OwnState,
}

/// A saved arena that no recipe has used since it was loaded, as listed in a [`StateReport`].
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, Direction, GemmSlots, Scaling, UnusedArena};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut trained = Scaling::new(&fc, &device)?;
/// let mut cx = trained.autocast(&DelayedScaling::default().into())?;
/// ops::quantize(&Tensor::from_vec(vec![3.5f32], [1, 1], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
///
/// let mut loaded = Scaling::new(&fc, &device)?;
/// let report = loaded.load_state(&trained.state()?)?; // no scope of the recipe is open yet
/// let UnusedArena { recipe, direction, updates } = &report.unused[0];
/// assert_eq!((recipe.to_string(), *direction, *updates), ("delayed".to_owned(), Direction::Forward, 1));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedArena {
    /// The recipe and group that it was saved under.
    pub recipe: RecipeLabel,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The number of committed scopes that had updated it.
    pub updates: u64,
}

impl StateReport {
    /// Returns whether all of a saved state was taken over unchanged: nothing is recomputed, new or unused.
    pub fn is_plain(&self) -> bool {
        self.recomputed.is_empty() && self.new.is_empty() && self.unused.is_empty()
    }

    /// Removes the entries of an arena that starts again.
    pub(crate) fn forget(&mut self, recipe: &RecipeLabel, direction: Direction) {
        let is_kept = |slot: &LoadedSlot| slot.recipe != *recipe || slot.direction != direction;
        self.taken_over.retain(is_kept);
        self.recomputed.retain(is_kept);
        self.new.retain(|slot| slot.recipe != *recipe || slot.direction != direction);
    }

    /// Keeps the entries of these slots alone.
    pub(crate) fn keep_slots(&mut self, is_kept: impl Fn(&Arc<str>) -> bool) {
        self.taken_over.retain(|loaded| is_kept(&loaded.slot));
        self.recomputed.retain(|loaded| is_kept(&loaded.slot));
        self.new.retain(|new| is_kept(&new.slot));
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.taken_over.append(&mut other.taken_over);
        self.recomputed.append(&mut other.recomputed);
        self.new.append(&mut other.new);
        self.unused.append(&mut other.unused);
    }
}

impl fmt::Display for StateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.taken_over.is_empty() {
            parts.push(format!("{} taken over", count(self.taken_over.len(), "slot")));
        }
        if let Some(first) = self.recomputed.first() {
            let is_like_first =
                |slot: &LoadedSlot| (&slot.from, &slot.recipe) == (&first.from, &first.recipe);
            let more = if self.recomputed.iter().all(is_like_first) { "" } else { ", and others" };
            let change = first.from.difference(&first.recipe);
            parts.push(format!("{} recomputed ({change}{more})", count(self.recomputed.len(), "slot")));
        }
        for (reason, text) in [
            (StartsNew::NeverRan, "never ran"),
            (StartsNew::NoWindow, "a history of length 1 keeps no amaxes"),
            (StartsNew::NoAmax, "no finite amax above 0 in the history"),
            (StartsNew::OwnState, "a custom recipe continues only its own state"),
        ] {
            let slots = self.new.iter().filter(|slot| slot.reason == reason).count();
            if slots > 0 {
                parts.push(format!("{} new ({text})", count(slots, "slot")));
            }
        }
        if !self.unused.is_empty() {
            parts.push(format!("{} not used so far", count(self.unused.len(), "saved arena")));
        }
        if parts.is_empty() {
            parts.push("nothing loaded".to_owned());
        }
        write!(f, "scaling state: {}", parts.join(", "))
    }
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
