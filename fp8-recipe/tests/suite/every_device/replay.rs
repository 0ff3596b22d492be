//! Recompute: a layer's forward again, in backward, with the scales of its first run.

use super::support::{
    backward, codes, forward, grad, input, message, scale_of, scaling, short, step, tensor, weight,
};
use fp8_recipe::{AutocastOptions, CurrentScaling, DelayedScaling, Recipe};

#[test]
fn it_uses_the_first_runs_scales_and_records_nothing() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    let (x, w) = ([1.0, 0.3, -0.7], [0.5, 0.11]);
    for _ in 0..3 {
        let mut cx = scaling.autocast(&recipe).unwrap();
        let snapshot = cx.snapshot();
        let (x8, _) = forward(&mut cx, &input("a"), &x);
        let w8 = cx.quantize_weight(&weight("a"), 1, &tensor(&w)).unwrap();
        cx.commit().unwrap();
        step(&mut scaling, &recipe, &input("a"), &[50.0]).unwrap(); // another scope moves the scale on
        let before = scaling.state().unwrap();

        let mut cx = scaling.backward().unwrap();
        let mut again = cx.replay(&snapshot).unwrap();
        let (y8, origin) = forward(&mut again, &input("a"), &x);
        let v8 = again.quantize_weight(&weight("a"), 1, &tensor(&w)).unwrap();
        assert!(again.fp8_gemms(&input("a")).fprop);
        drop(again);
        assert_eq!((codes(&x8), scale_of(&x8)), (codes(&y8), scale_of(&y8)));
        assert_eq!((codes(&w8), scale_of(&w8)), (codes(&v8), scale_of(&v8)));
        assert!(y8.as_fp8().unwrap().columnwise().is_some() == x8.as_fp8().unwrap().columnwise().is_some());
        drop(cx);
        assert_eq!(scaling.state().unwrap(), before);

        // What the replay saved goes through backward like the first run's.
        let mut cx = scaling.backward().unwrap();
        drop(cx.replay(&snapshot).unwrap());
        backward(&mut cx, &origin, &grad("a"), &[1.0]);
        cx.commit().unwrap();
    }
}

#[test]
fn first_step_scales_are_in_the_snapshot() {
    let (mut scaling, recipe) = (scaling(&["a", "b"]), short().into());
    let mut cx = scaling.autocast(&recipe).unwrap();
    let snapshot = cx.snapshot(); // before the layer runs
    forward(&mut cx, &input("a"), &[7.0]);
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let mut again = cx.replay(&snapshot).unwrap();
    assert_eq!(scale_of(&forward(&mut again, &input("a"), &[1.0]).0), 64.0);
    assert_eq!(scale_of(&forward(&mut again, &input("b"), &[1.0]).0), 448.0); // never run: its own
}

#[test]
fn several_layers_share_one_copy_and_nest() {
    let mut scaling = scaling(&["a", "b"]);
    let [outer, inner] = [0, 1].map(|margin| Recipe::from(DelayedScaling { margin, ..short() }));
    let current: Recipe = CurrentScaling::default().into();
    let mut cx = scaling.autocast(&outer).unwrap();
    let first = cx.snapshot();
    forward(&mut cx, &input("a"), &[1.0]);
    let mut nested = cx.nested(&inner).unwrap();
    let second = nested.snapshot();
    forward(&mut nested, &input("b"), &[1.0]);
    drop(nested);
    cx.commit().unwrap();

    let mut cx = scaling.backward().unwrap();
    let mut again = cx.replay(&first).unwrap();
    assert_eq!(scale_of(&forward(&mut again, &input("a"), &[9.0]).0), 448.0);
    assert_eq!(scale_of(&forward(&mut again.nested(&inner).unwrap(), &input("b"), &[9.0]).0), 224.0);
    assert_eq!(scale_of(&forward(&mut again.nested(&current).unwrap(), &input("b"), &[3.5]).0), 128.0);
    let third = again.snapshot(); // a layer inside that recomputes too
    drop(again);
    assert_eq!(scale_of(&forward(&mut cx.replay(&second).unwrap(), &input("b"), &[9.0]).0), 224.0);
    assert_eq!(scale_of(&forward(&mut cx.replay(&third).unwrap(), &input("a"), &[9.0]).0), 448.0);
    cx.commit().unwrap();
}

#[test]
fn an_evaluations_bytes_are_not_taken() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    let mut cx = scaling.autocast(&recipe).unwrap();
    let snapshot = cx.snapshot();
    let first = cx.quantize_weight(&weight("a"), 1, &tensor(&[3.5])).unwrap();
    cx.commit().unwrap();
    let state = scaling.state().unwrap();
    scaling.load_state(&state).unwrap(); // empties the cache
    scaling.eval(&recipe).unwrap().quantize_weight(&weight("a"), 1, &tensor(&[99.0, 1.0])).unwrap();
    let mut cx = scaling.backward().unwrap();
    let mut again = cx.replay(&snapshot).unwrap();
    let w8 = again.quantize_weight(&weight("a"), 1, &tensor(&[3.5])).unwrap();
    assert_eq!(codes(&w8), codes(&first));
}

#[test]
fn a_scope_without_fp8_replays_without() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    let options = AutocastOptions { enabled: false, ..Default::default() };
    let mut cx = scaling.scope(&recipe, &options).unwrap();
    let snapshot = cx.snapshot();
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    assert!(!forward(&mut cx.replay(&snapshot).unwrap(), &input("a"), &[1.0]).0.is_fp8());
    cx.commit().unwrap();
}

#[test]
fn what_cannot_be_replayed_is_refused() {
    let (mut scaling, mut other, recipe) = (scaling(&["a"]), scaling(&["a"]), short().into());
    let refused = "replay: no scales were kept: the forward scope of this Saved was an evaluation or left without commit";
    let mut cx = scaling.autocast(&recipe).unwrap();
    let dropped = cx.snapshot();
    drop(cx);
    let evaluated = scaling.eval(&recipe).unwrap().snapshot();
    let mut cx = other.autocast(&recipe).unwrap();
    let foreign = cx.snapshot();
    cx.commit().unwrap();

    let mut cx = scaling.backward().unwrap();
    assert_eq!(message(cx.replay(&dropped)), refused);
    assert_eq!(message(cx.replay(&evaluated)), refused);
    assert!(message(cx.replay(&foreign)).contains("another Scaling"));
    cx.commit().unwrap();
}
