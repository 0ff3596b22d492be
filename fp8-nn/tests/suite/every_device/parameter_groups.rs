//! Groups of parameters with a learning rate and a weight decay of their own.

use super::optimizer::oracle;
use super::support::{block, current, device, error, linear, noise, parameter_bits, values};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

fn group(pattern: &str, lr_factor: f32, weight_decay: Option<f32>) -> ParameterGroup {
    ParameterGroup { pattern: pattern.to_owned(), lr_factor, weight_decay }
}

fn optimizer(groups: &[ParameterGroup]) -> AdamW {
    AdamW::new(AdamWOptions { groups: groups.to_vec(), ..Default::default() }).unwrap()
}

/// Three steps with gradients of noise.
fn train(model: &mut TransformerLayer, optimizer: &mut AdamW, lr: f32) {
    for step in 0..3 {
        for (index, parameter) in parameters_mut(model).into_iter().enumerate() {
            *parameter.main_grad_mut() = noise(*parameter.shape(), 100 * step + index as u64);
        }
        optimizer.step(model, lr).unwrap();
    }
}

#[test]
fn each_parameter_has_the_rates_of_the_first_group_that_matches() {
    let groups = [
        group("*.norm.*", 3.0, Some(0.2)),
        group("qkv", 0.5, None),
        group("*.bias", 0.25, Some(0.3)), // not those of norms and of qkv
        group("*.fc1.weight", 2.0, Some(0.0)),
    ];
    let rates = |name: &str, shape: &Shape| match name {
        _ if name.contains(".norm.") => (3.0, 0.2),
        _ if name.contains(".qkv.") => (0.5, if shape.len() >= 2 { 0.1 } else { 0.0 }),
        _ if name.ends_with(".bias") => (0.25, 0.3),
        _ if name.ends_with(".fc1.weight") => (2.0, 0.0),
        _ => (1.0, 0.1),
    };
    let mut model = block("block", 1);
    let start: Vec<Vec<f32>> = parameters(&model).iter().map(|p| values(p.tensor())).collect();
    train(&mut model, &mut optimizer(&groups), 0.01);
    let mut seen = Vec::new();
    for (index, parameter) in parameters(&model).into_iter().enumerate() {
        let (factor, decay) = rates(parameter.name(), parameter.shape());
        seen.push((factor, decay));
        let grads: Vec<_> =
            (0..3).map(|step| values(&noise(*parameter.shape(), 100 * step + index as u64))).collect();
        for (i, &actual) in values(parameter.tensor()).iter().enumerate() {
            let grads: Vec<f64> = grads.iter().map(|grad| f64::from(grad[i])).collect();
            let expected = oracle(f64::from(start[index][i]), &grads, 0.01 * factor, decay, |v| v);
            let difference = (f64::from(actual) - expected).abs();
            assert!(difference <= 2e-6 * expected.abs().max(0.1), "{}[{i}]", parameter.name());
        }
    }
    seen.sort_by(|a, b| a.partial_cmp(b).unwrap());
    seen.dedup();
    assert_eq!(seen, [(0.25, 0.3), (0.5, 0.0), (0.5, 0.1), (1.0, 0.1), (2.0, 0.0), (3.0, 0.2)]);
}

#[test]
fn groups_that_say_nothing_new_change_no_bit() {
    let run = |groups: &[ParameterGroup]| {
        let mut model = block("block", 1);
        train(&mut model, &mut optimizer(groups), 0.01);
        parameter_bits(&model)
    };
    assert!(run(&[]) == run(&[group("*", 1.0, None)]));
    assert!(run(&[]) != run(&[group("*", 1.0, Some(0.1))])); // norms and biases decay, too
}

#[test]
fn groups_are_refused_before_anything_changes() {
    let mut model = block("block", 1);
    let before = parameter_bits(&model);
    let mut refuses = |groups: &[ParameterGroup]| {
        let mut optimizer = optimizer(groups);
        let refused = error(optimizer.step(&mut model, 0.1));
        assert_eq!(optimizer.steps(), 0);
        assert!(before == parameter_bits(&model));
        refused
    };
    let expected = "AdamW: groups = \"fc3\": it matches no parameter of the model: expected a pattern such as \
                    \"*.bias\" or \"head\"";
    assert_eq!(refuses(&[group("qkv", 1.0, None), group("fc3", 1.0, None)]), expected);
    // A rate that overflows in one group only.
    let mut refused = optimizer(&[group("qkv", 1e10, None)]);
    assert_eq!(
        error(refused.step(&mut model, 1e30)),
        "AdamW: lr = 1000000000000000000000000000000: expected finite and 0 or more; it is multiplied by lr_factor = 10000000000"
    );
    assert_eq!(error(refused.step(&mut model, -1.0)), "AdamW: lr = -1: expected finite and 0 or more");
    refused.step(&mut model, 1e-20).unwrap();

    let new = |group| error(AdamW::new(AdamWOptions { groups: vec![group], ..Default::default() }));
    assert_eq!(new(group("x", -1.0, None)), "AdamW: lr_factor = -1: expected finite and 0 or more");
    assert_eq!(
        new(group("x", 1.0, Some(f32::NAN))),
        "AdamW: weight_decay = NaN: expected finite and 0 or more"
    );
    assert_eq!(
        new(group("", 1.0, None)),
        "AdamW: groups = \"\": expected a pattern such as \"*.bias\" or \"head\""
    );
}

#[test]
fn a_pattern_may_match_frozen_parameters_alone() {
    let mut model = block("block", 1);
    for parameter in parameters_mut(&mut model) {
        if parameter.name().contains(".qkv.") {
            parameter.set_trainable(false).unwrap();
        }
    }
    optimizer(&[group("qkv", 0.1, None)]).step(&mut model, 0.1).unwrap();
}

#[test]
fn a_resumed_job_continues_with_the_groups_of_its_optimizer() {
    let (dir, frozen) = (tempfile::tempdir().unwrap(), group("*.weight", 0.0, None));
    let mut model = linear("fc", 8, 4, 1);
    let scaling = Scaling::new(&model, &device()).unwrap();
    let mut first = optimizer(&[]);
    first.step(&mut model, 0.1).unwrap();
    checkpoint::save(dir.path(), &model, &first, &scaling, &BTreeMap::new()).unwrap();
    let (mut other, mut resumed) = (linear("fc", 8, 4, 2), optimizer(&[frozen]));
    let mut scaling = Scaling::new(&other, &device()).unwrap();
    checkpoint::load(dir.path(), &mut other, &mut resumed, &mut scaling).unwrap();
    assert!(parameter_bits(&model) == parameter_bits(&other));
    resumed.step(&mut other, 0.1).unwrap();
    assert_eq!(values(model.weight().tensor()), values(other.weight().tensor())); // a rate of 0
    assert_eq!(resumed.steps(), 2);
}

#[test]
fn weights_in_fp8_follow_their_groups() {
    let recipe = current();
    let run = |is_fp8: bool| {
        let mut model = linear("fc", 16, 16, 1);
        let mut optimizer = optimizer(&[group("*.weight", 0.5, Some(0.3))]);
        if is_fp8 {
            optimizer.quantize_weights(&mut model, &recipe).unwrap();
        }
        for parameter in parameters_mut(&mut model) {
            *parameter.main_grad_mut() = noise(*parameter.shape(), 1);
        }
        optimizer.step(&mut model, 0.01).unwrap();
        model
    };
    // The codes are those of the f32 copy, which is updated as the weight itself would be.
    let (mut high, fp8) = (run(false), run(true));
    quantize_weights(&mut high, &recipe).unwrap();
    let codes = |model: &Linear| model.weight().fp8().unwrap().dequantize(DType::F32).unwrap();
    assert_eq!(values(&codes(&high)), values(&codes(&fp8)));
}
