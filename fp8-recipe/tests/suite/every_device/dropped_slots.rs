//! States of versions that had slots for the output and the input's gradient of every GEMM.

use super::support::{backward, device, forward, grad, input, message, scaling, short, step};
use fp8_recipe::{
    ArenaState, AutocastOptions, DelayedScaling, Direction, GemmSlots, Recipe, Scaling, ScalingState,
    SlotName, SlotRole, Slots,
};

fn te_rules() -> DelayedScaling {
    short().with_te_rules()
}

/// Adds a slot for the output and the input's gradient of each layer, as earlier versions did.
fn with_five_slots(state: &ScalingState, first_scale: f32) -> ScalingState {
    let arenas = state.arenas.iter().map(|arena| {
        let (of, role) = match arena.direction {
            Direction::Forward => ("input", "output"),
            Direction::Backward => ("grad_output", "grad_input"),
        };
        let mut arena = arena.clone();
        for (position, name) in arena.slots.clone().iter().enumerate().rev() {
            let Some(layer) = name.strip_suffix(of) else { continue };
            // `grad_input` comes before `grad_output`, and `output` after `input`.
            let position = if of == "input" { position + 1 } else { position };
            arena.slots.insert(position, format!("{layer}{role}").into());
            arena.scale.insert(position, first_scale);
            arena.amax_history.iter_mut().for_each(|row| row.insert(position, 0.0));
            if !arena.last_updates.is_empty() {
                arena.last_updates.insert(position, 0);
            }
        }
        assert!(arena.slots.is_sorted());
        arena
    });
    ScalingState { arenas: arenas.collect(), ..Default::default() }
}

fn trained(recipe: &Recipe) -> Scaling {
    let mut scaling = scaling(&["a", "b"]);
    for amax in [4.0, 2.0] {
        let origin = step(&mut scaling, recipe, &input("a"), &[amax]).unwrap();
        let mut cx = scaling.backward().unwrap();
        backward(&mut cx, &origin, &grad("a"), &[amax]);
        cx.commit().unwrap();
    }
    scaling
}

#[test]
fn slots_that_never_ran_and_are_not_registered_are_ignored() {
    for (recipe, first_scale) in [(short(), -1.0), (te_rules(), 1.0)] {
        let recipe = Recipe::from(recipe);
        let state = trained(&recipe).state().unwrap();
        let mut old = with_five_slots(&state, first_scale);
        assert_eq!([&old.arenas[0], &old.arenas[1]].map(|arena| arena.slots.len()), [6, 4]);
        for has_last_updates in [true, false] {
            if !has_last_updates {
                old.arenas.iter_mut().for_each(|arena| arena.last_updates.clear());
            }
            let mut resumed = scaling(&["a", "b"]);
            resumed.prepare(&recipe, &AutocastOptions::default()).unwrap();
            let report = resumed.load_state(&old).unwrap();
            assert_eq!(report.to_string(), "scaling state: 6 slots taken over");
            assert!(report.is_plain());
            let loaded = resumed.state().unwrap();
            let parts =
                |arena: &ArenaState| (arena.slots.clone(), arena.scale.clone(), arena.amax_history.clone());
            assert!(state.arenas.iter().map(parts).eq(loaded.arenas.iter().map(parts)));
            assert_eq!(has_last_updates, loaded == state);
        }
    }
}

#[test]
fn a_slot_that_has_run_is_not_ignored() {
    let recipe = Recipe::from(short());
    let old = with_five_slots(&trained(&recipe).state().unwrap(), -1.0);
    let edits: [&dyn Fn(&mut ArenaState); 3] =
        [&|arena| arena.scale[1] = 2.0, &|arena| arena.amax_history[2][1] = 1.0, &|arena| {
            arena.last_updates[1] = 1
        }];
    for edit in edits {
        let mut old = old.clone();
        edit(&mut old.arenas[0]);
        let text = message(scaling(&["a", "b"]).load_state(&old));
        assert!(text.contains("slots: it has `a.output` where this model has `a.weight`"), "{text}");
    }
    // Lengths that differ are refused as they are.
    let mut short = old.clone();
    short.arenas[0].scale.truncate(5);
    assert!(message(scaling(&["a", "b"]).load_state(&short)).contains("slots: it has `a.output`"));
    // Other slots are not ignored: the model has lost a layer.
    let text = message(scaling(&["a"]).load_state(&old));
    assert!(text.contains("slots: it has 4, this model 2"), "{text}");
}

/// A layer that writes its output in FP8, and one that does not.
struct Mixed([GemmSlots; 2], SlotName);

impl Slots for Mixed {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().for_each(|gemm| gemm.slots(f));
        f(&self.1);
    }
}

#[test]
fn slots_that_a_layer_registers_itself_are_loaded() {
    let recipe = Recipe::from(short());
    let mut old = with_five_slots(&trained(&recipe).state().unwrap(), -1.0);
    assert_eq!(&*old.arenas[0].slots[1], "a.output");
    (old.arenas[0].scale[1], old.arenas[0].last_updates[1]) = (2.0, 1);
    let model = Mixed(["a", "b"].map(GemmSlots::new), SlotName::new("a", SlotRole::Output));
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    scaling.prepare(&recipe, &AutocastOptions::default()).unwrap();
    let report = scaling.load_state(&old).unwrap();
    assert_eq!(report.to_string(), "scaling state: 7 slots taken over");
    let mut cx = scaling.autocast(&recipe).unwrap();
    let (y8, _) = forward(&mut cx, &model.1, &[3.0]);
    assert_eq!(super::support::scale_of(&y8), 2.0);
    cx.commit().unwrap();
}
