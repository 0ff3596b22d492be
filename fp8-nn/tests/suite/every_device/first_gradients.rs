//! The first gradient after `zero_grad` replaces what the memory held, here NaN, and nobody else ever sees that.

use super::support::{
    block_options, current, delayed, device, gpt_options, grads, ids, linear, noise, off, parameter_bits,
    rng, short, step, values, with_noise,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use fp8_nn::{LoraOptions, LossScaler, LossScalerOptions, backward_dw, composite};
use std::thread;
use std::time::Duration;

/// Leaves NaN in the memory of every gradient.
fn spoil(model: &mut (impl Layer + ?Sized)) {
    for parameter in parameters_mut(model).into_iter().filter(|parameter| parameter.is_trainable()) {
        let nan = Tensor::full(f32::NAN, *parameter.shape(), DType::F32, &device()).unwrap();
        *parameter.main_grad_mut() = nan;
    }
    zero_grad(model).unwrap();
}

/// Gives every gradient zeros that backward adds to.
fn set_zeros(model: &mut (impl Layer + ?Sized)) {
    for parameter in parameters_mut(model).into_iter().filter(|parameter| parameter.is_trainable()) {
        let zeros = Tensor::zeros(*parameter.shape(), DType::F32, &device()).unwrap();
        *parameter.main_grad_mut() = zeros;
    }
}

/// −0 and 0 are equal.
fn assert_equal(what: &str, expected: &[(String, Vec<f32>)], actual: &[(String, Vec<f32>)]) {
    for ((name, expected), (_, actual)) in expected.iter().zip(actual) {
        let differ = expected.iter().zip(actual).filter(|(e, a)| e != a).count();
        assert_eq!((differ, expected.len()), (0, actual.len()), "{what}: {name}");
    }
}

/// Runs `backward` on two models, one of which has NaN in the memory of its gradients, and compares the gradients after one and
/// after two calls.
fn compare<M: Layer>(what: &str, model: impl Fn() -> M, backward: impl Fn(&mut M)) {
    let (mut zeros, mut spoilt) = (model(), model());
    set_zeros(&mut zeros);
    spoil(&mut spoilt);
    for call in 0..2 {
        backward(&mut zeros);
        backward(&mut spoilt);
        assert_equal(&format!("{what}, call {call}"), &grads(&zeros), &grads(&spoilt));
    }
    spoil(&mut spoilt);
    set_zeros(&mut zeros);
    backward(&mut zeros);
    backward(&mut spoilt);
    assert_equal(&format!("{what}, cleared again"), &grads(&zeros), &grads(&spoilt));
}

fn block() -> TransformerLayer {
    with_noise(TransformerLayer::new("block", block_options(), &device(), &mut rng(1)).unwrap(), 1)
}

fn backward<M: Module>(model: &mut M, recipe: &Recipe, options: &AutocastOptions) {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    step(&mut scaling, recipe, options, model, &noise([2, 6, 32], 2), &noise([2, 6, 32], 3)).unwrap();
}

#[test]
fn of_a_block() {
    let wgrad_high = DelayedScaling { override_linear_precision: (false, false, true), ..short() };
    for (recipe, options) in [
        (delayed(), AutocastOptions::default()),
        (delayed(), off()),
        (wgrad_high.into(), AutocastOptions::default()),
    ] {
        compare(&recipe.to_string(), block, |model| backward(model, &recipe, &options));
    }
    compare(
        "recomputed",
        || Recompute::new(block()),
        |model| backward(model, &current(), &AutocastOptions::default()),
    );
}

#[test]
fn of_tied_weights_only_the_first_is_written() {
    let model = || {
        let options = GptOptions { tie_word_embeddings: true, ..gpt_options() };
        Gpt::new("gpt", &options, &device(), &mut rng(3)).unwrap()
    };
    let (ids, targets) = (ids([2, 8], 20, 0), ids([2, 8], 20, 100));
    compare("tied", model, |model| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &ids, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
    });
}

#[test]
fn of_delayed_weight_gradients() {
    compare("delayed", block, |model| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let x = noise([2, 6, 32], 2);
        let (y, saved) = scaling.in_autocast(&current(), |cx| model.forward(cx, &x)).unwrap();
        let mut cx = scaling.backward().unwrap();
        cx.delay_wgrad();
        model.backward(&mut cx, saved, &y).unwrap();
        let wgrads = cx.take_wgrads();
        cx.commit().unwrap();
        backward_dw(model, wgrads).unwrap();
    });
}

#[test]
fn of_frozen_weights_and_adapters() {
    let model = || {
        let mut fc = linear("fc", 32, 32, 1);
        fc.loras_mut()
            .add("all", 0..32, &LoraOptions { rank: 2, ..Default::default() }, &mut rng(5))
            .unwrap();
        for parameter in parameters_mut(&mut fc) {
            let trains = parameter.is_adapter();
            parameter.set_trainable(trains).unwrap();
            if trains {
                let value = noise(*parameter.shape(), 6);
                parameter.set(value).unwrap();
            }
        }
        fc
    };
    compare("adapters", model, |model| backward(model, &current(), &AutocastOptions::default()));
    let mut fc = model();
    spoil(&mut fc);
    backward(&mut fc, &current(), &AutocastOptions::default());
    assert_eq!(fc.weight().main_grad().numel(), 0);
}

#[test]
fn a_gradient_that_is_read_is_zeros() {
    let mut fc = linear("fc", 16, 16, 1);
    spoil(&mut fc);
    let storage = fc.weight().main_grad().storage_number();
    assert_eq!(values(fc.weight().main_grad()), [0.0; 256]);
    // The one that was read is added to, at the same address.
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let (x, dy) = (noise([4, 16], 2), noise([4, 16], 3));
    step(&mut scaling, &current(), &AutocastOptions::default(), &mut fc, &x, &dy).unwrap();
    assert!(values(fc.weight().main_grad()).iter().any(|value| *value != 0.0));
    assert_eq!(fc.weight().main_grad().storage_number(), storage);
    zero_grad(&mut fc).unwrap();
    zero_grad(&mut fc).unwrap();
    assert_eq!(fc.weight().gather_main_grad().unwrap().numel(), 256);
    // In place of one that is cleared comes the caller's.
    spoil(&mut fc);
    let weight = parameters_mut(&mut fc).remove(0);
    ops::accumulate(
        weight.main_grad_mut(),
        &Tensor::full(2.0, [16, 16], DType::F32, &device()).unwrap(),
        "w",
    )
    .unwrap();
    assert_eq!(values(weight.main_grad()), [2.0; 256]);
    // A copy that the caller keeps is not changed.
    spoil(&mut fc);
    let kept = fc.weight().main_grad().clone();
    step(&mut scaling, &current(), &AutocastOptions::default(), &mut fc, &x, &dy).unwrap_err();
    zero_grad(&mut fc).unwrap();
    step(&mut scaling, &current(), &AutocastOptions::default(), &mut fc, &x, &dy).unwrap();
    assert_eq!(values(&kept), [0.0; 256]);
}

/// Two layers, of which a step may use one.
#[derive(Debug)]
struct Pair {
    used: Linear,
    unused: Linear,
}
composite!(Pair { used, unused });

fn pair() -> Pair {
    Pair { used: linear("used", 16, 16, 1), unused: linear("unused", 16, 16, 2) }
}

fn use_one(pair: &mut Pair) {
    let mut scaling = Scaling::new(pair, &device()).unwrap();
    let (x, dy) = (noise([4, 16], 2), noise([4, 16], 3));
    let Pair { used, .. } = pair;
    step(&mut scaling, &current(), &AutocastOptions::default(), used, &x, &dy).unwrap();
}

#[test]
fn parameters_without_a_gradient_are_clipped_and_updated_as_with_zeros() {
    let train = |clear: fn(&mut Pair), check: bool| {
        let mut pair = pair();
        let mut optimizer = AdamW::new(AdamWOptions { weight_decay: 0.1, ..Default::default() }).unwrap();
        let scaler = LossScaler::new(LossScalerOptions::default(), &device()).unwrap();
        let mut norms = Vec::new();
        for _ in 0..3 {
            clear(&mut pair);
            use_one(&mut pair);
            if check {
                let mut scaling = Scaling::new(&pair, &device()).unwrap();
                scaling.in_backward(|cx| scaler.check(cx, &pair)).unwrap();
                scaler.unscale(&mut pair).unwrap();
                scaler.update().unwrap();
            }
            let norm = clip_grad_norm(&mut pair, 0.5).unwrap();
            norms.push(norm.item().unwrap());
            optimizer.step(&mut pair, 0.1).unwrap();
        }
        (norms, parameter_bits(&pair).into_iter().map(|(_, value, _)| value).collect::<Vec<_>>())
    };
    for check in [false, true] {
        let (norms, values) = train(set_zeros, check);
        assert!(norms.iter().all(|norm| norm.is_finite() && *norm > 0.0), "{norms:?}");
        assert_eq!((norms, values), train(spoil, check));
    }
}

#[test]
fn gradients_that_nothing_was_added_to_are_summed_as_zeros() {
    if !device().is_same(&Device::cpu()) {
        return; // the ranks are threads of their own
    }
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let mut pair = pair();
                spoil(&mut pair);
                use_one(&mut pair);
                let own = grads(&pair);
                all_reduce_gradients(&mut pair, &*group).unwrap();
                for ((name, own), (_, sum)) in own.iter().zip(grads(&pair)) {
                    assert!(own.iter().zip(&sum).all(|(own, sum)| own + own == *sum), "{name}");
                }
                assert_eq!(values(pair.unused.weight().main_grad()), [0.0; 256]);
            });
        }
    });
}

#[test]
fn a_backward_pass_that_fails_leaves_zeros() {
    let mut fc = linear("fc", 16, 16, 1);
    spoil(&mut fc);
    let weight = parameters_mut(&mut fc).remove(0);
    let other = Tensor::zeros([3], DType::F32, &device()).unwrap();
    weight.accumulate(&other).unwrap_err();
    assert_eq!(values(weight.main_grad()), [0.0; 256]);
}
