//! Lion, and SGD with momentum.

use super::adamw::STEP;
use super::case::{Outcome, cases};
use super::compare::{close, same};
use super::data::{f64s, normal, specials, tensor};
use super::optimizer::{KINDS, Parameter, Rule, shapes};
use super::reference::same_as_cpu;
use super::threads::same_bits;
use fp8_kernels::ops::AdamWStep;
use fp8_kernels::{DType, Device, Tensor};

cases![
    matches_the_oracle_over_steps,
    signs_of_zero_are_zero,
    bits_are_the_cpus: Dtypes,
    special_values_are_the_cpus: Dtypes,
    same_for_any_threads,
];

const RULES: [Rule; 3] = [Rule::Lion, Rule::Sgd { nesterov: false }, Rule::Sgd { nesterov: true }];

/// One element's textbook update: the new parameter and moment.
fn oracle(rule: Rule, [p, m]: [f64; 2], grad: f64, step: &AdamWStep) -> [f64; 2] {
    let [lr, beta1, beta2, decay] = [step.lr, step.beta1, step.beta2, step.weight_decay].map(f64::from);
    let g = grad * f64::from(step.grad_scale);
    match rule {
        Rule::Lion => {
            let c = beta1 * m + (1.0 - beta1) * g;
            let sign = if c == 0.0 { 0.0 } else { c.signum() };
            [p - lr * (sign + decay * p), beta2 * m + (1.0 - beta2) * g]
        }
        Rule::Sgd { nesterov } => {
            let g = g + decay * p;
            let m = beta1 * m + g;
            [p - lr * if nesterov { g + beta1 * m } else { m }, m]
        }
        Rule::AdamW => [p, m],
    }
}

fn matches_the_oracle_over_steps(device: &Device) -> Outcome {
    for rule in RULES {
        for shape in shapes() {
            let mut parameter = Parameter::new(normal(shape, DType::F32, 1, device)?, [DType::F32; 2], 1)?;
            parameter.rule = rule;
            let mut want: Vec<[f64; 2]> = f64s(&parameter.param)?.into_iter().map(|p| [p, 0.0]).collect();
            for number in 1..=10 {
                let step = AdamWStep { step: number, lr: STEP.lr / number as f32, ..STEP };
                parameter.grad = normal(shape, DType::F32, 100 + number, device)?;
                for (state, grad) in want.iter_mut().zip(f64s(&parameter.grad)?) {
                    *state = oracle(rule, *state, grad, &step);
                }
                parameter.step(&step)?;
            }
            let cols = shape.last_dim();
            for (i, (name, got)) in
                [("p", &parameter.param), ("m", &parameter.moments[0])].into_iter().enumerate()
            {
                let want: Vec<f64> = want.iter().map(|state| state[i]).collect();
                close(
                    &format!("{rule:?}: {name}, {shape:?}"),
                    &got.to_vec::<f32>()?,
                    &want,
                    cols,
                    [1e-5, 1e-6],
                )?;
            }
        }
    }
    Ok(())
}

fn signs_of_zero_are_zero(device: &Device) -> Outcome {
    let mut parameter = Parameter::new(Tensor::full(2.0, [9], DType::F32, device)?, [DType::F32; 2], 1)?;
    parameter.rule = Rule::Lion;
    let grad = vec![0.0f32, -0.0, 0.0, 0.0, -0.0, 0.0, -0.0, -0.0, 1e-30];
    parameter.grad = Tensor::from_vec(grad, [9], device)?;
    parameter.step(&AdamWStep { lr: 0.5, weight_decay: 0.5, ..STEP })?;
    let want = [1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.0];
    same("p", &parameter.param.to_vec::<f32>()?, &want, 9)
}

fn bits_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    for (seed, shape) in (0..).zip(shapes()) {
        for (rule, kind) in RULES.into_iter().flat_map(|rule| KINDS.map(|kind| (rule, kind))) {
            same_as_cpu(&format!("{rule:?} {shape:?} {kind}"), device, |device| {
                let mut parameter = Parameter::new(normal(shape, dtype, seed, device)?, [kind; 2], seed)?;
                parameter.rule = rule;
                parameter.is_rounded_stochastically = dtype == DType::BF16 && seed % 2 == 0;
                if seed % 3 == 0 {
                    parameter.main = Some(normal(shape, DType::F32, 60 + seed, device)?);
                }
                for number in 1..=3 {
                    parameter.grad = normal(shape, DType::F32, 20 + seed + number, device)?;
                    parameter.step(&AdamWStep { step: number, ..STEP })?;
                }
                parameter.results()
            })?;
        }
    }
    Ok(())
}

fn special_values_are_the_cpus(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let values =
        |at: usize| -> Vec<f32> { (0..74).map(|i| specials[(i * 7 + at) % specials.len()]).collect() };
    for (rule, kind) in RULES.into_iter().flat_map(|rule| KINDS.map(|kind| (rule, kind))) {
        same_as_cpu(&format!("{rule:?} {kind}"), device, |device| {
            let mut results = Vec::new();
            for seed in 0..4 {
                let param = tensor(values(seed), [2, 37], dtype, device)?;
                let mut parameter = Parameter::new(param, [kind; 2], 11)?;
                parameter.rule = rule;
                for number in 1..=2 {
                    parameter.grad = tensor(values(5 * number + seed), [2, 37], DType::F32, device)?;
                    parameter.step(&AdamWStep { step: number as u64, grad_scale: 1.0, ..STEP })?;
                }
                results.extend(parameter.results()?);
            }
            Ok(results)
        })?;
    }
    Ok(())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    for rule in RULES {
        same_bits("optimizer", || {
            let mut parameter =
                Parameter::new(normal([100_003], DType::F32, 1, device)?, [DType::BF16; 2], 4)?;
            parameter.rule = rule;
            parameter.grad = normal([100_003], DType::F32, 2, device)?;
            parameter.step(&STEP)?;
            let Parameter { param, moments: [m, _], .. } = parameter;
            Ok(vec![param, m])
        })?;
    }
    Ok(())
}
