//! What the quantizer slots of the FP8 training showed: amax and scale over time, and values lost to the format.

/// About this many steps are observed, spread evenly: few enough to leave the median time of a step alone.
const MAX_SAMPLES: usize = 100;

/// One quantizer slot after a step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SlotState {
    /// Path of the tensor, as in checkpoints.
    pub(crate) name: String,
    /// Whether it belongs to the backward pass.
    pub(crate) backward: bool,
    /// Largest absolute value of the last step; negative or NaN where there was none.
    pub(crate) amax: f32,
    /// The factor before the cast.
    pub(crate) scale: f32,
    /// Values beyond the format's largest, over the observed steps.
    pub(crate) saturated: u64,
    /// Values other than zero that became zero, likewise.
    pub(crate) underflowed: u64,
    /// Values quantized, likewise.
    pub(crate) elements: u64,
    /// NaN values, likewise.
    pub(crate) nan: u64,
}

impl SlotState {
    pub(crate) fn saturated_share(&self) -> f64 {
        share(self.saturated, self.elements)
    }

    pub(crate) fn underflowed_share(&self) -> f64 {
        share(self.underflowed, self.elements)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The slots over time.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    every: usize,
    /// Steps recorded.
    steps: Vec<usize>,
    /// For each of them (amax, scale) of every slot.
    values: Vec<Vec<(f32, f32)>>,
    /// Last state of each slot.
    last: Vec<SlotState>,
}

impl Telemetry {
    /// For a training of `steps` steps.
    pub(crate) fn new(steps: usize) -> Self {
        Self { every: steps.div_ceil(MAX_SAMPLES).max(1), ..Self::default() }
    }

    /// Whether `step` is to be observed; the last one always is.
    pub(crate) fn wants(&self, step: usize, last: usize) -> bool {
        step.is_multiple_of(self.every) || step == last
    }

    pub(crate) fn record(&mut self, step: usize, slots: Vec<SlotState>) {
        self.steps.push(step);
        self.values.push(slots.iter().map(|slot| (slot.amax, slot.scale)).collect());
        self.last = slots;
    }

    /// Every how many steps one is observed.
    pub(crate) fn every(&self) -> usize {
        self.every
    }

    /// Every slot as the last recorded step left it.
    pub(crate) fn slots(&self) -> &[SlotState] {
        &self.last
    }

    /// The slots that saw NaN.
    pub(crate) fn with_nan(&self) -> impl Iterator<Item = &SlotState> {
        self.last.iter().filter(|slot| slot.nan > 0)
    }

    /// (step, amax) of a slot, where there was an amax above zero.
    pub(crate) fn amaxes(&self, slot: usize) -> Vec<(f64, f64)> {
        self.series(slot, |(amax, _)| amax)
    }

    /// (step, scale) of a slot.
    pub(crate) fn scales(&self, slot: usize) -> Vec<(f64, f64)> {
        self.series(slot, |(_, scale)| scale)
    }

    fn series(&self, slot: usize, value: impl Fn((f32, f32)) -> f32) -> Vec<(f64, f64)> {
        let points = self.steps.iter().zip(&self.values);
        let points =
            points.filter_map(|(&step, values)| Some((step as f64, f64::from(value(*values.get(slot)?)))));
        points.filter(|(_, value)| value.is_finite() && *value > 0.0).collect()
    }

    /// Slots worth a curve, at most six: of each kind of tensor (the last part of a name, and the pass) in the
    /// order of how many there are, the first and the last in natural order. With few layers these are the ends of
    /// the model.
    pub(crate) fn chosen(&self) -> Vec<usize> {
        let mut kinds: Vec<(&str, bool, Vec<usize>)> = Vec::new();
        for (index, slot) in self.last.iter().enumerate() {
            let kind = slot.name.rsplit(['.', '/']).next().unwrap_or_default();
            match kinds.iter_mut().find(|(name, backward, _)| *name == kind && *backward == slot.backward) {
                Some((_, _, slots)) => slots.push(index),
                None => kinds.push((kind, slot.backward, vec![index])),
            }
        }
        kinds.sort_by_key(|(_, _, slots)| std::cmp::Reverse(slots.len()));
        let mut chosen = Vec::new();
        for (_, _, mut slots) in kinds {
            slots.sort_by_key(|&slot| natural(&self.last[slot].name));
            chosen.extend(slots.first());
            chosen.extend(slots.last().filter(|_| slots.len() > 1));
        }
        chosen.truncate(6);
        chosen
    }
}

/// A key that sorts `layers.10` after `layers.9`.
fn natural(name: &str) -> Vec<(u64, String)> {
    name.split(['.', '/']).map(|part| (part.parse().unwrap_or(u64::MAX), part.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(name: &str, backward: bool) -> SlotState {
        SlotState {
            name: name.into(),
            backward,
            amax: 1.0,
            scale: 2.0,
            saturated: 1,
            underflowed: 2,
            elements: 8,
            nan: 0,
        }
    }

    #[test]
    fn the_ends_of_each_kind_are_chosen() {
        let mut telemetry = Telemetry::new(1);
        let names = ["m.10.fc.x", "m.2.fc.x", "m.2.fc.w", "m.10.fc.w", "m.9.fc.x"];
        let mut slots: Vec<SlotState> = names.iter().map(|name| slot(name, false)).collect();
        slots.push(slot("m.2.fc.dy", true));
        telemetry.record(1, slots);
        assert_eq!(telemetry.chosen(), [1, 0, 2, 3, 5]);
    }

    #[test]
    fn long_trainings_are_thinned() {
        let telemetry = Telemetry::new(5001);
        let recorded = (1..=5001).filter(|&step| telemetry.wants(step, 5001)).count();
        assert!((80..=MAX_SAMPLES + 1).contains(&recorded), "{recorded}");
        assert!(telemetry.wants(5001, 5001));
    }

    #[test]
    fn slots_with_nan_are_found() {
        let mut telemetry = Telemetry::new(1);
        telemetry.record(1, vec![slot("a", false), SlotState { nan: 3, ..slot("b", true) }]);
        let found: Vec<_> = telemetry.with_nan().map(|slot| (&*slot.name, slot.nan)).collect();
        assert_eq!(found, [("b", 3)]);
    }

    #[test]
    fn cells_without_a_value_leave_a_gap() {
        let mut telemetry = Telemetry::new(3);
        for (step, amax) in [(1, -1.0), (2, f32::NAN), (3, 5.0)] {
            telemetry.record(step, vec![SlotState { amax, ..slot("a", false) }]);
        }
        assert_eq!(telemetry.amaxes(0), [(3.0, 5.0)]);
        assert_eq!(telemetry.scales(0).len(), 3);
        assert_eq!(telemetry.slots()[0].underflowed_share(), 0.25);
    }
}
