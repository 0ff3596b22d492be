//! Evaluation scopes write nothing.

use super::support::{forward, input, scale_of, scaling, short, slot_state, step, tensor, weight};
use fp8_recipe::{AutocastOptions, CurrentScaling, CustomRecipe, DelayedScaling, Format, Recipe, SlotUpdate};

#[test]
fn it_uses_the_scales_and_records_nothing() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    step(&mut scaling, &recipe, &input("a"), &[3.5]).unwrap();
    let before = scaling.state().unwrap();
    let mut cx = scaling.eval(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[100.0]).0), 128.0);
    assert_eq!(scale_of(&forward(&mut cx.nested(&recipe).unwrap(), &input("a"), &[100.0]).0), 128.0);
    drop(cx);
    scaling.eval(&recipe).unwrap().commit().unwrap();
    assert_eq!(scaling.state().unwrap(), before);
    step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("a")).1, [0.0, 3.5, 1.0]);
}

#[test]
fn before_calibration_it_uses_the_tensor_and_stores_nothing() {
    let (mut scaling, recipe) = (scaling(&["a", "b"]), short().into());
    for _ in 0..2 {
        let mut cx = scaling.eval(&recipe).unwrap();
        let scales =
            [[7.0], [3.5], [0.0], [f32::INFINITY]].map(|x| scale_of(&forward(&mut cx, &input("a"), &x).0));
        assert_eq!(scales, [64.0, 128.0, 1.0, 1.0]);
        drop(cx);
        // Once without arenas, once with arenas in which this slot has not run.
        step(&mut scaling, &recipe, &input("b"), &[1.0]).unwrap();
    }
    assert_eq!(slot_state(&scaling, &input("a")), (-1.0, vec![0.0; 3]));
}

#[test]
fn before_the_first_step_of_the_other_rule_the_scale_is_1() {
    let recipe = DelayedScaling { calibrate_first_step: false, ..short() }.into();
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.eval(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[7.0]).0), 1.0);
    drop(cx);
    assert!(scaling.state().unwrap().arenas.is_empty());
}

/// A recipe of the user's own, with the scale of current scaling.
#[derive(Debug)]
struct Own {
    calibrates: bool,
}

impl CustomRecipe for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn format(&self) -> Format {
        Format::Hybrid
    }

    fn scale(&self, slot: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
        slot.fp8_max / slot.amax
    }

    fn calibrate_first_step(&self) -> bool {
        self.calibrates
    }
}

#[test]
fn a_recipe_says_whether_it_starts_at_1() {
    let te = || DelayedScaling::default().with_te_rules();
    for (recipe, starts_at_one, calibrates) in [
        (DelayedScaling::default().into(), false, true),
        (te().into(), true, false),
        (DelayedScaling::te_v0().into(), true, false),
        (DelayedScaling { calibrate_first_step: false, ..short() }.into(), true, false),
        (DelayedScaling { calibrate_first_step: true, ..te() }.into(), false, true),
        (CurrentScaling::default().into(), false, false),
        (Recipe::off(), false, false),
        (Recipe::custom(Own { calibrates: false }), true, false),
        (Recipe::custom(Own { calibrates: true }), false, true),
        (Recipe::by_name([("a.input", te().into())], DelayedScaling::default()), true, true),
        (Recipe::by_name([("a.input", Recipe::off())], te()), true, false),
        (Recipe::by_name([("a.weight", Recipe::off())], CurrentScaling::default()), false, false),
    ] {
        let found = (recipe.starts_at_one(), recipe.calibrates_first_step());
        assert_eq!(found, (starts_at_one, calibrates), "{recipe}");
        let mut scaling = scaling(&["a"]);
        let mut cx = scaling.eval(&recipe).unwrap();
        let (x, _) = forward(&mut cx, &input("a"), &[7.0]);
        if x.is_fp8() {
            assert_eq!(scale_of(&x) == 1.0, starts_at_one, "{recipe}");
        }
    }
}

#[test]
fn a_calibrating_or_disabled_evaluation_records_nothing_either() {
    let (mut scaling, recipe) = (scaling(&["a"]), short().into());
    step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
    let before = scaling.state().unwrap();
    let options = AutocastOptions { enabled: false, calibrating: true, ..Default::default() };
    let mut cx = scaling.eval_with_options(&recipe, &options).unwrap();
    assert!(!forward(&mut cx, &input("a"), &[9.0]).0.is_fp8());
    assert!(!cx.quantize_weight(&weight("a"), 1, &tensor(&[9.0])).unwrap().is_fp8());
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
}
