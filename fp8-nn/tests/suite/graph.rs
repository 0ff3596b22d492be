//! Steps recorded as one graph: the bits of steps that are queued one by one.

use crate::every_device::support::*;
use crate::graph_loss_scale::with_group;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

mod gradients;
mod ranks;
mod tensor_parallel;
mod weights;

type Group = Arc<dyn ProcessGroup>;

/// A model in training, with inputs that stay where they are.
struct Training {
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    group: Option<Group>,
    /// Sums gradients while backward goes on.
    gradients: Option<Gradients>,
    ids: Tensor,
    targets: Tensor,
    /// Whether the optimizer gets the norm of clipping, or computes one.
    gives_norm: bool,
}

impl Training {
    fn new(recipe: Recipe) -> Self {
        let model = gpt(3);
        let scaling = Scaling::new(&model, &device()).unwrap();
        let optimizer = AdamW::new(with_group()).unwrap();
        let (ids, targets) = (ids([2, 8], 20, 0), ids([2, 8], 20, 100));
        let (group, gradients) = (None, None);
        Self { model, optimizer, scaling, recipe, group, gradients, ids, targets, gives_norm: true }
    }

    /// One of several ranks: amaxes and gradients are those of all.
    fn of(group: &Group, recipe: Recipe) -> Self {
        Self { group: Some(group.clone()), ..Self::new(recipe) }
    }

    /// One of several ranks that sum gradients while backward goes on.
    fn overlapping(group: &Group, recipe: Recipe) -> Self {
        let training = Self::of(group, recipe);
        let options = GradientsOptions { bucket_bytes: Some(8000), ..Default::default() };
        let gradients = Some(Gradients::new(&training.model, group.clone(), options).unwrap());
        Self { gradients, ..training }
    }

    /// The batch of a step, each rank's own.
    fn load(&mut self, step: u64) {
        let step = step + 1000 * self.group.as_ref().map_or(0, |group| group.rank() as u64);
        let values = |seed| ids([2, 8], 20, seed).to_vec::<i32>().unwrap();
        self.ids.write(&values(step), "ids").unwrap();
        self.targets.write(&values(100 + step), "targets").unwrap();
    }

    fn queue(&mut self, lr: f32) -> Result<[Tensor; 2]> {
        let amax_reduction_group = self.group.clone().map(|group| group as Arc<dyn AmaxGroup>);
        let options = AutocastOptions { amax_reduction_group, ..Default::default() };
        let mut cx = self.scaling.scope(&self.recipe, &options)?;
        let (loss, saved) = self.model.loss(&mut cx, &self.ids, &self.targets)?;
        cx.commit()?;
        let mut cx = self.scaling.backward()?;
        if let Some(gradients) = &mut self.gradients {
            gradients.watch(&mut cx, &mut self.model)?;
        }
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        if let Some(gradients) = &mut self.gradients {
            gradients.finish(&mut self.model)?;
        } else if let Some(group) = &self.group {
            all_reduce_gradients(&mut self.model, &**group)?;
        }
        let norm = clip_grad_norm(&mut self.model, 1.0)?;
        if self.gives_norm {
            self.optimizer.step_with_norm(&mut self.model, lr, &norm)?;
        } else {
            self.optimizer.step(&mut self.model, lr)?;
        }
        zero_grad(&mut self.model)?;
        Ok([loss, norm])
    }

    /// One number for the loss and one for the norm.
    fn eager(&mut self, step: u64) -> [u32; 2] {
        self.load(step);
        read(&self.queue(rate(step)).unwrap())
    }

    fn evaluate(&mut self) -> u32 {
        let mut cx = self.scaling.eval(&self.recipe).unwrap();
        self.model.loss(&mut cx, &self.ids, &self.targets).unwrap().0.item().unwrap().to_bits()
    }
}

fn read(results: &[Tensor; 2]) -> [u32; 2] {
    [0, 1].map(|i| results[i].item().unwrap().to_bits())
}

fn rate(step: u64) -> f32 {
    1e-2 / (1.0 + step as f32)
}

/// A recipe of the user's own computes scales on the host, which a graph cannot record.
fn recordable() -> Vec<Recipe> {
    recipes().into_iter().filter(|recipe| !recipe.to_string().starts_with("custom")).collect()
}

/// Two steps, a third that is recorded, and three replays, each beside an eager step of the same bits and before `between`.
fn recorded_beside(
    eager: &mut Training,
    recorded: &mut Training,
    between: impl Fn(&mut Training, &mut Training),
) -> (Graph, [Tensor; 2]) {
    for step in 0..2 {
        assert_eq!(eager.eager(step), recorded.eager(step));
    }
    recorded.load(2);
    let (graph, results) = device().capture(|| recorded.queue(rate(2))).unwrap();
    assert_eq!(eager.eager(2), read(&results), "the recorded step itself");
    for step in 3..6 {
        recorded.load(step);
        recorded.optimizer.set_lr(rate(step)).unwrap();
        graph.replay().unwrap();
        assert_eq!(eager.eager(step), read(&results), "step {step}");
        between(eager, recorded);
    }
    (graph, results)
}

#[test]
fn replays_have_the_bits_of_eager_steps() {
    for recipe in recordable() {
        let mut eager = Training::new(recipe.clone());
        let mut recorded = Training::new(recipe);
        let (graph, results) = recorded_beside(&mut eager, &mut recorded, |eager, recorded| {
            assert_eq!(eager.evaluate(), recorded.evaluate(), "an evaluation meets no weights of before");
        });
        // Between replays a step may be queued as ever.
        assert_eq!(eager.eager(6), recorded.eager(6));
        recorded.load(7);
        recorded.optimizer.set_lr(rate(7)).unwrap();
        graph.replay().unwrap();
        assert_eq!(eager.eager(7), read(&results));
        assert_eq!((eager.optimizer.steps(), recorded.optimizer.steps()), (8, 8));
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
    }
}

#[test]
fn attention_in_fp8_is_recorded() {
    let training = || {
        let options = GptOptions {
            vocab_size: 20,
            num_layers: 1,
            layer: TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 128,
                attention: AttentionOptions {
                    num_attention_heads: 2,
                    max_seq_length: 8,
                    attention_dropout: 0.2,
                    fp8_dpa: Some(true),
                    fp8_mha: Some(true),
                    ..Default::default()
                },
                ..Default::default()
            },
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device(), &mut rng(3)).unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        Training { model, scaling, ..Training::new(delayed()) }
    };
    let [mut eager, mut recorded] = [training(), training()];
    recorded_beside(&mut eager, &mut recorded, |_, _| ());
    let all = |training: &Training| everything(&training.model, &training.scaling);
    assert!(all(&eager) == all(&recorded), "parameters, histories and scales");
}

/// A step of a layer without RoPE, whose qkv writes FP8: recorded and replayed, beside eager steps.
#[test]
fn layers_that_write_fp8_are_recorded() {
    struct Trained(MultiheadAttention, Scaling, Tensor, AdamW);
    let new = || {
        let options = MultiheadAttentionOptions {
            hidden_size: 64,
            attention: AttentionOptions { num_attention_heads: 4, fp8_mha: Some(true), ..Default::default() },
            ..Default::default()
        };
        let model = MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        Trained(model, scaling, noise([1, 8, 64], 0), AdamW::new(AdamWOptions::default()).unwrap())
    };
    let queue = |Trained(model, scaling, x, optimizer): &mut Trained| -> Result<[Tensor; 2]> {
        fp8_nn::zero_grad(model)?;
        let (y, dx) = step(scaling, &delayed(), &AutocastOptions::default(), model, x, x)?;
        optimizer.step(model, 0.01)?;
        Ok([y, dx])
    };
    let read = |of: &[Tensor; 2]| of.each_ref().map(bits);
    let load = |of: &mut Trained, seed| of.2.write(&values(&noise([1, 8, 64], seed)), "x").unwrap();
    let (mut eager, mut recorded) = (new(), new());
    for seed in 0..2 {
        let results = [&mut eager, &mut recorded].map(|of| {
            load(of, seed);
            read(&queue(of).unwrap())
        });
        assert_eq!(results[0], results[1]);
    }
    let (graph, results) = device().capture(|| queue(&mut recorded)).unwrap();
    queue(&mut eager).unwrap();
    for seed in 3..5 {
        load(&mut eager, seed);
        load(&mut recorded, seed);
        graph.replay().unwrap();
        assert_eq!(read(&queue(&mut eager).unwrap()), read(&results));
    }
    assert!(everything(&eager.0, &eager.1) == everything(&recorded.0, &recorded.1));
}

/// Replay n draws the masks of eager step n, and each step others.
#[test]
fn replays_draw_the_masks_of_eager_steps() {
    let training = || {
        let options = GptOptions {
            vocab_size: 20,
            num_layers: 1,
            embedding_dropout: 0.1,
            layer: TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 128,
                attention: AttentionOptions {
                    num_attention_heads: 4,
                    max_seq_length: 8,
                    attention_dropout: 0.2,
                    ..Default::default()
                },
                hidden_dropout: 0.1,
                drop_path_rate: 0.3,
                ..Default::default()
            },
            ..Default::default()
        };
        let model = Gpt::new("gpt", &options, &device(), &mut rng(3)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_dropout_seed(17).unwrap();
        Training { model, scaling, ..Training::new(delayed()) }
    };
    let (mut eager, mut recorded) = (training(), training());
    let (graph, results) = recorded_beside(&mut eager, &mut recorded, |eager, recorded| {
        assert_eq!(eager.evaluate(), recorded.evaluate());
    });
    let mut seen = std::collections::BTreeSet::new();
    recorded.optimizer.set_lr(0.0).unwrap();
    for _ in 0..4 {
        graph.replay().unwrap();
        seen.insert(read(&results)[0]);
    }
    assert_eq!(seen.len(), 4, "equal weights and batches, other masks");
    assert_eq!(recorded.scaling.state().unwrap().dropout.map(|dropout| dropout.scopes), Some(10));
}

/// Replay n rounds gradients by the numbers of eager step n, and each step by others.
#[test]
fn replays_round_gradients_by_the_numbers_of_eager_steps() {
    let training = || {
        let mut training = Training::new(fp8_nn::fp8_recipe::Nvfp4::default().into());
        training.scaling.set_dropout_seed(23).unwrap();
        training
    };
    let queue = |of: &mut Training| -> Result<Tensor> {
        zero_grad(&mut of.model)?;
        let mut cx = of.scaling.scope(&of.recipe, &AutocastOptions::default())?;
        let (loss, saved) = of.model.loss(&mut cx, &of.ids, &of.targets)?;
        cx.commit()?;
        let mut cx = of.scaling.backward()?;
        of.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        Ok(loss)
    };
    let read = |of: &Training, loss: &Tensor| {
        let grads: Vec<_> = parameters(&of.model).iter().map(|p| bits(p.main_grad())).collect();
        (loss.item().unwrap().to_bits(), grads)
    };
    let (mut eager, mut recorded) = (training(), training());
    let mut eager_step = || {
        let loss = queue(&mut eager).unwrap();
        read(&eager, &loss)
    };
    let mut seen = Vec::new();
    for _ in 0..2 {
        let loss = queue(&mut recorded).unwrap();
        seen.push(read(&recorded, &loss));
        assert_eq!(seen.last(), Some(&eager_step()));
    }
    let (graph, loss) = device().capture(|| queue(&mut recorded)).unwrap();
    seen.push(read(&recorded, &loss));
    assert_eq!(seen.last(), Some(&eager_step()), "the recorded step itself");
    for step in 0..4 {
        graph.replay().unwrap();
        seen.push(read(&recorded, &loss));
        assert_eq!(seen.last(), Some(&eager_step()), "replay {step}");
    }
    let all = |training: &Training| everything(&training.model, &training.scaling);
    assert!(all(&eager) == all(&recorded), "gradients and counts of draws");
    assert_eq!(recorded.scaling.state().unwrap().dropout.map(|draws| draws.scopes), Some(7));
    assert!(seen.iter().all(|(loss, _)| *loss == seen[0].0), "forward rounds to nearest");
    let different: std::collections::BTreeSet<_> = seen.iter().map(|(_, grads)| grads).collect();
    assert_eq!(different.len(), seen.len(), "equal weights and batches, other numbers");

    // With an optimizer, clipping and batches of their own.
    let (mut eager, mut recorded) = (training(), training());
    recorded_beside(&mut eager, &mut recorded, |eager, recorded| {
        assert_eq!(eager.evaluate(), recorded.evaluate());
    });
    assert!(all(&eager) == all(&recorded), "parameters and counts of draws");
}

#[test]
fn the_first_draw_is_not_recorded() {
    let slots = fp8_nn::fp8_recipe::GemmSlots::new("fc");
    let mut scaling = Scaling::new(&slots, &device()).unwrap();
    scaling.prepare(&delayed(), &AutocastOptions::default()).unwrap();
    let refused = device().capture(|| {
        let mut cx = scaling.autocast(&delayed())?;
        cx.dropout_draw().map(drop)
    });
    let refused = refused.err().map(|error: fp8_nn::fp8_recipe::Error| error.to_string());
    assert_eq!(refused.as_deref(), Some("dropout state: cannot be recorded: run the step once before"));
}

/// Makes one element of a gradient infinite. Backward adds to it.
fn spoil(training: &mut Training) {
    let mut last = None;
    for parameter in parameters_mut(&mut training.model) {
        let grad = parameter.main_grad_mut();
        let mut values = vec![0.0f32; grad.numel()];
        if last.is_none() {
            values[grad.numel() / 2] = f32::INFINITY;
        }
        last = Some(());
        grad.write(&values, "grad").unwrap();
    }
}

#[test]
fn a_recorded_step_skips_gradients_that_are_not_finite() {
    for gives_norm in [true, false] {
        let [mut eager, mut recorded] = [(); 2].map(|()| Training { gives_norm, ..Training::new(delayed()) });
        let (graph, results) = recorded_beside(&mut eager, &mut recorded, |_, _| ());
        let values = |training: &Training| {
            parameters(&training.model).iter().map(|p| bits(p.tensor())).collect::<Vec<_>>()
        };
        for (step, bad, skipped) in [(6, true, 1), (7, false, 1), (8, true, 2), (9, true, 3), (10, false, 3)]
        {
            let before = values(&recorded);
            if bad {
                spoil(&mut eager);
                spoil(&mut recorded);
            }
            recorded.load(step);
            recorded.optimizer.set_lr(rate(step)).unwrap();
            graph.replay().unwrap();
            assert_eq!(eager.eager(step), read(&results), "step {step}");
            assert_eq!(values(&recorded) == before, bad, "step {step}");
            for training in [&eager, &recorded] {
                let optimizer = &training.optimizer;
                assert_eq!((optimizer.steps(), optimizer.skipped_steps().unwrap()), (step + 1, skipped));
            }
        }
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
    }
}

#[test]
fn a_recorded_step_goes_on_from_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for recipe in recordable() {
        let mut whole = Training::new(recipe.clone());
        for step in 0..4 {
            whole.eager(step);
        }
        let Training { model, optimizer, scaling, .. } = &whole;
        checkpoint::save(folder.path(), model, optimizer, scaling, &BTreeMap::new()).unwrap();
        let mut recorded = Training::new(recipe);
        for step in 10..12 {
            recorded.eager(step);
        }
        recorded.load(12);
        let (graph, results) = device().capture(|| recorded.queue(rate(12))).unwrap();
        let Training { model, optimizer, scaling, .. } = &mut recorded;
        checkpoint::load(folder.path(), model, optimizer, scaling).unwrap();
        for step in 4..7 {
            recorded.load(step);
            recorded.optimizer.set_lr(rate(step)).unwrap();
            graph.replay().unwrap();
            assert_eq!(whole.eager(step), read(&results), "step {step}");
        }
        let all = |training: &Training| everything(&training.model, &training.scaling);
        assert!(all(&whole) == all(&recorded), "parameters, histories, scales and counts of updates");
        assert_eq!(recorded.optimizer.steps(), 7);
    }
}

#[test]
fn a_recipe_new_after_replays_takes_the_amaxes_that_they_recorded() {
    let margin = |margin| Recipe::from(DelayedScaling { margin, ..short() });
    let (mut eager, mut recorded) = (Training::new(margin(1)), Training::new(margin(1)));
    for training in [&mut eager, &mut recorded] {
        training.eager(50);
        training.recipe = margin(0);
    }
    // The other recipe's only step is as recent as the first of these; replays make them the newer ones.
    let (graph, _) = recorded_beside(&mut eager, &mut recorded, |_, _| {});
    for training in [&mut eager, &mut recorded] {
        training.recipe = margin(2);
    }
    for step in 6..8 {
        assert_eq!(eager.eager(step), recorded.eager(step), "step {step}");
    }
    let all = |training: &Training| everything(&training.model, &training.scaling);
    assert!(all(&eager) == all(&recorded), "parameters, histories, scales and counts of updates");
    let report = recorded.scaling.state_report();
    let taken: Vec<_> =
        report.recomputed.iter().filter(|slot| slot.recipe.details().contains("margin=2")).collect();
    assert!(
        !taken.is_empty() && taken.iter().all(|slot| slot.from.details().contains("margin=0")),
        "{report}"
    );
    drop(graph);
}

#[test]
fn a_recorded_step_goes_on_from_a_checkpoint_without_moments() {
    let folder = tempfile::tempdir().unwrap();
    let mut fresh = Training::new(current());
    let Training { model, optimizer, scaling, .. } = &fresh;
    checkpoint::save(folder.path(), model, optimizer, scaling, &BTreeMap::new()).unwrap();
    let mut recorded = Training::new(current());
    for step in 10..12 {
        recorded.eager(step);
    }
    let (graph, results) = device().capture(|| recorded.queue(rate(12))).unwrap();
    let Training { model, optimizer, scaling, .. } = &mut recorded;
    checkpoint::load(folder.path(), model, optimizer, scaling).unwrap();
    for step in 0..3 {
        recorded.load(step);
        recorded.optimizer.set_lr(rate(step)).unwrap();
        graph.replay().unwrap();
        assert_eq!(fresh.eager(step), read(&results), "step {step}");
    }
    assert!(parameter_bits(&fresh.model) == parameter_bits(&recorded.model));
}

#[test]
fn a_graph_outlives_what_it_was_recorded_with() {
    let mut training = Training::new(delayed());
    for step in 0..2 {
        training.eager(step);
    }
    let (graph, results) = device().capture(|| training.queue(rate(2))).unwrap();
    drop(training);
    // Others get none of its memory.
    let noise: Vec<Tensor> = (0..50).map(|seed| noise([64, 64], seed)).collect();
    let before: Vec<Vec<f32>> = noise.iter().map(values).collect();
    graph.replay().unwrap();
    assert!(results[0].item().unwrap().is_finite());
    assert!(noise.iter().map(values).collect::<Vec<_>>() == before);
}

#[test]
fn first_steps_are_refused_and_change_nothing() {
    let mut training = Training::new(delayed());
    let refused = error(device().capture(|| training.queue(0.1)));
    assert!(refused.contains("cannot be recorded"), "{refused}");
    assert_eq!(training.optimizer.steps(), 0);
    // The device lives on, and so does the model.
    let mut fresh = Training::new(delayed());
    assert_eq!(training.eager(0), fresh.eager(0));
}

#[test]
fn a_recording_that_fails_leaves_no_weights_behind() {
    let (mut training, mut other) = (Training::new(delayed()), Training::new(delayed()));
    for step in 0..3 {
        assert_eq!(training.eager(step), other.eager(step));
    }
    // Its forward is committed: weights have codes that nothing has written.
    let Training { model, scaling, recipe, ids, targets, .. } = &mut training;
    let refused = error(device().capture(|| {
        let mut cx = scaling.autocast(recipe)?;
        let (loss, _) = model.loss(&mut cx, ids, targets)?;
        cx.commit()?;
        loss.item().map(drop).map_err(Error::from)
    }));
    assert!(refused.contains("cannot be recorded"), "{refused}");
    assert_eq!(training.evaluate(), other.evaluate());
    assert_eq!(training.eager(3), other.eager(3));
}

#[test]
fn a_recorded_step_does_not_go_on_without_scales() {
    let mut training = Training::new(delayed());
    for step in 0..2 {
        training.eager(step);
    }
    let (graph, results) = device().capture(|| training.queue(rate(2))).unwrap();
    graph.replay().unwrap();
    let steps = training.optimizer.steps();
    training.scaling.load_state(&Default::default()).unwrap();
    let refused = error(graph.replay().map_err(Error::from));
    let text = "replay: slots it was recorded with have lost their scales: run and commit a step that is not recorded";
    assert_eq!(refused, text);
    assert_eq!(training.optimizer.steps(), steps, "counters are as they were");
    // A step that calibrates, and it goes on as it would have without the graph.
    let updates = |training: &Training| training.scaling.state().unwrap().arenas[0].updates;
    assert_eq!(updates(&training), 0);
    training.eager(3);
    graph.replay().unwrap();
    assert!(results[0].item().unwrap().is_finite());
    assert_eq!(updates(&training), 2);
}

#[test]
fn a_recorded_step_computes_again_what_was_not_kept() {
    let run = |is_recorded: bool| {
        let mut model = Recompute { inner: block("block", 1) };
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (mut x, dy) = (noise([2, 6, 32], 1), noise([2, 6, 32], 2));
        let recipe = delayed();
        let mut queue =
            |x: &Tensor| step(&mut scaling, &recipe, &AutocastOptions::default(), &mut model, x, &dy);
        let mut out = Vec::new();
        for _ in 0..2 {
            let (y, dx) = queue(&x).unwrap();
            out.push([bits(&y), bits(&dx)]);
        }
        let recorded = is_recorded.then(|| device().capture(|| queue(&x)).unwrap());
        for seed in 3..5 {
            x.write(&values(&noise([2, 6, 32], seed)), "x").unwrap();
            out.push(match &recorded {
                None => queue(&x).map(|(y, dx)| [bits(&y), bits(&dx)]).unwrap(),
                Some((graph, (y, dx))) => {
                    graph.replay().unwrap();
                    [bits(y), bits(dx)]
                }
            });
        }
        (out, grads(&model))
    };
    assert!(run(false).0 == run(true).0);
}

#[test]
fn what_a_graph_cannot_hold_is_refused() {
    let x = noise([4, 4], 1);
    let mut training = Training::new(delayed());
    for step in 0..3 {
        training.eager(step);
    }
    let steps = training.optimizer.steps();
    let refuse = |what: &str, step: &mut dyn FnMut() -> Result<()>| {
        let refused = error(device().capture(&mut *step));
        assert!(refused.contains("cannot be recorded"), "{what}: {refused}");
    };
    refuse("a read", &mut || x.to_f32_vec().map(drop).map_err(Error::from));
    let key = ops::DropoutKey { seed: 1, offset: 0 };
    refuse("a mask", &mut || ops::dropout(&x, 0.5, key).map(drop).map_err(Error::from));
    refuse("a capture in a capture", &mut || device().capture(|| Ok::<_, Error>(())).map(drop));
    refuse("a late failure", &mut || {
        training.queue(0.1)?;
        x.to_f32_vec().map(drop).map_err(Error::from)
    });
    assert_eq!(training.optimizer.steps(), steps, "counters are as they were");
    let updates = |training: &Training| training.scaling.state().unwrap().arenas[0].updates;
    let before = updates(&training);
    training.eager(3);
    assert_eq!(updates(&training), before + 1);
    let interval: Recipe = DelayedScaling { interval: 2, ..short() }.into();
    let mut sparse = Training::new(interval);
    for step in 0..3 {
        sparse.eager(step);
    }
    refuse("an interval", &mut || sparse.queue(0.1).map(drop));
}
