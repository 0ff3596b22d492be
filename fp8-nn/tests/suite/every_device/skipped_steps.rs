//! Steps whose gradients have no finite norm: nothing changes, and the step is counted.

use super::support::{device, error, noise, values};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The values to which one element of one gradient is set, in the first or the last parameter.
const BAD: [f32; 3] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

fn model(params_dtype: DType) -> Linear {
    let options = LinearOptions { in_features: 8, out_features: 6, params_dtype, ..Default::default() };
    Linear::new("fc", options, &device(), &mut super::support::rng(1)).unwrap()
}

/// Gives every parameter noise as its gradient, with `bad` in the middle of the one at `place`.
fn set_gradients(model: &mut impl Layer, seed: u64, bad: Option<(usize, f32)>) {
    for (index, parameter) in parameters_mut(model).into_iter().enumerate() {
        let shape = *parameter.tensor().shape();
        let mut grad = values(&noise(shape, 100 * seed + index as u64));
        if let Some((place, bad)) = bad
            && place == index
        {
            let middle = grad.len() / 2;
            grad[middle] = bad;
        }
        *parameter.main_grad_mut() = Tensor::from_vec(grad, shape, &device()).unwrap();
    }
}

/// The bytes of every parameter, moment and f32 copy.
fn state(model: &impl Layer, optimizer: &AdamW) -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let scaling = Scaling::new(model, &device()).unwrap();
    checkpoint::save(dir.path(), model, optimizer, &scaling, &BTreeMap::new()).unwrap();
    let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

#[test]
fn a_step_whose_gradients_are_not_finite_changes_nothing() {
    for (dtype, main_params) in [(DType::F32, true), (DType::BF16, true), (DType::BF16, false)] {
        let mut model = model(dtype);
        let mut optimizer = AdamW::new(AdamWOptions { main_params, ..Default::default() }).unwrap();
        set_gradients(&mut model, 1, None);
        optimizer.step(&mut model, 0.1).unwrap();
        let before = state(&model, &optimizer);
        for (count, (place, bad)) in
            [0, 1].into_iter().flat_map(|place| BAD.map(|bad| (place, bad))).enumerate()
        {
            set_gradients(&mut model, 2, Some((place, bad)));
            optimizer.step(&mut model, 0.1).unwrap();
            assert!(before == state(&model, &optimizer), "{dtype}, {bad} in parameter {place}");
            let counts = (optimizer.steps(), optimizer.skipped_steps().unwrap());
            assert_eq!(counts, (2 + count as u64, 1 + count as u64), "the step number goes on");
        }
        set_gradients(&mut model, 3, None);
        optimizer.step(&mut model, 0.1).unwrap();
        let after = state(&model, &optimizer);
        assert!(before.iter().all(|(name, bytes)| name.starts_with("scaling") || after[name] != *bytes));
        assert!(model.weight().tensor().to_f32_vec().unwrap().iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_norm_that_was_computed_before_decides() {
    let mut model = model(DType::F32);
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    set_gradients(&mut model, 1, None);
    optimizer.step(&mut model, 0.1).unwrap();
    let before = state(&model, &optimizer);
    // Finite gradients, and a norm that is not: the norm is what counts.
    for norm in BAD {
        let norm = Tensor::scalar(norm, &device()).unwrap();
        optimizer.step_with_norm(&mut model, 0.1, &norm).unwrap();
    }
    assert!(before == state(&model, &optimizer));
    assert_eq!(optimizer.skipped_steps().unwrap(), 3);
    let two = Tensor::zeros([2], DType::F32, &device()).unwrap();
    let refused = error(optimizer.step_with_norm(&mut model, 0.1, &two));
    assert!(refused.contains("expected one number"), "{refused}");
    assert_eq!(optimizer.steps(), 4);
    // One that is given and one that is computed lead to the same bits.
    let mut other = super::skipped_steps::model(DType::F32);
    let mut others = AdamW::new(AdamWOptions::default()).unwrap();
    let mut alike = super::skipped_steps::model(DType::F32);
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    for step in 0..3 {
        set_gradients(&mut other, step, (step == 1).then_some((0, f32::NAN)));
        set_gradients(&mut alike, step, (step == 1).then_some((0, f32::NAN)));
        let norm = clip_grad_norm(&mut other, 0.5).unwrap();
        clip_grad_norm(&mut alike, 0.5).unwrap();
        others.step_with_norm(&mut other, 0.1, &norm).unwrap();
        optimizer.step(&mut alike, 0.1).unwrap();
    }
    assert!(state(&other, &others) == state(&alike, &optimizer));
    assert_eq!((others.skipped_steps().unwrap(), optimizer.skipped_steps().unwrap()), (1, 1));
}

#[test]
fn finite_gradients_whose_squares_overflow_do_not_skip_a_step() {
    let mut model = model(DType::F32);
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    // A square of 1e60, a norm of 1e30; then a norm beyond f32::MAX.
    for (value, skipped) in [(1e30, 0), (f32::MAX, 1)] {
        for parameter in parameters_mut(&mut model) {
            *parameter.main_grad_mut() =
                Tensor::full(value, *parameter.tensor().shape(), DType::F32, &device()).unwrap();
        }
        let norm = clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step_with_norm(&mut model, 0.1, &norm).unwrap();
        assert_eq!(optimizer.skipped_steps().unwrap(), skipped);
        assert!(values(model.weight().tensor()).iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_checkpoint_keeps_the_count_of_skipped_steps() {
    let mut model = model(DType::F32);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    for step in 0..4 {
        set_gradients(&mut model, step, (step % 2 == 1).then_some((1, f32::NAN)));
        optimizer.step(&mut model, 0.1).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    checkpoint::save(dir.path(), &model, &optimizer, &scaling, &BTreeMap::new()).unwrap();
    let mut other = AdamW::new(AdamWOptions::default()).unwrap();
    for optimizer in [&mut optimizer, &mut other] {
        set_gradients(&mut model, 5, Some((0, f32::INFINITY)));
        optimizer.step(&mut model, 0.1).unwrap();
        checkpoint::load(dir.path(), &mut model, optimizer, &mut scaling).unwrap();
        assert_eq!((optimizer.steps(), optimizer.skipped_steps().unwrap()), (4, 2));
        set_gradients(&mut model, 5, Some((0, f32::INFINITY)));
        optimizer.step(&mut model, 0.1).unwrap();
        assert_eq!((optimizer.steps(), optimizer.skipped_steps().unwrap()), (5, 3));
    }
}

#[test]
fn ranks_skip_a_step_together() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: Arc<dyn ProcessGroup>| {
        let mut model = model(DType::F32);
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let mut states = Vec::new();
        for step in 0..3 {
            // In the second step one rank alone has an infinite gradient.
            let bad = (step == 1 && group.rank() == 1).then_some((0, f32::INFINITY));
            set_gradients(&mut model, 10 * step + group.rank() as u64, bad);
            all_reduce_gradients(&mut model, &*group).unwrap();
            let norm = clip_grad_norm(&mut model, 1.0).unwrap();
            optimizer.step_with_norm(&mut model, 0.1, &norm).unwrap();
            states.push((state(&model, &optimizer), optimizer.skipped_steps().unwrap()));
        }
        states
    };
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ranks[0] == ranks[1]);
    let [first, second, third] = &ranks[0][..] else { panic!("{} steps", ranks[0].len()) };
    assert_eq!([first.1, second.1, third.1], [0, 1, 1]);
    assert!(first.0 == second.0 && second.0 != third.0);
}
