//! Recipes by the name of the slot: who gets which, and that each is as if it were alone.

use super::support::{
    backward, codes, device, forward, grad, input, message, of_recipe, scale_of, scaling, short, step,
    tensor, updates, weight,
};
use fp8_recipe::fp8_kernels::Arena;
use fp8_recipe::{
    AmaxGroup, AutocastOptions, CurrentScaling, CustomRecipe, DelayedScaling, Direction, Encoding, Error,
    Format, Fp8Gemms, Origin, Recipe, Result, Scaling, SlotName, SlotUpdate,
};
use std::sync::{Arc, Mutex};

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

/// Always 16.
#[derive(Debug)]
struct Sixteen;

impl CustomRecipe for Sixteen {
    fn name(&self) -> &str {
        "sixteen"
    }

    fn state(&self) -> &[&str] {
        &["commits"]
    }

    fn scale(&self, _: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
        state[0] += 1.0;
        16.0
    }
}

/// Two recipes with state, one without, and one in high precision.
fn mixed() -> Recipe {
    Recipe::by_name(
        [("b.*", margin(3)), ("c.input", CurrentScaling::default().into()), ("c", Recipe::off())],
        margin(0),
    )
}

/// One step, both passes, in which every slot of these layers runs on a tensor with this amax. The scales by slot.
fn both_passes(
    scaling: &mut Scaling,
    recipe: &Recipe,
    layers: &[&str],
    amax: f32,
) -> Result<Vec<(String, Option<f32>)>> {
    let mut scales = Vec::new();
    let mut note = |slot: &SlotName, operand: &fp8_recipe::fp8_kernels::Operand| {
        scales.push((slot.name().to_string(), operand.is_fp8().then(|| scale_of(operand))));
    };
    let mut cx = scaling.autocast(recipe)?;
    let mut origins: Vec<(SlotName, Origin)> = Vec::new();
    for layer in layers {
        let (x8, origin) = forward(&mut cx, &input(layer), &[amax]);
        note(&input(layer), &x8);
        note(&weight(layer), &forward(&mut cx, &weight(layer), &[amax]).0);
        origins.push((grad(layer), origin));
    }
    cx.commit()?;
    let mut cx = scaling.backward()?;
    for (slot, origin) in &origins {
        note(slot, &backward(&mut cx, origin, slot, &[amax]));
    }
    cx.commit()?;
    Ok(scales)
}

#[test]
fn the_first_pattern_that_matches_wins() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let scales = both_passes(&mut scaling, &mixed(), &["a", "b", "c"], 1.0).unwrap();
    let expected = [
        ("a.input", Some(448.0)),
        ("a.weight", Some(448.0)),
        ("b.input", Some(56.0)),
        ("b.weight", Some(56.0)),
        ("c.input", Some(448.0)),
        ("c.weight", None),
        ("a.grad_output", Some(57344.0)),
        ("b.grad_output", Some(7168.0)),
        ("c.grad_output", None),
    ];
    assert_eq!(scales, expected.map(|(name, scale)| (name.to_owned(), scale)));
    // In another order, another pattern is the first.
    let reordered = Recipe::by_name([("*", Recipe::off()), ("b.*", margin(3))], margin(0));
    let scales = both_passes(&mut scaling, &reordered, &["a", "b"], 1.0).unwrap();
    assert!(scales.iter().all(|(_, scale)| scale.is_none()), "{scales:?}");
}

#[test]
fn each_slot_keeps_the_scale_of_its_own_amax() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let slots = [input("a"), weight("a"), input("b"), weight("b"), input("c")];
    let mut quantize = |amaxes: [f32; 5]| {
        let mut cx = scaling.autocast(&mixed()).unwrap();
        let pairs = slots.iter().zip(amaxes);
        let scales: Vec<f32> =
            pairs.map(|(slot, amax)| scale_of(&forward(&mut cx, slot, &[amax]).0)).collect();
        cx.commit().unwrap();
        scales
    };
    quantize([1.0, 2.0, 4.0, 8.0, 16.0]);
    // The last one has a scale of its own each time.
    assert_eq!(quantize([0.5; 5]), [448.0, 224.0, 14.0, 7.0, 896.0]);
}

#[test]
fn each_recipe_is_as_if_it_were_alone() {
    let layers = ["a", "b", "c"];
    let (mut together, mut alone) = (scaling(&layers), [scaling(&layers), scaling(&layers)]);
    for amax in [1.0, 3.0, 0.5, 2.0] {
        let together = both_passes(&mut together, &mixed(), &layers, amax).unwrap();
        // With recipes of their own, the layers of one and of the other.
        let a = both_passes(&mut alone[0], &margin(0), &["a"], amax).unwrap();
        let b = both_passes(&mut alone[1], &margin(3), &["b"], amax).unwrap();
        for (name, scale) in a.iter().chain(&b) {
            let found = together.iter().find(|(other, _)| other == name).unwrap();
            assert_eq!(found.1, *scale, "{name} at {amax}");
        }
    }
    let together = together.state().unwrap();
    for alone in alone {
        for arena in alone.state().unwrap().arenas {
            let found = together
                .arenas
                .iter()
                .find(|other| (&other.recipe, other.direction) == (&arena.recipe, arena.direction));
            assert_eq!(*found.unwrap(), arena);
        }
    }
    assert_eq!(together.arenas.len(), 4);
}

#[test]
fn slots_of_other_recipes_never_run_in_an_arena() {
    let mut scaling = scaling(&["a", "b", "c"]);
    both_passes(&mut scaling, &mixed(), &["a", "b", "c"], 7.0).unwrap();
    let rest = (-1.0, vec![0.0; 3]);
    let ran = |scale| (scale, vec![0.0, 0.0, 7.0]);
    assert_eq!(of_recipe(&scaling, "margin=0", &input("a")), ran(64.0));
    assert_eq!(of_recipe(&scaling, "margin=0", &input("b")), rest);
    assert_eq!(of_recipe(&scaling, "margin=3", &input("a")), rest);
    assert_eq!(of_recipe(&scaling, "margin=3", &input("b")), ran(8.0));
    for option in ["margin=0", "margin=3"] {
        assert_eq!(of_recipe(&scaling, option, &input("c")), rest);
        assert_eq!(of_recipe(&scaling, option, &grad("c")), rest);
    }
    assert_eq!(of_recipe(&scaling, "margin=3", &grad("b")), ran(1024.0));
    // The arenas are those of the recipes alone.
    step(&mut scaling, &margin(3), &input("b"), &[1.0]).unwrap();
    assert_eq!(of_recipe(&scaling, "margin=3", &input("b")), (8.0, vec![0.0, 7.0, 1.0]));
    assert_eq!(scaling.state().unwrap().arenas.len(), 4);
}

#[test]
fn a_gemm_needs_both_operands() {
    let all = Fp8Gemms { fprop: true, dgrad: true, wgrad: true };
    let current = |override_linear_precision| {
        Recipe::from(CurrentScaling { override_linear_precision, ..Default::default() })
    };
    for (pattern, recipe, expected) in [
        ("a.input", Recipe::off(), Fp8Gemms { fprop: false, wgrad: false, ..all }),
        ("a.weight", Recipe::off(), Fp8Gemms { fprop: false, dgrad: false, ..all }),
        ("a.grad_output", Recipe::off(), Fp8Gemms { dgrad: false, wgrad: false, ..all }),
        ("a", Recipe::off(), Fp8Gemms { fprop: false, dgrad: false, wgrad: false }),
        ("a.weight", current((false, false, false)), all),
        ("a.weight", current((true, true, true)), Fp8Gemms { fprop: false, dgrad: false, ..all }),
        ("a.grad_output", current((true, false, true)), Fp8Gemms { wgrad: false, ..all }),
    ] {
        let mut scaling = scaling(&["a", "b"]);
        let recipe = Recipe::by_name([(pattern, recipe)], margin(0));
        let mut cx = scaling.autocast(&recipe).unwrap();
        assert_eq!(cx.fp8_gemms(&weight("a")), expected, "{recipe}");
        assert_eq!(cx.fp8_gemms(&input("b")), all, "{recipe}");
        assert_eq!(cx.fp8_gemms(&input("stranger")), Fp8Gemms { fprop: false, dgrad: false, wgrad: false });
        let (_, origin) = forward(&mut cx, &input("a"), &[1.0]);
        cx.commit().unwrap();
        let cx = scaling.backward().unwrap();
        assert_eq!(cx.fp8_gemms(&origin), expected, "{recipe}");
        cx.commit().unwrap();
        let explained = scaling.explain(&recipe).unwrap();
        assert_eq!(explained.layers[0].gemms, expected, "{recipe}");
    }
}

#[test]
fn a_pattern_that_matches_nothing_is_refused_by_name() {
    let mut scaling = scaling(&["blocks.0.fc1", "blocks.0.fc2", "head"]);
    let refused = |scaling: &mut Scaling, pattern: &str| {
        let recipe = Recipe::by_name([("blocks.*", margin(1)), (pattern, Recipe::off())], margin(0));
        let error = scaling.autocast(&recipe).map(drop).unwrap_err();
        assert!(matches!(error, Error::Pattern { .. }));
        assert_eq!(message(scaling.explain(&recipe)), error.to_string());
        assert_eq!(message(scaling.eval(&recipe)), error.to_string());
        error.to_string()
    };
    assert_eq!(
        refused(&mut scaling, "blocks.*.fc2.grad_input"),
        "recipe by name: pattern `blocks.*.fc2.grad_input` matches no slot: the nearest are \
         `blocks.0.fc2.grad_output`, `blocks.0.fc1.grad_output` and `blocks.0.fc2.input`"
    );
    assert!(refused(&mut scaling, "haed").contains("no slot: the nearest are `head.input`"));
    assert!(scaling.state().unwrap().arenas.is_empty());
    // An outer scope goes on after a nested one was refused.
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    assert!(cx.nested(&Recipe::by_name([("x", Recipe::off())], margin(0))).is_err());
    forward(&mut cx, &input("head"), &[1.0]);
    cx.commit().unwrap();
    let nothing = Scaling::new(&Vec::<fp8_recipe::GemmSlots>::new(), &device()).unwrap();
    assert_eq!(
        message(nothing.explain(&Recipe::by_name([("a", Recipe::off())], margin(0)))),
        "recipe by name: pattern `a` matches no slot: the model has no slots"
    );
}

#[test]
fn what_a_recipe_by_name_cannot_be_made_of() {
    let nested = Recipe::by_name([("a", mixed())], margin(0));
    let text = "by_name: recipe = another recipe by name: expected a recipe for all slots, or Recipe::off(); list the \
                patterns of both in one";
    assert_eq!(message(nested.validate()), text);
    assert_eq!(message(scaling(&["a"]).autocast(&nested)), text);
    let bad: Recipe = DelayedScaling { interval: 0, ..short() }.into();
    for recipe in [Recipe::by_name([("a", bad.clone())], margin(0)), Recipe::by_name([("a", margin(0))], bad)]
    {
        assert!(message(recipe.validate()).starts_with("DelayedScaling: interval = 0"));
    }
}

#[test]
fn recipes_in_words() {
    let recipe = mixed();
    let expected = "by name (b.*: delayed (margin=3, amax_history_len=4); c.input: current; c: off; default: delayed \
         (amax_history_len=4))";
    assert_eq!(recipe.to_string(), expected);
    assert_eq!((Recipe::off().to_string(), Recipe::off().format()), ("off".to_owned(), Format::Hybrid));
    let e4m3: Recipe = CurrentScaling { fp8_format: Format::E4M3, ..Default::default() }.into();
    assert_eq!(Recipe::by_name([("a", margin(0))], e4m3).format(), Format::E4M3);
    assert!(recipe.options::<DelayedScaling>().is_none());
    let explained = scaling(&["a", "b", "c"])
        .explain(&Recipe::by_name([("*.weight", margin(1)), ("b.weight", Recipe::off())], Recipe::off()));
    let text = explained.unwrap().to_string();
    assert!(
        text.starts_with(
            "a: no GEMM runs in low precision\n  input: off (default)\n  weight: delayed (margin=1, "
        ),
        "{text}"
    );
    let shadowed = "pattern `b.weight` decides nothing: earlier patterns match all of its slots\n";
    assert!(text.ends_with(shadowed), "{text}");
    let plain = scaling(&["a"]).explain(&margin(0)).unwrap().to_string();
    assert!(
        plain.starts_with("a: fprop, dgrad and wgrad run in FP8\n  input: delayed (amax_history_len=4)"),
        "{plain}"
    );
}

#[test]
fn formats_by_slot() {
    let e4m3 = Recipe::from(DelayedScaling { fp8_format: Format::E4M3, ..short() });
    let recipe = Recipe::by_name([("a", e4m3)], margin(0));
    let mut scaling = scaling(&["a", "b"]);
    let mut cx = scaling.autocast(&recipe).unwrap();
    let origins = ["a", "b"].map(|layer| forward(&mut cx, &input(layer), &[1.0]).1);
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let encodings = [0, 1].map(|layer| {
        let dy8 = backward(&mut cx, &origins[layer], &grad(["a", "b"][layer]), &[1.0]);
        dy8.as_fp8().unwrap().encoding()
    });
    cx.commit().unwrap();
    assert_eq!(encodings, [Encoding::E4M3, Encoding::E5M2]);
}

#[test]
fn all_off_is_high_precision() {
    for recipe in [Recipe::off(), Recipe::by_name([("a", Recipe::off())], Recipe::off())] {
        let mut scaling = scaling(&["a"]);
        scaling.set_counting(true);
        let scales = both_passes(&mut scaling, &recipe, &["a"], 1.0).unwrap();
        assert!(scales.iter().all(|(_, scale)| scale.is_none()));
        let mut cx = scaling.autocast(&recipe).unwrap();
        assert!(!cx.quantize_weight(&weight("a"), 1, &tensor(&[1.0])).unwrap().is_fp8());
        cx.commit().unwrap();
        assert_eq!((scaling.cached_weights(), scaling.state().unwrap().arenas.len()), (0, 0));
        assert!(scaling.slot_reports().unwrap().is_empty());
    }
}

#[test]
fn evaluation_uses_the_scales_and_records_nothing() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let evaluate = |scaling: &mut Scaling| {
        let mut cx = scaling.eval(&mixed()).unwrap();
        ["a", "b", "c"].map(|layer| scale_of(&forward(&mut cx, &input(layer), &[7.0]).0))
    };
    assert_eq!(evaluate(&mut scaling), [64.0, 8.0, 64.0]); // each tensor's own
    assert!(scaling.state().unwrap().arenas.is_empty());
    both_passes(&mut scaling, &mixed(), &["a", "b", "c"], 2.0).unwrap();
    let before = scaling.state().unwrap();
    assert_eq!(evaluate(&mut scaling), [224.0, 28.0, 64.0]);
    assert_eq!(scaling.state().unwrap(), before);
}

#[test]
fn recompute_runs_with_each_recipes_first_scales() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let (x, layers) = ([1.0, 0.3, -0.7], ["a", "b"]);
    for _ in 0..3 {
        let mut cx = scaling.autocast(&mixed()).unwrap();
        let snapshot = cx.snapshot();
        let first = layers.map(|layer| codes(&forward(&mut cx, &input(layer), &x).0));
        cx.commit().unwrap();
        both_passes(&mut scaling, &mixed(), &layers, 50.0).unwrap();
        let before = scaling.state().unwrap();
        let mut cx = scaling.backward().unwrap();
        let mut again = cx.replay(&snapshot).unwrap();
        assert_eq!(layers.map(|layer| codes(&forward(&mut again, &input(layer), &x).0)), first);
        assert!(!forward(&mut again, &weight("c"), &x).0.is_fp8());
        drop(again);
        drop(cx);
        assert_eq!(scaling.state().unwrap(), before);
    }
}

#[test]
fn microbatches_share_weights() {
    let mut scaling = scaling(&["a", "b", "c"]);
    for _ in 0..3 {
        let mut cx = scaling.autocast(&mixed()).unwrap();
        let scales = ["a", "b"]
            .map(|layer| scale_of(&cx.quantize_weight(&weight(layer), 1, &tensor(&[2.0])).unwrap()));
        assert_eq!(scales, [224.0, 28.0]);
        assert!(!cx.quantize_weight(&weight("c"), 1, &tensor(&[2.0])).unwrap().is_fp8());
        cx.commit().unwrap();
        assert_eq!(scaling.cached_weights(), 2);
    }
    assert_eq!(of_recipe(&scaling, "margin=0", &weight("a")), (224.0, vec![0.0, 0.0, 2.0]));
    assert_eq!(of_recipe(&scaling, "margin=3", &weight("b")), (28.0, vec![0.0, 0.0, 2.0]));
    assert_eq!(updates(&scaling, Direction::Forward), [3, 3]);
}

#[test]
fn a_scope_that_is_dropped_or_fails_changes_none_of_them() {
    let picky = |amax: f32, _: f32, _: f32, _: &DelayedScaling| if amax > 10.0 { f32::NAN } else { 2.0 };
    let scaling_factor_compute_algo = fp8_recipe::ScalingFactorComputeAlgo::Custom(fp8_recipe::CustomScale {
        name: "picky".into(),
        function: Arc::new(picky),
    });
    let picky = DelayedScaling { scaling_factor_compute_algo, margin: 9, ..short() }.with_te_rules();
    let recipe = Recipe::by_name([("a", picky.into()), ("b", Recipe::custom(Sixteen))], margin(0));
    let mut scaling = scaling(&["a", "b", "c"]);
    both_passes(&mut scaling, &recipe, &["a", "b", "c"], 1.0).unwrap();
    let before = scaling.state().unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    for layer in ["a", "b", "c"] {
        forward(&mut cx, &input(layer), &[5.0]);
    }
    cx.quantize_weight(&weight("c"), 1, &tensor(&[5.0])).unwrap();
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
    assert_eq!(scaling.cached_weights(), 0);
    assert!(message(both_passes(&mut scaling, &recipe, &["a", "b", "c"], 11.0)).contains("`picky`"));
    assert_eq!(scaling.state().unwrap(), before);
    both_passes(&mut scaling, &recipe, &["a", "b", "c"], 2.0).unwrap();
    assert_eq!(of_recipe(&scaling, "sixteen", &input("b")), (16.0, vec![2.0, 2.0]));
    assert_eq!(of_recipe(&scaling, "margin=0", &input("c")), (224.0, vec![0.0, 1.0, 2.0]));
}

#[test]
fn state_goes_to_each_recipe() {
    let mut trained = scaling(&["a", "b", "c"]);
    for amax in [1.0, 4.0] {
        both_passes(&mut trained, &mixed(), &["a", "b", "c"], amax).unwrap();
    }
    let state = trained.state().unwrap();
    let mut resumed = scaling(&["a", "b", "c"]);
    resumed.prepare(&mixed(), &AutocastOptions::default()).unwrap();
    let report = resumed.load_state(&state).unwrap();
    assert!(report.is_plain(), "{report}");
    for amax in [2.0, 0.1] {
        let [a, b] = [&mut trained, &mut resumed]
            .map(|scaling| both_passes(scaling, &mixed(), &["a", "b", "c"], amax).unwrap());
        assert_eq!(a, b);
    }
    assert_eq!(trained.state().unwrap(), resumed.state().unwrap());
    assert_eq!(trained.state_digests().unwrap(), resumed.state_digests().unwrap());
}

/// Two ranks that are the same, unless told that they differ.
#[derive(Debug, Default)]
struct Others {
    log: Mutex<Vec<String>>,
    names: Mutex<Vec<Vec<Arc<str>>>>,
    differs: Mutex<bool>,
}

impl AmaxGroup for Others {
    fn id(&self) -> &str {
        "dp"
    }

    fn world_size(&self) -> usize {
        2
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> Result<()> {
        self.log.lock().unwrap().push(format!("agree {key}"));
        self.names.lock().unwrap().push(names.to_vec());
        if *self.differs.lock().unwrap() { Err(Error::Group("they differ".into())) } else { Ok(()) }
    }

    fn agree_on_state(&self, _: &str, _: &[fp8_recipe::StateDigest]) -> Result<()> {
        Ok(())
    }

    fn all_reduce_max(&self, key: &str, _: &Arena) -> Result<()> {
        self.log.lock().unwrap().push(format!("reduce {key}"));
        Ok(())
    }

    fn poison(&self, _: &str) {}
}

#[test]
fn ranks_compare_who_gets_what_before_they_reduce() {
    let group = Arc::new(Others::default());
    let log = || {
        let log = std::mem::take(&mut *group.log.lock().unwrap());
        log.iter()
            .map(|call| call.replace(" (amax_history_len=4)", "").replace("amax_history_len=4", ""))
            .collect::<Vec<_>>()
    };
    let mut scaling = scaling(&["a", "b", "c"]);
    scaling.set_group(group.clone());
    *group.differs.lock().unwrap() = true;
    assert_eq!(message(both_passes(&mut scaling, &mixed(), &["a"], 1.0)), "they differ");
    assert_eq!(log(), ["agree recipes by name"]); // nothing was reduced
    *group.differs.lock().unwrap() = false;
    both_passes(&mut scaling, &mixed(), &["a"], 1.0).unwrap();
    assert_eq!(
        log(),
        [
            "agree recipes by name",
            "agree forward delayed, group dp",
            "reduce forward delayed, group dp",
            "agree forward delayed (margin=3, ), group dp",
            "reduce forward delayed (margin=3, ), group dp",
            "agree backward delayed, group dp",
            "reduce backward delayed, group dp",
            "agree backward delayed (margin=3, ), group dp",
            "reduce backward delayed (margin=3, ), group dp",
        ]
    );
    let names: Vec<String> = group.names.lock().unwrap()[1].iter().map(|name| name.to_string()).collect();
    assert_eq!(
        names,
        [
            "a.input under delayed (amax_history_len=4)",
            "a.weight under delayed (amax_history_len=4)",
            "b.input under delayed (margin=3, amax_history_len=4)",
            "b.weight under delayed (margin=3, amax_history_len=4)",
            "c.input under current",
            "c.weight under off",
            "a.grad_output under delayed (amax_history_len=4)",
            "b.grad_output under delayed (margin=3, amax_history_len=4)",
            "c.grad_output under off",
        ]
    );
    // Later steps have one collective an arena. Another assignment is compared, too.
    both_passes(&mut scaling, &mixed(), &["a"], 1.0).unwrap();
    assert!(log().iter().all(|call| call.starts_with("reduce")));
    let other = Recipe::by_name([("a", margin(3))], margin(0));
    both_passes(&mut scaling, &other, &["a"], 1.0).unwrap();
    assert_eq!(log().iter().filter(|call| call.starts_with("agree")).count(), 1);
    // So is the same one with the ranks of a new group.
    let anew = Arc::new(Others::default());
    scaling.set_group(anew.clone());
    both_passes(&mut scaling, &mixed(), &["a"], 1.0).unwrap();
    assert_eq!(anew.log.lock().unwrap()[0], "agree recipes by name");
    // Without reductions there is nothing to compare.
    let current = Recipe::by_name([("a", CurrentScaling::default().into())], Recipe::off());
    anew.log.lock().unwrap().clear();
    both_passes(&mut scaling, &current, &["a"], 1.0).unwrap();
    assert!(anew.log.lock().unwrap().is_empty());
}
