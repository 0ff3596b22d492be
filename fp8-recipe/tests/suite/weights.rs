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

#[test]
fn loading_state_empties_the_cache() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    step(&mut scaling, &recipe, 1, &[3.5]);
    let state = scaling.state().unwrap();
    scaling.load_state(&state).unwrap();
    step(&mut scaling, &recipe, 1, &[7.0]);
    assert_eq!(slot_state(&scaling, &weight("a")).1, [0.0, 3.5, 7.0]);
}
