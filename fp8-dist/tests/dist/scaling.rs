//! A commit over a group: scales equal on all ranks, whoever ran what.

use crate::{Group, LONG, bits, f32s, noise, ranks, try_ranks};
use fp8_dist::ReduceOp;
use fp8_kernels::{Device, Encoding, ops};
use fp8_recipe::{
    AutocastOptions, CurrentScaling, DelayedScaling, Direction, Recipe, Result, Scaling, ScalingState,
    SlotName, SlotRole, Slots,
};

/// One quantized activation per layer, and its gradient.
struct Model(Vec<[SlotName; 2]>);

impl Model {
    fn new(layers: &[&str]) -> Self {
        let slots =
            |layer: &&str| [SlotRole::Input, SlotRole::GradOutput].map(|role| SlotName::new(layer, role));
        Self(layers.iter().map(slots).collect())
    }
}

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().flatten().for_each(f);
    }
}

fn recipe() -> Recipe {
    DelayedScaling { amax_history_len: 4, ..Default::default() }.into()
}

fn options(group: &Group) -> AutocastOptions {
    AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() }
}

/// One forward and one backward scope, in which the named layers run on constants.
fn step(model: &Model, scaling: &mut Scaling, group: &Group, runs: &[(usize, f32)]) -> Result<()> {
    let mut cx = scaling.scope(&recipe(), &options(group))?;
    let mut origins = Vec::new();
    for &(layer, value) in runs {
        ops::quantize(&f32s(&[value], &[1, 1]), &cx.slot(&model.0[layer][0])?)?;
        origins.push((layer, value, cx.origin(&model.0[layer][0])));
    }
    cx.commit()?;
    let mut cx = scaling.backward()?;
    for (layer, value, origin) in origins {
        ops::quantize(&f32s(&[value / 8.0], &[1, 1]), &cx.slot(&origin, &model.0[layer][1])?)?;
    }
    cx.commit()
}

/// Scale and window of one slot.
fn slot(state: &ScalingState, direction: Direction, index: usize) -> (f32, Vec<f32>) {
    let arena = state.arenas.iter().find(|arena| arena.direction == direction).unwrap();
    (arena.scale[index], arena.amax_history.iter().map(|row| row[index]).collect())
}

#[test]
fn scales_are_equal_on_all_ranks() {
    for n in [2, 4] {
        let states = ranks(n, |group| {
            let model = Model::new(&["a", "b"]);
            let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
            let mut states = Vec::new();
            for round in 0..6 {
                let mine = noise(2, 10 * round + group.rank() as u64);
                step(&model, &mut scaling, &group, &[(0, mine[0]), (1, mine[1])]).unwrap();
                states.push(scaling.state().unwrap());
            }
            states
        });
        for round in 0..6 {
            let amax = |layer: usize| {
                (0..n).map(|rank| noise(2, 10 * round as u64 + rank as u64)[layer].abs()).fold(0.0, f32::max)
            };
            for rank in &states {
                assert_eq!(rank[round], states[0][round]);
                for arena in &rank[round].arenas {
                    let first =
                        states[0][round].arenas.iter().find(|a| a.direction == arena.direction).unwrap();
                    assert_eq!(bits(&arena.scale), bits(&first.scale));
                }
                for layer in [0, 1] {
                    let (_, window) = slot(&rank[round], Direction::Forward, layer);
                    assert_eq!(window.last(), Some(&amax(layer)), "{n} ranks, round {round}");
                    let (scale, window) = slot(&rank[round], Direction::Backward, layer);
                    assert_eq!(window.last(), Some(&(amax(layer) / 8.0)));
                    assert!(scale <= 57344.0 / (amax(layer) / 8.0)); // of the largest in the window
                }
            }
        }
    }
}

#[test]
fn experts_that_no_rank_one_rank_or_all_ranks_ran() {
    let states = ranks(4, |group| {
        let model = Model::new(&["all", "none", "one"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let value = 1.0 + group.rank() as f32;
        step(&model, &mut scaling, &group, &[(0, value), (1, value), (2, value)]).unwrap();
        let runs = if group.rank() == 2 { [(0, 7.0), (2, 3.5)].as_slice() } else { &[(0, 1.0)] };
        step(&model, &mut scaling, &group, runs).unwrap();
        scaling.state().unwrap()
    });
    for state in &states {
        assert_eq!(*state, states[0]);
        assert_eq!(slot(state, Direction::Forward, 0), (448.0 / 7.0, vec![0.0, 4.0, 7.0]));
        assert_eq!(slot(state, Direction::Forward, 1), (448.0 / 4.0, vec![0.0, 0.0, 4.0])); // as it was
        assert_eq!(slot(state, Direction::Forward, 2), (448.0 / 4.0, vec![0.0, 4.0, 3.5])); // rolled on all ranks
        assert_eq!(slot(state, Direction::Backward, 1).1, [0.0, 0.0, 0.5]);
        assert_eq!(slot(state, Direction::Backward, 2).1, [0.0, 0.5, 3.5 / 8.0]);
    }
}

#[test]
fn a_slot_that_has_never_run_anywhere_stays_unset() {
    let states = ranks(2, |group| {
        let model = Model::new(&["a", "b", "c"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        // `a` is calibrated on one rank by its tensor, and on the other by the commit.
        let runs = [[(0, 2.0), (2, 1.0)].as_slice(), &[(2, 4.0)]][group.rank()];
        step(&model, &mut scaling, &group, runs).unwrap();
        scaling.state().unwrap()
    });
    for state in states {
        assert_eq!(slot(&state, Direction::Forward, 0), (224.0, vec![0.0, 0.0, 2.0]));
        assert_eq!(slot(&state, Direction::Forward, 1), (-1.0, vec![0.0; 3]));
        assert_eq!(slot(&state, Direction::Forward, 2), (112.0, vec![0.0, 0.0, 4.0])); // not rank 0's own 448
    }
}

#[test]
fn models_with_different_names() {
    let errors = ranks(2, |group| {
        let model = Model::new([&["a", "b"], &["a", "c"]][group.rank()]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        step(&model, &mut scaling, &group, &[(0, 1.0)]).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("agree_on_names `forward "), "{error}");
        let expected =
            "name 1 is `c.input` on rank 1 and `b.input` on rank 0: build the same model on all ranks";
        assert!(error.ends_with(expected), "{error}");
    }
}

#[test]
fn different_recipes() {
    let errors = ranks(2, |group| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let margin = group.rank() as i32;
        let recipe = DelayedScaling { margin, amax_history_len: 4, ..Default::default() }.into();
        let mut cx = scaling.scope(&recipe, &options(&group)).unwrap();
        ops::quantize(&f32s(&[1.0], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
        cx.commit().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("the call is agree_on_names")), "{errors:?}");
}

#[test]
fn a_scope_left_without_commit_stops_the_others() {
    let results = ranks(2, |group| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        step(&model, &mut scaling, &group, &[(0, 1.0)]).unwrap();
        let before = scaling.state().unwrap();
        if group.rank() == 1 {
            let mut cx = scaling.scope(&recipe(), &options(&group)).unwrap();
            ops::quantize(&f32s(&[9.0], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
            drop(cx);
            assert_eq!(scaling.state().unwrap(), before);
            return String::new();
        }
        let error = step(&model, &mut scaling, &group, &[(0, 5.0)]).unwrap_err().to_string();
        assert_eq!(scaling.state().unwrap(), before);
        error
    });
    assert!(results[0].contains("rank 1 gave up: left a forward scope without commit"), "{}", results[0]);
}

#[test]
fn the_others_hear_why_a_scope_was_left() {
    let results = ranks(2, |group| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let mut cx = scaling.scope(&recipe(), &options(&group)).unwrap();
        if group.rank() == 1 {
            return cx.attempt(|_| Err::<(), _>("no tokens")).unwrap_err().to_owned();
        }
        ops::quantize(&f32s(&[1.0], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
        cx.commit().unwrap_err().to_string()
    });
    assert!(results[0].contains("rank 1 gave up: in a forward scope: no tokens"), "{}", results[0]);
    assert_eq!(results[1], "no tokens");
}

/// The passes in which a rank's layers run.
#[derive(Clone, Copy, PartialEq)]
enum Runs {
    Both,
    Forward,
    Nothing,
}

/// Three steps in which the layers of the last rank run as told, under a recipe and one nested in it. States of all ranks.
fn last_rank_runs(ranks_of: usize, runs: Runs) -> Vec<ScalingState> {
    ranks(ranks_of, |group| {
        let is_last = group.rank() + 1 == group.world_size();
        let runs = if is_last { runs } else { Runs::Both };
        let inner = Recipe::from(DelayedScaling { margin: 1, amax_history_len: 4, ..Default::default() });
        let model = Model::new(&["a", "expert"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        scaling.set_group(group.clone());
        for step in 0..3 {
            let value = 1.0 + (step * 10 + group.rank()) as f32;
            let mut cx = scaling.autocast(&recipe()).unwrap();
            let mut origins = Vec::new();
            let mut nested = cx.nested(&inner).unwrap(); // on every rank, tokens or none
            if runs != Runs::Nothing {
                ops::quantize(&f32s(&[value], &[1, 1]), &nested.slot(&model.0[1][0]).unwrap()).unwrap();
                origins.push((1, nested.origin(&model.0[1][0])));
            }
            drop(nested);
            if runs != Runs::Nothing {
                ops::quantize(&f32s(&[value], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
                origins.push((0, cx.origin(&model.0[0][0])));
            }
            cx.commit().unwrap();
            let mut cx = scaling.backward().unwrap();
            for (layer, origin) in origins.into_iter().filter(|_| runs == Runs::Both) {
                let slot = cx.slot(&origin, &model.0[layer][1]).unwrap();
                ops::quantize(&f32s(&[value / 8.0], &[1, 1]), &slot).unwrap();
            }
            cx.commit().unwrap();
        }
        scaling.state().unwrap()
    })
}

#[test]
fn a_rank_whose_layers_run_in_no_scope_or_in_forward_alone_holds_up_nobody() {
    for ranks in [2, 3] {
        for runs in [Runs::Nothing, Runs::Forward, Runs::Both] {
            let states = last_rank_runs(ranks, runs);
            assert!(states.iter().all(|state| *state == states[0]), "{ranks} ranks");
            // Of the largest amax among the ranks that ran.
            let most = |runs: bool| 20.0 + if runs { ranks } else { ranks - 1 } as f32;
            let of_outer = |direction| {
                let of = |arena: &&fp8_recipe::ArenaState| {
                    arena.direction == direction && arena.recipe.contains("margin=0")
                };
                let arena = states[0].arenas.iter().find(of).unwrap();
                (arena.updates, arena.amax_history.last().unwrap()[0])
            };
            assert_eq!(of_outer(Direction::Forward), (3, most(runs != Runs::Nothing)));
            assert_eq!(of_outer(Direction::Backward), (3, most(runs == Runs::Both) / 8.0));
            assert!(states[0].arenas.iter().all(|arena| arena.updates == 3));
        }
    }
}

/// A rank that opens backward scopes alone: what it did not run, the others do.
#[test]
fn a_rank_whose_layers_run_in_backward_alone_holds_up_nobody() {
    for n in [2, 3] {
        let states = ranks(n, |group| {
            let is_last = group.rank() + 1 == group.world_size();
            let model = Model::new(&["a"]);
            let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
            let mut before = None;
            for step in 0..4 {
                // The last rank runs forward in the first of two microbatches, and backward in the second.
                let mut cx = scaling.scope(&recipe(), &options(&group)).unwrap();
                if !is_last || step % 2 == 0 {
                    let slot = cx.slot(&model.0[0][0]).unwrap();
                    ops::quantize(&f32s(&[2.0], &[1, 1]), &slot).unwrap();
                    before = Some(cx.origin(&model.0[0][0]));
                }
                cx.commit().unwrap();
                let mut cx = scaling.backward().unwrap();
                if !is_last || step % 2 == 1 {
                    let slot = cx.slot(before.as_ref().unwrap(), &model.0[0][1]).unwrap();
                    ops::quantize(&f32s(&[4.0], &[1, 1]), &slot).unwrap();
                }
                cx.commit().unwrap();
            }
            scaling.state().unwrap()
        });
        assert!(states.iter().all(|state| *state == states[0]), "{n} ranks");
        assert!(states[0].arenas.iter().all(|arena| arena.updates == 4));
        assert_eq!(slot(&states[0], Direction::Backward, 0), (57344.0 / 4.0, vec![4.0; 3]));
    }
}

#[test]
fn a_panic_in_a_scope_stops_the_others() {
    let results = try_ranks(2, LONG, |group| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let _cx = scaling.scope(&recipe(), &options(&group)).unwrap();
        if group.rank() == 1 {
            std::panic::resume_unwind(Box::new("a broken layer"));
        }
        group.barrier().unwrap_err().to_string()
    });
    let told = |error: &String| error.contains("rank 1 gave up: panicked in a forward scope");
    assert!(results[0].as_ref().is_ok_and(told), "{:?}", results[0]);
    assert!(results[1].is_err());
}

#[test]
fn a_discarded_scope_leaves_the_group_alive() {
    ranks(2, |group| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        step(&model, &mut scaling, &group, &[(0, 1.0)]).unwrap();
        let before = scaling.state().unwrap();
        let mut cx = scaling.scope(&recipe(), &options(&group)).unwrap();
        ops::quantize(&f32s(&[9.0], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
        cx.discard().unwrap();
        assert_eq!(scaling.state().unwrap(), before);
        group.all_reduce("x", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap();
    });
}

#[test]
fn current_scaling_and_one_rank_need_no_exchange() {
    let alone = ranks(2, |group| {
        if group.rank() == 1 {
            return None; // leaves at once
        }
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        let mut cx = scaling.scope(&Recipe::from(CurrentScaling::default()), &options(&group)).unwrap();
        let q = ops::quantize(&f32s(&[2.0], &[1, 1]), &cx.slot(&model.0[0][0]).unwrap()).unwrap();
        cx.commit().unwrap();
        Some((q.as_fp8().unwrap().encoding(), q.as_fp8().unwrap().scale_inv().item().unwrap()))
    });
    assert_eq!(alone[0], Some((Encoding::E4M3, 1.0 / 224.0)));
}
