//! The quantizer slots of the FP8 training over time: amax, scale, and how many values saturated or underflowed.

use fp8_nn::fp8_recipe::{Encoding, Nvfp4Report};
use fp8_nn::prelude::{Direction, Scaling};

use crate::train::nvfp4::Nvfp4Tensor;

/// About this many steps are observed, spread evenly. They are few enough not to affect the median time of a step.
const MAX_SAMPLES: usize = 100;

/// One of this many observed steps measures the tensors in NVFP4, and the last one.
const MEASURED: usize = 10;

/// One quantizer slot after a step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SlotState {
    /// Path of the tensor, as in checkpoints.
    pub(crate) name: String,
    /// Whether it belongs to the backward pass.
    pub(crate) backward: bool,
    /// Largest absolute value of the last step; negative or NaN if there was none.
    pub(crate) amax: f32,
    /// The factor before the cast.
    pub(crate) scale: f32,
    /// Whether the recipe rounds every scale to a power of two.
    pub(crate) has_powers_of_two: bool,
    /// Values beyond the format's largest, over the observed steps.
    pub(crate) saturated: u64,
    /// Values other than zero that became zero, over the observed steps.
    pub(crate) underflowed: u64,
    /// Values quantized, over the observed steps.
    pub(crate) elements: u64,
    /// NaN values, over the observed steps.
    pub(crate) nan: u64,
    /// The SQNR of the codes of the last step, in decibels, if it was measured.
    pub(crate) sqnr: Option<f64>,
    /// Whether its codes have 4 bits.
    pub(crate) is_nvfp4: bool,
    /// The blocks of the last step, if it is in NVFP4 and was measured.
    pub(crate) nvfp4: Option<Nvfp4Report>,
}

/// Returns the slots that have quantized something, always in the same order.
pub(crate) fn slot_states(scaling: &Scaling) -> fp8_nn::Result<Vec<SlotState>> {
    // Slots without values belong to tensors that the model does not quantize.
    let reports = scaling.slot_reports()?.into_iter().filter(|report| report.elements > 0);
    let states = reports.map(|report| SlotState {
        name: report.name.to_string(),
        backward: report.direction == Direction::Backward,
        amax: report.amax,
        scale: report.scale,
        has_powers_of_two: report.has_powers_of_two,
        saturated: report.saturated,
        underflowed: report.underflowed,
        elements: report.elements,
        nan: report.nan,
        sqnr: report.sqnr,
        is_nvfp4: report.encoding == Encoding::E2M1,
        nvfp4: report.nvfp4,
    });
    Ok(states.collect())
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

/// One slot after an observed step.
#[derive(Debug, Clone, Copy)]
struct Point {
    amax: f32,
    scale: f32,
    saturated: u64,
    underflowed: u64,
    elements: u64,
    sqnr: Option<f64>,
}

/// The two ways in which a format loses values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    Saturated,
    Underflowed,
}

impl Point {
    fn lost(&self, loss: Loss) -> u64 {
        match loss {
            Loss::Saturated => self.saturated,
            Loss::Underflowed => self.underflowed,
        }
    }
}

/// The slots of one kind of tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kind {
    /// The last part of their names: `input`, `weight`, `grad_output`.
    pub(crate) name: String,
    backward: bool,
    pub(crate) slots: Vec<usize>,
}

/// The slots over time.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    every: usize,
    /// The observed steps.
    steps: Vec<usize>,
    /// Every slot after each of them.
    points: Vec<Vec<Point>>,
    /// The last state of each slot.
    last: Vec<SlotState>,
    /// The slots in NVFP4, in the same order.
    nvfp4: Vec<Nvfp4Tensor>,
}

impl Telemetry {
    /// Prepares for a training of `steps` steps.
    pub(crate) fn new(steps: usize) -> Self {
        Self { every: steps.div_ceil(MAX_SAMPLES).max(1), ..Self::default() }
    }

    /// Whether `step` is to be observed; the last one always is.
    pub(crate) fn wants(&self, step: usize, last: usize) -> bool {
        step.is_multiple_of(self.every) || step == last
    }

    /// Whether the next observed step, `step`, is to measure the tensors in NVFP4, which takes longer; the last one always is.
    pub(crate) fn measures(&self, step: usize, last: usize) -> bool {
        self.steps.len().is_multiple_of(MEASURED) || step == last
    }

    pub(crate) fn record(&mut self, step: usize, slots: Vec<SlotState>) {
        self.steps.push(step);
        let point = |slot: &SlotState| Point {
            amax: slot.amax,
            scale: slot.scale,
            saturated: slot.saturated,
            underflowed: slot.underflowed,
            elements: slot.elements,
            sqnr: slot.sqnr,
        };
        self.points.push(slots.iter().map(point).collect());
        for slot in slots.iter().filter(|slot| slot.is_nvfp4) {
            let known = self.nvfp4.iter().position(|tensor| tensor.tensor == slot.name);
            let position = known.unwrap_or_else(|| {
                self.nvfp4.push(Nvfp4Tensor::new(&slot.name));
                self.nvfp4.len() - 1
            });
            if let Some(report) = &slot.nvfp4 {
                self.nvfp4[position].add(slot.sqnr, report);
            }
        }
        self.last = slots;
    }

    /// One of this many steps is observed.
    pub(crate) fn every(&self) -> usize {
        self.every
    }

    /// Returns every slot after the last observed step.
    pub(crate) fn slots(&self) -> &[SlotState] {
        &self.last
    }

    /// Returns the slots in NVFP4.
    pub(crate) fn nvfp4(&self) -> &[Nvfp4Tensor] {
        &self.nvfp4
    }

    /// Returns the slots that saw NaN.
    pub(crate) fn with_nan(&self) -> impl Iterator<Item = &SlotState> {
        self.last.iter().filter(|slot| slot.nan > 0)
    }

    /// Returns (step, amax) of a slot wherever its amax was above zero.
    pub(crate) fn amaxes(&self, slot: usize) -> Vec<(f64, f64)> {
        self.series(slot, |point| point.amax)
    }

    /// Returns (step, scale) of a slot.
    pub(crate) fn scales(&self, slot: usize) -> Vec<(f64, f64)> {
        self.series(slot, |point| point.scale)
    }

    /// Returns the observed steps.
    pub(crate) fn steps(&self) -> &[usize] {
        &self.steps
    }

    /// Returns the amax of a slot after each observed step. `None` where there was none above zero.
    pub(crate) fn amaxes_of(&self, slot: usize) -> Vec<Option<f64>> {
        let amax = |point: &Point| Some(f64::from(point.amax)).filter(|amax| amax.is_finite() && *amax > 0.0);
        self.of(slot, amax)
    }

    /// Returns the SQNR of a slot after each observed step, where it was measured.
    pub(crate) fn sqnrs_of(&self, slot: usize) -> Vec<Option<f64>> {
        self.of(slot, |point| point.sqnr)
    }

    /// Returns the share of the values that a slot lost since the observed step before. `None` where it quantized none.
    pub(crate) fn lost_by(&self, slot: usize, loss: Loss) -> Vec<Option<f64>> {
        let mut before = [0, 0];
        let counts = self.of(slot, |point| Some([point.lost(loss), point.elements]));
        let shares = counts.into_iter().map(|counts| {
            let [lost, elements] = counts?;
            let since = [lost.saturating_sub(before[0]), elements.saturating_sub(before[1])];
            before = [lost, elements];
            (since[1] > 0).then(|| share(since[0], since[1]))
        });
        shares.collect()
    }

    fn of<T>(&self, slot: usize, value: impl Fn(&Point) -> Option<T>) -> Vec<Option<T>> {
        self.points.iter().map(|slots| value(slots.get(slot)?)).collect()
    }

    fn series(&self, slot: usize, value: impl Fn(&Point) -> f32) -> Vec<(f64, f64)> {
        let points = self.steps.iter().zip(&self.points);
        let points =
            points.filter_map(|(&step, slots)| Some((step as f64, f64::from(value(slots.get(slot)?)))));
        points.filter(|(_, value)| value.is_finite() && *value > 0.0).collect()
    }

    /// Returns (step, percentage) of the values that the slots of a kind lost since the observed step before.
    pub(crate) fn lost(&self, kind: &Kind, loss: Loss) -> Vec<(f64, f64)> {
        let mut before = [0, 0];
        let mut points = Vec::new();
        for (&step, slots) in self.steps.iter().zip(&self.points) {
            let mut sums = [0, 0];
            for point in kind.slots.iter().filter_map(|&slot| slots.get(slot)) {
                sums = [sums[0] + point.lost(loss), sums[1] + point.elements];
            }
            let [lost, elements] = [0, 1].map(|index| sums[index].saturating_sub(before[index]));
            before = sums;
            if elements > 0 {
                points.push((step as f64, 100.0 * share(lost, elements)));
            }
        }
        points
    }

    /// Returns the kinds of tensors, those with the most slots first. The slots of a kind are in natural order.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = Vec::new();
        for (index, slot) in self.last.iter().enumerate() {
            let name = slot.name.rsplit(['.', '/']).next().unwrap_or_default();
            match kinds.iter_mut().find(|kind| kind.name == name && kind.backward == slot.backward) {
                Some(kind) => kind.slots.push(index),
                None => {
                    let name = name.to_owned();
                    kinds.push(Kind { name, backward: slot.backward, slots: vec![index] });
                }
            }
        }
        for kind in &mut kinds {
            kind.slots.sort_by_key(|&slot| natural(&self.last[slot].name));
        }
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.slots.len()));
        kinds
    }

    /// Returns the slots to plot, at most six: the first and the last of each kind. In a model of layers, these are at
    /// its two ends.
    pub(crate) fn chosen(&self) -> Vec<usize> {
        let mut chosen = Vec::new();
        for kind in self.kinds() {
            chosen.extend(kind.slots.first());
            chosen.extend(kind.slots.last().filter(|_| kind.slots.len() > 1));
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
            has_powers_of_two: false,
            saturated: 1,
            underflowed: 2,
            elements: 8,
            nan: 0,
            sqnr: None,
            is_nvfp4: false,
            nvfp4: None,
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
    fn a_tenth_of_the_observed_steps_measures_and_the_blocks_add_up() {
        let mut telemetry = Telemetry::new(25);
        let report = Nvfp4Report { blocks: 8, lost: 1, fp8_sqnr: Some(31.0), ..Nvfp4Report::default() };
        let mut measured = Vec::new();
        for step in 1..=25 {
            let measures = telemetry.measures(step, 25);
            measured.extend(measures.then_some(step));
            let nvfp4 = measures.then_some(report);
            let plain = slot("a.weight", false);
            telemetry
                .record(step, vec![SlotState { is_nvfp4: true, nvfp4, ..slot("a.input", false) }, plain]);
        }
        assert_eq!(measured, [1, 11, 21, 25]);
        let [tensor] = telemetry.nvfp4() else { panic!("{:?}", telemetry.nvfp4()) };
        assert_eq!((&*tensor.tensor, tensor.measured_steps, tensor.blocks), ("a.input", 4, 32));
        assert_eq!((tensor.lost_blocks, tensor.fp8_sqnr_db), (4, Some(31.0)));
    }

    #[test]
    fn lost_values_are_counted_between_observed_steps() {
        let mut telemetry = Telemetry::new(4);
        let at = |saturated, elements| SlotState { saturated, elements, ..slot("a.x", false) };
        for (step, slots) in [(1, [at(1, 100), at(3, 100)]), (3, [at(1, 200), at(5, 200)])] {
            telemetry.record(step, slots.into());
        }
        telemetry.record(4, [at(1, 200), at(5, 200)].into());
        let kinds = telemetry.kinds();
        assert_eq!(kinds.len(), 1);
        assert_eq!(telemetry.lost(&kinds[0], Loss::Saturated), [(1.0, 2.0), (3.0, 1.0)]);
        assert_eq!(telemetry.lost(&kinds[0], Loss::Underflowed), [(1.0, 2.0), (3.0, 0.0)]);
        assert_eq!(telemetry.lost_by(1, Loss::Saturated), [Some(0.03), Some(0.02), None]);
        assert_eq!(telemetry.steps(), [1, 3, 4]);
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
