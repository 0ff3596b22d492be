//! The cache of quantized weights.

use crate::support::{codes, scale_of, scaling, short, slot_state, tensor, weight};
use fp8_recipe::fp8_kernels::Operand;
use fp8_recipe::{DelayedScaling, Forward, Recipe, Scaling};

fn quantize(cx: &mut Forward<'_>, version: u64, values: &[f32]) -> Operand {
    cx.quantize_weight(&weight("a"), version, &tensor(values)).unwrap()
}

fn step(scaling: &mut Scaling, recipe: &Recipe, version: u64, values: &[f32]) -> Operand {
    let mut cx = scaling.autocast(recipe).unwrap();
    let w8 = quantize(&mut cx, version, values);
    cx.commit().unwrap();
    w8
}

#[test]
fn one_version_is_quantized_once_and_recorded_once() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    let first = step(&mut scaling, &recipe, 1, &[3.5]);
    // Another microbatch: the tensor is not even looked at.
    let second = step(&mut scaling, &recipe, 1, &[99.0]);
    assert_eq!((codes(&first), scale_of(&first)), (codes(&second), scale_of(&second)));
    assert_eq!(slot_state(&scaling, &weight("a")), (128.0, vec![0.0, 0.0, 3.5]));
    let third = step(&mut scaling, &recipe, 2, &[7.0]);
    assert_eq!(scale_of(&third), 128.0);
    assert_eq!(slot_state(&scaling, &weight("a")), (64.0, vec![0.0, 3.5, 7.0]));
    // The cached bytes keep their own factor although the slot's scale has moved on.
    assert_eq!(scale_of(&step(&mut scaling, &recipe, 2, &[7.0])), 128.0);
}

#[test]
fn each_recipe_has_its_own_bytes() {
    let (mut scaling, recipe) = (scaling(&["a"]), Recipe::from(short()));
    let inner = DelayedScaling { margin: 1, ..short() }.into();
    let mut cx = scaling.autocast(&recipe).unwrap();
    let outer = quantize(&mut cx, 1, &[1.0]);
    let nested = quantize(&mut cx.nested(&inner).unwrap(), 1, &[1.0]);
    cx.commit().unwrap();
    assert_eq!((scale_of(&outer), scale_of(&nested)), (448.0, 224.0));
}

#[test]
fn an_evaluation_takes_recorded_bytes_and_leaves_none_to_a_recording_scope() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    let own = quantize(&mut scaling.eval(&recipe).unwrap(), 1, &[7.0]);
    assert_eq!(scale_of(&own), 64.0);
    assert_eq!(codes(&quantize(&mut scaling.eval(&recipe).unwrap(), 1, &[99.0])), codes(&own)); // its own cache
    let recorded = step(&mut scaling, &recipe, 1, &[3.5]);
    assert_eq!(scale_of(&recorded), 128.0);
    assert_eq!(slot_state(&scaling, &weight("a")).1, [0.0, 0.0, 3.5]);
    assert_eq!(scale_of(&quantize(&mut scaling.eval(&recipe).unwrap(), 1, &[99.0])), 128.0);
}

#[test]
fn bytes_of_a_scope_left_without_commit_are_removed() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    for discarded in [true, false] {
        let mut cx = scaling.autocast(&recipe).unwrap();
        assert_eq!(scale_of(&quantize(&mut cx, 1, &[7.0])), 64.0);
        if discarded { cx.discard().unwrap() } else { drop(cx) }
    }
    assert_eq!(scale_of(&step(&mut scaling, &recipe, 1, &[3.5])), 128.0);
    assert_eq!(slot_state(&scaling, &weight("a")).1, [0.0, 0.0, 3.5]);
    // Bytes of a committed scope outlive a later one that only used them.
    let mut cx = scaling.autocast(&recipe).unwrap();
    quantize(&mut cx, 1, &[3.5]);
    drop(cx);
    step(&mut scaling, &recipe, 1, &[99.0]);
    assert_eq!(slot_state(&scaling, &weight("a")).1, [0.0, 0.0, 3.5]);
}

#[test]
fn a_scope_left_without_commit_gives_an_evaluation_its_bytes_back() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    quantize(&mut scaling.eval(&recipe).unwrap(), 1, &[7.0]);
    let mut cx = scaling.autocast(&recipe).unwrap();
    quantize(&mut cx, 1, &[3.5]);
    drop(cx);
    assert_eq!(scale_of(&quantize(&mut scaling.eval(&recipe).unwrap(), 1, &[99.0])), 64.0);
}

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

#[test]
fn weights_of_older_versions_go_whatever_recipe_they_were_for() {
    let mut scaling = scaling(&["a", "b"]);
    for i in 0..200 {
        let mut cx = scaling.autocast(&margin(i % 100)).unwrap();
        quantize(&mut cx, 2 * i as u64, &[1.0]);
        cx.quantize_weight(&weight("b"), 2 * i as u64 + 1, &tensor(&[2.0])).unwrap();
        cx.commit().unwrap();
        assert_eq!(scaling.cached_weights(), 2, "step {i}");
        quantize(&mut scaling.eval(&margin(i % 100)).unwrap(), 2 * i as u64, &[1.0]);
        assert_eq!(scaling.cached_weights(), 2, "step {i}");
    }
}

#[test]
fn recipes_that_change_while_a_weight_does_not_leave_few_copies() {
    let mut scaling = scaling(&["a"]);
    for i in 0..200 {
        step(&mut scaling, &margin(i % 100), 1, &[1.0]);
        assert!(scaling.cached_weights() <= 2, "step {i}: {}", scaling.cached_weights());
    }
    // Two recipes that take turns keep theirs: neither quantizes again.
    for i in 0..10 {
        let first = step(&mut scaling, &margin(i % 2), 1, &[if i < 2 { 1.0 } else { 99.0 }]);
        assert_eq!(scale_of(&first), f32::powi(448.0, 1) / f32::powi(2.0, i % 2), "scope {i}");
    }
    // Evaluations, too, and they take nothing from training.
    for i in 0..200 {
        quantize(&mut scaling.eval(&margin(i % 100)).unwrap(), 1, &[1.0]);
        assert!(scaling.cached_weights() <= 4, "evaluation {i}: {}", scaling.cached_weights());
    }
    let updates = scaling.state().unwrap();
    step(&mut scaling, &margin(0), 1, &[99.0]);
    step(&mut scaling, &margin(1), 1, &[99.0]);
    let windows = |state: &fp8_recipe::ScalingState| {
        state.arenas.iter().map(|arena| arena.amax_history.clone()).collect::<Vec<_>>()
    };
    assert_eq!(windows(&scaling.state().unwrap()), windows(&updates));
}

#[test]
fn nested_recipes_that_are_used_at_each_step_keep_their_weights() {
    let mut scaling = scaling(&["a"]);
    for i in 0..20 {
        let value = if i == 0 { 1.0 } else { 99.0 };
        let mut cx = scaling.autocast(&margin(0)).unwrap();
        quantize(&mut cx, 1, &[value]);
        for inner in 1..6 {
            let w8 = quantize(&mut cx.nested(&margin(inner)).unwrap(), 1, &[value]);
            assert_eq!(scale_of(&w8), 448.0 / f32::powi(2.0, inner), "step {i}");
        }
        cx.commit().unwrap();
        assert_eq!(scaling.cached_weights(), 6);
    }
}

#[test]
fn a_scope_left_without_commit_takes_no_weights_of_others_away() {
    let mut scaling = scaling(&["a"]);
    for recipe in [margin(0), margin(1)] {
        step(&mut scaling, &recipe, 1, &[3.5]);
    }
    let before = scaling.state().unwrap();
    for i in 2..9 {
        let mut cx = scaling.autocast(&margin(i)).unwrap();
        quantize(&mut cx, 1, &[7.0]);
        drop(cx);
    }
    for recipe in [margin(0), margin(1)] {
        step(&mut scaling, &recipe, 1, &[99.0]);
    }
    let of = |state: &fp8_recipe::ScalingState| {
        state.arenas.iter().take(4).map(|arena| arena.amax_history.clone()).collect::<Vec<_>>()
    };
    assert_eq!(of(&scaling.state().unwrap()), of(&before)); // neither was quantized and recorded again
}

#[test]
fn loading_state_empties_the_cache() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    step(&mut scaling, &recipe, 1, &[3.5]);
    let state = scaling.state().unwrap();
    scaling.load_state(&state).unwrap();
    step(&mut scaling, &recipe, 1, &[7.0]);
    assert_eq!(slot_state(&scaling, &weight("a")).1, [0.0, 3.5, 7.0]);
}
