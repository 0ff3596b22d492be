//! Attention in FP8 as an option of the recipe, in layers that leave it to the recipe: which slots are used, and where they show.

use crate::every_device::support::{
    bits, block_options, current, delayed, device, first_step, noise, off, parameter_bits, rng, short, step,
    train_block, with_noise,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::{Direction, ScalingState};
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// `fp8_dpa` and `fp8_mha` of a layer.
type Options = [Option<bool>; 2];

const LEFT: Options = [None, None];
const HIGH: Options = [Some(false), Some(false)];
const DPA: Options = [Some(true), Some(false)];
const MHA: Options = [None, Some(true)];

fn attention([fp8_dpa, fp8_mha]: Options, rope: bool) -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 32,
        attention: AttentionOptions {
            num_attention_heads: 2,
            num_gqa_groups: Some(1),
            rope,
            max_seq_length: 16,
            fp8_dpa,
            fp8_mha,
            ..Default::default()
        },
        init: InitOptions { init_std: 0.15, output_layer_init_std: 0.1 },
        ..Default::default()
    };
    with_noise(MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap(), 1)
}

/// y, dx, gradients and the state after two steps.
fn run(mut model: MultiheadAttention, recipe: &Recipe) -> (Vec<u32>, impl PartialEq) {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut all = Vec::new();
    for seed in 0..2 {
        let (x, dy) = (noise([2, 12, 32], 2 + seed), noise([2, 12, 32], 12 + seed));
        let (y, dx) = step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        all.extend(bits(&y).into_iter().chain(bits(&dx)));
    }
    (all, parameter_bits(&model))
}

fn with(fp8_dpa: bool, fp8_mha: bool) -> [Recipe; 2] {
    [
        DelayedScaling { fp8_dpa, fp8_mha, ..short() }.into(),
        CurrentScaling { fp8_dpa, fp8_mha, ..Default::default() }.into(),
    ]
}

#[test]
fn the_recipe_decides_for_layers_that_leave_it_to_the_recipe() {
    for rope in [false, true] {
        let plain = [Recipe::from(short()), current()];
        for (recipes, layer) in [(with(true, false), DPA), (with(false, true), MHA), (with(true, true), MHA)]
        {
            for (recipe, plain) in recipes.iter().zip(&plain) {
                let what = format!("{recipe}, {rope}");
                let by_recipe = run(attention(LEFT, rope), recipe);
                assert!(by_recipe == run(attention(layer, rope), plain), "{what}: as the layer's option");
                let high = run(attention(HIGH, rope), plain);
                assert!(by_recipe != high, "{what}: in FP8");
                assert!(run(attention(HIGH, rope), recipe) == high, "{what}: ruled out by the layer");
                assert!(run(attention(LEFT, rope), plain) == high, "{what}: the recipe's default");
            }
        }
        // The layer's option and the recipe's are combined as in one place.
        let [mha, _] = with(false, true);
        let (by_both, dpa) =
            (run(attention([None, Some(false)], rope), &mha), run(attention(DPA, rope), &plain[0]));
        assert!(by_both == dpa, "fp8_mha implies fp8_dpa, and the layer rules out fp8_mha");
        let by_both = run(attention([Some(true), None], rope), &mha);
        assert!(by_both == run(attention(MHA, rope), &plain[0]), "fp8_mha of the recipe");
        assert!(run(attention([Some(false), None], rope), &mha) == run(attention(HIGH, rope), &plain[0]));
    }
}

fn trained(options: Options, recipes: &[Recipe]) -> Scaling {
    let mut model = attention(options, true);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.set_counting(true);
    let (x, dy) = (noise([1, 8, 32], 2), noise([1, 8, 32], 3));
    for recipe in recipes {
        step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
    }
    scaling
}

#[test]
fn slots_that_no_recipe_uses_show_nowhere() {
    for recipe in
        [delayed(), current(), Recipe::from_name("block").unwrap(), crate::every_device::support::custom()]
    {
        let [left, without] = [LEFT, HIGH].map(|options| trained(options, std::slice::from_ref(&recipe)));
        assert!(left.state().unwrap() == without.state().unwrap(), "{recipe}: checkpoints");
        assert!(left.slot_reports().unwrap() == without.slot_reports().unwrap(), "{recipe}: reports");
        assert!(left.state_digests().unwrap() == without.state_digests().unwrap(), "{recipe}: digests");
        for direction in Direction::ALL {
            assert_eq!(left.slot_names(direction), without.slot_names(direction));
        }
        assert_eq!(format!("{left:?}"), format!("{without:?}"));
    }
    let [left, without] = [LEFT, HIGH].map(|options| trained(options, &[]));
    for recipe in [delayed(), current(), Recipe::off()] {
        assert_eq!(left.explain(&recipe).unwrap(), without.explain(&recipe).unwrap(), "{recipe}");
    }
}

#[test]
fn ranks_agree_although_one_has_slots_that_no_recipe_uses() {
    let recipes = [delayed(), Recipe::by_name([("*.grad_output", delayed())], short())];
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let states: Vec<_> = thread::scope(|scope| {
        let run = |group: Arc<dyn ProcessGroup>| {
            let mut model = attention(if group.rank() == 0 { LEFT } else { HIGH }, true);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(group.clone());
            let x = ops::scale(&noise([1, 8, 32], 2), 1.0 + group.rank() as f32).unwrap();
            for recipe in &recipes {
                step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, &x, &x).unwrap();
            }
            scaling.state().unwrap()
        };
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(states[0] == states[1]);
}

#[test]
fn states_of_models_without_the_slots_load_and_are_saved_as_they_were() {
    let state = trained(HIGH, &[delayed()]).state().unwrap();
    let mut loaded = Scaling::new(&attention(LEFT, true), &device()).unwrap();
    loaded.load_state(&state).unwrap();
    assert!(loaded.state().unwrap() == state, "before the first scope");
    loaded.prepare(&delayed(), &AutocastOptions::default()).unwrap();
    assert!(loaded.state_report().is_plain(), "{}", loaded.state_report());
    assert!(loaded.state().unwrap() == state, "after it");
    // A state with attention's slots, in a model that leaves them to the recipe.
    let state = trained(DPA, &[delayed()]).state().unwrap();
    loaded.load_state(&state).unwrap();
    let [recipe, _] = with(true, false);
    loaded.prepare(&recipe, &AutocastOptions::default()).unwrap();
    let arenas = loaded.state().unwrap().arenas;
    let slots = &arenas.iter().find(|arena| arena.recipe.contains("fp8_dpa")).unwrap().slots;
    assert!(slots.is_sorted() && slots.iter().any(|slot| &**slot == "attention.q.input"));
}

#[test]
fn switching_fp8_dpa_on_later_keeps_the_scales_of_all_other_slots() {
    let [dpa, _] = with(true, false);
    let before = trained(LEFT, &[short().into(), short().into()]).state().unwrap();
    let mut resumed = Scaling::new(&attention(LEFT, true), &device()).unwrap();
    resumed.prepare(&dpa, &AutocastOptions::default()).unwrap();
    let report = resumed.load_state(&before).unwrap();
    let loaded = (report.taken_over.len(), report.recomputed.len(), report.new.len());
    assert_eq!(loaded, (6, 0, 4), "{report}");
    let scales = |state: &ScalingState, recipe: &str, slot: &str| {
        let mut arenas =
            state.arenas.iter().filter(|arena| arena.recipe.contains("fp8_dpa") == (recipe == "dpa"));
        arenas.find_map(|arena| {
            let index = arena.slots.iter().position(|name| &**name == slot)?;
            Some(arena.scale[index])
        })
    };
    let after = resumed.state().unwrap();
    for slot in ["attention.qkv.input", "attention.proj.weight", "attention.qkv.grad_output"] {
        assert_eq!(scales(&after, "dpa", slot), scales(&before, "", slot), "{slot}");
        assert!(scales(&before, "", slot).is_some_and(|scale| scale > 0.0));
    }
    assert_eq!(scales(&after, "dpa", "attention.v.input"), Some(-1.0));
    assert!(scales(&after, "dpa", "attention.qkv.output").is_none(), "a slot of fp8_mha");
    // And in the same run, with all that was saved loaded again.
    let both = trained(LEFT, &[short().into(), dpa.clone()]);
    let state = both.state().unwrap();
    resumed.load_state(&state).unwrap();
    resumed.prepare(&short().into(), &AutocastOptions::default()).unwrap();
    let names = |state: &ScalingState| -> Vec<_> {
        let mut arenas = state.arenas.clone();
        arenas.sort_by_key(|arena| (arena.recipe.clone(), arena.direction as usize));
        arenas
    };
    assert_eq!(names(&resumed.state().unwrap()), names(&state));
}

#[test]
fn scales_for_blocks_leave_attention_in_high_precision_and_reports_say_so() {
    const SAYS: &str = "attention stays in high precision, because it needs one scale for a tensor";
    let rowwise = CurrentScaling { fp8_dpa: true, ..CurrentScaling::rowwise() }.into();
    let plain = CurrentScaling::rowwise().into();
    assert!(run(attention(LEFT, true), &rowwise) == run(attention(HIGH, true), &plain));
    for (options, recipe) in [(DPA, Recipe::from_name("mxfp8").unwrap()), (LEFT, rowwise)] {
        let scaling = trained(options, std::slice::from_ref(&recipe));
        let reports = scaling.slot_reports().unwrap();
        let says = reports.iter().filter(|slot| slot.stays_in_high_precision).map(|slot| slot.to_string());
        let names =
            ["k.input (forward)", "q.input (forward)", "v.input (forward)", "o.grad_output (backward)"];
        let mut says: Vec<_> = says.collect();
        says.sort();
        let mut expected = names.map(|name| format!("attention.{name}: {SAYS}"));
        expected.sort();
        assert_eq!(says, expected, "{recipe}");
    }
    let scaling = trained(LEFT, &[]);
    for name in ["rowwise", "block", "mxfp8"] {
        let text = scaling.explain(&Recipe::from_name(name).unwrap()).unwrap().to_string();
        assert!(text.contains(&format!("  input: {name} (default): {SAYS}\n")), "{text}");
        assert_eq!(text.matches(SAYS).count(), 4, "{text}");
    }
    let explained = |options| trained(options, &[]).explain(&Recipe::from_name("block").unwrap()).unwrap();
    assert!(!explained(HIGH).to_string().contains(SAYS), "the layer rules FP8 out");
}

#[test]
fn under_a_recipe_by_name_each_slot_follows_its_own_recipe() {
    let [dpa, _] = with(true, false);
    let forward = Recipe::by_name([("*.grad_output", Recipe::from(short()))], dpa.clone());
    let off = Recipe::by_name([("*.o.grad_output", Recipe::off())], short());
    let one_less = Recipe::by_name([("*.v.input", Recipe::from(short()))], dpa);
    let halves = run(attention(LEFT, true), &forward);
    assert!(halves == run(attention(DPA, true), &off), "FP8 forward, high precision backward");
    assert!(run(attention(LEFT, true), &one_less) != halves);
}

#[test]
fn a_recomputed_block_has_the_bits_of_a_stored_one() {
    let block = |recompute| {
        let options = block_options();
        let attention = AttentionOptions {
            num_attention_heads: 2,
            num_gqa_groups: Some(1),
            attention_dropout: 0.2,
            ..options.attention
        };
        let options = TransformerLayerOptions { attention, recompute, ..options };
        with_noise(TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap(), 1)
    };
    for recipe in with(true, false).into_iter().chain(with(false, true)) {
        let stored = train_block(8, block(RecomputeLevel::None), &recipe);
        assert!(
            stored == train_block(8, Recompute { inner: block(RecomputeLevel::None) }, &recipe),
            "{recipe}"
        );
        assert!(stored == train_block(8, block(RecomputeLevel::Attention), &recipe), "{recipe}");
    }
}

#[test]
fn cross_attention_leaves_it_to_the_recipe_too() {
    let run = |[fp8_dpa, fp8_mha]: Options, recipe: &Recipe| {
        let options = CrossAttentionOptions {
            hidden_size: 32,
            attention: AttentionOptions {
                num_attention_heads: 2,
                causal: false,
                fp8_dpa,
                fp8_mha,
                ..Default::default()
            },
            ..Default::default()
        };
        let mut model = with_noise(CrossAttention::new("cross", options, &device(), &mut rng(1)).unwrap(), 1);
        let (x, e, dy) = (noise([2, 12, 32], 1), noise([2, 20, 32], 2), noise([2, 12, 32], 3));
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.autocast(recipe).unwrap();
        let (y, saved) = model.forward(&mut cx, &x, &e, &Sequences::Full).unwrap();
        cx.commit().unwrap();
        let (dx, de) = scaling.in_backward(|cx| model.backward(cx, saved, &dy)).unwrap();
        [y, dx, de].map(|x| bits(&x))
    };
    let plain = short().into();
    let ([dpa, _], [mha, _]) = (with(true, false), with(false, true));
    assert!(run(LEFT, &plain) == run(HIGH, &plain));
    assert!(run(LEFT, &dpa) == run(DPA, &plain) && run(LEFT, &dpa) != run(HIGH, &plain));
    assert!(run(LEFT, &mha) == run(MHA, &plain) && run(LEFT, &mha) != run(DPA, &plain));
}

#[test]
fn calibration_and_evaluation_use_the_recipes_slots() {
    let [recipe, _] = with(true, false);
    let mut model = attention(LEFT, true);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, dy) = (noise([1, 8, 32], 2), noise([1, 8, 32], 3));
    let calibrating = AutocastOptions { enabled: false, calibrating: true, ..Default::default() };
    step(&mut scaling, &recipe, &calibrating, &mut model, &x, &dy).unwrap();
    let amax = |scaling: &Scaling, name: &str| {
        scaling.slot_reports().unwrap().iter().find(|slot| &*slot.name == name).map(|slot| slot.amax)
    };
    for name in ["attention.q.input", "attention.v.input"] {
        assert!(amax(&scaling, name).is_some_and(|amax| amax > 0.0), "{name}");
    }
    let state = scaling.state().unwrap();
    let mut evaluate =
        |recipe: &Recipe| bits(&model.forward(&mut scaling.eval(recipe).unwrap(), &x).unwrap().0);
    assert!(evaluate(&recipe) != evaluate(&short().into()));
    assert!(scaling.state().unwrap().arenas[..state.arenas.len()] == state.arenas[..]);
    let high = first_step(&recipe, &off(), &mut attention(LEFT, true), &x, &dy).unwrap();
    assert!(
        bits(&high.0) == bits(&first_step(&recipe, &off(), &mut attention(HIGH, true), &x, &dy).unwrap().0)
    );
}
