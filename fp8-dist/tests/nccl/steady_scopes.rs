//! The quantized all-gather in scopes of delayed scaling: provisional scales, scopes that are left, states that are loaded.

use crate::rig::{Group, LONG, Rig, SEEDS, ranks, tensor};
use crate::steady::{Bytes, bytes, shard, values};
use fp8_dist::quantized_all_gather;
use fp8_kernels::{DType, Device, Slot, Tensor, UNSET};
use fp8_recipe::{AutocastOptions, DelayedScaling, Recipe, Scaling, ScalingState, SlotName, SlotRole, Slots};

struct Model(SlotName);

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        f(&self.0);
    }
}

/// The way in which a forward scope ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Commit,
    Discard,
    /// A state in which nothing has run is loaded behind the commit.
    Load,
}

/// The bytes of one gather in each scope.
fn train(
    group: &Group,
    device: &Device,
    steps: &[End],
    x_of: &(dyn Fn(usize) -> Tensor + Sync),
) -> Vec<Bytes> {
    let model = Model(SlotName::new("layer", SlotRole::Input));
    let mut scaling = Scaling::new(&model, device).unwrap();
    let recipe = Recipe::from(DelayedScaling { amax_history_len: 2, ..Default::default() });
    let options = AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() };
    let mut fresh: Option<ScalingState> = None;
    let mut all = Vec::new();
    for (round, end) in steps.iter().enumerate() {
        let mut cx = scaling.scope(&recipe, &options).unwrap();
        let slot = Slot { columnwise: false, ..cx.slot(&model.0).unwrap() };
        let whole = quantized_all_gather(&**group, "x", &x_of(round), &slot).unwrap();
        all.push(bytes(&whole));
        match end {
            End::Discard => cx.discard().unwrap(),
            End::Commit | End::Load => cx.commit().unwrap(),
        }
        if *end == End::Load {
            scaling.load_state(fresh.as_ref().unwrap()).unwrap();
        }
        if fresh.is_none() {
            let mut state = scaling.state().unwrap();
            for arena in &mut state.arenas {
                arena.scale.fill(UNSET);
                arena.amax_history.iter_mut().flatten().for_each(|amax| *amax = 0.0);
                arena.last_updates.fill(0);
            }
            fresh = Some(state);
        }
    }
    all
}

/// A layer that backward runs again gathers its input again, with the scales of the forward pass, which have been updated since.
#[test]
fn a_gather_that_is_replayed_asks_no_host_and_is_recorded() {
    let rig = Rig::new();
    for seed in SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        ranks(2, |group, device| {
            let model = Model(SlotName::new("layer", SlotRole::Input));
            let mut scaling = Scaling::new(&model, device).unwrap();
            let recipe = Recipe::from(DelayedScaling { amax_history_len: 1, ..Default::default() });
            let options = AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() };
            let mut x = shard(&values(4 * 16, 0), &[2, 2], group.rank(), 16, DType::BF16, device);
            let mut step = |x: &Tensor| {
                let mut cx = scaling.scope(&recipe, &options).unwrap();
                let snapshot = cx.snapshot();
                let gather = |cx: &mut fp8_recipe::Forward<'_>| {
                    let slot = Slot { columnwise: false, ..cx.slot(&model.0).unwrap() };
                    quantized_all_gather(&*group, "x", x, &slot)
                };
                let first = gather(&mut cx).unwrap();
                cx.commit().unwrap();
                let mut backward = scaling.backward().unwrap();
                let again = gather(&mut backward.replay(&snapshot).unwrap());
                backward.commit().unwrap();
                again.map(|again| [first, again])
            };
            let mut exchanges = Vec::new();
            for round in 0..5 {
                // The scale changes from step to step.
                let values = shard(&values(4 * 16, round), &[2, 2], group.rank(), 16, DType::BF16, device);
                let before = group.traffic().exchanges;
                let [first, again] = step(&values).unwrap();
                exchanges.push(group.traffic().exchanges - before);
                assert_eq!(bytes(&again), bytes(&first), "round {round}");
            }
            assert!(exchanges[0] > 0 && exchanges[3..] == [0, 0], "{exchanges:?}");
            let (graph, [first, again]) = device.capture(|| step(&x)).unwrap();
            for round in 5..8 {
                let values = shard(&values(4 * 16, round), &[2, 2], group.rank(), 16, DType::BF16, device);
                x.write(&values.to_vec::<fp8_kernels::bf16>().unwrap(), "x").unwrap();
                let before = group.traffic().exchanges;
                graph.replay().unwrap();
                assert_eq!(bytes(&again), bytes(&first), "round {round}");
                assert_eq!(group.traffic().exchanges, before);
            }
        });
    }
    rig.finish();
}

/// Unset scales are calibrated again from the whole tensor, whatever took them away, and an outlier on the last rank sets
/// everyone's.
#[test]
fn scales_that_are_lost_are_made_anew() {
    use End::{Commit, Discard, Load};
    let rig = Rig::new();
    let steps = [Discard, Commit, Commit, Discard, Commit, Load, Discard, Commit, Commit];
    let whole = |round: usize| {
        let mut x = values(6 * 16, round);
        if [0, 1, 6, 7].contains(&round) {
            x[6 * 16 - 1] = 1e4 / (round + 1) as f32;
        }
        x
    };
    let alone = fp8_dist::local("alone", 1, LONG).unwrap().remove(0);
    let cpu = Device::cpu();
    let wanted = train(&alone, &cpu, &steps, &|round| tensor(&whole(round), &[6, 16], DType::BF16, &cpu));
    for (seed, rows) in SEEDS.into_iter().zip([[3, 3].as_slice(), &[0, 6], &[5, 0, 1], &[1, 5]]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let results = ranks(rows.len(), |group, device| {
            train(&group, device, &steps, &|round| {
                shard(&whole(round), rows, group.rank(), 16, DType::BF16, device)
            })
        });
        for result in results {
            let without_columns = |all: &[Bytes]| {
                all.iter().map(|(codes, _, factor)| (codes.clone(), *factor)).collect::<Vec<_>>()
            };
            assert_eq!(without_columns(&result), without_columns(&wanted), "{rows:?}, seed {seed}");
        }
    }
    rig.finish();
}
