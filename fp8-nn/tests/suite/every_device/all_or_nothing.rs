//! Functions over many tensors change all of them or none.

use super::support::{block, delayed, device, error, first_step, grads, linear, noise, off, parameter_bits};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// A layer with gradients, and one gradient in the middle that something else holds, too.
fn with_a_shared_gradient() -> (TransformerLayer, Tensor) {
    let mut model = block("block", 1);
    first_step(&delayed(), &off(), &mut model, &noise([1, 4, 32], 1), &noise([1, 4, 32], 2)).unwrap();
    let shared = parameters(&model).into_iter().find(|p| &**p.name() == "block.mlp.fc1.weight");
    let held = shared.map(|parameter| parameter.main_grad().clone());
    (model, held.unwrap())
}

#[test]
fn clipping_refuses_a_shared_gradient_before_it_changes_any() {
    let (mut model, held) = with_a_shared_gradient();
    let before = grads(&model);
    let refused = error(clip_grad_norm(&mut model, 1e-3));
    assert!(before == grads(&model), "some gradients were clipped");
    let expected = "block.mlp.fc1.weight.main_grad: cannot be changed in place, because 1 other tensor shares its storage";
    assert!(refused.starts_with(expected), "{refused}");
    drop(held);
    clip_grad_norm(&mut model, 1e-3).unwrap();
    assert!(before != grads(&model));
}

#[test]
fn clipping_refuses_a_gradient_of_integers_before_it_changes_any() {
    let (mut model, _) = with_a_shared_gradient();
    for parameter in parameters_mut(&mut model) {
        if &**parameter.name() == "block.mlp.fc2.bias" {
            *parameter.main_grad_mut() = Tensor::zeros([32], DType::I32, &device()).unwrap();
        }
    }
    let first = |model: &TransformerLayer| parameters(model)[0].main_grad().to_f32_vec().unwrap();
    let before = first(&model);
    assert!(error(clip_grad_norm(&mut model, 1e-3)).contains("has dtype i32"));
    assert_eq!(before, first(&model));
}

#[test]
fn a_step_refuses_a_gradient_of_another_shape_before_it_changes_anything() {
    let (mut model, _) = with_a_shared_gradient();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    optimizer.step(&mut model, 0.1).unwrap();
    for parameter in parameters_mut(&mut model) {
        if &**parameter.name() == "block.mlp.fc2.bias" {
            *parameter.main_grad_mut() = Tensor::zeros([31], DType::F32, &device()).unwrap();
        }
    }
    let before = parameter_bits(&model);
    assert!(error(optimizer.step(&mut model, 0.1)).contains("[32] and [31]"));
    assert!(before == parameter_bits(&model));
    assert_eq!(optimizer.steps(), 1);
}

#[test]
fn reloading_refuses_another_models_parameters_before_it_changes_any() {
    let model = |last: usize| {
        let linear = |path: &str, out_features| {
            let options = LinearOptions {
                in_features: 4,
                out_features,
                params_dtype: DType::BF16,
                ..Default::default()
            };
            Linear::new(path, options, &device(), &mut super::support::rng(last as u64)).unwrap()
        };
        Stack(vec![Box::new(linear("a", 4)), Box::new(linear("b", last))])
    };
    let (mut ours, other) = (model(4), model(5));
    let mut optimizer = AdamW::new(AdamWOptions { weight_decay: 0.0, ..Default::default() }).unwrap();
    optimizer.step(&mut ours, 0.1).unwrap();
    let before = parameter_bits(&ours);
    assert!(error(optimizer.reload_params(&other)).contains("[5, 4] and [4, 4]"));
    // Without gradients a step writes what the f32 copies hold.
    optimizer.step(&mut ours, 0.1).unwrap();
    assert!(before == parameter_bits(&ours), "some f32 copies were replaced");
}

#[test]
fn a_broadcast_that_fails_half_way_changes_nothing() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: Arc<dyn ProcessGroup>| {
        // The first layers agree, the second ones do not.
        let seed = group.rank() as u64;
        let second = if seed == 0 { "b" } else { "c" };
        let mut model = Stack(vec![Box::new(linear("a", 4, 4, seed)), Box::new(linear(second, 4, 4, seed))]);
        let before = parameter_bits(&model);
        error(broadcast_parameters(&mut model, &*group));
        before == parameter_bits(&model)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        for thread in threads {
            assert!(thread.join().unwrap(), "some parameters were replaced");
        }
    });
}
