//! One step under different recipes, transpose policies and kinds of scope.

use super::support::{
    assert_close, bits, block, block_options, current, delayed, device, first_step, gpt, grads, ids,
    is_nvfp4, linear, noise, off, parameter_bits, recipes, relative_rms, rng, short, step, values,
};
use fp8_nn::prelude::*;

#[test]
fn fp8_stays_near_high_precision() {
    let (x, dy) = (noise([4, 16, 32], 2), noise([4, 16, 32], 3));
    let run = |recipe: &Recipe, options: &AutocastOptions| {
        let mut model = block("block", 1);
        let (y, dx) = first_step(recipe, options, &mut model, &x, &dy).unwrap();
        (values(&y), values(&dx), grads(&model))
    };
    let high = run(&delayed(), &off());
    let e4m3 = DelayedScaling { fp8_format: Format::E4M3, ..short() };
    let margin = DelayedScaling { margin: 1, ..short() };
    for recipe in recipes().into_iter().chain([e4m3.into(), margin.into()]) {
        let fp8 = run(&recipe, &AutocastOptions::default());
        let (y, dx) = (relative_rms(&high.0, &fp8.0), relative_rms(&high.1, &fp8.1));
        let (most, most_of_gradients) = if is_nvfp4(&recipe) { (0.1, 0.4) } else { (0.03, 0.2) };
        let is_near = (1e-4..most).contains(&y) && (1e-4..most_of_gradients).contains(&dx);
        assert!(is_near, "{recipe:?}: y {y}, dx {dx}");
        for ((name, expected), (_, actual)) in high.2.iter().zip(&fp8.2) {
            let error = relative_rms(expected, actual);
            assert!(error < most_of_gradients, "{recipe:?} {name}: {error}");
        }
    }
}

#[test]
fn gradients_in_e4m3_are_finer_than_in_e5m2() {
    let (x, dy) = (noise([64, 64], 2), noise([64, 48], 3));
    let run = |fp8_format, options: &AutocastOptions| {
        let recipe = DelayedScaling { fp8_format, ..short() }.into();
        values(&first_step(&recipe, options, &mut linear("fc", 64, 48, 1), &x, &dy).unwrap().1)
    };
    let high = run(Format::Hybrid, &off());
    let [hybrid, e4m3] =
        [Format::Hybrid, Format::E4M3].map(|format| run(format, &AutocastOptions::default()));
    let [hybrid, e4m3] = [hybrid, e4m3].map(|dx| relative_rms(&high, &dx));
    assert!(e4m3 < 0.045 && hybrid > 1.3 * e4m3 && hybrid < 0.08, "{hybrid} {e4m3}");
}

#[test]
fn a_first_step_under_delayed_scaling_is_one_of_current_scaling() {
    let (x, dy) = (noise([2, 8, 32], 2), noise([2, 8, 32], 3));
    let run = |recipe: &Recipe| {
        let mut model = block("block", 1);
        let (y, dx) = first_step(recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        (bits(&y), bits(&dx), parameter_bits(&model))
    };
    assert_eq!(run(&delayed()), run(&current()));
}

#[test]
fn transpose_policies_give_the_same_bits() {
    let overridden = [(false, true, false), (true, false, false)]
        .map(|override_linear_precision| DelayedScaling { override_linear_precision, ..short() }.into());
    for recipe in recipes().into_iter().chain(overridden) {
        let run = |policy| {
            let device = device().with_transpose_policy(policy);
            let mut model = TransformerLayer::new("block", block_options(), &device, &mut rng(1)).unwrap();
            let mut scaling = Scaling::new(&model, &device).unwrap();
            let mut out = Vec::new();
            for seed in 0..3 {
                let on = |t: Tensor| Tensor::from_vec(values(&t), *t.shape(), &device).unwrap();
                let (x, dy) = (on(noise([2, 8, 32], seed)), on(noise([2, 8, 32], 100 + seed)));
                let options = AutocastOptions::default();
                let (y, dx) = step(&mut scaling, &recipe, &options, &mut model, &x, &dy).unwrap();
                assert_eq!(y.device().transpose_policy(), policy);
                out.push((bits(&y), bits(&dx)));
            }
            (out, parameter_bits(&model), scaling.state().unwrap())
        };
        let never = run(TransposePolicy::Never);
        assert!(never == run(TransposePolicy::WithCast), "with the cast, {recipe:?}");
        assert!(never == run(TransposePolicy::OnDemand), "on demand, {recipe:?}");
    }
}

#[test]
fn an_evaluation_changes_nothing() {
    let (x, dy) = (noise([2, 8, 32], 2), noise([2, 8, 32], 3));
    let run = |recipe: &Recipe, evaluate: bool| {
        let mut model = block("block", 1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut out = Vec::new();
        for seed in 0..3 {
            if evaluate {
                let mut cx = scaling.eval(recipe).unwrap();
                model.forward(&mut cx, &noise([2, 8, 32], 50 + seed)).unwrap();
            }
            let options = AutocastOptions::default();
            let (y, dx) = step(&mut scaling, recipe, &options, &mut model, &x, &dy).unwrap();
            out.push((bits(&y), bits(&dx)));
        }
        (out, parameter_bits(&model), scaling.state().unwrap())
    };
    for recipe in recipes() {
        assert!(run(&recipe, false) == run(&recipe, true), "{recipe}");
    }
}

#[test]
fn an_evaluation_of_a_recipe_without_state_computes_what_training_does() {
    let x = noise([2, 8, 32], 2);
    for recipe in recipes() {
        let model = block("block", 1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (trained, _) = scaling.in_autocast(&recipe, |cx| model.forward(cx, &x)).unwrap();
        let keeps_state = !scaling.state().unwrap().arenas.is_empty();
        let mut cx = scaling.eval(&recipe).unwrap();
        let (evaluated, _) = model.forward(&mut cx, &x).unwrap();
        assert!(keeps_state || bits(&trained) == bits(&evaluated), "{recipe}");
    }
}

#[test]
fn the_saved_of_an_evaluation_is_refused() {
    let mut fc = linear("fc", 16, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let x = noise([4, 16], 2);
    let (y, saved) = fc.forward(&mut scaling.eval(&delayed()).unwrap(), &x).unwrap();
    let error = scaling.in_backward(|cx| fc.backward(cx, saved, &y)).unwrap_err().to_string();
    assert_eq!(
        error,
        "backward of `fc`: its Saved comes from an evaluation scope: expected one from a committed training scope"
    );
}

#[test]
fn calibrating_records_what_fp8_would_see() {
    let (x, dy) = (noise([8, 16], 2), noise([8, 16], 3));
    let run = |enabled: bool| {
        let mut fc = linear("fc", 16, 16, 1);
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let options = AutocastOptions { enabled, calibrating: !enabled, ..Default::default() };
        let (y, _) = step(&mut scaling, &delayed(), &options, &mut fc, &x, &dy).unwrap();
        let mut state = scaling.state().unwrap();
        let weights = std::mem::take(&mut state.arenas[0].weights);
        assert_eq!(weights.len(), usize::from(enabled), "calibrating quantizes no weight");
        (values(&y), state)
    };
    let ((fp8, state), (high, calibrated)) = (run(true), run(false));
    assert!(relative_rms(&high, &fp8) > 1e-4);
    assert_eq!(state, calibrated);
}

#[test]
fn a_weight_is_quantized_once_per_version() {
    let mut fc = linear("fc", 16, 24, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    scaling.set_counting(true);
    let elements = |scaling: &Scaling, name: &str| {
        scaling.slot_reports().unwrap().iter().find(|slot| &*slot.name == name).unwrap().elements
    };
    let x = noise([8, 16], 2);
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    for round in 1..=3 {
        for _ in 0..4 {
            scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &x).map(drop)).unwrap();
        }
        assert_eq!(elements(&scaling, "fc.weight"), round * 16 * 24);
        assert_eq!(elements(&scaling, "fc.input"), round * 4 * 8 * 16);
        optimizer.step(&mut fc, 0.01).unwrap();
    }
}

#[test]
fn gradients_of_micro_batches_add_up() {
    let (x, dy) = (noise([4, 8, 32], 2), noise([4, 8, 32], 3));
    let mut whole = block("block", 1);
    first_step(&delayed(), &off(), &mut whole, &x, &dy).unwrap();
    let mut parts = block("block", 1);
    let mut scaling = Scaling::new(&parts, &device()).unwrap();
    for i in 0..4 {
        let part = |t: &Tensor| {
            Tensor::from_vec(values(t)[i * 256..][..256].to_vec(), [1, 8, 32], &device()).unwrap()
        };
        step(&mut scaling, &delayed(), &off(), &mut parts, &part(&x), &part(&dy)).unwrap();
    }
    for ((name, expected), (_, actual)) in grads(&whole).iter().zip(grads(&parts)) {
        assert_close(name, expected, &actual, 1e-5);
    }
    fp8_nn::zero_grad(&mut parts).unwrap();
    assert!(grads(&parts).iter().all(|(_, grad)| grad.iter().all(|&g| g == 0.0)));
}

/// The gradients of micro-batches that are accumulated are the sums of those that are zeroed in between, and each weight is
/// quantized once.
#[test]
fn micro_batches_add_up_under_every_recipe() {
    for recipe in recipes() {
        let run = |accumulate: bool| {
            let mut model = block("block", 1);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            let mut sums: Vec<Vec<f32>> = Vec::new();
            for seed in 0..3 {
                let (x, dy) = (noise([1, 8, 32], seed), noise([1, 8, 32], 100 + seed));
                step(&mut scaling, &recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
                if !accumulate {
                    let all = grads(&model);
                    sums.resize_with(all.len(), Vec::new);
                    for (sum, (_, grad)) in sums.iter_mut().zip(all) {
                        sum.resize(grad.len(), 0.0);
                        sum.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad);
                    }
                    fp8_nn::zero_grad(&mut model).unwrap();
                }
                assert_eq!(scaling.cached_weights(), 4, "{recipe}");
            }
            if accumulate { grads(&model).into_iter().map(|(_, grad)| grad).collect() } else { sums }
        };
        for (index, (expected, actual)) in run(false).iter().zip(run(true)).enumerate() {
            assert_close(&format!("{recipe}: parameter {index}"), expected, &actual, 1e-5);
        }
    }
}

/// Steps under another recipe leave scales and histories of delayed scaling as they were.
#[test]
fn switching_recipes_keeps_delayed_histories() {
    let delayed = Recipe::from(DelayedScaling { margin: 3, ..short() });
    for other in recipes() {
        let run = |switches: bool| {
            let mut model = block("block", 1);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            let mut out = Vec::new();
            for seed in 0..4 {
                let (x, dy) = (noise([2, 8, 32], seed), noise([2, 8, 32], 100 + seed));
                let mut step = |recipe, x: &Tensor| {
                    step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, x, &dy).unwrap()
                };
                if switches && seed > 0 {
                    step(&other, &noise([2, 8, 32], 200 + seed));
                }
                let (y, dx) = step(&delayed, &x);
                out.push((bits(&y), bits(&dx)));
            }
            let state = scaling.state().unwrap();
            let own = state.arenas.into_iter().filter(|arena| arena.recipe.contains("margin=3"));
            let kept: Vec<_> = own.map(|arena| (arena.direction, arena.scale, arena.amax_history)).collect();
            assert_eq!(kept.len(), 2);
            (out, kept)
        };
        assert!(run(false) == run(true), "{other}");
    }
}

#[test]
fn a_language_models_blocks_run_in_fp8_and_its_head_does_not() {
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let (_, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &x, &targets)).unwrap();
    scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    let mut calibrated = 0;
    for arena in scaling.state().unwrap().arenas {
        for (name, scale) in arena.slots.iter().zip(&arena.scale) {
            let used = [".input", ".weight", ".grad_output"].iter().any(|role| name.ends_with(role));
            assert_eq!(*scale > 0.0, used && !name.starts_with("gpt.head"), "{name}: {scale}");
            calibrated += usize::from(*scale > 0.0);
        }
    }
    // Three slots for the three GEMMs of each Linear.
    assert_eq!(calibrated, model.fp8_gemms_per_step());
}
