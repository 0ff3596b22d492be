//! One batch with a huge, infinite or NaN value in the middle of a training: the training goes on, and soon its loss is that of a
//! training without it.

use crate::every_device::support::{block, device, linear, noise, recipes, values};
use fp8_nn::prelude::*;
use std::ops::Range;

const STEPS: u64 = 100;
/// The step whose batch has the spike. 50 steps follow it.
const SPIKE_AT: u64 = STEPS - 51;
const CLASSES: usize = 8;

/// A block and a head that classifies its outputs. The head stays in high precision, as in a language model.
#[derive(Debug)]
struct Classifier {
    block: TransformerLayer,
    head: Linear,
}

composite!(Classifier { block, head });

impl Classifier {
    fn new(seed: u64) -> Self {
        Self { block: block("block", seed), head: linear("head", 32, CLASSES, seed) }
    }

    fn logits(&self, cx: &mut Forward<'_>, x: &Tensor) -> Tensor {
        let (h, _) = self.block.forward(cx, x).unwrap();
        self.head.forward(&mut cx.disabled(), &h).unwrap().0
    }
}

/// Inputs, and the classes that a random model draws for them: no model predicts all of them.
fn batches(seeds: Range<u64>) -> Vec<(Tensor, Tensor)> {
    let teacher = Classifier::new(77);
    let mut scaling = Scaling::new(&teacher, &device()).unwrap();
    let mut batch = |seed| {
        let x = noise([2, 8, 32], seed);
        let mut cx = scaling.eval(&Recipe::off()).unwrap();
        let logits = ops::add(&teacher.logits(&mut cx, &x), &noise([2, 8, CLASSES], 5000 + seed)).unwrap();
        let largest = |row: &[f32]| (0..CLASSES).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i32;
        let classes: Vec<i32> = values(&logits).chunks(CLASSES).map(largest).collect();
        (x, Tensor::from_vec(classes, [2, 8], &device()).unwrap())
    };
    seeds.map(&mut batch).collect()
}

/// Trains as a user's loop does: it clips the gradients and passes their norm to the optimizer, which skips a step without a finite
/// norm. Returns the loss on the batches `held_out`, and how many steps were skipped.
fn train(
    recipe: &Recipe,
    batches: &[(Tensor, Tensor)],
    held_out: &[(Tensor, Tensor)],
    spike: Option<f32>,
) -> (f64, u64) {
    let mut model = Classifier::new(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let schedule = Schedule::cosine(5e-3, 5, STEPS, 0.1).unwrap();
    let options = ops::CrossEntropyOptions::default();
    for step in 0..STEPS {
        let (x, classes) = &batches[step as usize % batches.len()];
        let mut x = x.clone();
        if let Some(spike) = spike.filter(|_| step == SPIKE_AT) {
            let mut spoiled = values(&x);
            spoiled[100] = spike;
            x = Tensor::from_vec(spoiled, *x.shape(), &device()).unwrap();
        }
        let mut cx = scaling.autocast(recipe).unwrap();
        let (h, block) = model.block.forward(&mut cx, &x).unwrap();
        let (logits, head) = model.head.forward(&mut cx.disabled(), &h).unwrap();
        cx.commit().unwrap();
        let (_, saved) = ops::cross_entropy(&logits, classes, &options).unwrap();
        let dlogits = ops::cross_entropy_backward(&logits, classes, &saved, &options, 1.0).unwrap();
        let mut cx = scaling.backward().unwrap();
        let dh = model.head.backward(&mut cx, head, &dlogits).unwrap();
        model.block.backward(&mut cx, block, &dh).unwrap();
        cx.commit().unwrap();
        let norm = clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step_with_norm(&mut model, schedule.lr(step), &norm).unwrap();
        zero_grad(&mut model).unwrap();
    }
    let losses = held_out.iter().map(|(x, classes)| {
        let logits = model.logits(&mut scaling.eval(recipe).unwrap(), x);
        f64::from(ops::cross_entropy(&logits, classes, &options).unwrap().0.item().unwrap())
    });
    (losses.sum::<f64>() / held_out.len() as f64, optimizer.skipped_steps().unwrap())
}

#[test]
fn fifty_steps_after_a_spike_the_loss_is_as_without_it() {
    let (training, held_out) = (batches(0..64), batches(1000..1016));
    let mut failures = Vec::new();
    // In the default history, a huge amax stays until the end.
    for recipe in recipes().into_iter().chain([DelayedScaling::default().into()]) {
        let (undisturbed, skipped) = train(&recipe, &training, &held_out, None);
        assert_eq!(skipped, 0, "{recipe}");
        assert!(undisturbed < 0.9 * (CLASSES as f64).ln(), "{recipe} learned nothing: {undisturbed}");
        for (spike, skips) in [(1e4, 0), (f32::INFINITY, 1), (f32::NAN, 1)] {
            let (loss, skipped) = train(&recipe, &training, &held_out, Some(spike));
            let percent = 100.0 * (loss / undisturbed - 1.0);
            let line = format!(
                "{recipe}: {undisturbed:.4} undisturbed, after {spike} {percent:+.2} %, {skipped} skipped"
            );
            if skipped != skips || percent.abs() > 2.0 {
                failures.push(line);
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
