//! Gradients that are summed while backward goes on: the bits of sums behind it, and what happens around them.

use super::support::{
    bits, block_options, current, delayed, device, error, gpt, gpt_options, ids, linear, noise, off, rng,
    step, unless_simulated,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

type Group = Arc<dyn ProcessGroup>;

/// `f` on every rank of a new group; in rank order.
fn ranks<T: Send>(world_size: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = local("dp", world_size, Duration::from_secs(60)).unwrap();
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn options(bucket_bytes: usize) -> GradientsOptions {
    GradientsOptions { bucket_bytes: Some(bucket_bytes), ..Default::default() }
}

fn gradient_bits(model: &(impl Layer + ?Sized)) -> Vec<(String, Vec<u32>)> {
    parameters(model)
        .iter()
        .map(|parameter| (parameter.name().to_string(), bits(parameter.main_grad())))
        .collect()
}

/// Forward and backward of a microbatch, watched by `gradients`.
fn microbatch(
    model: &mut Gpt,
    scaling: &mut Scaling,
    gradients: Option<&mut Gradients>,
    recipe: &Recipe,
    seed: u64,
) -> Result<()> {
    let [x, targets] = [0, 50].map(|part| ids([2, 8], 20, part + seed));
    let (_, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &x, &targets))?;
    let mut cx = scaling.backward()?;
    if let Some(gradients) = gradients {
        gradients.watch(&mut cx, model)?;
    }
    model.loss_backward(&mut cx, saved)?;
    Ok(cx.commit()?)
}

type Make = fn() -> Gpt;

fn models() -> Vec<(&'static str, Make)> {
    let tied = || {
        let options = GptOptions { tie_word_embeddings: true, ..gpt_options() };
        Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap()
    };
    let positions = || {
        let options = GptOptions { learned_positions: true, ..gpt_options() };
        let mut model = Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
        let all = parameters_mut(&mut model).into_iter().enumerate();
        all.filter(|(index, _)| index % 3 == 0).for_each(|(_, p)| p.set_trainable(false).unwrap());
        model
    };
    vec![("a head of its own", || gpt(1)), ("a tied head", tied), ("frozen parameters", positions)]
}

#[test]
fn sums_have_the_bits_of_sums_behind_backward() {
    let models = models();
    let models = &models[..unless_simulated(3, 1)];
    for (name, model) in models {
        for (world_size, microbatches) in unless_simulated(vec![(1, 1), (2, 1), (3, 2)], vec![(2, 2)]) {
            let run = |group: Group, how: Option<GradientsOptions>| {
                let mut model = model();
                let mut scaling = Scaling::new(&model, &device()).unwrap();
                scaling.set_group(group.clone());
                let mut gradients =
                    how.map(|options| Gradients::new(&model, group.clone(), options).unwrap());
                let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
                let mut found = Vec::new();
                for step in 0..2 {
                    for microbatch in 0..microbatches {
                        let is_last = microbatch + 1 == microbatches;
                        let watching = gradients.as_mut().filter(|_| is_last);
                        let seed = 100 * group.rank() as u64 + 10 * step + microbatch;
                        self::microbatch(&mut model, &mut scaling, watching, &delayed(), seed).unwrap();
                    }
                    match &mut gradients {
                        Some(gradients) => gradients.finish(&mut model).unwrap(),
                        None => all_reduce_gradients(&mut model, &*group).unwrap(),
                    }
                    found.push(gradient_bits(&model));
                    optimizer.step(&mut model, 0.01).unwrap();
                    zero_grad(&mut model).unwrap();
                }
                found
            };
            let expected = ranks(world_size, |group| run(group, None));
            let ways = vec![
                options(1),
                options(8000),
                GradientsOptions::default(),
                GradientsOptions { overlap: false, ..options(3000) },
            ];
            for options in unless_simulated(ways, vec![options(8000)]) {
                let found = ranks(world_size, |group| run(group, Some(options.clone())));
                assert!(found == expected, "{name}, {world_size} ranks, {options:?}");
            }
        }
    }
}

#[test]
fn gradients_are_away_until_they_are_summed_and_nothing_reads_them_meanwhile() {
    ranks(2, |group| {
        let mut model = gpt(1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(group.clone());
        let mut gradients = Gradients::new(&model, group.clone(), options(1)).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        microbatch(&mut model, &mut scaling, Some(&mut gradients), &delayed(), 1).unwrap();
        assert!(parameters(&model).iter().all(|parameter| parameter.main_grad().numel() == 0));
        let again =
            microbatch(&mut model, &mut scaling, None, &delayed(), 1).map_err(|error| error.to_string());
        // A backward pass that adds to what is away ends the group, so this one has another.
        assert_eq!(
            again.unwrap_err(),
            "the gradient of `gpt.head.weight` is being summed over the ranks: call Gradients::finish before it is used; if a backward \
             pass reaches its layer twice, set GradientsOptions::overlap to false"
        );
        let folder = tempfile::tempdir().unwrap();
        let texts = [
            error(clip_grad_norm(&mut model, 1.0)),
            error(optimizer.step(&mut model, 0.01)),
            error(all_reduce_gradients(&mut model, &*group)),
            error(parameters_mut(&mut model)[0].accumulate(&noise([20, 32], 1))),
        ];
        for text in texts {
            assert!(text.contains("is being summed over the ranks: call Gradients::finish"), "{text}");
        }
        let text = error(checkpoint::save(folder.path(), &model, &optimizer, &scaling, &Default::default()));
        assert!(text.contains("added to since the last optimizer step"), "{text}");
        zero_grad(&mut model).unwrap();
        let zeros = |parameter: &&Parameter| parameter.main_grad().shape() == parameter.shape();
        assert!(parameters(&model).iter().all(zeros));
    });
}

#[test]
fn a_step_that_fails_leaves_nothing_in_the_way_of_the_next() {
    // In high precision no scope reduces anything, so the error of a scope does not end the group.
    let found = ranks(2, |group| {
        let mut model = gpt(1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut gradients = Gradients::new(&model, group.clone(), options(4000)).unwrap();
        let [x, targets] = [0, 50].map(|part| ids([2, 8], 20, part));
        let mut found = Vec::new();
        for step in 0..3 {
            let mut cx = scaling.scope(&delayed(), &off()).unwrap();
            let (logits, saved) = model.forward(&mut cx, &x).unwrap();
            cx.commit().unwrap();
            let mut cx = scaling.backward().unwrap();
            gradients.watch(&mut cx, &mut model).unwrap();
            model.backward(&mut cx, saved, &logits).unwrap();
            if step == 1 {
                drop(cx); // and no finish
                zero_grad(&mut model).unwrap();
                continue;
            }
            cx.commit().unwrap();
            gradients.finish(&mut model).unwrap();
            found.push(gradient_bits(&model));
            zero_grad(&mut model).unwrap();
        }
        drop(targets);
        found
    });
    assert!(found[0] == found[1] && found[0][0] == found[0][1]);
}

/// A layer that runs another one twice.
#[derive(Debug)]
struct Twice {
    inner: Stack,
}

composite!(Twice { inner });

impl Module for Twice {
    type Saved = [Vec<fp8_nn::AnySaved>; 2];

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (x, first) = self.inner.forward(cx, x)?;
        let (y, second) = self.inner.forward(cx, &x)?;
        Ok((y, [first, second]))
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        [first, second]: Self::Saved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let dy = self.inner.backward(cx, second, dy)?;
        self.inner.backward(cx, first, &dy)
    }
}

fn twice() -> Twice {
    Twice { inner: Stack(vec![Box::new(linear("inner", 16, 16, 1))]) }
}

#[test]
fn layers_that_run_twice_are_handed_over_by_who_knows_it() {
    ranks(2, |group| {
        let (x, dy) = (noise([4, 16], 2), noise([4, 16], 3));
        let run = |model: &mut dyn DynModule, options: Option<GradientsOptions>| -> Result<Vec<_>> {
            let mut scaling = Scaling::new(model, &device())?;
            let mut gradients =
                options.map(|options| Gradients::new(model, group.clone(), options)).transpose()?;
            let mut cx = scaling.scope(&delayed(), &off())?;
            let (_, saved) = model.forward_dyn(&mut cx, &x)?;
            cx.commit()?;
            let mut cx = scaling.backward()?;
            if let Some(gradients) = &mut gradients {
                gradients.watch(&mut cx, model)?;
            }
            model.backward_dyn(0, &mut cx, saved, &dy)?;
            cx.commit()?;
            match &mut gradients {
                Some(gradients) => gradients.finish(model)?,
                None => all_reduce_gradients(model, &*group)?,
            }
            Ok(gradient_bits(model))
        };
        // The outer stack alone hands over.
        let outer = || Stack(vec![Box::new(twice()), Box::new(linear("fc", 16, 16, 2))]);
        let expected = run(&mut outer(), None).unwrap();
        assert!(run(&mut outer(), Some(options(1))).unwrap() == expected);
        // By itself, the inner one does not know that it is run again.
        let text = error(run(&mut twice(), Some(options(1))));
        assert!(text.contains("reaches its layer twice, set GradientsOptions::overlap to false"), "{text}");
        let without = GradientsOptions { overlap: false, ..options(1) };
        assert!(run(&mut twice(), Some(without)).unwrap() == run(&mut twice(), None).unwrap());
    });
}

#[test]
fn weight_gradients_that_are_delayed_are_summed_by_finish() {
    ranks(2, |group| {
        let run = |delays: bool| {
            let mut model = gpt(1);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(group.clone());
            let mut gradients = Gradients::new(&model, group.clone(), options(4000)).unwrap();
            let x = ids([2, 8], 20, group.rank() as u64);
            let (logits, saved) = scaling.in_autocast(&current(), |cx| model.forward(cx, &x)).unwrap();
            let mut cx = scaling.backward().unwrap();
            gradients.watch(&mut cx, &mut model).unwrap();
            if delays {
                cx.delay_wgrad();
            }
            model.backward(&mut cx, saved, &logits).unwrap();
            let delayed = cx.take_wgrads();
            cx.commit().unwrap();
            backward_dw(&mut model, delayed).unwrap();
            gradients.finish(&mut model).unwrap();
            gradient_bits(&model)
        };
        assert!(run(true) == run(false));
    });
}

#[test]
fn a_gradient_that_shares_its_storage_gets_new_storage() {
    ranks(2, |group| {
        let mut fc = Stack(vec![Box::new(linear("fc", 16, 16, 1))]);
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        scaling.set_group(group.clone());
        let mut gradients = Gradients::new(&fc, group.clone(), options(1)).unwrap();
        let (_, saved) = scaling.in_autocast(&current(), |cx| fc.forward(cx, &noise([4, 16], 1))).unwrap();
        let mut cx = scaling.backward().unwrap();
        gradients.watch(&mut cx, &mut fc).unwrap();
        fc.backward(&mut cx, saved, &noise([4, 16], 2)).unwrap();
        cx.commit().unwrap();
        gradients.finish(&mut fc).unwrap();
        let kept = parameters(&fc)[0].main_grad().clone();
        let before = bits(&kept);
        *parameters_mut(&mut fc)[0].main_grad_mut() = kept.clone(); // another gradient, for all that is known
        zero_grad(&mut fc).unwrap();
        *parameters_mut(&mut fc)[0].main_grad_mut() = kept.clone();
        gradients.finish(&mut fc).unwrap();
        assert!(bits(&kept) == before && bits(parameters(&fc)[0].main_grad()) != before);
    });
}

#[test]
fn ranks_with_other_models_are_told_so_when_they_begin() {
    let texts = ranks(2, |group| {
        let fc = linear("fc", 16, [16, 32][group.rank()], 1);
        error(Gradients::new(&fc, group, GradientsOptions::default()))
    });
    for text in texts {
        assert!(text.contains("`fc.weight: [32, 16] of f32` on rank 1"), "{text}");
    }
}

#[test]
fn traffic_is_one_reduction_a_step_and_two_of_amaxes_a_microbatch() {
    for num_layers in unless_simulated(vec![2, 8, 32], vec![2]) {
        ranks(2, |group| {
            let layer = TransformerLayerOptions { ffn_hidden_size: 32, ..block_options() };
            let options = GptOptions { vocab_size: 20, num_layers, layer, ..Default::default() };
            let mut model = Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(group.clone());
            let mut gradients = Gradients::new(&model, group.clone(), GradientsOptions::default()).unwrap();
            let mut before = group.traffic();
            for _ in 0..2 {
                for microbatch in 0..4 {
                    let watching = Some(&mut gradients).filter(|_| microbatch == 3);
                    self::microbatch(&mut model, &mut scaling, watching, &delayed(), microbatch).unwrap();
                }
                gradients.finish(&mut model).unwrap();
                zero_grad(&mut model).unwrap();
                let after = group.traffic();
                let bytes = (after.reductions.bytes - before.reductions.bytes) as f64;
                let all = (num_parameters(&model) * size_of::<f32>()) as f64; // 2 (n − 1) / n is 1
                assert!((bytes / all - 1.0).abs() < 0.01, "{num_layers} layers: {bytes} of {all} bytes");
                assert_eq!(after.amaxes.calls - before.amaxes.calls, 2 * 4, "{num_layers} layers");
                before = after;
            }
        });
    }
}

#[test]
fn a_stack_and_adapters_are_summed_like_the_rest() {
    ranks(2, |group| {
        let run = |overlap| {
            let mut model = Stack(vec![Box::new(linear("a", 16, 16, 1)), Box::new(linear("b", 16, 16, 2))]);
            parameters_mut(&mut model)[2].set_trainable(false).unwrap();
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            scaling.set_group(group.clone());
            let options = GradientsOptions { overlap, ..options(600) };
            let mut gradients = Gradients::new(&model, group.clone(), options).unwrap();
            let (x, dy) = (noise([4, 16], group.rank() as u64), noise([4, 16], 3));
            step(&mut scaling, &current(), &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
            let (_, saved) = scaling.in_autocast(&current(), |cx| model.forward(cx, &x)).unwrap();
            let mut cx = scaling.backward().unwrap();
            gradients.watch(&mut cx, &mut model).unwrap();
            model.backward(&mut cx, saved, &dy).unwrap();
            cx.commit().unwrap();
            gradients.finish(&mut model).unwrap();
            gradient_bits(&model)
        };
        assert!(run(true) == run(false));
    });
}

#[test]
fn two_parameters_of_one_name_are_refused_before_anything_is_summed() {
    ranks(2, |group| {
        let mut model = Stack(vec![Box::new(linear("fc", 16, 16, 1)), Box::new(linear("fc", 16, 16, 2))]);
        let twice = "parameter `fc.weight` occurs twice: give the two layers different paths";
        assert_eq!(error(Gradients::new(&model, group.clone(), GradientsOptions::default())), twice);
        assert_eq!(error(all_reduce_gradients(&mut model, &*group)), twice);
        group.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_cannot_hand_over_a_gradient_tells_the_others() {
    let started = Instant::now();
    let texts = ranks(2, |group| {
        let mut model = gpt(1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut gradients = Gradients::new(&model, group.clone(), options(4000)).unwrap();
        let x = ids([2, 8], 20, 1);
        // Without FP8 no scope reduces anything, so the error of a scope tells nobody.
        let mut step = |model: &mut Gpt| -> Result<()> {
            let mut cx = scaling.scope(&delayed(), &off())?;
            let (logits, saved) = model.forward(&mut cx, &x)?;
            cx.commit()?;
            let mut cx = scaling.backward()?;
            gradients.watch(&mut cx, model)?;
            model.backward(&mut cx, saved, &logits)?;
            cx.commit()?;
            gradients.finish(model)
        };
        step(&mut model).unwrap();
        if group.rank() == 0 {
            zero_grad(&mut model).unwrap(); // which the other forgets
        }
        let text = error(step(&mut model));
        (group, text) // the other keeps its handle
    });
    assert!(texts[0].1.contains("rank 1 gave up: all_reduce_gradients: the gradient of"), "{}", texts[0].1);
    assert!(texts[1].1.contains("is already a sum over group `dp`"), "{}", texts[1].1);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}
