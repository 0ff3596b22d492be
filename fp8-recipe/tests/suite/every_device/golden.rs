//! Traces of the scale update made by another program, replayed bit for bit. Transformer Engine's own rules: no first-step
//! calibration, non-finite amaxes recorded, 0 = did not run.

use super::support::{device, grad, input};
use fp8_recipe::{
    AmaxComputeAlgo, DelayedScaling, Direction, Format, Recipe, Scaling, ScalingFactorComputeAlgo, SlotName,
    Slots,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    format: String,
    amax_history_len: usize,
    amax_compute_algo: String,
    margin: i32,
    policy: String,
    interval: u64,
    slots: Vec<String>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    staged: Vec<u32>,
    scale: Vec<u32>,
    window: Option<Vec<Vec<u32>>>,
}

/// One slot each.
struct Streams(Vec<SlotName>);

impl Slots for Streams {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().for_each(f);
    }
}

impl Case {
    fn recipe(&self, fp8_format: Format) -> Recipe {
        let amax_compute_algo = match self.amax_compute_algo.as_str() {
            "max" => AmaxComputeAlgo::Max,
            "most_recent" => AmaxComputeAlgo::MostRecent,
            other => panic!("algorithm {other}"),
        };
        let scaling_factor_compute_algo = match self.policy.as_str() {
            "exact" => ScalingFactorComputeAlgo::Exact,
            "power_of_two" => ScalingFactorComputeAlgo::PowerOfTwo,
            other => panic!("policy {other}"),
        };
        let (margin, interval, amax_history_len) = (self.margin, self.interval, self.amax_history_len);
        let recipe = DelayedScaling { margin, interval, fp8_format, amax_history_len, ..Default::default() };
        DelayedScaling { amax_compute_algo, scaling_factor_compute_algo, ..recipe }.with_te_rules().into()
    }

    /// Stages each step's values in the cells that quantizing would write, commits, and compares.
    fn replay(&self, fp8_format: Format, name: &str) {
        let direction = if self.format == "E4M3" { Direction::Forward } else { Direction::Backward };
        let slot = |path: &String| if direction == Direction::Forward { input(path) } else { grad(path) };
        let slots: Vec<SlotName> = self.slots.iter().map(slot).collect();
        let mut scaling = Scaling::new(&Streams(slots.clone()), &device()).unwrap();
        let recipe = self.recipe(fp8_format);
        let names = scaling.slot_names(direction).to_vec();
        let position = |slot: &SlotName| names.iter().position(|name| name == slot.name()).unwrap();

        for (number, step) in self.steps.iter().enumerate() {
            let staged = slots.iter().zip(&step.staged).map(|(slot, &bits)| (slot, f32::from_bits(bits)));
            let mut cx = scaling.autocast(&recipe).unwrap();
            let origins: Vec<_> = slots.iter().map(|slot| cx.origin(slot)).collect();
            if direction == Direction::Forward {
                staged.for_each(|(slot, amax)| cx.slot(slot).unwrap().amax.unwrap().merge_max(amax).unwrap());
                cx.commit().unwrap();
            } else {
                cx.commit().unwrap();
                let mut cx = scaling.backward().unwrap();
                for ((slot, amax), origin) in staged.zip(&origins) {
                    cx.slot(origin, slot).unwrap().amax.unwrap().merge_max(amax).unwrap();
                }
                cx.commit().unwrap();
            }

            let state = scaling.state().unwrap();
            let arena = state.arenas.iter().find(|arena| arena.direction == direction).unwrap();
            assert_eq!(arena.amax_history.len(), self.amax_history_len - 1);
            for (i, slot) in slots.iter().enumerate() {
                let (at, place) = (position(slot), format!("{name}, step {number}, {}", slot.name()));
                same(step.scale[i], arena.scale[at], &format!("{place}: scale"));
                for (row, &expected) in step.window.iter().flat_map(|window| window[i].iter().enumerate()) {
                    same(expected, arena.amax_history[row][at], &format!("{place}: window[{row}]"));
                }
            }
        }
    }
}

fn same(expected: u32, actual: f32, place: &str) {
    let value = f32::from_bits(expected);
    assert!(
        actual.to_bits() == expected || actual.is_nan() && value.is_nan(),
        "{place} is {actual:e} ({:#010x}), expected {value:e} ({expected:#010x})",
        actual.to_bits()
    );
}

#[test]
fn every_trace_bit_for_bit() {
    let file: File = serde_json::from_str(include_str!("../../golden/recipe/delayed_scaling.json")).unwrap();
    assert_eq!(file.cases.len(), 104);
    for (number, case) in file.cases.iter().enumerate() {
        case.replay(Format::Hybrid, &format!("case {number}, HYBRID"));
        if case.format == "E4M3" {
            case.replay(Format::E4M3, &format!("case {number}, E4M3"));
        }
    }
}
