//! Traces of the delayed-scaling update: every `*.json` file, each trace in it a case.
//!
//! A trace is a configuration and, step by step, the reduced staging value of every slot; after the step the scale
//! of every slot and, at some steps, its window (oldest first, without the staging cell). Values are f32 bits; a NaN equals any NaN.

use std::fs;
use std::path::Path;

use fp8_kernels::Device;
use fp8_recipe::{
    AmaxComputeAlgo, DelayedScaling, Direction, Origin, Recipe, Scaling, ScalingFactorComputeAlgo, SlotName,
    SlotRole, Slots,
};
use serde::Deserialize;
use serde_json::Value;

use super::tally::{Mismatches, Tally, listing, say_ignored};
use crate::result::Result as TaskResult;

/// One configuration and what happened under it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Trace {
    pub(super) format: Format,
    pub(super) amax_history_len: usize,
    pub(super) amax_compute_algo: Algorithm,
    pub(super) margin: i32,
    pub(super) policy: Policy,
    /// Scales are computed at every n-th step.
    pub(super) interval: u32,
    pub(super) slots: Vec<String>,
    steps: Vec<Step>,
}

/// Forward slots hold E4M3, backward slots of a HYBRID recipe E5M2.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub(super) enum Format {
    E4M3,
    E5M2,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Algorithm {
    Max,
    MostRecent,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Policy {
    Exact,
    PowerOfTwo,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    /// 0: the slot did not run.
    staged: Vec<u32>,
    scale: Vec<u32>,
    window: Option<Vec<Vec<u32>>>,
}

/// Scales and windows of all slots after a step, in the order of the trace's slots.
#[derive(Debug)]
pub(super) struct State {
    pub(super) scale: Vec<f32>,
    pub(super) window: Vec<Vec<f32>>,
}

type Check<T = ()> = Result<T, String>;

/// Replays every trace of `folder` through the scopes that a model would open.
pub(super) fn run(folder: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    let mut ignored = Vec::new();
    for (file, path) in listing(folder)? {
        if path.extension().is_none_or(|end| end != "json") {
            ignored.push(file);
            continue;
        }
        let before = (tally.passed, tally.failed);
        match traces(&fs::read_to_string(&path)?) {
            Err(error) => tally.record(&format!("recipe/{file}"), Err(error)),
            Ok(traces) => {
                for (number, trace) in traces.iter().enumerate() {
                    let name =
                        trace.as_ref().map_or_else(|_| String::new(), |trace| format!(" {}", trace.name()));
                    let result =
                        trace.as_ref().map_err(Clone::clone).and_then(|trace| compare(trace, device));
                    tally.record(&format!("recipe/{file} trace {number}{name}"), result);
                }
            }
        }
        let (passed, failed) = (tally.passed - before.0, tally.failed - before.1);
        println!("recipe/{file}: {passed} passed, {failed} failed");
    }
    say_ignored("recipe", &ignored);
    Ok(())
}

fn compare(trace: &Trace, device: &Device) -> Check {
    let mut player = Player::new(trace, device).map_err(|error| error.to_string())?;
    trace.replay(|staged| player.step(staged).map_err(|error| error.to_string()))
}

/// A model of the trace's slots in one arena, and the recipe.
struct Player {
    slots: Vec<SlotName>,
    scaling: Scaling,
    recipe: Recipe,
}

impl Slots for Trace {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.slot_names().iter().for_each(f);
    }
}

impl Player {
    fn new(trace: &Trace, device: &Device) -> fp8_recipe::Result<Self> {
        let recipe = DelayedScaling {
            margin: trace.margin,
            interval: trace.interval.into(),
            fp8_format: fp8_recipe::Format::Hybrid,
            amax_history_len: trace.amax_history_len,
            amax_compute_algo: match trace.amax_compute_algo {
                Algorithm::Max => AmaxComputeAlgo::Max,
                Algorithm::MostRecent => AmaxComputeAlgo::MostRecent,
            },
            scaling_factor_compute_algo: match trace.policy {
                Policy::Exact => ScalingFactorComputeAlgo::Exact,
                Policy::PowerOfTwo => ScalingFactorComputeAlgo::PowerOfTwo,
            },
            ..Default::default()
        };
        let scaling = Scaling::new(trace, device)?;
        Ok(Self { slots: trace.slot_names(), scaling, recipe: recipe.with_te_rules().into() })
    }

    /// A scope in which quantizing finds these amaxes.
    fn step(&mut self, staged: &[f32]) -> fp8_recipe::Result<State> {
        let mut cx = self.scaling.autocast(&self.recipe)?;
        let origins: Vec<Origin> = self.slots.iter().map(|slot| cx.origin(slot)).collect();
        let staged = self.slots.iter().zip(&origins).zip(staged);
        if self.slots.iter().all(|slot| slot.direction() == Direction::Forward) {
            for ((name, _), &amax) in staged {
                cx.slot(name)?.amax.map_or(Ok(()), |cell| cell.merge_max(amax))?;
            }
            cx.commit()?;
        } else {
            cx.commit()?;
            let mut cx = self.scaling.backward()?;
            for ((name, origin), &amax) in staged {
                cx.slot(origin, name)?.amax.map_or(Ok(()), |cell| cell.merge_max(amax))?;
            }
            cx.commit()?;
        }
        self.state()
    }

    fn state(&self) -> fp8_recipe::Result<State> {
        let state = self.scaling.state()?;
        let mut found = State { scale: Vec::new(), window: Vec::new() };
        for name in &self.slots {
            for arena in state.arenas.iter().filter(|arena| arena.direction == name.direction()) {
                if let Some(slot) = arena.slots.iter().position(|slot| slot == name.name()) {
                    found.scale.push(arena.scale[slot]);
                    found.window.push(arena.amax_history.iter().map(|row| row[slot]).collect());
                }
            }
        }
        Ok(found)
    }
}

/// The traces of a file. A trace that cannot be read is a failed case of its own.
pub(super) fn traces(json: &str) -> Check<Vec<Check<Trace>>> {
    #[derive(Deserialize)]
    struct File {
        cases: Vec<Value>,
    }
    let file: File = serde_json::from_str(json).map_err(|error| error.to_string())?;
    Ok(file.cases.into_iter().map(Trace::parse).collect())
}

impl Trace {
    fn parse(json: Value) -> Check<Self> {
        let trace: Self = serde_json::from_value(json).map_err(|error| error.to_string())?;
        if trace.amax_history_len == 0 || trace.interval == 0 {
            return Err("amax_history_len and interval must be at least 1".to_owned());
        }
        let slots = trace.slots.len();
        for (number, step) in trace.steps.iter().enumerate() {
            let windows = step.window.as_deref().unwrap_or_default();
            let of_window = step.window.as_ref().map_or(slots, Vec::len);
            if step.staged.len() != slots || step.scale.len() != slots || of_window != slots {
                return Err(format!("step {number} does not have one value for each of the {slots} slots"));
            }
            if windows.iter().any(|window| window.len() != trace.amax_history_len - 1) {
                let rows = trace.amax_history_len - 1;
                return Err(format!("step {number}: a window has {rows} rows under this history length"));
            }
        }
        Ok(trace)
    }

    fn slot_names(&self) -> Vec<SlotName> {
        let role = match self.format {
            Format::E4M3 => SlotRole::Input,
            Format::E5M2 => SlotRole::GradOutput,
        };
        self.slots.iter().map(|stream| SlotName::new(stream, role)).collect()
    }

    /// Returns the settings that distinguish this trace from the others of its file.
    pub(super) fn name(&self) -> String {
        let Self { format, amax_history_len, amax_compute_algo, margin, policy, interval, .. } = self;
        format!(
            "{format:?} len {amax_history_len} {amax_compute_algo:?} margin {margin} {policy:?} interval {interval}"
        )
    }

    /// Feeds every step's staging values to `update` and compares the state it returns.
    pub(super) fn replay(&self, mut update: impl FnMut(&[f32]) -> Check<State>) -> Check {
        let mut mismatches = Mismatches::default();
        for (number, step) in self.steps.iter().enumerate() {
            let staged: Vec<f32> = step.staged.iter().copied().map(f32::from_bits).collect();
            let state = update(&staged).map_err(|error| format!("step {number}: {error}"))?;
            let mut all = |what: &str, slot: &str, expected: &[u32], actual: &[f32]| {
                if expected.len() != actual.len() {
                    let (is, should) = (actual.len(), expected.len());
                    return Err(format!(
                        "step {number} slot {slot}: {is} values of {what}, expected {should}"
                    ));
                }
                for (row, (&expected, &actual)) in expected.iter().zip(actual).enumerate() {
                    mismatches.compare(is_same(expected, actual), || {
                        let (value, bits) = (f32::from_bits(expected), actual.to_bits());
                        format!(
                            "step {number} slot {slot}: {what}[{row}] is {actual:e} ({bits:#010x}), \
                             expected {value:e} ({expected:#010x})"
                        )
                    });
                }
                Ok(())
            };
            if state.scale.len() != self.slots.len() || state.window.len() != self.slots.len() {
                return Err(format!("step {number}: the state is not one of {} slots", self.slots.len()));
            }
            for (slot, name) in self.slots.iter().enumerate() {
                all("scale", name, &step.scale[slot..=slot], &state.scale[slot..=slot])?;
                if let Some(window) = &step.window {
                    all("window", name, &window[slot], &state.window[slot])?;
                }
            }
        }
        mismatches.finish()
    }
}

fn is_same(expected: u32, actual: f32) -> bool {
    expected == actual.to_bits() || f32::from_bits(expected).is_nan() && actual.is_nan()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Margin 2, E4M3: 448 / 4 / 0.25 = 448, then a slot that did not run, then NaN (kept out of the maximum).
    fn file() -> String {
        let bits = f32::to_bits;
        serde_json::json!({"about": "", "cases": [{
            "format": "E4M3", "amax_history_len": 3, "amax_compute_algo": "max", "margin": 2,
            "policy": "exact", "interval": 1, "slots": ["x"],
            "steps": [
                {"staged": [bits(0.25)], "scale": [bits(448.0)]},
                {"staged": [0], "scale": [bits(448.0)], "window": [[0, bits(0.25)]]},
                {"staged": [bits(f32::NAN)], "scale": [bits(448.0)], "window": [[bits(0.25), 0xffc0_0001u32]]},
            ],
        }]})
        .to_string()
    }

    fn state(scale: f32, window: [f32; 2]) -> Check<State> {
        Ok(State { scale: vec![scale], window: vec![window.to_vec()] })
    }

    fn trace() -> Trace {
        traces(&file()).unwrap().remove(0).unwrap()
    }

    #[test]
    fn a_trace_is_read_and_named() {
        let trace = trace();
        assert_eq!(trace.name(), "E4M3 len 3 Max margin 2 Exact interval 1");
        assert_eq!((trace.format, trace.policy), (Format::E4M3, Policy::Exact));
        assert_eq!(trace.amax_compute_algo, Algorithm::Max);
    }

    #[test]
    fn equal_states_pass_and_any_nan_equals_any() {
        let mut states =
            [state(448.0, [0.0, 0.25]), state(448.0, [0.0, 0.25]), state(448.0, [0.25, f32::NAN])]
                .into_iter();
        let mut staged = Vec::new();
        let result = trace().replay(|values| {
            staged.push(values[0]);
            states.next().unwrap()
        });
        assert_eq!(result, Ok(()));
        assert_eq!((staged[0], staged[1], staged[2].is_nan()), (0.25, 0.0, true));
    }

    #[test]
    fn a_mismatch_tells_step_slot_values_bits_and_count() {
        let error = trace().replay(|_| state(1.0, [0.25, 0.0])).unwrap_err();
        assert_eq!(
            error,
            "step 0 slot x: scale[0] is 1e0 (0x3f800000), expected 4.48e2 (0x43e00000); 6 of 7 differ"
        );
        assert!(trace().replay(|_| Err("no arena".to_owned())).unwrap_err().starts_with("step 0: no arena"));
    }

    #[test]
    fn a_trace_passes_through_the_scopes_and_a_wrong_one_fails() {
        for format in ["E4M3", "E5M2"] {
            let file = file().replace("E4M3", format);
            let expected = if format == "E4M3" { Ok(()) } else { Err(()) }; // the scales in it are E4M3's
            assert_eq!(
                compare(traces(&file).unwrap()[0].as_ref().unwrap(), &Device::cpu()).map_err(drop),
                expected
            );
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.json"), file()).unwrap();
        fs::write(folder.path().join("b.json"), "{}").unwrap();
        fs::write(folder.path().join("c.py"), "").unwrap();
        let mut tally = Tally::default();
        run(folder.path(), &Device::cpu(), &mut tally).unwrap();
        assert_eq!((tally.passed, tally.failed), (1, 1));
    }

    #[test]
    fn what_cannot_be_read_fails_with_a_sentence() {
        assert!(traces("{}").unwrap_err().contains("cases"));
        let unknown = file().replace("exact", "exotic");
        assert!(traces(&unknown).unwrap()[0].as_ref().unwrap_err().contains("unknown variant `exotic`"));
        let short = file().replace("\"slots\":[\"x\"]", "\"slots\":[\"x\",\"w\"]");
        assert!(traces(&short).unwrap()[0].as_ref().unwrap_err().contains("each of the 2 slots"));
    }
}
