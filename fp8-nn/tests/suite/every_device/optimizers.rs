//! Lion and SGD: their updates against f64, and everything that they share with AdamW.

use super::support::{block, current, device, error, linear, noise, parameter_bits, values};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Each of the optimizers, with a weight decay of 0.1.
fn lion(moments: MomentDtype) -> Lion {
    Lion::new(LionOptions { weight_decay: 0.1, moments, ..Default::default() }).unwrap()
}

fn sgd(nesterov: bool, moments: MomentDtype) -> Sgd {
    Sgd::new(SgdOptions { weight_decay: 0.1, nesterov, moments, ..Default::default() }).unwrap()
}

fn set_gradients(model: &mut impl Layer, step: u64) {
    for (index, parameter) in (0..).zip(parameters_mut(model)) {
        *parameter.main_grad_mut() = noise(*parameter.shape(), 100 * step + index);
    }
}

fn run(model: &mut impl Layer, optimizer: &mut impl Optimizer, steps: std::ops::Range<u64>) {
    for step in steps {
        set_gradients(model, step);
        optimizer.step(model, 0.01).unwrap();
    }
}

/// The parameter after the gradients, by the textbook.
type Textbook = fn(f64, &[f64], f64) -> f64;

fn lion_textbook(mut p: f64, grads: &[f64], decay: f64) -> f64 {
    let mut m = 0.0;
    for g in grads {
        let update = (0.9 * m + (1.0 - 0.9) * g).signum();
        p -= 0.01 * (update + decay * p);
        m = 0.99 * m + (1.0 - 0.99) * g;
    }
    p
}

fn sgd_textbook(mut p: f64, grads: &[f64], decay: f64) -> f64 {
    let mut velocity = 0.0;
    for g in grads {
        velocity = 0.9 * velocity + g + decay * p;
        p -= 0.01 * velocity;
    }
    p
}

fn nesterov_textbook(mut p: f64, grads: &[f64], decay: f64) -> f64 {
    let mut velocity = 0.0;
    for g in grads {
        let g = g + decay * p;
        velocity = 0.9 * velocity + g;
        p -= 0.01 * (g + 0.9 * velocity);
    }
    p
}

fn is_the_textbooks(mut optimizer: impl Optimizer, textbook: Textbook) {
    let mut model = block("block", 1);
    let start: Vec<Vec<f32>> = parameters(&model).iter().map(|p| values(p.tensor())).collect();
    run(&mut model, &mut optimizer, 0..5);
    assert_eq!((optimizer.steps(), optimizer.skipped_steps().unwrap()), (5, 0));
    for (index, parameter) in (0..).zip(parameters(&model)) {
        let decay = if parameter.shape().len() >= 2 { 0.1 } else { 0.0 };
        let grads: Vec<_> =
            (0..5).map(|step| values(&noise(*parameter.shape(), 100 * step + index))).collect();
        for (i, &actual) in values(parameter.tensor()).iter().enumerate() {
            let grads: Vec<f64> = grads.iter().map(|grad| f64::from(grad[i])).collect();
            let expected = textbook(f64::from(start[index as usize][i]), &grads, decay);
            let difference = (f64::from(actual) - expected).abs();
            assert!(difference <= 2e-6 * expected.abs().max(0.1), "{}[{i}]", parameter.name());
        }
    }
}

#[test]
fn updates_are_the_textbooks() {
    is_the_textbooks(lion(MomentDtype::F32), lion_textbook);
    is_the_textbooks(sgd(false, MomentDtype::F32), sgd_textbook);
    is_the_textbooks(sgd(true, MomentDtype::F32), nesterov_textbook);
}

fn save(dir: &Path, model: &impl Layer, optimizer: &impl Optimizer) {
    let scaling = Scaling::new(model, &device()).unwrap();
    checkpoint::save(dir, model, optimizer, &scaling, &BTreeMap::new()).unwrap();
}

fn load(dir: &Path, model: &mut impl Layer, optimizer: &mut impl Optimizer) -> Result<()> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    checkpoint::load(dir, model, optimizer, &mut scaling).map(drop)
}

fn bytes(model: &impl Layer, optimizer: &impl Optimizer) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), model, optimizer);
    std::fs::read(checkpoint::path(dir.path())).unwrap()
}

fn resumes<O: Optimizer>(new: impl Fn() -> O) {
    let (mut model, mut optimizer, dir) = (block("block", 1), new(), tempfile::tempdir().unwrap());
    run(&mut model, &mut optimizer, 0..2);
    save(dir.path(), &model, &optimizer);
    checkpoint::expect_finite(&model, &optimizer).unwrap();
    run(&mut model, &mut optimizer, 2..4);
    let (mut other, mut resumed) = (block("block", 2), new());
    load(dir.path(), &mut other, &mut resumed).unwrap();
    run(&mut other, &mut resumed, 2..4);
    assert!(bytes(&model, &optimizer) == bytes(&other, &resumed));
}

#[test]
fn training_resumes_bit_for_bit() {
    for moments in [MomentDtype::F32, MomentDtype::BF16, MomentDtype::Fp8] {
        resumes(|| lion(moments));
        resumes(|| sgd(true, moments));
    }
}

#[test]
fn checkpoints_have_one_moment() {
    let count = |moments| {
        let (mut model, mut optimizer) = (linear("fc", 256, 16, 1), lion(moments));
        run(&mut model, &mut optimizer, 0..1);
        let bytes = bytes(&model, &optimizer);
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let state = file.iter().filter(|(name, _)| name.starts_with("optimizer."));
        state.map(|(_, view)| view.data().len()).sum::<usize>()
    };
    assert_eq!(count(MomentDtype::F32), 4 * (256 * 16 + 16));
    assert_eq!(count(MomentDtype::Fp8), 256 * 16 + 16 + 4 * (2 * 16 + 1));
}

#[test]
fn checkpoints_of_another_optimizer_are_refused() {
    let refuses = |saved: &mut dyn FnMut(&mut Linear, &Path),
                   load_into: &mut dyn FnMut(&mut Linear, &Path) -> Result<()>,
                   want: &str| {
        let (mut model, dir) = (linear("fc", 4, 4, 1), tempfile::tempdir().unwrap());
        saved(&mut model, dir.path());
        let mut other = linear("fc", 4, 4, 2);
        let before = parameter_bits(&other);
        let refused = error(load_into(&mut other, dir.path()));
        assert!(refused.ends_with(want), "{refused}");
        assert!(before == parameter_bits(&other));
    };
    let mut adamw = |model: &mut Linear, dir: &Path| {
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        run(model, &mut optimizer, 0..1);
        save(dir, model, &optimizer);
    };
    let mut lions = |model: &mut Linear, dir: &Path| {
        let mut optimizer = lion(MomentDtype::F32);
        run(model, &mut optimizer, 0..1);
        save(dir, model, &optimizer);
    };
    let mut into_sgd = |model: &mut Linear, dir: &Path| load(dir, model, &mut sgd(false, MomentDtype::F32));
    let mut into_adamw =
        |model: &mut Linear, dir: &Path| load(dir, model, &mut AdamW::new(AdamWOptions::default()).unwrap());
    refuses(
        &mut adamw,
        &mut into_sgd,
        "it was saved with AdamW, and this optimizer is Sgd: load it with AdamW",
    );
    refuses(
        &mut lions,
        &mut into_sgd,
        "it was saved with Lion, and this optimizer is Sgd: load it with Lion",
    );
    refuses(
        &mut lions,
        &mut into_adamw,
        "it was saved with Lion, and this optimizer is AdamW: load it with Lion",
    );
}

fn skips(mut optimizer: impl Optimizer) {
    let mut model = linear("fc", 8, 8, 1);
    run(&mut model, &mut optimizer, 0..1);
    let held = |model: &Linear| parameters(model).iter().map(|p| values(p.tensor())).collect::<Vec<_>>();
    let before = held(&model);
    *parameters_mut(&mut model)[1].main_grad_mut() =
        Tensor::full(f32::NAN, [8], DType::F32, &device()).unwrap();
    optimizer.step(&mut model, 0.1).unwrap();
    assert!(before == held(&model));
    assert_eq!((optimizer.steps(), optimizer.skipped_steps().unwrap()), (2, 1));
    run(&mut model, &mut optimizer, 2..3);
    assert!(before != held(&model));
}

#[test]
fn steps_with_gradients_that_are_not_finite_are_skipped() {
    skips(lion(MomentDtype::F32));
    skips(sgd(false, MomentDtype::Fp8));
}

#[test]
fn loss_scalers_divide_gradients() {
    let scaler =
        LossScaler::new(LossScalerOptions { init_scale: 8.0, ..Default::default() }, &device()).unwrap();
    let (mut scaled, mut plain) = (linear("fc", 8, 8, 1), linear("fc", 8, 8, 1));
    let (mut optimizer, mut other) = (sgd(true, MomentDtype::F32), sgd(true, MomentDtype::F32));
    for step in 0..3 {
        set_gradients(&mut scaled, step);
        for parameter in parameters_mut(&mut scaled) {
            *parameter.main_grad_mut() = ops::scale(parameter.main_grad(), 8.0).unwrap();
        }
        scaler.step(&mut optimizer, &mut scaled, 0.01).unwrap();
        scaler.update().unwrap();
    }
    assert_eq!(optimizer.loss_scaler().map(|scaler| scaler.loss_scale().unwrap()), Some(8.0));
    run(&mut plain, &mut other, 0..3);
    for (got, want) in parameters(&scaled).iter().zip(parameters(&plain)) {
        assert!(values(got.tensor()) == values(want.tensor()), "{}", got.name());
    }
}

#[test]
fn ranks_share_the_state_of_one() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let train = |group: std::sync::Arc<dyn ProcessGroup>| {
        let rank = group.rank() as u64;
        let (mut model, mut optimizer) = (linear("fc", 200, 8, rank), lion(MomentDtype::Fp8));
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        run(&mut model, &mut optimizer, 10 * rank..10 * rank + 2);
        assert!(agree(&model, &optimizer, &scaling, &*group).is_err());
        broadcast_state(&mut model, &mut optimizer, &mut scaling, &*group, 1).unwrap();
        run(&mut model, &mut optimizer, 30..32);
        agree(&model, &optimizer, &scaling, &*group).unwrap();
        // A rank with another optimizer is told.
        let text = match rank {
            0 => error(agree(&model, &sgd(false, MomentDtype::Fp8), &scaling, &*group)),
            _ => error(agree(&model, &optimizer, &scaling, &*group)),
        };
        assert!(text.contains("rank 1") && text.contains("rank 0"), "{text}");
        bytes(&model, &optimizer)
    };
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || train(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all[0] == all[1]);
}

#[test]
fn bf16_weights_train_without_copies() {
    let options = LionOptions {
        main_params: false,
        stochastic_rounding: true,
        moments: MomentDtype::Fp8,
        ..Default::default()
    };
    let fc = LinearOptions {
        in_features: 64,
        out_features: 64,
        bias: false,
        params_dtype: DType::BF16,
        ..Default::default()
    };
    let mut model = Linear::new("fc", fc, &device(), &mut super::support::rng(1)).unwrap();
    let weight = parameters_mut(&mut model).swap_remove(0);
    weight.set(Tensor::full(1.0, [64, 64], DType::BF16, &device()).unwrap()).unwrap();
    *weight.main_grad_mut() = Tensor::full(1.0, [64, 64], DType::F32, &device()).unwrap();
    let mut optimizer = Lion::new(options).unwrap();
    (0..50).for_each(|_| optimizer.step(&mut model, 2e-4).unwrap());
    let values = values(model.weight().tensor());
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    assert!((mean - 0.99).abs() < 5e-4, "{mean}");
}

#[test]
fn small_models_learn() {
    let train = |optimizer: &mut dyn FnMut(&mut Gpt)| {
        let (mut model, ids, targets) =
            (super::support::gpt(1), super::support::ids([2, 8], 20, 1), super::support::ids([2, 8], 20, 2));
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut losses = Vec::new();
        for _ in 0..5 {
            let (loss, saved) = scaling.in_autocast(&current(), |cx| model.loss(cx, &ids, &targets)).unwrap();
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
            optimizer(&mut model);
            zero_grad(&mut model).unwrap();
            losses.push(loss.item().unwrap());
        }
        assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?}");
    };
    let (mut lion, mut sgd) = (lion(MomentDtype::Fp8), sgd(false, MomentDtype::F32));
    train(&mut |model| lion.step(model, 2e-3).unwrap());
    train(&mut |model| {
        let norm = clip_grad_norm(model, 1.0).unwrap();
        sgd.step_with_norm(model, 0.05, &norm).unwrap();
    });
}

#[test]
fn options_are_checked() {
    let lion = |options| error(Lion::new(options));
    assert_eq!(
        lion(LionOptions { beta2: -0.5, ..Default::default() }),
        "Lion: beta2 = -0.5: expected 0 or more and less than 1"
    );
    assert_eq!(
        lion(LionOptions { stochastic_rounding: true, ..Default::default() }),
        "Lion: stochastic_rounding = true: bf16 parameters have f32 copies, which are rounded to nearest: set main_params to \
         false"
    );
    assert_eq!(
        error(Sgd::new(SgdOptions { weight_decay: f32::NAN, ..Default::default() })),
        "Sgd: weight_decay = NaN: expected finite and 0 or more"
    );
    let groups = vec![ParameterGroup { pattern: "nothing".to_owned(), ..Default::default() }];
    let mut optimizer = Sgd::new(SgdOptions { groups, ..Default::default() }).unwrap();
    let mut model = linear("fc", 4, 4, 1);
    assert!(
        error(optimizer.step(&mut model, 0.1))
            .starts_with("Sgd: groups = \"nothing\": it matches no parameter")
    );
    let mut optimizer = Sgd::new(SgdOptions::default()).unwrap();
    assert_eq!(error(optimizer.step(&mut model, f32::NAN)), "Sgd: lr = NaN: expected finite and 0 or more");
    optimizer.step(&mut model, 0.1).unwrap();
    let refused = error(optimizer.step(&mut linear("fc", 4, 5, 1), 0.1));
    assert!(refused.starts_with("optimizer: parameter and its moments: got [5, 4] and [4, 4]"), "{refused}");
}
