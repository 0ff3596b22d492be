//! Recipes of the user's own: what they are asked, their state, and what they cannot break.

use super::support::{
    Alone, backward, device, forward, grad, input, message, scale_of, scaling, short, slot_state,
    slot_states, step, weight,
};
use fp8_recipe::fp8_kernels::{Arena, Tensor};
use fp8_recipe::{
    AmaxGroup, CustomRecipe, DelayedScaling, Direction, Error, Format, Recipe, Result, Scaling, SlotName,
    SlotRole, SlotUpdate, StartsNew,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

/// The mean of all amaxes so far, and how many there were.
#[derive(Debug, Default)]
struct Mean {
    format: Format,
    first_is_one: bool,
    own_amaxes: bool,
}

impl CustomRecipe for Mean {
    fn name(&self) -> &str {
        "mean"
    }

    fn format(&self) -> Format {
        self.format
    }

    fn state(&self) -> &[&str] {
        &["sum", "count"]
    }

    fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
        state[0] += slot.amax;
        state[1] += 1.0;
        slot.fp8_max * state[1] / state[0]
    }

    fn calibrate_first_step(&self) -> bool {
        !self.first_is_one
    }

    fn reduce_amax(&self) -> bool {
        !self.own_amaxes
    }
}

fn mean() -> Recipe {
    Recipe::custom(Mean::default())
}

#[test]
fn all_gemms_of_a_layer_run_in_fp8() {
    let mut scaling = scaling(&["fc"]);
    let gemms = scaling.autocast(&mean()).unwrap().fp8_gemms(&input("fc"));
    assert_eq!([gemms.fprop, gemms.dgrad, gemms.wgrad], [true; 3]);
}

/// A stateless recipe from a function, which may return anything or panic.
struct Function<F>(F);

impl<F> std::fmt::Debug for Function<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Function")
    }
}

impl<F: Fn(&SlotUpdate<'_>, &mut [f32]) -> f32 + Send + Sync + 'static> CustomRecipe for Function<F> {
    fn name(&self) -> &str {
        "function"
    }

    fn state(&self) -> &[&str] {
        &["last"]
    }

    fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
        (self.0)(slot, state)
    }
}

fn function(f: impl Fn(&SlotUpdate<'_>, &mut [f32]) -> f32 + Send + Sync + 'static) -> Recipe {
    Recipe::custom(Function(f))
}

/// One forward scope in which several slots run.
fn run(scaling: &mut Scaling, recipe: &Recipe, amaxes: &[(SlotName, f32)]) -> Result<Vec<f32>> {
    let mut cx = scaling.autocast(recipe)?;
    let scales = amaxes.iter().map(|(slot, amax)| scale_of(&forward(&mut cx, slot, &[*amax]).0)).collect();
    cx.commit()?;
    Ok(scales)
}

#[test]
fn each_slot_has_its_own_scale_and_state() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let slots = |amaxes: [f32; 3]| -> Vec<(SlotName, f32)> {
        ["a", "b", "c"].map(input).into_iter().zip(amaxes).filter(|(_, amax)| *amax >= 0.0).collect()
    };
    let first = run(&mut scaling, &mean(), &slots([1.0, 2.0, 4.0])).unwrap();
    assert_eq!(first, [448.0, 224.0, 112.0]); // each tensor's own
    let second = run(&mut scaling, &mean(), &slots([3.0, -1.0, 12.0])).unwrap();
    assert_eq!(second, [448.0, 112.0]); // of the first commit
    assert_eq!(slot_state(&scaling, &input("a")), (224.0, vec![4.0, 2.0, 3.0])); // sum, count, newest amax
    assert_eq!(slot_state(&scaling, &input("b")), (224.0, vec![2.0, 1.0, 2.0])); // did not run
    assert_eq!(slot_state(&scaling, &input("c")), (56.0, vec![16.0, 2.0, 12.0]));
    assert_eq!(slot_state(&scaling, &weight("b")), (-1.0, vec![0.0; 3]));
    let third = run(&mut scaling, &mean(), &slots([1.0, 1.0, 1.0])).unwrap();
    assert_eq!(third, [224.0, 224.0, 56.0]);
}

#[test]
fn a_slot_update_says_which_slot_it_is() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let recipe = function(move |slot, state| {
        let SlotUpdate { name, role, amax, fp8_max, scale, .. } = *slot;
        notes.lock().unwrap().push((name.to_owned(), role, amax, fp8_max, scale, state.to_vec()));
        state[0] = amax;
        2.0
    });
    let mut scaling = scaling(&["a", "b"]);
    let mut cx = scaling.autocast(&recipe).unwrap();
    let (_, origin) = forward(&mut cx, &input("b"), &[1.0]);
    forward(&mut cx, &input("b"), &[-3.0]); // the larger amax counts
    cx.quantize_weight(&weight("a"), 1, &Tensor::from_vec(vec![5.0f32], [1, 1], &device()).unwrap()).unwrap();
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("b"), &[7.0]);
    cx.commit().unwrap();
    step(&mut scaling, &recipe, &input("b"), &[4.0]).unwrap();
    let all = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(
        all,
        [
            ("a.weight".to_owned(), SlotRole::Weight, 5.0, 448.0, None, vec![0.0]),
            ("b.input".to_owned(), SlotRole::Input, 3.0, 448.0, None, vec![0.0]),
            ("b.grad_output".to_owned(), SlotRole::GradOutput, 7.0, 57344.0, None, vec![0.0]),
            ("b.input".to_owned(), SlotRole::Input, 4.0, 448.0, Some(2.0), vec![3.0]),
        ]
    );
}

#[test]
fn tensors_that_say_nothing_change_nothing() {
    let mut scaling = scaling(&["a"]);
    step(&mut scaling, &mean(), &input("a"), &[2.0]).unwrap();
    for (nothing, newest) in [(f32::INFINITY, 2.0), (f32::NAN, 0.0), (0.0, 0.0)] {
        step(&mut scaling, &mean(), &input("a"), &[nothing]).unwrap();
        assert_eq!(slot_state(&scaling, &input("a")), (224.0, vec![2.0, 1.0, newest]), "{nothing}");
    }
    let report = &scaling.slot_reports().unwrap()[0];
    assert_eq!((report.non_finite, report.scale, report.calibrated), (1, 224.0, true));
    // A slot that has only seen zeros takes its scale from the first tensor that says something.
    for (amax, scale) in [(0.0, 1.0), (4.0, 112.0), (1.0, 112.0)] {
        assert_eq!(run(&mut scaling, &mean(), &[(weight("a"), amax)]).unwrap(), [scale]);
    }
}

#[test]
fn the_options_of_a_recipe() {
    let recipe = Recipe::custom(Mean { format: Format::E4M3, first_is_one: true, own_amaxes: true });
    let mut scaling = scaling(&["a"]);
    scaling.set_group(Arc::new(Alone("dp")));
    let origin = step(&mut scaling, &recipe, &input("a"), &[2.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("a")).0, 224.0);
    let mut cx = scaling.backward().unwrap();
    assert_eq!(scale_of(&backward(&mut cx, &origin, &grad("a"), &[1.0])), 1.0);
    cx.commit().unwrap();
    assert_eq!(slot_state(&scaling, &grad("a")).0, 448.0); // E4M3
    let text = r#"custom("mean") (fp8_format=E4M3, reduce_amax=false, calibrate_first_step=false)"#;
    assert_eq!(recipe.to_string(), text);
    assert_eq!(scaling.slot_reports().unwrap()[0].recipe.to_string(), format!("{text}, group dp"));
    assert_eq!(
        scaling.eval(&recipe).unwrap().slot(&weight("a")).unwrap().encoding,
        Format::E4M3.encoding(Direction::Forward)
    );
}

#[test]
fn options_out_of_range() {
    #[derive(Debug)]
    struct Bad(&'static str, &'static [&'static str], Format);
    impl CustomRecipe for Bad {
        fn name(&self) -> &str {
            self.0
        }
        fn state(&self) -> &[&str] {
            self.1
        }
        fn format(&self) -> Format {
            self.2
        }
        fn scale(&self, _: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
            1.0
        }
    }
    static MANY: [&str; 1025] = ["x"; 1025];
    for (bad, text) in [
        (
            Bad("", &[], Format::Hybrid),
            "CustomRecipe: name = \"\": expected a name, by which checkpoints identify it",
        ),
        (
            Bad("a", &["m", "v", "m"], Format::Hybrid),
            "CustomRecipe: state = \"m\" twice: expected different names",
        ),
        (
            Bad("a", &MANY, Format::Hybrid),
            "CustomRecipe: state = 1025 names: expected at most 1024 numbers for each slot",
        ),
        (Bad("a", &[], Format::E5M2), "CustomRecipe: fp8_format = E5M2: no FP8 GEMM multiplies E5M2 by E5M2"),
    ] {
        let error = message(scaling(&["a"]).autocast(&Recipe::custom(bad)));
        assert!(error.starts_with(text), "{error}");
    }
}

#[test]
fn a_number_that_cannot_be_used_is_an_error_and_changes_nothing() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE.next_down()] {
        let recipe = function(move |slot, state| {
            state[0] += slot.amax;
            if slot.amax > 10.0 && slot.name == "b.input" { bad } else { 2.0 }
        });
        let mut scaling = scaling(&["a", "b"]);
        let both = |amax| [(input("a"), amax), (input("b"), amax)];
        run(&mut scaling, &recipe, &both(1.0)).unwrap();
        let before = scaling.state().unwrap();
        let error = run(&mut scaling, &recipe, &both(11.0)).unwrap_err();
        assert!(matches!(error, Error::CustomRecipe { .. }));
        let text = format!(
            "recipe \"function\", slot `b.input`: scale {bad} for amax 11: expected a finite number of at least 2^-126, so \
             that its inverse is finite, too"
        );
        assert_eq!(error.to_string(), text);
        assert_eq!(scaling.state().unwrap(), before);
        run(&mut scaling, &recipe, &both(2.0)).unwrap();
        assert_eq!(slot_state(&scaling, &input("a")), (2.0, vec![3.0, 2.0])); // nothing of 11 is left
        assert_eq!(slot_state(&scaling, &input("b")), (2.0, vec![3.0, 2.0]));
    }
    let recipe = function(|slot, state| {
        state[0] = 1.0 / (slot.amax - 4.0);
        1.0
    });
    assert_eq!(
        message(step(&mut scaling(&["a"]), &recipe, &input("a"), &[4.0])),
        "recipe \"function\", slot `a.input`: state \"last\" is inf after amax 4: expected a finite number"
    );
}

#[test]
fn a_bad_number_or_a_panic_leaves_other_recipes_alone() {
    let picky = function(|slot, _| match slot.amax {
        11.0 => f32::NAN,
        12.0 => panic!("too large"),
        _ => 2.0,
    });
    let delayed: Recipe = short().into();
    let mut scaling = scaling(&["a"]);
    let both = |scaling: &mut Scaling, amax: f32| {
        let mut cx = scaling.autocast(&delayed)?;
        forward(&mut cx, &input("a"), &[amax]);
        forward(&mut cx.nested(&picky)?, &input("a"), &[amax]);
        forward(&mut cx.nested(&mean())?, &input("a"), &[amax]);
        cx.commit()
    };
    both(&mut scaling, 1.0).unwrap();
    let before = scaling.state().unwrap();
    assert!(both(&mut scaling, 11.0).is_err());
    assert_eq!(scaling.state().unwrap(), before);
    assert!(catch_unwind(AssertUnwindSafe(|| both(&mut scaling, 12.0))).is_err());
    assert_eq!(scaling.state().unwrap(), before);
    both(&mut scaling, 3.0).unwrap();
    let states = slot_states(&scaling, &input("a"));
    assert!(states.contains(&(448.0 / 3.0, vec![0.0, 1.0, 3.0])), "{states:?}");
    assert!(states.contains(&(2.0, vec![0.0, 3.0])), "{states:?}");
    assert!(states.contains(&(224.0, vec![4.0, 2.0, 3.0])), "{states:?}");
}

#[test]
fn a_scope_that_is_dropped_takes_its_numbers_back() {
    let mut scaling = scaling(&["a", "b"]);
    step(&mut scaling, &mean(), &input("a"), &[1.0]).unwrap();
    let before = scaling.state().unwrap();
    let mut cx = scaling.autocast(&mean()).unwrap();
    forward(&mut cx, &input("a"), &[9.0]);
    forward(&mut cx, &input("b"), &[9.0]);
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
    let mut cx = scaling.autocast(&mean()).unwrap();
    forward(&mut cx, &input("a"), &[9.0]);
    cx.discard().unwrap();
    assert_eq!(scaling.state().unwrap(), before);
    step(&mut scaling, &mean(), &input("a"), &[3.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), (224.0, vec![4.0, 2.0, 3.0]));
    assert_eq!(slot_state(&scaling, &input("b")), (-1.0, vec![0.0; 3]));
}

#[test]
fn evaluation_and_recompute_change_nothing() {
    let mut scaling = scaling(&["a"]);
    assert_eq!(scale_of(&forward(&mut scaling.eval(&mean()).unwrap(), &input("a"), &[7.0]).0), 64.0);
    assert!(scaling.state().unwrap().arenas.is_empty());
    let mut cx = scaling.autocast(&mean()).unwrap();
    let snapshot = cx.snapshot();
    forward(&mut cx, &input("a"), &[2.0]);
    cx.commit().unwrap();
    step(&mut scaling, &mean(), &input("a"), &[8.0]).unwrap();
    let before = scaling.state().unwrap();
    assert_eq!(scale_of(&forward(&mut scaling.eval(&mean()).unwrap(), &input("a"), &[7.0]).0), 89.6);
    let mut cx = scaling.backward().unwrap();
    assert_eq!(scale_of(&forward(&mut cx.replay(&snapshot).unwrap(), &input("a"), &[7.0]).0), 224.0);
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
}

#[test]
fn state_is_saved_and_restored_by_name() {
    let mut trained = scaling(&["a", "b"]);
    let both = |scaling: &mut Scaling, amaxes: [f32; 2]| {
        run(scaling, &mean(), &[(input("a"), amaxes[0]), (input("b"), amaxes[1])]).unwrap()
    };
    both(&mut trained, [1.0, 4.0]);
    both(&mut trained, [3.0, 8.0]);
    let state = trained.state().unwrap();
    assert_eq!(
        state.arenas[0].recipe,
        r#"custom(name="mean",state=("sum","count"),fp8_format=HYBRID,override=(false, false, false),reduce_amax=true,calibrate_first_step=true)"#
    );
    for is_prepared in [false, true] {
        let mut resumed = scaling(&["a", "b"]);
        if is_prepared {
            resumed.prepare(&mean(), &Default::default()).unwrap();
        }
        let report = resumed.load_state(&state).unwrap();
        assert_eq!(resumed.state().unwrap(), state);
        assert_eq!(report.unused.len(), usize::from(!is_prepared), "{report}");
        assert_eq!(both(&mut resumed, [5.0, 1.0]), [224.0, 448.0 * 2.0 / 12.0]);
        assert_eq!(slot_state(&resumed, &input("a")), (448.0 / 3.0, vec![9.0, 3.0, 5.0]));
        assert_eq!(resumed.state_report().taken_over.len(), 6, "{}", resumed.state_report());
    }
}

#[test]
fn state_that_cannot_be_loaded() {
    let mut trained = scaling(&["a"]);
    step(&mut trained, &mean(), &input("a"), &[1.0]).unwrap();
    let state = trained.state().unwrap();
    let mut negative = state.clone();
    negative.arenas[0].amax_history[0][0] = -3.0;
    scaling(&["a"]).load_state(&negative).unwrap(); // a number of the user's may be negative
    for bad in [f32::NAN, f32::INFINITY] {
        let mut damaged = state.clone();
        damaged.arenas[0].amax_history[1][0] = bad;
        assert_eq!(
            message(scaling(&["a"]).load_state(&damaged)),
            format!(
                "scaling state of custom(\"mean\"), forward: amax_history: {bad:e} for `a.input`: expected a finite number"
            )
        );
    }
    // Numbers are never taken for others: with a row more or less, the arena is not used.
    let mut longer = state;
    longer.arenas[0].amax_history.push(vec![5.0, 5.0]);
    let mut other = scaling(&["a"]);
    other.load_state(&longer).unwrap();
    step(&mut other, &mean(), &input("a"), &[4.0]).unwrap();
    assert_eq!(other.state_report().unused.len(), 1, "{}", other.state_report());
}

#[test]
fn recipes_that_change() {
    let delayed: Recipe = short().into();
    let mut scaling = scaling(&["a", "b"]);
    step(&mut scaling, &delayed, &input("a"), &[2.0]).unwrap();
    // A recipe of the user's own starts from the next tensor, and says so.
    step(&mut scaling, &mean(), &input("a"), &[4.0]).unwrap();
    let reasons: Vec<_> =
        scaling.state_report().new.iter().map(|slot| (slot.slot.to_string(), slot.reason)).collect();
    assert_eq!(reasons[0], ("a.input".to_owned(), StartsNew::OwnState));
    assert!(reasons[1..].iter().all(|(_, reason)| *reason == StartsNew::NeverRan), "{reasons:?}");
    let report = scaling.state_report().to_string();
    assert!(report.contains("1 slot new (a custom recipe continues only its own state)"), "{report}");
    // The earlier recipe continues its own history.
    step(&mut scaling, &delayed, &input("a"), &[1.0]).unwrap();
    assert!(slot_states(&scaling, &input("a")).contains(&(224.0, vec![0.0, 2.0, 1.0])));
    // Another one takes the newest amax of whatever ran last.
    step(&mut scaling, &mean(), &input("a"), &[8.0]).unwrap();
    let wide = DelayedScaling { margin: 1, ..short() }.into();
    let mut cx = scaling.autocast(&wide).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[1.0]).0), 28.0); // 448 / 2 / 8
    cx.commit().unwrap();
    assert!(slot_states(&scaling, &input("a")).contains(&(28.0, vec![0.0, 8.0, 1.0])));
}

/// Another rank whose row 0 is this.
#[derive(Debug)]
struct Other(Vec<f32>);

impl AmaxGroup for Other {
    fn id(&self) -> &str {
        "dp"
    }

    fn world_size(&self) -> usize {
        2
    }

    fn agree_on_names(&self, _: &str, _: &[Arc<str>]) -> Result<()> {
        Ok(())
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()> {
        assert!(key.starts_with("forward custom(\"mean\")"), "{key}");
        Ok(arena.merge_staged(&self.0)?)
    }

    fn poison(&self, _: &str) {}
}

#[test]
fn amaxes_are_reduced_first() {
    for own_amaxes in [false, true] {
        let mut scaling = scaling(&["a"]);
        scaling.set_group(Arc::new(Other(vec![8.0, 4.0]))); // a.input, a.weight
        let recipe = Recipe::custom(Mean { own_amaxes, ..Default::default() });
        step(&mut scaling, &recipe, &input("a"), &[2.0]).unwrap();
        let expected = if own_amaxes { [224.0, -1.0] } else { [56.0, 112.0] };
        assert_eq!([input("a"), weight("a")].map(|slot| slot_state(&scaling, &slot).0), expected);
        assert_eq!(scaling.state_digests().unwrap().is_empty(), own_amaxes);
    }
}

#[test]
fn microbatches_of_one_step() {
    let mut scaling = scaling(&["a"]);
    let w = Tensor::from_vec(vec![2.0f32], [1, 1], &device()).unwrap();
    for (amax, x_scale) in [(1.0, 448.0), (3.0, 448.0), (2.0, 224.0)] {
        let mut cx = scaling.autocast(&mean()).unwrap();
        assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[amax]).0), x_scale);
        assert_eq!(scale_of(&cx.quantize_weight(&weight("a"), 7, &w).unwrap()), 224.0);
        cx.commit().unwrap();
    }
    assert_eq!(slot_state(&scaling, &weight("a")), (224.0, vec![2.0, 1.0, 2.0])); // quantized once
    assert_eq!(slot_state(&scaling, &input("a")), (224.0, vec![6.0, 3.0, 2.0]));
}
