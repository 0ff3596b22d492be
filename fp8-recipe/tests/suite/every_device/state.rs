//! State out and in: resuming is exact.

use super::support::{
    Alone, backward, codes, forward, grad, input, message, scale_of, scaling, short, slot_state, slot_states,
    step, updates,
};
use fp8_recipe::{AutocastOptions, CurrentScaling, DelayedScaling, Direction, Recipe, Scaling, ScalingState};

fn with_len(amax_history_len: usize) -> Recipe {
    DelayedScaling { amax_history_len, interval: 2, ..short() }.into()
}

/// A whole step; returns codes and scales.
fn train(scaling: &mut Scaling, recipe: &Recipe, s: u8) -> (Vec<u8>, f32, f32) {
    let amax = 1.0 + f32::from(s % 7 * 5 % 11);
    let mut cx = scaling.autocast(recipe).unwrap();
    let (x8, origin) = forward(&mut cx, &input("a"), &[amax, 0.3]);
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let dy8 = backward(&mut cx, &origin, &grad("a"), &[0.1 / amax]);
    cx.commit().unwrap();
    (codes(&x8), scale_of(&x8), scale_of(&dy8))
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for loaded_late in [false, true] {
        let recipe = with_len(4);
        let mut straight = scaling(&["a", "b"]);
        (0..5).for_each(|s| drop(train(&mut straight, &recipe, s)));
        let state = straight.state().unwrap();
        let mut resumed = scaling(&["a", "b"]);
        if loaded_late {
            train(&mut resumed, &recipe, 77);
        }
        resumed.load_state(&state).unwrap();
        assert_eq!(resumed.state().unwrap(), state);
        for s in 5..12 {
            assert_eq!(train(&mut straight, &recipe, s), train(&mut resumed, &recipe, s), "step {s}");
        }
        assert_eq!(straight.state().unwrap(), resumed.state().unwrap());
    }
}

#[test]
fn a_slot_not_yet_calibrated_stays_so() {
    let (mut first, mut second, recipe) = (scaling(&["a", "b"]), scaling(&["a", "b"]), short().into());
    step(&mut first, &recipe, &input("a"), &[1.0]).unwrap();
    second.load_state(&first.state().unwrap()).unwrap();
    let mut cx = second.autocast(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("b"), &[7.0]).0), 64.0);
    cx.commit().unwrap();
}

#[test]
fn an_evaluation_uses_loaded_scales_at_once() {
    let (mut first, mut second, recipe) = (scaling(&["a"]), scaling(&["a"]), short().into());
    step(&mut first, &recipe, &input("a"), &[7.0]).unwrap();
    second.load_state(&first.state().unwrap()).unwrap();
    let mut cx = second.eval(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[1.0]).0), 64.0);
    drop(cx);
    assert_eq!(second.state().unwrap(), first.state().unwrap());
}

#[test]
fn a_longer_history_gets_zeros_on_its_old_side_a_shorter_one_keeps_the_newest_rows() {
    let (mut saved, recipe) = (scaling(&["a"]), with_len(4));
    for amax in [4.0, 2.0, 1.0] {
        step(&mut saved, &recipe, &input("a"), &[amax]).unwrap();
    }
    let scale = slot_state(&saved, &input("a")).0;
    for (len, window) in
        [(6, &[0.0, 0.0, 4.0, 2.0, 1.0][..]), (4, &[4.0, 2.0, 1.0]), (3, &[2.0, 1.0]), (1, &[])]
    {
        let mut resumed = scaling(&["a"]);
        resumed.load_state(&saved.state().unwrap()).unwrap();
        resumed.autocast(&with_len(len)).unwrap().discard().unwrap();
        assert_eq!(slot_states(&resumed, &input("a"))[0], (scale, window.to_vec()), "length {len}");
        // The arena of another length is another recipe's, which may be used as well.
        let expected = if len == 4 { vec![3] } else { vec![0, 3] };
        assert_eq!(updates(&resumed, Direction::Forward), expected, "length {len}");
    }
}

#[test]
fn two_lengths_of_one_recipe_find_their_own() {
    let mut saved = scaling(&["a"]);
    step(&mut saved, &with_len(3), &input("a"), &[3.0]).unwrap();
    step(&mut saved, &with_len(5), &input("a"), &[5.0]).unwrap();
    for order in [[3, 5], [5, 3]] {
        let mut resumed = scaling(&["a"]);
        resumed.load_state(&saved.state().unwrap()).unwrap();
        for len in order {
            resumed.eval(&with_len(len)).unwrap().commit().unwrap();
        }
        let mut states = slot_states(&resumed, &input("a"));
        states.sort_by_key(|state| state.1.len());
        assert_eq!(states, slot_states(&saved, &input("a")));
    }
}

#[test]
fn loading_takes_the_place_of_what_was_there() {
    let (mut scaling, mut empty, recipe) = (scaling(&["a"]), scaling(&["a"]), with_len(4));
    train(&mut scaling, &recipe, 1);
    scaling.load_state(&ScalingState::default()).unwrap();
    for s in 0..4 {
        assert_eq!(train(&mut scaling, &recipe, s), train(&mut empty, &recipe, s), "step {s}");
    }
    assert_eq!(scaling.state().unwrap(), empty.state().unwrap());
}

fn in_a_group() -> AutocastOptions {
    AutocastOptions { amax_reduction_group: Some(std::sync::Arc::new(Alone("dp"))), ..Default::default() }
}

#[test]
fn an_evaluation_leaves_the_state_to_the_training_that_goes_on() {
    let (mut saved, recipe) = (scaling(&["a"]), with_len(4));
    let train = |scaling: &mut Scaling, amax: f32| {
        let mut cx = scaling.scope(&recipe, &in_a_group()).unwrap();
        let scale = scale_of(&forward(&mut cx, &input("a"), &[amax]).0);
        cx.commit().unwrap();
        scale
    };
    train(&mut saved, 7.0);
    let state = saved.state().unwrap();
    assert_eq!(train(&mut saved, 1.0), 64.0);
    // Without the group, and with another length besides: neither is that training.
    for evaluate in [
        |scaling: &mut Scaling| drop(scaling.eval(&with_len(4)).unwrap()),
        |scaling: &mut Scaling| drop(scaling.eval(&with_len(6)).unwrap()),
    ] {
        let mut resumed = scaling(&["a"]);
        resumed.load_state(&state).unwrap();
        evaluate(&mut resumed);
        assert_eq!(train(&mut resumed, 1.0), 64.0);
        assert_eq!(resumed.state().unwrap(), saved.state().unwrap());
    }
}

#[test]
fn state_loads_into_a_run_without_the_group() {
    let (mut saved, mut resumed, recipe) = (scaling(&["a"]), scaling(&["a"]), Recipe::from(short()));
    let mut cx = saved.scope(&recipe, &in_a_group()).unwrap();
    forward(&mut cx, &input("a"), &[7.0]);
    cx.commit().unwrap();
    assert_eq!(saved.state().unwrap().arenas[0].group.as_deref(), Some("dp"));
    resumed.load_state(&saved.state().unwrap()).unwrap();
    let mut cx = resumed.autocast(&recipe).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[1.0]).0), 64.0);
    cx.commit().unwrap();
    assert_eq!(resumed.state().unwrap().arenas.len(), 2);
    assert_eq!(resumed.state().unwrap().arenas[0].group, None);
}

#[test]
fn state_that_nobody_asked_for_is_kept() {
    let (mut saved, mut resumed) = (scaling(&["a"]), scaling(&["a"]));
    step(&mut saved, &with_len(4), &input("a"), &[3.0]).unwrap();
    resumed.load_state(&saved.state().unwrap()).unwrap();
    step(&mut resumed, &short().into(), &input("a"), &[1.0]).unwrap();
    let arenas = resumed.state().unwrap().arenas;
    assert_eq!((arenas.len(), &arenas[2..]), (4, &saved.state().unwrap().arenas[..]));
}

#[test]
fn other_slots_or_impossible_numbers_are_refused_and_change_nothing() {
    let (mut saved, recipe) = (scaling(&["a", "b"]), short().into());
    step(&mut saved, &recipe, &input("a"), &[3.5]).unwrap();
    let state = saved.state().unwrap();
    let refused = |path: &[&str], state: &ScalingState| {
        let mut scaling = scaling(path);
        step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
        let before = scaling.state().unwrap();
        let text = message(scaling.load_state(state));
        assert_eq!(scaling.state().unwrap(), before);
        let (head, problem) = text.split_once(": ").unwrap();
        assert!(head.starts_with("scaling state of delayed"), "{text}");
        problem.to_owned()
    };
    let model = "load it into the model that it was saved from";
    let slots = format!("slots: it has `b.input` where this model has `c.input`: {model}");
    assert_eq!(refused(&["a", "c"], &state), slots);
    assert_eq!(refused(&["a"], &state), format!("slots: it has 4, this model 2: {model}"));
    assert_eq!(refused(&["a", "b", "c"], &state), format!("slots: it has 4, this model 6: {model}"));
    let edited = |edit: &dyn Fn(&mut fp8_recipe::ArenaState)| {
        let mut state = state.clone();
        edit(&mut state.arenas[0]);
        refused(&["a", "b"], &state)
    };
    assert_eq!(edited(&|arena| arena.scale.truncate(3)), "scale: it has 3 values for 4 slots");
    assert_eq!(
        edited(&|arena| arena.amax_history[1].truncate(3)),
        "amax_history: row 1 has 3 values for 4 slots"
    );
    assert_eq!(
        edited(&|arena| arena.amax_history.resize(1 << 20, vec![0.0; 4])),
        "amax_history: it has 1048576 rows: expected at most 1048575"
    );
    assert_eq!(edited(&|arena| arena.last_updates.truncate(3)), "last_updates: it has 3 values for 4 slots");
    let subnormal = f32::from_bits(0x007F_FFFF);
    for scale in [0.0, -0.0, -2.0, 1e-45, subnormal, f32::NAN, f32::INFINITY] {
        let text = format!(
            "scale: {scale:e} for `a.weight`: expected -1 (not calibrated) or a finite number of at least 2^-126"
        );
        assert_eq!(edited(&|arena| arena.scale[1] = scale), text);
    }
    for amax in [-1.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let text = format!("amax_history: {amax:e} for `b.input`: expected a finite number of at least 0");
        assert_eq!(edited(&|arena| arena.amax_history[0][2] = amax), text);
    }
    let limit = "expected at most 2^62, which no training reaches";
    for count in [(1 << 62) + 1, u64::MAX - 1, u64::MAX] {
        assert_eq!(edited(&|arena| arena.updates = count), format!("updates: {count}: {limit}"));
        assert_eq!(edited(&|arena| arena.last_updates[1] = count), format!("last_updates: {count}: {limit}"));
    }
    let text = "recipe: expected the options of a recipe with state, as `state` writes them";
    assert_eq!(edited(&|arena| arena.recipe = arena.recipe.replace("reduce_amax=true,", "")), text);
    let mut twice = state.clone();
    twice.arenas.push(state.arenas[0].clone());
    let text = "recipe: it occurs twice with the same group and history length";
    assert_eq!(refused(&["a", "b"], &twice), text);
}

#[test]
fn infinite_amaxes_are_taken_where_the_recipe_records_them() {
    let recipe: Recipe = DelayedScaling { record_non_finite: true, ..short() }.into();
    let mut saved = scaling(&["a"]);
    step(&mut saved, &recipe, &input("a"), &[f32::INFINITY]).unwrap();
    let mut state = saved.state().unwrap();
    assert_eq!(slot_state(&saved, &input("a")).1, [0.0, 0.0, f32::INFINITY]);
    let mut resumed = scaling(&["a"]);
    resumed.prepare(&recipe, &AutocastOptions::default()).unwrap();
    resumed.load_state(&state).unwrap();
    assert_eq!(resumed.state().unwrap(), state);
    state.arenas[0].amax_history[0][0] = f32::NAN;
    let text = message(resumed.load_state(&state));
    let problem = "amax_history: NaN for `a.input`: expected a finite number of at least 0 or infinity";
    assert!(text.ends_with(problem), "{text}");
    // No user's function can name itself an option.
    let name = "x\"),record_non_finite=true,zero_is_skipped=true".into();
    let custom = fp8_recipe::CustomAmax { name, function: std::sync::Arc::new(|_| 1.0) };
    let recipe = DelayedScaling { amax_compute_algo: fp8_recipe::AmaxComputeAlgo::Custom(custom), ..short() };
    let mut saved = scaling(&["a"]);
    step(&mut saved, &recipe.into(), &input("a"), &[1.0]).unwrap();
    let mut state = saved.state().unwrap();
    scaling(&["a"]).load_state(&state).unwrap();
    state.arenas[0].amax_history[0][0] = f32::INFINITY;
    assert!(scaling(&["a"]).load_state(&state).is_err());
}

#[test]
fn the_largest_counts_that_load_can_be_counted_on() {
    let (mut saved, recipe) = (scaling(&["a"]), with_len(4));
    step(&mut saved, &recipe, &input("a"), &[1.0]).unwrap();
    let mut state = saved.state().unwrap();
    state.arenas[0].updates = 1 << 62;
    state.arenas[0].last_updates[0] = 1 << 62;
    let mut resumed = scaling(&["a"]);
    resumed.load_state(&state).unwrap();
    for _ in 0..3 {
        step(&mut resumed, &recipe, &input("a"), &[2.0]).unwrap();
    }
    let arena = &resumed.state().unwrap().arenas[0];
    assert_eq!((arena.updates, arena.last_updates[0]), ((1 << 62) + 3, (1 << 62) + 3));
}

#[test]
fn state_has_names_and_leaves_out_recipes_without_any() {
    let mut scaling = scaling(&["b", "a"]);
    step(&mut scaling, &CurrentScaling::default().into(), &input("a"), &[1.0]).unwrap();
    step(&mut scaling, &short().into(), &input("a"), &[1.0]).unwrap();
    let state = scaling.state().unwrap();
    assert_eq!(state.arenas.len(), 2);
    let arena = &state.arenas[0];
    assert_eq!((arena.direction, arena.updates, &arena.group), (Direction::Forward, 1, &None));
    assert_eq!(arena.last_updates, [1, 0, 0, 0]); // a.input has run
    assert_eq!(&*arena.slots[0], "a.input");
    assert_eq!(
        arena.recipe,
        "delayed(margin=0,interval=1,fp8_format=HYBRID,amax=max,scale=exact,override=(false, false, false),\
         reduce_amax=true,calibrate_first_step=true,record_non_finite=false,zero_is_skipped=false)"
    );
}

/// The state of a run, interrupted or not, by recipe, direction and length.
fn arenas(scaling: &Scaling) -> Vec<fp8_recipe::ArenaState> {
    let mut arenas = scaling.state().unwrap().arenas;
    arenas.sort_by_key(|of| (of.recipe.clone(), of.direction.name(), of.amax_history.len()));
    arenas
}

fn reloaded(saved: &Scaling) -> Scaling {
    let mut resumed = scaling(&["a"]);
    resumed.load_state(&saved.state().unwrap()).unwrap();
    resumed
}

#[test]
fn recipes_that_differ_in_length_alone_keep_their_own_arenas_after_a_load() {
    let mut undisturbed = scaling(&["a"]);
    for amax in [8.0, 4.0, 2.0] {
        step(&mut undisturbed, &with_len(5), &input("a"), &[amax]).unwrap();
    }
    let mut resumed = reloaded(&undisturbed);
    for scaling in [&mut undisturbed, &mut resumed] {
        step(scaling, &with_len(3), &input("a"), &[1.0]).unwrap();
    }
    assert_eq!(arenas(&undisturbed), arenas(&resumed));
    let mut resumed = reloaded(&resumed);
    for scaling in [&mut undisturbed, &mut resumed] {
        step(scaling, &with_len(5), &input("a"), &[1.0]).unwrap();
    }
    assert_eq!(arenas(&undisturbed), arenas(&resumed));
    assert_eq!(slot_states(&undisturbed, &input("a"))[0], (56.0, vec![8.0, 4.0, 2.0, 1.0]));
}

#[test]
fn an_arena_that_was_never_updated_follows_the_others_after_a_load_too() {
    let joins = Recipe::from(DelayedScaling { margin: 1, ..short() });
    let run = |is_interrupted: bool| {
        let mut scaling = scaling(&["a"]);
        let interrupt = |scaling: &mut Scaling| {
            if is_interrupted {
                *scaling = reloaded(scaling);
            }
        };
        let both = |scaling: &mut Scaling, recipe: &Recipe, amax: f32| {
            let origin = step(scaling, recipe, &input("a"), &[amax]).unwrap();
            let mut cx = scaling.backward().unwrap();
            let dy8 = backward(&mut cx, &origin, &grad("a"), &[amax]);
            cx.commit().unwrap();
            scale_of(&dy8)
        };
        both(&mut scaling, &short().into(), 4.0);
        // One scope is dropped, another has no backward.
        drop(scaling.autocast(&joins).unwrap());
        step(&mut scaling, &with_len(6), &input("a"), &[4.0]).unwrap();
        interrupt(&mut scaling);
        both(&mut scaling, &short().into(), 8.0);
        interrupt(&mut scaling);
        let scales = [both(&mut scaling, &joins, 1.0), both(&mut scaling, &with_len(6), 1.0)];
        (scales, arenas(&scaling))
    };
    let (undisturbed, resumed) = (run(false), run(true));
    assert_eq!(undisturbed, resumed);
    assert_eq!(undisturbed.0[0], 57344.0 / 2.0 / 8.0);
}
