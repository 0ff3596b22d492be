//! AdamW against f64, its refusals, clipping, and the schedule.

use super::support::{
    bits, block, delayed, device, error, first_step, linear, noise, off, parameter_bits, rng, values,
};
use fp8_nn::Schedule;
use fp8_nn::prelude::*;

/// One value's textbook AdamW. `keep`: what survives between steps, in f32 or rounded to bf16.
pub(crate) fn oracle(p: f64, grads: &[f64], lr: f64, decay: f64, keep: fn(f64) -> f64) -> f64 {
    let (beta1, beta2, eps) = (0.9, 0.95, 1e-8);
    let (mut p, mut m, mut v) = (p, 0.0, 0.0);
    for (t, g) in grads.iter().enumerate() {
        m = beta1 * m + (1.0 - beta1) * g;
        v = beta2 * v + (1.0 - beta2) * g * g;
        let correction = |beta: f64| 1.0 - beta.powi(t as i32 + 1);
        let update = m / correction(beta1) / ((v / correction(beta2)).sqrt() + eps);
        p = keep(p * (1.0 - lr * decay) - lr * update);
    }
    p
}

fn fc(params_dtype: DType) -> Linear {
    let options = LinearOptions { in_features: 8, out_features: 6, params_dtype, ..Default::default() };
    Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
}

fn round_bf16(v: f64) -> f64 {
    bf16::from_f64(v).to_f64()
}

#[test]
fn adamw_is_the_textbooks_wherever_the_f32_weights_live() {
    // (parameters, main_params, what survives a step, what the model holds, tolerance)
    type Place = (DType, bool, fn(f64) -> f64, fn(f64) -> f64, f64);
    let places: [Place; 3] = [
        (DType::F32, true, |v| v, |v| v, 2e-6),
        (DType::BF16, true, |v| v, round_bf16, 0.008),
        (DType::BF16, false, round_bf16, |v| v, 0.016),
    ];
    for (dtype, main_params, keep, held, tolerance) in places {
        let mut model = fc(dtype);
        let start: Vec<Vec<f32>> = parameters(&model).iter().map(|p| values(p.tensor())).collect();
        let mut optimizer = AdamW::new(AdamWOptions { main_params, ..Default::default() }).unwrap();
        let mut history: Vec<Vec<Vec<f64>>> = vec![Vec::new(); 2];
        for step in 0..10 {
            for (index, p) in parameters_mut(&mut model).into_iter().enumerate() {
                let grad = noise(*p.tensor().shape(), 10 * step + index as u64);
                history[index].push(values(&grad).into_iter().map(f64::from).collect());
                *p.main_grad_mut() = grad;
            }
            optimizer.step(&mut model, 0.01).unwrap();
        }
        assert_eq!(optimizer.steps(), 10);
        for (index, parameter) in parameters(&model).into_iter().enumerate() {
            let name = parameter.name();
            let decay = if index == 0 { 0.1 } else { 0.0 }; // biases do not decay
            for (i, &actual) in values(parameter.tensor()).iter().enumerate() {
                let grads: Vec<f64> = history[index].iter().map(|grad| grad[i]).collect();
                let expected = held(oracle(f64::from(start[index][i]), &grads, 0.01, decay, keep));
                let difference = (f64::from(actual) - expected).abs();
                let bound = tolerance * expected.abs().max(0.05);
                assert!(
                    difference <= bound,
                    "{dtype} {main_params} {name}[{i}]: {actual}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn small_updates_survive_where_there_are_f32_weights() {
    let run = |dtype, main_params| {
        let mut model = fc(dtype);
        let ones = Tensor::full(1.0, [6, 8], dtype, &device()).unwrap();
        let mut first = Some(ones);
        for p in parameters_mut(&mut model) {
            *p.main_grad_mut() = Tensor::full(1.0, *p.tensor().shape(), DType::F32, &device()).unwrap();
            first.take().map_or(Ok(()), |ones| p.set(ones)).unwrap();
        }
        let mut optimizer =
            AdamW::new(AdamWOptions { main_params, weight_decay: 0.0, ..Default::default() }).unwrap();
        (0..100).for_each(|_| optimizer.step(&mut model, 1e-4).unwrap());
        values(model.weight().tensor())[0]
    };
    assert!((run(DType::F32, true) - 0.99).abs() < 1e-4);
    assert!((run(DType::BF16, true) - 0.99).abs() < 0.004);
    assert_eq!(run(DType::BF16, false), 1.0); // each update is less than half a bf16 ulp
}

#[test]
fn only_matrices_decay() {
    let mut model = block("block", 1);
    let before: Vec<_> = parameters(&model).iter().map(|p| values(p.tensor())).collect();
    AdamW::new(AdamWOptions::default()).unwrap().step(&mut model, 0.5).unwrap(); // all gradients are 0
    for (before, parameter) in before.iter().zip(parameters(&model)) {
        let (name, after) = (parameter.name(), parameter.tensor());
        let factor = if after.shape().len() < 2 { 1.0 } else { 0.95 };
        let expected: Vec<f32> = before.iter().map(|v| v * factor).collect();
        super::support::assert_close(name, &expected, &values(after), 1e-6);
    }
}

/// The names of the tensors of a checkpoint.
fn saved_names(model: &TransformerLayer, optimizer: &AdamW) -> Vec<String> {
    let (dir, scaling) = (tempfile::tempdir().unwrap(), Scaling::new(model, &device()).unwrap());
    let options = checkpoint::SaveOptions { without_gradients: true };
    checkpoint::save_with_options(dir.path(), model, optimizer, &scaling, &Default::default(), &options)
        .unwrap();
    let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.names().into_iter().map(ToOwned::to_owned).collect()
}

#[test]
fn a_refused_step_changes_nothing() {
    let mut model = block("block", 1);
    let (x, dy) = (noise([1, 4, 32], 1), noise([1, 4, 32], 2));
    first_step(&delayed(), &off(), &mut model, &x, &dy).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let before = parameter_bits(&model);
    let versions =
        |model: &TransformerLayer| -> Vec<u64> { parameters(model).iter().map(|p| p.version()).collect() };
    let old = versions(&model);

    let held = parameters(&model).pop().map(|parameter| parameter.tensor().clone());
    assert_eq!(
        error(optimizer.step(&mut model, 0.1)),
        "block.mlp.fc2.bias: cannot be changed in place, because 1 other tensor shares its storage: drop every clone of it, and \
         every Saved that contains one, first"
    );
    drop(held);
    for (lr, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-0.1, "-0.1")] {
        let refused = error(optimizer.step(&mut model, lr));
        assert_eq!(refused, format!("AdamW: lr = {shown}: expected finite and 0 or more"));
    }
    assert!(!saved_names(&model, &optimizer).iter().any(|name| name.starts_with("optimizer.")), "no state");
    assert_eq!((optimizer.steps(), versions(&model)), (0, old));
    assert!(before == parameter_bits(&model));

    // A Saved in high precision holds the weight itself.
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let saved = model.forward(&mut cx, &x).unwrap();
    cx.commit().unwrap();
    assert!(error(optimizer.step(&mut model, 0.1)).contains("shares its storage"));
    drop(saved);
    optimizer.step(&mut model, 0.1).unwrap();
    assert_eq!(optimizer.steps(), 1);
}

#[test]
fn an_optimizer_belongs_to_one_model() {
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    optimizer.step(&mut linear("fc", 4, 4, 1), 0.1).unwrap();
    let refused = error(optimizer.step(&mut linear("fc", 4, 5, 1), 0.1));
    assert!(refused.contains("[5, 4] and [4, 4]"), "{refused}");
    let mut twice = Stack(vec![Box::new(linear("a", 4, 4, 1)), Box::new(linear("a", 4, 4, 2))]);
    let refused = error(optimizer.step(&mut twice, 0.1));
    assert_eq!(refused, "parameter `a.weight` occurs twice: give the two layers different paths");
}

#[test]
fn options_of_adamw_are_checked() {
    let new = |options| error(AdamW::new(options));
    let default = AdamWOptions::default;
    assert_eq!(
        new(AdamWOptions { beta1: 1.0, ..default() }),
        "AdamW: beta1 = 1: expected 0 or more and less than 1"
    );
    assert!(new(AdamWOptions { beta2: f32::NAN, ..default() }).contains("beta2 = NaN"));
    assert!(new(AdamWOptions { eps: -1.0, ..default() }).contains("eps = -1"));
    assert!(new(AdamWOptions { weight_decay: f32::INFINITY, ..default() }).contains("weight_decay = inf"));
}

#[test]
fn clipping_scales_all_gradients_alike() {
    let mut model = block("block", 1);
    first_step(&delayed(), &off(), &mut model, &noise([1, 4, 32], 1), &noise([1, 4, 32], 2)).unwrap();
    let before = super::support::grads(&model);
    let square: f64 = before.iter().flat_map(|(_, g)| g).map(|&g| f64::from(g) * f64::from(g)).sum();
    let norm = clip_grad_norm(&mut model, 1e9).unwrap().item().unwrap();
    assert!((f64::from(norm) - square.sqrt()).abs() < 1e-4 * square.sqrt());
    assert_eq!(before, super::support::grads(&model)); // below the bound: untouched
    assert_eq!(clip_grad_norm(&mut model, norm / 4.0).unwrap().item().unwrap(), norm);
    for ((name, before), (_, after)) in before.iter().zip(super::support::grads(&model)) {
        let expected: Vec<f32> = before.iter().map(|g| g / 4.0).collect();
        super::support::assert_close(name, &expected, &after, 1e-6);
    }
    let mut first = true;
    for p in parameters_mut(&mut model) {
        if std::mem::take(&mut first) {
            *p.main_grad_mut() =
                Tensor::full(f32::INFINITY, *p.tensor().shape(), DType::F32, &device()).unwrap();
        }
    }
    let before = parameter_bits(&model);
    assert!(!clip_grad_norm(&mut model, 1.0).unwrap().item().unwrap().is_finite());
    assert!(before == parameter_bits(&model)); // the caller sees it and skips
    for max_norm in [0.0, -1.0, f32::NAN] {
        assert!(error(clip_grad_norm(&mut model, max_norm)).contains("expected greater than 0"));
    }
}

#[test]
fn a_model_without_gradients_has_a_norm_of_0() {
    let mut frozen = linear("fc", 4, 4, 1);
    parameters_mut(&mut frozen).into_iter().for_each(|p| p.set_trainable(false).unwrap());
    let before = parameter_bits(&frozen);
    let scaler = LossScaler::new(LossScalerOptions::default(), &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    for norm in [clip_grad_norm(&mut frozen, 1.0), scaler.clip_grad_norm(&mut frozen, 1.0)] {
        let norm = norm.unwrap();
        assert_eq!((norm.item().unwrap(), norm.device().is_simulated()), (0.0, device().is_simulated()));
        optimizer.step_with_norm(&mut frozen, 0.1, &norm).unwrap();
    }
    assert!(before == parameter_bits(&frozen));
    assert_eq!(clip_grad_norm(&mut Stack(Vec::new()), 1.0).unwrap().item().unwrap(), 0.0);
}

#[test]
fn a_warm_up_that_is_longer_than_the_run_ends_with_the_run() {
    let schedule = Schedule::cosine(1.0, 8, 4, 0.125).unwrap();
    let rates = [0, 1, 2, 3, 4, 7, 8, 9, u64::MAX].map(|step| schedule.lr(step));
    assert_eq!(rates, [0.125, 0.25, 0.375, 0.5, 0.125, 0.125, 0.125, 0.125, 0.125]);
}

#[test]
fn the_schedule_warms_up_and_decays() {
    let schedule = Schedule::cosine(1.0, 4, 12, 0.1).unwrap();
    assert_eq!([0, 1, 2, 3].map(|step| schedule.lr(step)), [0.25, 0.5, 0.75, 1.0]);
    assert!((schedule.lr(7) - 0.55).abs() < 1e-6); // half-way down
    assert!((4..30).all(|step| schedule.lr(step + 1) <= schedule.lr(step)));
    for step in [11, 12, 1000, u64::MAX] {
        assert!((schedule.lr(step) - 0.1).abs() < 1e-6, "{step}");
    }
    for (peak, warmup, total) in [(1.0, 0, 0), (1.0, u64::MAX, u64::MAX), (1.0, 0, u64::MAX)] {
        let schedule = Schedule::cosine(peak, warmup, total, 0.0).unwrap();
        assert!([0, 1, u64::MAX].iter().all(|&step| (0.0..=1.0).contains(&schedule.lr(step))));
    }
    for (peak, ratio) in [(0.0, 0.1), (-1.0, 0.1), (f32::NAN, 0.1), (1.0, -0.1), (1.0, 1.1), (1.0, f32::NAN)]
    {
        assert!(Schedule::cosine(peak, 0, 10, ratio).is_err());
    }
}

#[test]
fn every_schedule_warms_up_and_ends_where_it_says() {
    let schedules = [
        Schedule::constant(2.0, 4).unwrap(),
        Schedule::linear(2.0, 4, 12, 0.25).unwrap(),
        Schedule::cosine(2.0, 4, 12, 0.25).unwrap(),
        Schedule::warmup_stable_decay(2.0, 4, 12, 3, 0.25).unwrap(),
    ];
    let rates = schedules.map(|schedule| (0..14).map(|step| schedule.lr(step)).collect::<Vec<_>>());
    for rates in &rates {
        assert_eq!(rates[..4], [0.5, 1.0, 1.5, 2.0]);
    }
    let [constant, linear, cosine, stable] = rates;
    assert_eq!(constant[4..], [2.0; 10]);
    for (t, step) in (1..=8).zip(4..12) {
        let t = f64::from(t) / 8.0;
        assert!((f64::from(linear[step]) - 2.0 * (1.0 - 0.75 * t)).abs() < 1e-6, "{linear:?}");
        let wave = (1.0 + (std::f64::consts::PI * t).cos()) / 2.0;
        assert!((f64::from(cosine[step]) - 2.0 * (0.25 + 0.75 * wave)).abs() < 1e-6, "{cosine:?}");
    }
    assert_eq!(stable[4..], [2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.5, 0.5]);
    for rates in [linear, cosine, stable] {
        assert_eq!(rates[11..], [0.5; 3]);
    }
    // Without a decay, and with nothing else.
    assert_eq!(Schedule::warmup_stable_decay(1.0, 0, 4, 0, 0.5).unwrap().lr(3), 1.0);
    assert_eq!(Schedule::warmup_stable_decay(1.0, 0, 4, 4, 0.0).unwrap().lr(0), 0.75);
    assert_eq!(Schedule::constant(1.0, 0).unwrap().lr(u64::MAX), 1.0);
    let error = Schedule::warmup_stable_decay(1.0, 3, 4, 2, 0.5).unwrap_err().to_string();
    assert_eq!(error, "schedule: decay_steps = 2: expected at most 1, the steps behind the warm-up");
    assert!(Schedule::linear(f32::INFINITY, 0, 1, 0.0).is_err() && Schedule::constant(0.0, 0).is_err());
}

#[test]
fn a_parameter_keeps_its_shape_and_dtype() {
    let mut p = Parameter::new("w", noise([2, 3], 1)).unwrap();
    let (version, before) = (p.version(), bits(p.tensor()));
    let refused = error(p.set(noise([3, 2], 2)));
    assert_eq!(refused, "set: parameter and value: got [2, 3] and [3, 2]: a parameter keeps its shape");
    let refused = error(p.set(ops::cast(&noise([2, 3], 2), DType::BF16).unwrap()));
    assert_eq!(refused, "set: the value has dtype bf16: expected f32");
    assert_eq!((p.version(), bits(p.tensor())), (version, before));
    p.set(noise([2, 3], 2)).unwrap();
    assert_ne!(p.version(), version);
}

#[test]
fn parameters_that_something_else_set_are_taken_over_when_asked_for() {
    for reloads in [false, true] {
        let mut model = fc(DType::BF16);
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        optimizer.reload_params(&model).unwrap(); // it has no copies yet
        optimizer.step(&mut model, 0.01).unwrap();
        let before = parameter_bits(&model);
        for parameter in parameters_mut(&mut model) {
            let value = noise(*parameter.tensor().shape(), 99);
            parameter.set(fp8_nn::fp8_kernels::ops::cast(&value, DType::BF16).unwrap()).unwrap();
        }
        let value = parameter_bits(&model);
        assert!(value != before);
        if reloads {
            optimizer.reload_params(&model).unwrap();
        }
        // Nothing moves at a rate of 0 but to what the optimizer goes on from.
        optimizer.step(&mut model, 0.0).unwrap();
        assert!(parameter_bits(&model) == if reloads { value } else { before }, "{reloads}");
    }
}
