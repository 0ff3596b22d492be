//! Any call of a step whose plans, kernels and moments are there.

use crate::fault::{self, expect_typed, is_dispensable};
use crate::rig::Rig;
use crate::training::{Stage, Training, expect_useless};
use fp8_nn::prelude::checkpoint;
use std::collections::BTreeMap;

/// An undisturbed step.
struct Survey {
    calls: BTreeMap<String, u64>,
    loss: u32,
    /// The bytes of everything that lasts, before each stage.
    states: BTreeMap<Stage, Vec<u8>>,
}

fn survey(rig: &Rig, training: &mut Training) -> Survey {
    training.save(rig.path()).unwrap();
    training.restore(rig.path());
    // Restored tensors have other addresses, for which products make descriptors once.
    training.step().unwrap();
    training.restore(rig.path());
    let (calls, loss) = rig.calls(|| training.step().unwrap());
    training.restore(rig.path());
    let mut states = BTreeMap::from([(Stage::Forward, training.bytes(rig.path()))]);
    let mut before = |training: &mut Training| {
        states.insert(training.stage, training.bytes(rig.path()));
        Ok(())
    };
    assert_eq!(training.queue_until(&mut before).unwrap().item().unwrap().to_bits(), loss);
    states.insert(Stage::Read, training.bytes(rig.path()));
    assert_ne!(states[&Stage::Forward], states[&Stage::Backward]);
    assert_ne!(states[&Stage::Backward], states[&Stage::Clip]);
    assert_eq!(states[&Stage::Clip], states[&Stage::Optimize]);
    assert_ne!(states[&Stage::Optimize], states[&Stage::Clear]);
    Survey { calls, loss, states }
}

#[test]
fn any_call_of_a_step_may_fail() {
    let rig = Rig::new();
    let mut training = Training::warm(rig.open());
    let survey = survey(&rig, &mut training);
    let old = std::fs::read(checkpoint::path(rig.path())).unwrap();
    let faults = fault::chosen(&survey.calls, 100);
    let (mut poisoned, mut unnoticed) = (0, 0);
    for fault in &faults {
        training.restore(rig.path());
        rig.fail(fault);
        let result = training.step();
        rig.stop_failing();
        match result {
            Ok(loss) => {
                assert!(is_dispensable(&fault.function), "{fault} failed unnoticed");
                assert_eq!(loss, survey.loss, "{fault}");
                unnoticed += 1;
            }
            Err(error) => expect_typed(&error, fault),
        }
        if training.is_poisoned() {
            assert_eq!(
                (fault.function.as_str(), training.stage),
                ("cuLaunchKernel", Stage::Optimize),
                "{fault}"
            );
            expect_useless(&mut training, rig.path(), &old);
            drop(training);
            assert_eq!(rig.left(), [""; 0], "{fault}");
            poisoned += 1;
            training = Training::warm(rig.open());
        } else {
            let found = training.bytes(rig.path());
            assert!(found == survey.states[&training.stage], "{fault}, in {:?}: what lasts", training.stage);
        }
        // Another call of the same function tells nothing new.
        if fault.count == 1 {
            training.restore(rig.path());
            assert_eq!(training.step().unwrap(), survey.loss, "after {fault}");
        }
    }
    println!("step: {} faults, {unnoticed} unnoticed, {poisoned} in the optimizer's launches", faults.len());
    assert!(faults.len() > 100 && poisoned > 0);
    drop(training);
    assert_eq!(rig.left(), [""; 0]);
}
