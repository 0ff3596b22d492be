//! The cache of quantized weights.

use super::support::{codes, scale_of, scaling, short, slot_state, tensor, weight};
use fp8_recipe::fp8_kernels::Operand;
use fp8_recipe::{
    AmaxComputeAlgo, CustomAmax, CustomRecipe, DelayedScaling, Forward, Recipe, Scaling, SlotUpdate,
    WeightVersion,
};
use std::sync::Arc;

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

/// Quantizes a parameter in a committed scope and returns its scale, and that of an evaluation after it.
fn parameter_scales(
    scaling: &mut Scaling,
    recipe: &Recipe,
    version: &Arc<WeightVersion>,
    values: &[f32],
) -> [f32; 2] {
    let mut cx = scaling.autocast(recipe).unwrap();
    let trained = cx.quantize_parameter(&weight("a"), version, true, &tensor(values)).unwrap();
    cx.commit().unwrap();
    let mut cx = scaling.eval(recipe).unwrap();
    let evaluated = cx.quantize_parameter(&weight("a"), version, true, &tensor(values)).unwrap();
    [scale_of(&trained), scale_of(&evaluated)]
}

/// Half the scale that the tensor alone gives.
#[derive(Debug)]
struct Half;

impl CustomRecipe for Half {
    fn name(&self) -> &str {
        "half"
    }

    fn scale(&self, slot: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
        slot.fp8_max / slot.amax / 2.0
    }
}

#[test]
fn a_copy_made_before_its_slot_had_a_scale_is_made_again_once_it_has_one() {
    let twice = CustomAmax {
        name: "twice".into(),
        function: Arc::new(|window: &[f32]| 2.0 * window.last().copied().unwrap_or(0.0)),
    };
    let recipes: [(Recipe, [f32; 2]); 4] = [
        (DelayedScaling { calibrate_first_step: false, ..short() }.into(), [1.0, 128.0]),
        (
            DelayedScaling { amax_compute_algo: AmaxComputeAlgo::Custom(twice), ..short() }.into(),
            [128.0, 64.0],
        ),
        (Recipe::custom(Half), [128.0, 64.0]),
        (short().into(), [128.0, 128.0]), // calibrated by its own tensor
    ];
    for (recipe, [first, then]) in recipes {
        let mut scaling = scaling(&["a"]);
        let version = Arc::new(WeightVersion::new());
        // An evaluation uses the codes that the next scope would.
        assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [first, then], "{recipe}");
        let updated = scaling.state().unwrap().arenas[0].last_updates.clone();
        for _microbatch in 0..2 {
            assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [then; 2], "{recipe}");
        }
        assert_eq!(scaling.state().unwrap().arenas[0].last_updates, updated, "the amax is recorded once");
        // A changed weight is quantized with its slot's scale, and that copy stays.
        version.advance();
        for _microbatch in 0..2 {
            assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[7.0]), [then; 2], "{recipe}");
        }
    }
}

#[test]
fn under_te_rules_a_first_copy_serves_the_scopes_of_its_optimizer_step() {
    for recipe in [short().with_te_rules(), DelayedScaling::te_v0()] {
        let (mut scaling, recipe) = (scaling(&["a"]), Recipe::from(recipe));
        let version = Arc::new(WeightVersion::new());
        for _microbatch in 0..3 {
            assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [1.0; 2]);
        }
        for _step in 0..2 {
            version.end_step(); // the weight is frozen
            for _microbatch in 0..2 {
                assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [128.0; 2]);
            }
        }
    }
}

#[test]
fn a_weight_of_zeros_gives_its_slot_no_scale() {
    let recipe = Recipe::from(DelayedScaling { calibrate_first_step: false, ..short() });
    let (mut scaling, version) = (scaling(&["a"]), Arc::new(WeightVersion::new()));
    for _ in 0..3 {
        assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[0.0, 0.0]), [1.0; 2]);
    }
    version.advance();
    assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [1.0, 128.0]);
    assert_eq!(parameter_scales(&mut scaling, &recipe, &version, &[3.5]), [128.0; 2]);
}

#[test]
fn how_many_copies_are_kept_decides_neither_codes_nor_amaxes() {
    let (mut scaling, versions) = (scaling(&["a"]), [1.0, 2.0]);
    let version = Arc::new(WeightVersion::new());
    for value in versions {
        version.advance();
        for i in 0..6 {
            let expected = parameter_scales(&mut scaling, &margin(i), &version, &[value]);
            assert_eq!(expected, [448.0 / f32::powi(2.0, i); 2]); // of the first value: the slots' scales then
        }
    }
    let before = scaling.state().unwrap();
    for i in 0..6 {
        let again = parameter_scales(&mut scaling, &margin(i), &version, &[2.0]);
        assert_eq!(again, [448.0 / f32::powi(2.0, i); 2], "margin {i}");
    }
    let histories = |state: &fp8_recipe::ScalingState| {
        state.arenas.iter().map(|arena| (arena.scale.clone(), arena.amax_history.clone())).collect::<Vec<_>>()
    };
    assert_eq!(histories(&scaling.state().unwrap()), histories(&before));
    assert!(scaling.cached_weights() <= 4);
}

#[test]
fn a_replay_has_the_codes_of_its_forward_although_the_copy_was_made_again() {
    let recipe = Recipe::from(DelayedScaling { calibrate_first_step: false, ..short() });
    let (mut scaling, version, w) = (scaling(&["a"]), Arc::new(WeightVersion::new()), tensor(&[3.5, 1.1]));
    let mut cx = scaling.autocast(&recipe).unwrap();
    let snapshot = cx.snapshot();
    let first = cx.quantize_parameter(&weight("a"), &version, true, &w).unwrap();
    cx.commit().unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    let later = cx.snapshot();
    let second = cx.quantize_parameter(&weight("a"), &version, true, &w).unwrap();
    cx.commit().unwrap();
    assert_eq!((scale_of(&first), scale_of(&second)), (1.0, 128.0));
    let mut cx = scaling.backward().unwrap();
    for (snapshot, expected) in [(&snapshot, &first), (&later, &second), (&snapshot, &first)] {
        let mut cx = cx.replay(snapshot).unwrap();
        let again = cx.quantize_parameter(&weight("a"), &version, true, &w).unwrap();
        assert_eq!((codes(&again), scale_of(&again)), (codes(expected), scale_of(expected)));
    }
    cx.commit().unwrap();
}
