//! The rules in which the defaults differ from Transformer Engine. Each switch is tested alone against the default, and
//! then all of them together.

use super::support::{forward, input, scale_of, scaling, short, slot_state, step};
use fp8_recipe::{DelayedScaling, Recipe};

/// Runs one scope for each tensor. Returns the scale of the first quantization, the scale and window after each scope,
/// and the number of non-finite amaxes.
fn run(recipe: DelayedScaling, tensors: &[&[f32]]) -> (f32, Vec<(f32, Vec<f32>)>, u64) {
    let (mut scaling, recipe) = (scaling(&["fc"]), Recipe::from(recipe));
    let mut first = None;
    let mut states = Vec::new();
    for values in tensors {
        let mut cx = scaling.autocast(&recipe).unwrap();
        let (x8, _) = forward(&mut cx, &input("fc"), values);
        cx.commit().unwrap();
        first.get_or_insert(scale_of(&x8));
        states.push(slot_state(&scaling, &input("fc")));
    }
    let report =
        scaling.slot_reports().unwrap().into_iter().find(|report| report.name == *input("fc").name());
    (first.unwrap(), states, report.unwrap().non_finite)
}

#[test]
fn first_step_calibration() {
    let (first, states, _) = run(short(), &[&[3.5], &[7.0]]);
    assert_eq!((first, states[0].0, states[1].0), (128.0, 128.0, 64.0));
    let te = DelayedScaling { calibrate_first_step: false, ..short() };
    let (first, states, _) = run(te, &[&[3.5], &[7.0]]);
    assert_eq!((first, states[0].0, states[1].0), (1.0, 128.0, 64.0));
}

#[test]
fn first_tensors_that_say_nothing_leave_the_slot_unset() {
    for nothing in [&[0.0, 0.0][..], &[f32::INFINITY, 1.0], &[f32::NAN, f32::NAN], &[f32::NEG_INFINITY]] {
        let (first, states, _) = run(short(), &[nothing, &[3.5]]);
        assert_eq!((first, states[0].0, states[1].0), (1.0, -1.0, 128.0), "{nothing:?}");
    }
    // NaN beside numbers: the amax ignores it.
    let (first, states, _) = run(short(), &[&[f32::NAN, 3.5]]);
    assert_eq!((first, states[0].0), (128.0, 128.0));
}

#[test]
fn a_slot_unset_after_zeros_calibrates_on_its_next_tensor() {
    let (mut scaling, recipe) = (scaling(&["fc"]), short().into());
    step(&mut scaling, &recipe, &input("fc"), &[0.0]).unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("fc"), &[7.0]).0), 64.0);
    cx.commit().unwrap();
}

#[test]
fn a_first_scale_is_taken_by_policy_and_margin() {
    use fp8_recipe::ScalingFactorComputeAlgo::PowerOfTwo;
    let recipe = DelayedScaling { margin: 1, scaling_factor_compute_algo: PowerOfTwo, ..short() };
    assert_eq!(run(recipe, &[&[3.0]]).0, 64.0);
}

#[test]
fn non_finite_amaxes() {
    let tensors: [&[f32]; 4] = [&[3.5], &[f32::INFINITY], &[7.0], &[1.0]];
    let (_, states, counted) = run(short(), &tensors);
    let windows: Vec<_> = states.iter().map(|state| state.1.clone()).collect();
    assert_eq!(windows[1], [0.0, 0.0, 3.5]);
    assert_eq!(windows[3], [3.5, 7.0, 1.0]);
    assert_eq!(states.iter().map(|state| state.0).collect::<Vec<_>>(), [128.0, 128.0, 64.0, 64.0]);
    assert_eq!(counted, 1);

    let te = DelayedScaling { record_non_finite: true, ..short() };
    let (_, states, counted) = run(te, &tensors);
    assert_eq!(states[3].1, [f32::INFINITY, 7.0, 1.0]);
    // An infinity in the window freezes the scale until it has dropped out.
    assert_eq!(states.iter().map(|state| state.0).collect::<Vec<_>>(), [128.0; 4]);
    assert_eq!(counted, 0);
}

#[test]
fn zeros() {
    let tensors: [&[f32]; 3] = [&[3.5], &[0.0], &[1.0]];
    let (_, states, _) = run(short(), &tensors);
    assert_eq!(states[2].1, [3.5, 0.0, 1.0]);
    let te = DelayedScaling { zero_is_skipped: true, ..short() };
    let (_, states, _) = run(te, &tensors);
    assert_eq!(states[1], (128.0, vec![0.0, 0.0, 3.5]));
    assert_eq!(states[2].1, [0.0, 3.5, 1.0]);
}

#[test]
fn all_three_at_once() {
    let te = short().with_te_rules();
    assert_eq!((te.calibrate_first_step, te.record_non_finite, te.zero_is_skipped), (false, true, true));
    let (first, states, _) = run(te, &[&[0.0], &[3.5], &[f32::INFINITY], &[7.0]]);
    assert_eq!(first, 1.0);
    assert_eq!(states[0], (1.0, vec![0.0; 3]));
    assert_eq!(states[3], (128.0, vec![3.5, f32::INFINITY, 7.0]));
}
