//! Weights that no step changes, in recorded steps.

use super::{Training, rate, read, recorded_beside};
use crate::every_device::support::short;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

fn freeze(model: &mut Gpt) {
    let frozen = parameters_mut(model).into_iter().filter(|of| of.name().ends_with("fc1.weight"));
    frozen.for_each(|parameter| parameter.set_trainable(false).unwrap());
}

#[test]
fn frozen_weights_are_quantized_and_recorded_as_in_steps_that_are_not_recorded() {
    for recipe in [short(), short().with_te_rules()] {
        let [mut eager, mut recorded] = [(); 2].map(|()| Training::new(recipe.clone().into()));
        // Their slots get other scales than they were quantized with.
        assert_eq!(eager.eager(0), recorded.eager(0));
        freeze(&mut eager.model);
        freeze(&mut recorded.model);
        let (graph, results) = recorded_beside(&mut eager, &mut recorded, |_, _| ());
        let [expected, found] = [&eager, &recorded].map(|of| of.scaling.state().unwrap().arenas);
        for (expected, found) in expected.iter().zip(&found) {
            assert_eq!(expected.amax_history, found.amax_history);
            assert_eq!((&expected.scale, &expected.last_updates), (&found.scale, &found.last_updates));
            assert_eq!(expected.weights, found.weights);
        }
        assert_eq!(eager.evaluate(), recorded.evaluate());

        // Both continue from the same file, the recorded step at the addresses that it knows.
        let (dir, metadata) = (tempfile::tempdir().unwrap(), BTreeMap::new());
        let mut other = Training::new(recipe.into());
        other.eager(50);
        freeze(&mut other.model);
        for step in 51..54 {
            other.eager(step);
        }
        checkpoint::save(dir.path(), &other.model, &other.optimizer, &other.scaling, &metadata).unwrap();
        for Training { model, optimizer, scaling, .. } in [&mut eager, &mut recorded] {
            checkpoint::load(dir.path(), model, optimizer, scaling).unwrap();
        }
        for step in 7..9 {
            recorded.load(step);
            recorded.optimizer.set_lr(rate(step)).unwrap();
            graph.replay().unwrap();
            assert_eq!(eager.eager(step), read(&results), "step {step} after the load");
        }
    }
}
