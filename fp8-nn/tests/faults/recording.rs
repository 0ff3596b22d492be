//! Any call of a step that is recorded, of its replay, and of the graph's end.

use crate::fault::{self, expect_typed, is_dispensable, is_release};
use crate::rig::Rig;
use crate::training::Training;
use fp8_nn::prelude::*;

/// The last part of a recorded step that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Done {
    Nothing,
    Recorded,
    Read,
    Replayed,
    ReadAgain,
    Dropped,
}

/// Records a step, replays it, and reads both losses.
pub(crate) fn record(training: &mut Training, done: &mut Done) -> Result<[u32; 2]> {
    *done = Done::Nothing;
    let device = training.device.clone();
    let (graph, loss): (Graph, Tensor) = device.capture(|| training.queue())?;
    *done = Done::Recorded;
    let first = loss.item()?.to_bits();
    *done = Done::Read;
    graph.replay()?;
    *done = Done::Replayed;
    let second = loss.item()?.to_bits();
    *done = Done::ReadAgain;
    drop(graph);
    *done = Done::Dropped;
    Ok([first, second])
}

#[test]
fn any_call_of_a_recording_and_its_replay_may_fail() {
    let rig = Rig::new();
    let mut training = Training::warm(rig.open());
    training.save(rig.path()).unwrap();
    let mut done = Done::Nothing;
    // Once before: the second stream is made, and memory that a graph holds comes back.
    training.restore(rig.path());
    record(&mut training, &mut done).unwrap();
    training.restore(rig.path());
    let before = training.bytes(rig.path());
    let (calls, losses) = rig.calls(|| record(&mut training, &mut done).unwrap());
    let twice = training.bytes(rig.path());
    training.restore(rig.path());
    assert_eq!(training.step().unwrap(), losses[0], "an eager step's loss");
    let once = training.bytes(rig.path());

    let faults = fault::chosen(&calls, 100);
    let mut unnoticed = 0;
    for fault in &faults {
        let is_release = is_release(&fault.function);
        training.restore(rig.path());
        rig.fail(fault);
        let result = record(&mut training, &mut done);
        rig.stop_failing();
        match result {
            Ok(found) => {
                // The graph's own end waits for its last launch.
                let ends = fault.function == "cuStreamSynchronize" && fault.count == calls[&fault.function];
                let may_pass = ends || is_dispensable(&fault.function) || is_release;
                assert!(may_pass, "{fault} failed unnoticed");
                assert_eq!(found, losses, "{fault}");
                unnoticed += 1;
            }
            Err(error) => {
                expect_typed(&error, fault);
                assert!(!is_release, "{fault}: {error}");
            }
        }
        if is_release {
            drop(training);
            let left = rig.left();
            assert!(left.len() <= 1, "{fault}: {left:?}");
            training = Training::warm(rig.open());
            continue;
        }
        let expected = match done {
            Done::Nothing => &before,
            Done::Recorded | Done::Read => &once,
            Done::Replayed | Done::ReadAgain | Done::Dropped => &twice,
        };
        assert!(training.bytes(rig.path()) == *expected, "{fault}, {done:?}: what lasts");
        if fault.count == 1 {
            training.restore(rig.path());
            assert_eq!(record(&mut training, &mut done).unwrap(), losses, "after {fault}");
        }
    }
    println!("recording: {} faults, {unnoticed} unnoticed", faults.len());
    assert!(faults.len() > 100);
    drop(training);
    assert_eq!(rig.left(), [""; 0]);
}
