//! Any call of a first step, which compiles and loads kernels, plans products and makes moments.

use crate::fault::{self, Fault, expect_typed, is_dispensable, is_release};
use crate::rig::Rig;
use crate::training::{Stage, Training};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::parameters;
use std::collections::BTreeMap;

type State = (Vec<Vec<f32>>, ScalingState, u64);

fn state(training: &Training) -> State {
    let mut values = Vec::new();
    for parameter in parameters(&training.model) {
        values.push(parameter.tensor().to_f32_vec().unwrap());
    }
    (values, training.scaling.state().unwrap(), training.optimizer.steps())
}

/// An undisturbed first step.
struct Survey {
    calls: BTreeMap<String, u64>,
    loss: u32,
    before: State,
    after: State,
}

fn survey(rig: &Rig) -> Survey {
    let mut training = Training::new(rig.open());
    let before = state(&training);
    let (calls, loss) = rig.calls(|| training.step().unwrap());
    let after = state(&training);
    drop(training);
    assert_eq!(rig.left(), [""; 0]);
    Survey { calls, loss, before, after }
}

impl Survey {
    /// Checks the state that a failed step has left, and the loss of a step after it.
    fn check(&self, rig: &Rig, training: &mut Training, fault: &Fault) {
        let (parameters, scaling, steps) = state(training);
        // What fails behind the optimizer's step does not take it back.
        let expected = if training.stage > Stage::Optimize { &self.after } else { &self.before };
        assert_eq!(steps, expected.2, "{fault}");
        assert!(parameters == expected.0, "{fault}: parameters");
        training.save(rig.path()).unwrap();
        if training.stage > Stage::Forward {
            return;
        }
        // A first scale that was found is provisional until the scope's end.
        let mut scales = scaling.arenas.iter().flat_map(|arena| &arena.scale);
        assert!(scales.all(|scale| scale.is_nan() || *scale <= 0.0), "{fault}");
        if fault.count == 1 {
            assert_eq!(training.step().unwrap(), self.loss, "after {fault}");
        }
    }
}

#[test]
fn any_call_of_a_first_step_may_fail() {
    let rig = Rig::new();
    let survey = survey(&rig);
    let faults = fault::chosen(&survey.calls, 6);
    let (mut unnoticed, mut poisoned) = (0, 0);
    for fault in &faults {
        let mut training = Training::new(rig.open());
        rig.fail(fault);
        let result = training.step();
        rig.stop_failing();
        match result {
            Ok(found) => {
                assert!(
                    is_dispensable(&fault.function) || is_release(&fault.function),
                    "{fault} failed unnoticed"
                );
                assert_eq!(found, survey.loss, "{fault}");
                unnoticed += 1;
            }
            Err(error) => {
                expect_typed(&error, fault);
                assert!(!is_release(&fault.function), "{fault}: {error}");
                if training.is_poisoned() {
                    let place = (fault.function.as_str(), training.stage);
                    assert_eq!(place, ("cuLaunchKernel", Stage::Optimize), "{fault}");
                    poisoned += 1;
                } else {
                    survey.check(&rig, &mut training, fault);
                }
            }
        }
        drop(training);
        let left = rig.left();
        assert!(left.len() <= usize::from(is_release(&fault.function)), "{fault}: {left:?}");
    }
    println!(
        "first step: {} faults, {unnoticed} unnoticed, {poisoned} in the optimizer's launches",
        faults.len()
    );
    assert!(faults.len() > 100);
}
