//! A commit over a group of GPUs: scales equal on all ranks, by one collective an arena and no word between the hosts.

use crate::rig::{Group, LONG, Rig, SEEDS, ranks};
use fp8_dist::{StateDigest, local};
use fp8_kernels::{Device, Tensor, ops};
use fp8_recipe::{
    AutocastOptions, DelayedScaling, Recipe, Result, Scaling, ScalingState, SlotName, SlotRole, Slots,
};
use std::thread;

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

/// One forward and one backward scope, in which the named layers run on constants.
fn step(
    model: &Model,
    scaling: &mut Scaling,
    group: &Group,
    device: &Device,
    runs: &[(usize, f32)],
) -> Result<()> {
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
    let options = AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() };
    let mut cx = scaling.scope(&recipe, &options)?;
    let mut origins = Vec::new();
    for &(layer, value) in runs {
        ops::quantize(&Tensor::from_vec(vec![value], [1, 1], device)?, &cx.slot(&model.0[layer][0])?)?;
        origins.push((layer, value, cx.origin(&model.0[layer][0])));
    }
    cx.commit()?;
    let mut cx = scaling.backward()?;
    for (layer, value, origin) in origins {
        let dy = Tensor::from_vec(vec![value / 8.0], [1, 1], device)?;
        ops::quantize(&dy, &cx.slot(&origin, &model.0[layer][1])?)?;
    }
    cx.commit()
}

/// The state after each of five steps; every rank sees other values, and one layer runs on one rank alone.
fn train(group: &Group, device: &Device) -> Vec<ScalingState> {
    let model = Model::new(&["all", "none", "one"]);
    let mut scaling = Scaling::new(&model, device).unwrap();
    let rank = group.rank();
    (0..5)
        .map(|round| {
            let value = [3.0, 0.5, 7.0, 1.25][(rank + round) % 4];
            let mut runs = vec![(0, value)];
            if rank == round % group.world_size() {
                runs.push((2, value * 2.0));
            }
            step(&model, &mut scaling, group, device, &runs).unwrap();
            scaling.state().unwrap()
        })
        .collect()
}

#[test]
fn scales_are_those_of_a_group_of_threads() {
    let rig = Rig::new();
    for n in [2, 4] {
        let expected: Vec<_> = thread::scope(|scope| {
            let run = |group| scope.spawn(move || train(&group, &Device::cpu()));
            let threads: Vec<_> = local("dp", n, LONG).unwrap().into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for seed in SEEDS {
            rig.control.set("seed", &seed.to_string()).unwrap();
            rig.control.set("reset_calls", "").unwrap();
            let states = ranks(n, |group, device| train(&group, device));
            assert_eq!(states, expected, "{n} ranks, seed {seed}");
            // Forward and backward, five times.
            assert_eq!(rig.calls("ncclAllReduce"), 10 * n as u64);
        }
    }
    rig.finish();
}

#[test]
fn models_with_different_names() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let model = Model::new([&["a", "b"], &["a", "c"]][group.rank()]);
        let mut scaling = Scaling::new(&model, device).unwrap();
        step(&model, &mut scaling, &group, device, &[(0, 1.0)]).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("agree_on_names `forward "), "{error}");
        let expected =
            "name 1 is `c.input` on rank 1 and `b.input` on rank 0: build the same model on all ranks";
        assert!(error.ends_with(expected), "{error}");
    }
    rig.finish();
}

#[test]
fn state_that_differs_is_named_on_all_ranks_and_the_group_lives_on() {
    let rig = Rig::new();
    let errors = ranks(3, |group, device| {
        let value = |rank: usize| if group.rank() == rank { 1u8 } else { 0 };
        let state = [("a", 0), ("b", value(2)), ("c", value(1))]
            .map(|(name, value)| StateDigest::new(name, [[value]]));
        let error = group.agree_on_state("parameters", &state).unwrap_err().to_string();
        group.agree_on_state("parameters", &state[..1]).unwrap();
        assert_eq!(train(&group, device).len(), 5);
        error
    });
    let expected = "agree_on_state `parameters`: b differs between rank 2 and rank 0: ";
    assert!(errors.iter().all(|error| error.starts_with(expected)), "{errors:?}");
    rig.finish();
}

#[test]
fn a_scope_left_without_commit_stops_the_others() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let model = Model::new(&["a"]);
        let mut scaling = Scaling::new(&model, device).unwrap();
        step(&model, &mut scaling, &group, device, &[(0, 1.0)]).unwrap();
        device.synchronize().unwrap();
        group.barrier().unwrap();
        if group.rank() == 1 {
            let options = AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() };
            let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
            drop(scaling.scope(&recipe, &options).unwrap());
            return String::new();
        }
        // Its own collective may be queued before the word arrives: then the device tells, and else the group.
        let stepped =
            step(&model, &mut scaling, &group, device, &[(0, 5.0)]).map_err(|error| error.to_string());
        let waited = stepped.and_then(|()| device.synchronize().map_err(|error| error.to_string()));
        waited.unwrap_err()
    });
    assert!(results[0].contains("rank 1 gave up: left a forward scope without commit"), "{}", results[0]);
    rig.finish();
}
