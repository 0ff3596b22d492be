//! A recipe that is new to a model goes on with the amaxes of those before it.

use super::support::{
    Alone, backward, forward, grad, input, message, of_recipe, scale_of, scaling, short, slot_states, step,
};
use fp8_recipe::{
    AmaxComputeAlgo, AutocastOptions, CustomAmax, CustomScale, DelayedScaling, Direction, Format, Recipe,
    Scaling, ScalingFactorComputeAlgo,
};
use std::sync::Arc;

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

fn run(scaling: &mut Scaling, recipe: &Recipe, path: &str, amaxes: &[f32]) {
    for amax in amaxes {
        step(scaling, recipe, &input(path), &[*amax]).unwrap();
    }
}

/// Returns the scale that the next tensor of a slot is quantized with, in a scope that is not committed.
fn next_scale(scaling: &mut Scaling, recipe: &Recipe, path: &str) -> f32 {
    let mut cx = scaling.autocast(recipe).unwrap();
    let scale = scale_of(&forward(&mut cx, &input(path), &[1.0]).0);
    cx.discard().unwrap();
    scale
}

/// The scale and window that `recipe`, margin 0 first, gives after 4, 2, 1 under another recipe, oldest first.
fn taken(from: &DelayedScaling, to: &DelayedScaling) -> (f32, Vec<f32>) {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &from.clone().into(), "a", &[4.0, 2.0, 1.0]);
    scaling.autocast(&to.clone().into()).unwrap().discard().unwrap();
    slot_states(&scaling, &input("a")).pop().unwrap()
}

#[test]
fn a_recipe_with_another_margin_computes_its_scales_from_the_same_amaxes() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0, 2.0, 1.0]);
    let mut cx = scaling.autocast(&margin(1)).unwrap();
    let (x8, origin) = forward(&mut cx, &input("a"), &[0.5]);
    assert_eq!(scale_of(&x8), 56.0); // 448 / 2 / 4, not this tensor's own
    cx.commit().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=1", &input("a")), (56.0, vec![2.0, 1.0, 0.5]));
    assert_eq!(of_recipe(&scaling, "margin=0", &input("a")), (112.0, vec![4.0, 2.0, 1.0]));
    let mut cx = scaling.backward().unwrap();
    assert_eq!(scale_of(&backward(&mut cx, &origin, &grad("a"), &[2.0])), 14336.0); // gradients are new
    cx.commit().unwrap();
}

#[test]
fn a_checkpoint_continues_under_another_margin() {
    let mut saved = scaling(&["a"]);
    run(&mut saved, &margin(0), "a", &[4.0, 2.0, 1.0]);
    let mut resumed = scaling(&["a"]);
    resumed.load_state(&saved.state().unwrap()).unwrap();
    assert_eq!(next_scale(&mut resumed, &margin(1), "a"), 56.0);
}

#[test]
fn gradients_go_on_as_activations_do() {
    let mut scaling = scaling(&["a"]);
    let train = |scaling: &mut Scaling, recipe: &Recipe, amax: f32| {
        let origin = step(scaling, recipe, &input("a"), &[1.0]).unwrap();
        let mut cx = scaling.backward().unwrap();
        let scale = scale_of(&backward(&mut cx, &origin, &grad("a"), &[amax]));
        cx.commit().unwrap();
        scale
    };
    assert_eq!(train(&mut scaling, &margin(0), 2.0), 28672.0);
    assert_eq!(train(&mut scaling, &margin(3), 1.0), 3584.0); // 57344 / 8 / 2
}

#[test]
fn each_rule_is_the_new_recipes_own() {
    let from = short();
    let power_of_two =
        DelayedScaling { scaling_factor_compute_algo: ScalingFactorComputeAlgo::PowerOfTwo, ..short() };
    let most_recent = DelayedScaling { amax_compute_algo: AmaxComputeAlgo::MostRecent, ..short() };
    assert_eq!(taken(&from, &power_of_two), (64.0, vec![4.0, 2.0, 1.0]));
    assert_eq!(taken(&from, &most_recent), (448.0, vec![4.0, 2.0, 1.0]));
    assert_eq!(taken(&most_recent, &from), (112.0, vec![4.0, 2.0, 1.0]));
    assert_eq!(taken(&from, &short().with_te_rules()), (112.0, vec![4.0, 2.0, 1.0]));
    // An amax is an amax whatever the format. Scales are recomputed although the interval is not over.
    let e4m3 = DelayedScaling { fp8_format: Format::E4M3, interval: 100, ..short() };
    assert_eq!(taken(&from, &e4m3), (112.0, vec![4.0, 2.0, 1.0]));
}

#[test]
fn a_users_functions_see_a_whole_window() {
    let digits = |window: &[f32]| window.iter().fold(0.0, |sum, amax| sum * 10.0 + amax);
    let digits = AmaxComputeAlgo::Custom(CustomAmax { name: "digits".into(), function: Arc::new(digits) });
    let plain = |amax: f32, old: f32, fp8_max: f32, _: &DelayedScaling| amax + 1000.0 * old + fp8_max;
    let plain = CustomScale { name: "plain".into(), function: Arc::new(plain) };
    let recipe = DelayedScaling {
        amax_compute_algo: digits,
        scaling_factor_compute_algo: ScalingFactorComputeAlgo::Custom(plain),
        ..short()
    };
    assert_eq!(taken(&short(), &recipe).0, 421.0 + 1000.0 + 448.0);
    let recipe = DelayedScaling { amax_history_len: 6, ..recipe };
    assert_eq!(taken(&short(), &recipe), (421.0 + 1000.0 + 448.0, vec![0.0, 0.0, 4.0, 2.0, 1.0]));
}

#[test]
fn a_users_function_that_refuses_leaves_no_scope_open() {
    let never = |_: f32, _: f32, _: f32, _: &DelayedScaling| f32::NAN;
    let never = CustomScale { name: "never".into(), function: Arc::new(never) };
    let refusing: Recipe =
        DelayedScaling { scaling_factor_compute_algo: ScalingFactorComputeAlgo::Custom(never), ..short() }
            .into();
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0]);
    let before = scaling.state().unwrap();
    assert!(message(scaling.autocast(&refusing)).starts_with("scale policy `never` returned NaN for amax 4"));
    assert_eq!(scaling.state().unwrap(), before);
    run(&mut scaling, &margin(0), "a", &[2.0]);
    assert_eq!(of_recipe(&scaling, "margin=0", &input("a")).1, [0.0, 4.0, 2.0]);
}

#[test]
fn a_recipe_that_returns_continues_its_own_state() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0]);
    run(&mut scaling, &margin(1), "a", &[2.0]);
    run(&mut scaling, &margin(0), "a", &[1.0]);
    assert_eq!(of_recipe(&scaling, "margin=0", &input("a")), (112.0, vec![0.0, 4.0, 1.0]));
    assert_eq!(of_recipe(&scaling, "margin=1", &input("a")), (56.0, vec![0.0, 4.0, 2.0]));
}

#[test]
fn each_slot_takes_the_history_that_was_updated_last() {
    for loaded in [false, true] {
        let mut scaling = scaling(&["body", "head"]);
        // The head is nested in a recipe of its own; one recipe's arena is older, the other's is, slot by slot.
        for amax in [1.0, 2.0] {
            let mut cx = scaling.autocast(&margin(0)).unwrap();
            forward(&mut cx, &input("body"), &[amax]);
            forward(&mut cx.nested(&margin(1)).unwrap(), &input("head"), &[10.0 * amax]);
            cx.commit().unwrap();
        }
        run(&mut scaling, &margin(1), "body", &[7.0]); // now the body is newer there
        run(&mut scaling, &margin(0), "head", &[5.0]);
        run(&mut scaling, &margin(1), "head", &[14.0]);
        if loaded {
            let state = scaling.state().unwrap();
            scaling = super::support::scaling(&["body", "head"]);
            scaling.load_state(&state).unwrap();
        }
        scaling.autocast(&margin(2)).unwrap().discard().unwrap();
        assert_eq!(of_recipe(&scaling, "margin=2", &input("body")), (16.0, vec![0.0, 0.0, 7.0]));
        assert_eq!(of_recipe(&scaling, "margin=2", &input("head")), (5.6, vec![10.0, 20.0, 14.0]));
    }
}

#[test]
fn a_slot_that_did_not_run_is_no_update() {
    let mut scaling = scaling(&["a", "b"]);
    run(&mut scaling, &margin(0), "a", &[1.0, 2.0]);
    run(&mut scaling, &margin(1), "b", &[5.0]);
    // Opened later, and only the other slot ran; an infinite amax is left out.
    run(&mut scaling, &margin(0), "a", &[4.0]);
    run(&mut scaling, &margin(1), "b", &[f32::INFINITY]);
    run(&mut scaling, &margin(1), "a", &[f32::INFINITY]);
    scaling.autocast(&margin(2)).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=2", &input("a")).1, [1.0, 2.0, 4.0]);
    assert_eq!(of_recipe(&scaling, "margin=2", &input("b")).1, [0.0, 0.0, 5.0]);
}

#[test]
fn a_recipe_whose_first_scopes_were_left_is_still_new() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 56.0); // discarded
    drop(scaling.autocast(&margin(1)).unwrap());
    run(&mut scaling, &margin(0), "a", &[8.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 28.0);
    run(&mut scaling, &margin(1), "a", &[1.0]);
    run(&mut scaling, &margin(0), "a", &[64.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 28.0); // its own from here on
}

#[test]
fn another_length_keeps_the_newest_rows_and_the_scale() {
    let of_length = |amax_history_len| DelayedScaling { amax_history_len, ..short() };
    for (len, window) in
        [(6, &[0.0, 0.0, 4.0, 2.0, 1.0][..]), (5, &[0.0, 4.0, 2.0, 1.0]), (3, &[2.0, 1.0]), (1, &[])]
    {
        assert_eq!(taken(&of_length(4), &of_length(len)), (112.0, window.to_vec()), "length {len}");
    }
    // With another rule besides, the scale is that of the amaxes that the new recipe looks at.
    let of_length = |amax_history_len| DelayedScaling { amax_history_len, margin: 1, ..short() };
    for (len, scale) in [(6, 56.0), (3, 56.0), (2, 112.0), (1, 224.0)] {
        assert_eq!(taken(&short(), &of_length(len)).0, scale, "length {len}");
    }
}

#[test]
fn a_history_of_length_1_keeps_no_window_and_calibrates() {
    let one_row = DelayedScaling { amax_history_len: 1, ..short() };
    assert_eq!(taken(&one_row, &DelayedScaling { margin: 1, ..short() }), (-1.0, vec![0.0; 3]));
    // Under Transformer Engine's first-step rule a slot without history starts at 1.
    assert_eq!(taken(&one_row, &short().with_te_rules()), (1.0, vec![0.0; 3]));
    // The same rules with another length go on with their scale.
    assert_eq!(taken(&one_row, &short()), (448.0, vec![0.0; 3]));
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &one_row.into(), "a", &[4.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 224.0); // by its own tensor
}

#[test]
fn amaxes_that_the_new_recipe_would_not_have_recorded_are_left_out() {
    let mut scaling = scaling(&["a"]);
    let all = DelayedScaling { record_non_finite: true, ..short() };
    run(&mut scaling, &all.into(), "a", &[4.0, 0.0, f32::INFINITY]);
    scaling.autocast(&margin(1)).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=1", &input("a")), (56.0, vec![0.0, 4.0, 0.0]));
    let te = DelayedScaling { zero_is_skipped: true, margin: 2, ..short() };
    scaling.autocast(&te.into()).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=2", &input("a")), (28.0, vec![0.0, 0.0, 4.0]));
}

#[test]
fn a_history_without_a_usable_amax_calibrates() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[0.0, 0.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 224.0); // by its own tensor
    assert_eq!(of_recipe(&scaling, "margin=1", &input("a")), (-1.0, vec![0.0; 3]));
}

fn in_group(id: &'static str) -> AutocastOptions {
    AutocastOptions { amax_reduction_group: Some(Arc::new(Alone(id))), ..Default::default() }
}

#[test]
fn histories_stay_within_their_group() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0]);
    let open = |scaling: &mut Scaling, recipe: &Recipe, id| {
        let mut cx = scaling.scope(recipe, &in_group(id)).unwrap();
        let scale = scale_of(&forward(&mut cx, &input("a"), &[1.0]).0);
        cx.commit().unwrap();
        scale
    };
    assert_eq!(open(&mut scaling, &margin(0), "dp"), 448.0);
    assert_eq!(open(&mut scaling, &margin(1), "tp"), 224.0);
    assert_eq!(open(&mut scaling, &margin(2), "dp"), 112.0); // from 1 in dp
    assert_eq!(next_scale(&mut scaling, &margin(2), "a"), 28.0); // from 4 without a group
}

/// Ranks that do not reduce have histories of their own: a recipe that reduces would start with different scales on them.
#[test]
fn a_recipe_that_reduces_takes_no_history_that_was_not_reduced() {
    let local = DelayedScaling { reduce_amax: false, ..short() };
    let open = |scaling: &mut Scaling, recipe: Recipe, options: &AutocastOptions, amax| {
        let mut cx = scaling.scope(&recipe, options).unwrap();
        let scale = scale_of(&forward(&mut cx, &input("a"), &[amax]).0);
        cx.commit().unwrap();
        scale
    };
    let mut grouped = scaling(&["a"]);
    open(&mut grouped, local.clone().into(), &in_group("dp"), 4.0);
    assert_eq!(open(&mut grouped, short().into(), &in_group("dp"), 1.0), 448.0);
    // The other way round is safe, and alone there is no difference.
    let also_local = DelayedScaling { margin: 1, ..local.clone() };
    assert_eq!(open(&mut grouped, also_local.into(), &in_group("dp"), 9.0), 224.0);
    let mut alone = scaling(&["a"]);
    open(&mut alone, local.into(), &AutocastOptions::default(), 4.0);
    assert_eq!(open(&mut alone, short().into(), &AutocastOptions::default(), 1.0), 112.0);
}

#[test]
fn a_recipe_without_state_is_passed_over() {
    let mut scaling = scaling(&["a"]);
    scaling.set_counting(true); // current scaling notes amaxes for the report
    run(&mut scaling, &margin(0), "a", &[4.0]);
    run(&mut scaling, &fp8_recipe::CurrentScaling::default().into(), "a", &[64.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 56.0);
    assert_eq!(scaling.state().unwrap().arenas[0].last_updates[0], 1); // counting changes no state
}

#[test]
fn an_evaluation_takes_nothing_and_leaves_a_recipe_new() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[4.0]);
    let mut cx = scaling.eval(&margin(1)).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[1.0]).0), 224.0);
    drop(cx);
    run(&mut scaling, &margin(0), "a", &[8.0]);
    assert_eq!(next_scale(&mut scaling, &margin(1), "a"), 28.0);
}

#[test]
fn a_margin_that_changes_at_each_step_never_loses_the_history() {
    let mut scaling = scaling(&["a"]);
    run(&mut scaling, &margin(0), "a", &[1.0]);
    for step in 1..20_u8 {
        let (before, now) = (f32::from(step), f32::from(step) + 1.0);
        let recipe = margin(i32::from(step));
        let mut cx = scaling.autocast(&recipe).unwrap();
        let scale = scale_of(&forward(&mut cx, &input("a"), &[now]).0);
        cx.commit().unwrap();
        let expected = 448.0 / f32::powi(2.0, i32::from(step)) / before;
        assert_eq!(scale.recip(), expected.recip(), "step {step}");
    }
    assert_eq!(
        scaling.state().unwrap().arenas.iter().filter(|a| a.direction == Direction::Forward).count(),
        20
    );
}
