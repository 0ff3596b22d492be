//! The saved state of a weight that has not changed since it was last quantized.

use crate::WeightVersion;
use fp8_kernels::UNSET;
use std::sync::Arc;

/// A weight that has not changed since it was last quantized and recorded under a recipe: a part of
/// [`ArenaState`](crate::ArenaState).
///
/// Its amax is in the history already, and its slot may have got another scale since. After the state is loaded, the FP8 copy
/// is made with the saved scale, and nothing is recorded again, as if the training had not been interrupted.
///
/// Two are equal if their slots and scales are. The versions of weights differ between processes, so a state that was read
/// from a file applies to a model's weights only after [`Scaling::bind_weights`](crate::Scaling::bind_weights).
///
/// ```
/// use fp8_recipe::WeightState;
/// let state = WeightState::new("fc.weight".into(), 128.0, None);
/// assert_eq!((&*state.slot, state.scale, state.step_scale), ("fc.weight", 128.0, None));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WeightState {
    /// The slot's name.
    pub slot: Arc<str>,
    /// The scale that copies of the weight are made with; −1 if no recorded amax had determined one.
    pub scale: f32,
    /// Under Transformer Engine's rules, the scale that the rest of the optimizer step in which it was quantized uses.
    pub step_scale: Option<f32>,
    /// The weight that it describes. `None` until it is bound.
    pub(crate) bound: Option<Bound>,
}

/// A weight as it was when it was quantized, or bound.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) version: u64,
    pub(crate) steps: u64,
    pub(crate) of: Arc<WeightVersion>,
}

impl Bound {
    fn is_current(&self) -> bool {
        self.version == self.of.current()
    }
}

impl WeightState {
    /// Returns the state of a weight that was read from a file.
    pub fn new(slot: Arc<str>, scale: f32, step_scale: Option<f32>) -> Self {
        Self { slot, scale, step_scale, bound: None }
    }

    /// Returns whether it describes the present value of the weight with this version.
    pub fn is_of(&self, version: &Arc<WeightVersion>) -> bool {
        self.bound.as_ref().is_some_and(|bound| Arc::ptr_eq(&bound.of, version) && bound.is_current())
    }

    /// Makes it describe the present value of the weight with this version.
    pub(crate) fn bind(&mut self, version: &Arc<WeightVersion>) {
        self.bound = Some(Bound { version: version.current(), steps: version.steps(), of: version.clone() });
    }

    /// Returns whether it describes the present value of a weight.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound.as_ref().is_some_and(Bound::is_current)
    }

    /// Returns the state as it is now: `None` if the weight has changed since.
    pub(crate) fn now(&self) -> Option<Self> {
        let mut now = self.clone();
        if let Some(bound) = &self.bound {
            if !bound.is_current() {
                return None;
            }
            now.step_scale = self.step_scale.filter(|_| bound.steps == bound.of.steps());
        }
        Some(now)
    }

    /// Returns why it cannot be loaded.
    pub(crate) fn problem(&self, names: &[Arc<str>]) -> Option<String> {
        let Self { slot, scale, step_scale, .. } = self;
        if !names.contains(slot) {
            return Some(format!("weights: `{slot}` is not among its slots"));
        }
        let is_scale = |scale: f32| scale == UNSET || scale.is_finite() && scale >= f32::MIN_POSITIVE;
        let bad = [Some(*scale), *step_scale].into_iter().flatten().find(|&scale| !is_scale(scale))?;
        Some(format!(
            "weights: scale {bad:e} for `{slot}`: expected -1 (not calibrated) or a finite number of at least 2^-126"
        ))
    }
}

impl PartialEq for WeightState {
    fn eq(&self, other: &Self) -> bool {
        (&self.slot, self.scale, self.step_scale) == (&other.slot, other.scale, other.step_scale)
    }
}
