//! Ranks with one batch each against one process with the joined batch, and what they get when one of them is lost.

use super::support::{
    ParameterBits, bits, current, delayed, device, error, gpt, ids, is_nvfp4, linear, noise, off,
    parameter_bits, recipes, short, unless_simulated,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

type Group = Arc<dyn ProcessGroup>;

/// Longer than a test may take: who waits for it has not been told.
const DEADLINE: Duration = Duration::from_secs(60);

/// `f` on every rank; `None` for one that panicked.
fn ranks<T: Send>(world_size: usize, f: impl Fn(Group) -> T + Sync) -> Vec<Option<T>> {
    let groups = local("dp", world_size, DEADLINE).unwrap();
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

const BATCH: usize = 8;
const SEQ: usize = 8;

/// Rank r's part of the global batch.
fn shard(t: &Tensor, rank: usize, world_size: usize) -> Tensor {
    let rows = BATCH / world_size;
    let part = t.to_vec::<i32>().unwrap()[rank * rows * SEQ..][..rows * SEQ].to_vec();
    Tensor::from_vec(part, [rows, SEQ], &device()).unwrap()
}

/// The global loss of each step, then parameters and scales. Each rank has a model of its own seed before rank 0's is broadcast.
fn train(
    group: Option<Group>,
    model: impl Fn(u64) -> Gpt,
    recipe: &Recipe,
    options: &AutocastOptions,
) -> Result<(Vec<f32>, ParameterBits, ScalingState)> {
    let (rank, world_size) = group.as_ref().map_or((0, 1), |group| (group.rank(), group.world_size()));
    let mut model = model(if rank == 0 { 1 } else { 99 });
    let mut scaling = Scaling::new(&model, &device())?;
    if let Some(group) = &group {
        broadcast_parameters(&mut model, &**group)?;
        scaling.set_group(group.clone());
    }
    let mut optimizer = AdamW::new(AdamWOptions::default())?;
    let normalizer = Some((BATCH * SEQ) as f32);
    let mut losses = Vec::new();
    for step in 0..unless_simulated(6, 3) {
        let [x, targets] = [0, 50].map(|seed| shard(&ids([BATCH, SEQ], 20, seed + step), rank, world_size));
        let cross_entropy = ops::CrossEntropyOptions { normalizer, ..Default::default() };
        let mut cx = scaling.scope(recipe, options)?;
        let (loss, saved) =
            model.loss_with_info(&mut cx, &x, &targets, cross_entropy, &SequenceInfo::default())?;
        cx.commit()?;
        scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
        let mut loss = loss;
        if let Some(group) = &group {
            all_reduce_gradients(&mut model, &**group)?;
            loss = group.all_reduce("loss", &loss, ReduceOp::Sum)?;
        }
        losses.push(loss.item()?);
        clip_grad_norm(&mut model, 1.0)?;
        optimizer.step(&mut model, 0.01)?;
        fp8_nn::zero_grad(&mut model)?;
    }
    Ok((losses, parameter_bits(&model), scaling.state().unwrap()))
}

/// Two recipes with histories; that of the weights is in the first arenas.
fn weights_apart() -> Recipe {
    Recipe::by_name([("*.weight", DelayedScaling { margin: 1, ..short() }.into())], short())
}

#[test]
fn ranks_with_other_assignments_get_an_error_that_names_the_slot() {
    let errors = ranks(2, |group| {
        let mut scaling = Scaling::new(&gpt(1), &device())?;
        let pattern = ["*.qkv.input", "*.proj.input"][group.rank()];
        scaling.set_group(group);
        let recipe = Recipe::by_name([(pattern, DelayedScaling { margin: 1, ..short() }.into())], short());
        scaling.autocast(&recipe)?.commit()?;
        Ok::<_, Error>(())
    });
    for error in errors {
        let text = error.unwrap().unwrap_err().to_string();
        assert!(text.contains("gpt.blocks.0.attention.proj.input under delayed ("), "{text}");
        assert!(text.contains("margin=1"), "{text}");
    }
}

#[test]
fn ranks_train_as_one_process_with_the_joined_batch() {
    let mut cases = vec![(delayed(), off(), 1e-5), (weights_apart(), AutocastOptions::default(), 0.01)];
    let most = unless_simulated(usize::MAX, 1);
    cases.extend(recipes().into_iter().take(most).map(|recipe| {
        let tolerance = if is_nvfp4(&recipe) { 0.03 } else { 0.01 };
        (recipe, AutocastOptions::default(), tolerance)
    }));
    for (index, (recipe, options, tolerance)) in cases.into_iter().enumerate() {
        let alone = train(None, gpt, &recipe, &options).unwrap();
        let world_sizes = if index < 3 { vec![2, 4] } else { vec![2] };
        for world_size in unless_simulated(world_sizes, vec![2]) {
            let all: Vec<_> = ranks(world_size, |group| train(Some(group), gpt, &recipe, &options))
                .into_iter()
                .map(|r| r.unwrap().unwrap())
                .collect();
            for (step, (expected, loss)) in alone.0.iter().zip(&all[0].0).enumerate() {
                let difference = (expected - loss).abs() / expected;
                assert!(
                    difference <= tolerance,
                    "{recipe}, {world_size} ranks, step {step}: {loss}, alone {expected}"
                );
            }
            for other in &all[1..] {
                assert!(all[0] == *other, "{recipe}: ranks differ");
            }
            assert_eq!(all[0].2.arenas.len(), alone.2.arenas.len(), "{recipe}");
            if index == 1 || recipe.to_string() == delayed().to_string() && options.enabled {
                let slots = |state: &ScalingState| state.arenas[0].slots.clone();
                assert_eq!(slots(&all[0].2), slots(&alone.2));
                // All ranks' amaxes are in the histories, as of one process: the first forward sees equal weights.
                let amax = |state: &ScalingState| state.arenas[0].amax_history.clone();
                let index =
                    slots(&alone.2).iter().position(|n| &**n == "gpt.blocks.0.attention.qkv.weight").unwrap();
                let [a, b] = [&all[0].2, &alone.2].map(|state| amax(state)[0][index]);
                assert!((a - b).abs() < 0.01 * b, "{a} {b}");
            }
        }
    }
}

/// Replicas with one seed and the same batch: only random numbers can make their gradients differ.
#[test]
fn replicas_with_one_seed_round_gradients_with_other_numbers() {
    let gradients = |recipe: Nvfp4, watches: bool, replica: Option<usize>| {
        let all = ranks(2, |group| {
            let mut fc = linear("fc", 32, 32, 1);
            let mut scaling = Scaling::new(&fc, &device()).unwrap();
            scaling.set_dropout_seed(7).unwrap();
            if let Some(replica) = replica {
                scaling.set_replica(replica * group.rank());
            }
            let mut gradients = Gradients::new(&fc, group, GradientsOptions::default()).unwrap();
            let (x, dy) = (noise([32, 32], 2), noise([32, 32], 3));
            let (_, saved) = scaling.in_autocast(&recipe.into(), |cx| fc.forward(cx, &x)).unwrap();
            let mut cx = scaling.backward().unwrap();
            if watches {
                gradients.watch(&mut cx, &mut fc).unwrap();
            }
            let dx = fc.backward(&mut cx, saved, &dy).unwrap();
            cx.commit().unwrap();
            let dw = bits(&fc.weight().main_grad().clone());
            gradients.finish(&mut fc).unwrap();
            (bits(&dx), dw)
        });
        all.into_iter().map(Option::unwrap).collect::<Vec<_>>()
    };
    let recipe = Nvfp4::default();
    let alone = gradients(recipe, false, None);
    assert_eq!(alone[0], alone[1]);
    for different in [gradients(recipe, true, None), gradients(recipe, false, Some(1))] {
        assert_eq!(different[0], alone[0]);
        assert!(different[1].0 != alone[0].0 && different[1].1 != alone[0].1);
    }
    let nearest = Nvfp4 { disable_stochastic_rounding: true, ..recipe };
    let rounded = gradients(nearest, true, Some(1));
    assert_eq!(rounded[0], rounded[1]);
}

/// A model with adapters of the user's own, which alone are trained.
fn adapted(seed: u64) -> Gpt {
    let mut model = super::own_block::wrap(gpt(seed));
    for (i, parameter) in parameters_mut(&mut model).into_iter().enumerate() {
        let is_adapter = parameter.name().contains(".adapter.");
        if is_adapter {
            let shape = *parameter.shape();
            parameter.set(ops::scale(&noise(shape, seed + i as u64), 0.1).unwrap()).unwrap();
        }
        parameter.set_trainable(is_adapter).unwrap();
    }
    model
}

#[test]
fn ranks_train_adapters_of_ones_own_as_one_process_does() {
    for recipe in unless_simulated(vec![delayed(), current()], vec![delayed()]) {
        let options = AutocastOptions::default();
        let alone = train(None, adapted, &recipe, &options).unwrap();
        let all: Vec<_> = ranks(2, |group| train(Some(group), adapted, &recipe, &options))
            .into_iter()
            .map(|r| r.unwrap().unwrap())
            .collect();
        assert!(all[0] == all[1], "{recipe}: ranks differ");
        for (step, (expected, loss)) in alone.0.iter().zip(&all[0].0).enumerate() {
            assert!(
                (expected - loss).abs() <= 0.01 * expected,
                "{recipe}, step {step}: {loss}, alone {expected}"
            );
        }
        let start = parameter_bits(&adapted(1));
        for ((name, trained, _), (_, start, _)) in all[0].1.iter().zip(&start) {
            assert_eq!(trained != start, name.contains(".adapter."), "{recipe}: {name}");
        }
    }
}

/// A layer that all ranks run, and two experts that only some do.
#[derive(Debug)]
struct Experts {
    shared: Linear,
    experts: Vec<Linear>,
}

composite!(Experts { shared, experts });

impl Experts {
    fn new() -> Self {
        let experts = (0..2).map(|i| linear(&format!("experts.{i}"), 16, 16, i)).collect();
        Self { shared: linear("shared", 16, 16, 9), experts }
    }

    /// One step in which `active` experts run.
    fn step(&mut self, scaling: &mut Scaling, active: &[usize], seed: u64) -> Result<()> {
        let x = noise([4, 16], seed);
        let mut cx = scaling.autocast(&delayed())?;
        let shared = self.shared.forward(&mut cx, &x)?;
        let experts: Vec<_> =
            active.iter().map(|&i| self.experts[i].forward(&mut cx, &shared.0)).collect::<Result<_>>()?;
        cx.commit()?;
        scaling.in_backward(|cx| {
            for ((y, saved), &i) in experts.into_iter().zip(active) {
                self.experts[i].backward(cx, saved, &y)?;
            }
            self.shared.backward(cx, shared.1, &shared.0)
        })?;
        Ok(())
    }
}

/// Scale and history of the slots whose names begin with `path`.
fn of(state: &ScalingState, path: &str) -> Vec<(String, f32, Vec<f32>)> {
    let mut all = Vec::new();
    for arena in &state.arenas {
        for (i, name) in arena.slots.iter().enumerate().filter(|(_, name)| name.starts_with(path)) {
            all.push((
                name.to_string(),
                arena.scale[i],
                arena.amax_history.iter().map(|row| row[i]).collect(),
            ));
        }
    }
    all
}

#[test]
fn experts_that_nobody_runs_stay_and_those_that_one_rank_runs_roll_everywhere() {
    let outcomes = ranks(3, |group| {
        let rank = group.rank() as u64;
        let mut model = Experts::new();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(group);
        let mut states = Vec::new();
        // All run both; then rank 1 alone runs expert 0, and nobody expert 1; then nobody runs any.
        for step in 0..3 {
            let active: &[usize] = match (step, rank) {
                (0, _) => &[0, 1],
                (1, 1) => &[0],
                _ => &[],
            };
            model.step(&mut scaling, active, 10 * step + rank).unwrap();
            states.push(scaling.state().unwrap());
        }
        states
    });
    let outcomes: Vec<_> = outcomes.into_iter().map(Option::unwrap).collect();
    assert!(outcomes.iter().all(|states| *states == outcomes[0]), "ranks differ");
    let [first, second, third] = &outcomes[0][..] else { panic!("three states") };
    assert_eq!(of(first, "experts.1"), of(third, "experts.1"));
    assert_eq!(of(second, "experts.0"), of(third, "experts.0"));
    for ((name, _, before), (_, _, after)) in of(first, "experts.0").iter().zip(of(second, "experts.0")) {
        let runs = ["input", "weight", "grad_output"].iter().any(|role| name.ends_with(&format!(".{role}")));
        assert_eq!(before[2] > 0.0, runs, "{name}");
        if runs && !name.ends_with("weight") {
            assert_eq!(after[..2], before[1..], "{name} rolled");
            assert!(after[2] > 0.0, "{name}");
        } else {
            assert_eq!(*before, after, "{name}"); // the weight is still in the cache: it did not run
        }
    }
}

/// Returns the results of four ranks that train, except that rank 1 runs `rank_1` instead.
fn lost(rank_1: impl Fn(Group) -> Result<()> + Sync) -> Vec<Option<Result<()>>> {
    let start = Instant::now();
    let all = ranks(4, |group| {
        if group.rank() == 1 {
            return rank_1(group);
        }
        train(Some(group), gpt, &delayed(), &AutocastOptions::default()).map(drop)
    });
    assert!(start.elapsed() < DEADLINE / 2, "ranks waited for one that was gone");
    all
}

fn expect_errors(all: Vec<Option<Result<()>>>, words: &str) {
    for (rank, result) in all.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let error = error(result.unwrap());
        assert!(error.contains(words), "rank {rank}: {error}");
    }
}

fn begin(group: &Group) -> (Gpt, Scaling) {
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    broadcast_parameters(&mut model, &**group).unwrap();
    scaling.set_group(group.clone());
    (model, scaling)
}

#[test]
fn a_rank_that_fails_in_a_scope_is_an_error_on_all() {
    let all = lost(|group| {
        let (model, mut scaling) = begin(&group);
        let flat = ids([1, 8], 20, 1).reshape([8]).unwrap();
        scaling.in_autocast(&delayed(), |cx| model.forward(cx, &flat).map(drop))
    });
    let own = all[1].as_ref().unwrap().as_ref().unwrap_err().to_string();
    assert!(own.contains("gpt: ids of shape [8]"), "{own}"); // its own error, not the group's
    expect_errors(all, "rank 1 gave up: in a forward scope: gpt: ids of shape [8]");
}

#[test]
fn the_others_hear_the_error_of_a_layer_though_its_guard_is_dropped() {
    let all = lost(|group| {
        let (model, mut scaling) = begin(&group);
        let flat = ids([1, 8], 20, 1).reshape([8]).unwrap();
        let mut cx = scaling.autocast(&delayed())?;
        model.forward(&mut cx, &flat)?; // drops the guard
        Ok(cx.commit()?)
    });
    expect_errors(all, "rank 1 gave up: in a forward scope: gpt: ids of shape [8]");
    let all = lost(|group| {
        let (mut model, mut scaling) = begin(&group);
        let mut cx = scaling.autocast(&delayed())?;
        let (logits, saved) = model.forward(&mut cx, &ids([1, 8], 20, 1))?;
        cx.commit()?;
        let mut cx = scaling.backward()?;
        model.backward(&mut cx, saved, &logits.reshape([8, 20])?)?;
        Ok(cx.commit()?)
    });
    expect_errors(all, "rank 1 gave up: in a backward scope: gpt: dy of shape [8, 20]");
}

#[test]
fn a_rank_that_panics_is_an_error_on_the_others() {
    let all = lost(|group| {
        let (model, mut scaling) = begin(&group);
        let mut cx = scaling.autocast(&delayed())?;
        let _ = model.forward(&mut cx, &ids([1, 8], 20, 1))?;
        panic!("lost on purpose");
    });
    assert!(all[1].is_none());
    expect_errors(all, "rank 1 gave up: ");
}

#[test]
fn a_rank_that_leaves_between_scopes_is_an_error_on_the_others() {
    let all = lost(|group| {
        begin(&group);
        Ok(())
    });
    expect_errors(all, "rank 1 left the group");
}

#[test]
fn a_rank_with_another_model_is_an_error_on_all() {
    let all = ranks(2, |group| {
        let model = linear(["fc", "fd"][group.rank()], 16, 16, 1);
        let mut scaling = Scaling::new(&model, &device())?;
        scaling.set_group(group);
        scaling.in_autocast(&delayed(), |cx| model.forward(cx, &noise([2, 16], 1)).map(drop))
    });
    for result in all {
        let error = error(result.unwrap());
        assert!(error.contains("`fd.input` on rank 1 and `fc.input` on rank 0"), "{error}");
    }
}
