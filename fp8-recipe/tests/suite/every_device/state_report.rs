//! Tests of the report on a loaded state, which says for each slot how the state was used.

use super::support::{
    Alone, backward, forward, grad, input, message, of_recipe, scaling, short, slot_state, step,
};
use fp8_recipe::{
    AmaxComputeAlgo, AutocastOptions, CustomScale, DelayedScaling, Direction, Recipe, Scaling,
    ScalingFactorComputeAlgo, ScalingState, StartsNew,
};
use std::sync::Arc;

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

/// Two layers, of which the first one's input has run.
fn saved(recipe: &Recipe, amaxes: &[f32]) -> ScalingState {
    let mut scaling = scaling(&["a", "b"]);
    for amax in amaxes {
        step(&mut scaling, recipe, &input("a"), &[*amax]).unwrap();
    }
    scaling.state().unwrap()
}

fn prepared(recipe: &Recipe) -> Scaling {
    let mut scaling = scaling(&["a", "b"]);
    scaling.prepare(recipe, &AutocastOptions::default()).unwrap();
    scaling
}

#[test]
fn every_slot_of_a_prepared_recipe_is_listed() {
    let state = saved(&margin(0), &[4.0]);
    let mut resumed = prepared(&margin(1));
    let report = resumed.load_state(&state).unwrap();
    assert_eq!(
        report.to_string(),
        "scaling state: 1 slot recomputed (margin=0 → margin=1), 5 slots new (never ran)"
    );
    let slot = &report.recomputed[0];
    assert_eq!((&*slot.slot, slot.direction), ("a.input", Direction::Forward));
    assert_eq!(slot.recipe.to_string(), "delayed (margin=1, amax_history_len=4)");
    assert_eq!(slot.from.to_string(), "delayed (amax_history_len=4)");
    let details = slot.from.details();
    assert!(details.starts_with("delayed(margin=0,") && details.ends_with(",len=4"), "{details}");
    assert!(report.new.iter().all(|slot| slot.reason == StartsNew::NeverRan));
    assert_eq!(report.new.iter().filter(|slot| slot.direction == Direction::Backward).count(), 2);
    assert!(report.taken_over.is_empty() && report.unused.is_empty() && !report.is_plain());
    assert_eq!(of_recipe(&resumed, "margin=1", &input("a")), (56.0, vec![0.0, 0.0, 4.0]));

    let report = prepared(&margin(0)).load_state(&state).unwrap();
    assert_eq!(report.to_string(), "scaling state: 6 slots taken over");
    assert!(report.is_plain());
    assert!(report.taken_over.iter().all(|slot| slot.from == slot.recipe));
}

#[test]
fn what_no_recipe_has_asked_for_is_unused_until_one_does() {
    let state = saved(&margin(0), &[4.0]);
    let mut resumed = scaling(&["a", "b"]);
    let report = resumed.load_state(&state).unwrap();
    assert_eq!(report.to_string(), "scaling state: 1 saved arena not used so far"); // gradients never ran
    assert_eq!((report.unused[0].direction, report.unused[0].updates), (Direction::Forward, 1));
    assert_eq!(report.unused[0].recipe.to_string(), "delayed (amax_history_len=4)");
    assert_eq!(resumed.state_report(), report);

    let mut other = scaling(&["a", "b"]);
    other.load_state(&state).unwrap();
    other.autocast(&margin(1)).unwrap().discard().unwrap();
    let report = other.state_report();
    assert!(report.unused.is_empty() && report.recomputed.len() == 1, "{report:?}");
    assert_eq!(other.state().unwrap().arenas.len(), 4); // and the saved ones are kept

    resumed.autocast(&margin(0)).unwrap().discard().unwrap();
    assert_eq!(resumed.state_report().to_string(), "scaling state: 6 slots taken over");
}

#[test]
fn slots_that_start_anew_say_why() {
    let one_row: Recipe = DelayedScaling { amax_history_len: 1, ..short() }.into();
    let report = prepared(&margin(1)).load_state(&saved(&one_row, &[4.0])).unwrap();
    let text = "scaling state: 5 slots new (never ran), 1 slot new (a history of length 1 keeps no amaxes)";
    assert_eq!(report.to_string(), text);
    let report = prepared(&margin(1)).load_state(&saved(&margin(0), &[0.0])).unwrap();
    let text = "scaling state: 5 slots new (never ran), 1 slot new (no finite amax above 0 in the history)";
    assert_eq!(report.to_string(), text);
    let report = prepared(&margin(1)).load_state(&ScalingState::default()).unwrap();
    assert_eq!(report.to_string(), "scaling state: 6 slots new (never ran)");
    assert_eq!(scaling(&["a"]).state_report().to_string(), "scaling state: nothing loaded");
}

#[test]
fn the_line_names_the_options_that_differ() {
    let difference = |to: DelayedScaling| {
        let report = prepared(&to.into()).load_state(&saved(&margin(0), &[4.0])).unwrap().to_string();
        let (_, rest) = report.split_once(" recomputed (").unwrap();
        rest.split_once("), ").unwrap().0.to_owned()
    };
    let most_recent = AmaxComputeAlgo::MostRecent;
    let to = DelayedScaling { margin: 2, amax_compute_algo: most_recent, amax_history_len: 8, ..short() };
    assert_eq!(
        difference(to),
        "margin=0 → margin=2, amax_compute_algo=max → amax_compute_algo=most_recent, \
         amax_history_len=4 → amax_history_len=8"
    );
    let to = DelayedScaling { override_linear_precision: (false, false, true), ..short() };
    assert_eq!(
        difference(to),
        "override_linear_precision=(false, false, false) → override_linear_precision=(false, false, true)"
    );
}

#[test]
fn a_recipe_that_joins_later_is_listed_too() {
    let mut scaling = scaling(&["a"]);
    let train = |scaling: &mut Scaling, recipe: &Recipe| {
        let mut cx = scaling.autocast(recipe).unwrap();
        let (_, origin) = forward(&mut cx, &input("a"), &[1.0]);
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        backward(&mut cx, &origin, &grad("a"), &[1.0]);
        cx.commit().unwrap();
    };
    train(&mut scaling, &margin(0));
    assert_eq!(scaling.state_report(), fp8_recipe::StateReport::default()); // there was nothing to take
    for _ in 0..2 {
        drop(scaling.autocast(&margin(1)).unwrap());
        train(&mut scaling, &margin(0));
    }
    train(&mut scaling, &margin(1));
    let report = scaling.state_report();
    let slots: Vec<_> = report.recomputed.iter().map(|slot| &*slot.slot).collect();
    assert_eq!(slots, ["a.input", "a.grad_output"]); // once each, though it started anew
    assert_eq!(report.new.len(), 1);
}

#[test]
fn recipes_of_one_state_go_on_side_by_side() {
    let mut first = scaling(&["a"]);
    for (recipe, amax) in [(margin(0), 4.0), (margin(1), 2.0), (margin(0), 8.0)] {
        step(&mut first, &recipe, &input("a"), &[amax]).unwrap();
    }
    let mut second = scaling(&["a"]);
    for recipe in [margin(2), margin(1), margin(0)] {
        second.prepare(&recipe, &AutocastOptions::default()).unwrap();
    }
    let report = second.load_state(&first.state().unwrap()).unwrap();
    assert_eq!((report.taken_over.len(), report.recomputed.len()), (6, 1));
    for recipe in ["margin=0", "margin=1"] {
        assert_eq!(of_recipe(&second, recipe, &input("a")), of_recipe(&first, recipe, &input("a")));
    }
    assert_eq!(of_recipe(&second, "margin=2", &input("a")), (14.0, vec![0.0, 4.0, 8.0]));
}

/// Versions before `last_updates` saved arenas in the order in which their recipes came.
#[test]
fn a_state_without_the_order_of_updates_loads() {
    let mut first = scaling(&["a", "b"]);
    for (recipe, path, amax) in [(margin(0), "a", 4.0), (margin(0), "b", 2.0), (margin(1), "a", 8.0)] {
        step(&mut first, &recipe, &input(path), &[amax]).unwrap();
    }
    let mut state = first.state().unwrap();
    state.arenas.iter_mut().for_each(|arena| arena.last_updates.clear());
    let mut second = prepared(&margin(2));
    second.load_state(&state).unwrap();
    assert_eq!(of_recipe(&second, "margin=2", &input("a")), (14.0, vec![0.0, 4.0, 8.0]));
    assert_eq!(of_recipe(&second, "margin=2", &input("b")), (56.0, vec![0.0, 0.0, 2.0]));
    // From here on there is an order.
    step(&mut second, &margin(0), &input("a"), &[16.0]).unwrap();
    second.autocast(&margin(3)).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&second, "margin=3", &input("a")).1, [0.0, 4.0, 16.0]);
}

#[test]
fn a_state_of_another_group_is_taken_where_it_is_the_only_one() {
    let mut grouped = scaling(&["a", "b"]);
    let of = |id| AutocastOptions { amax_reduction_group: Some(Arc::new(Alone(id))), ..Default::default() };
    let mut cx = grouped.scope(&margin(0), &of("dp")).unwrap();
    forward(&mut cx, &input("a"), &[4.0]);
    cx.commit().unwrap();
    let mut alone = prepared(&margin(1));
    let report = alone.load_state(&grouped.state().unwrap()).unwrap();
    assert_eq!(report.recomputed[0].from.to_string(), "delayed (amax_history_len=4), group dp");
    assert_eq!(of_recipe(&alone, "margin=1", &input("a")).0, 56.0);

    let mut cx = grouped.scope(&margin(0), &of("tp")).unwrap();
    forward(&mut cx, &input("a"), &[2.0]);
    cx.commit().unwrap();
    let report = prepared(&margin(1)).load_state(&grouped.state().unwrap()).unwrap();
    assert_eq!((report.recomputed.len(), report.new.len(), report.unused.len()), (0, 6, 2), "{report}");
}

#[test]
fn a_scale_function_that_refuses_changes_nothing() {
    let never = |_: f32, _: f32, _: f32, _: &DelayedScaling| 1e-40;
    let never = CustomScale { name: "never".into(), function: Arc::new(never) };
    let scaling_factor_compute_algo = ScalingFactorComputeAlgo::Custom(never);
    let mut resumed = prepared(&DelayedScaling { scaling_factor_compute_algo, ..short() }.into());
    let before = (resumed.state().unwrap(), resumed.state_report());
    let text = message(resumed.load_state(&saved(&margin(0), &[4.0])));
    assert!(text.starts_with("scale policy `never` returned"), "{text}");
    assert_eq!((resumed.state().unwrap(), resumed.state_report()), before);
}

#[test]
fn prepare_makes_what_the_first_scope_would() {
    let mut scaling = scaling(&["a"]);
    let off = AutocastOptions { enabled: false, ..Default::default() };
    scaling.prepare(&margin(0), &off).unwrap();
    assert!(scaling.state().unwrap().arenas.is_empty());
    scaling.prepare(&margin(0), &AutocastOptions::default()).unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), (-1.0, vec![0.0; 3]));
    let out_of_range = DelayedScaling { interval: 0, ..short() }.into();
    assert!(message(scaling.prepare(&out_of_range, &off)).starts_with("DelayedScaling: interval"));
}
