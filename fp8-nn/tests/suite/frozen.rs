//! Frozen parameters: training through weights that are codes, what the optimizer has of them, and checkpoints of them.

use crate::support::{bits, device, error, linear, noise, step, unless_simulated, values};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A recipe whose dgrad reads other codes of a weight than fprop does, unless the device is simulated.
fn turned() -> Recipe {
    Recipe::from_name(unless_simulated("mxfp8", "block")).unwrap()
}

fn freeze(model: &mut impl Layer, is_frozen: impl Fn(&Parameter) -> bool) {
    for parameter in parameters_mut(model) {
        let trainable = !is_frozen(parameter);
        parameter.set_trainable(trainable).unwrap();
    }
}

/// A layer with its optimizer, and the names of what a checkpoint has of the latter.
struct One {
    fc: Linear,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
}

impl One {
    fn new(seed: u64, recipe: &Recipe) -> Self {
        let fc = linear("fc", 32, 32, seed);
        let scaling = Scaling::new(&fc, &device()).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        Self { fc, optimizer, scaling, recipe: recipe.clone() }
    }

    fn step(&mut self) -> Vec<u32> {
        let (x, dy) = (noise([16, 32], 1), noise([16, 32], 2));
        let options = AutocastOptions::default();
        let (_, dx) = step(&mut self.scaling, &self.recipe, &options, &mut self.fc, &x, &dy).unwrap();
        self.optimizer.step(&mut self.fc, 0.01).unwrap();
        zero_grad(&mut self.fc).unwrap();
        bits(&dx)
    }

    fn freeze(&mut self, is_frozen: bool) {
        parameters_mut(&mut self.fc)[0].set_trainable(!is_frozen).unwrap();
    }

    fn quantize(&mut self) {
        assert_eq!(self.optimizer.quantize_weights(&mut self.fc, &self.recipe).unwrap(), 1);
    }

    fn save(&self, dir: &Path) {
        checkpoint::save(dir, &self.fc, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
    }

    /// The parts of the weight's state that a checkpoint has.
    fn state(&self) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        self.save(dir.path());
        let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let parts = tensors.names().into_iter().filter_map(|name| name.strip_prefix("optimizer.fc.weight."));
        let mut parts: Vec<_> = parts.map(str::to_owned).collect();
        parts.sort();
        parts
    }

    fn weight(&self) -> Vec<f32> {
        values(&self.fc.weight().values(DType::F32).unwrap())
    }
}

#[test]
fn an_optimizer_quantizes_a_frozen_weight_and_leaves_it_frozen() {
    for steps in [0, 2] {
        let mut one = One::new(1, &turned());
        (0..steps).for_each(|_| drop(one.step()));
        one.freeze(true);
        one.quantize();
        let weight = one.fc.weight();
        assert!(!weight.is_trainable() && weight.main_grad().numel() == 0);
        assert!(weight.fp8().unwrap().columnwise().is_some());
        let before = one.weight();
        one.step();
        assert_eq!(before, one.weight());
        // Not even moments from before.
        one.freeze(false);
        assert!(one.state().is_empty());
        one.step();
        assert_eq!(one.state(), ["exp_avg", "exp_avg_sq", "main_param"]);
        assert_ne!(before, one.weight());
    }
}

#[test]
fn a_step_frees_the_state_of_parameters_that_were_frozen() {
    let mut one = One::new(1, &turned());
    one.step();
    one.freeze(true);
    assert!(one.state().is_empty(), "it is not saved");
    one.freeze(false);
    assert_eq!(one.state(), ["exp_avg", "exp_avg_sq"], "nothing was lost without a step");
    one.freeze(true);
    one.step();
    one.freeze(false);
    assert!(one.state().is_empty());
    // Steps without a parameter to update free it, too.
    one.step();
    freeze(&mut one.fc, |_| true);
    one.optimizer.step(&mut one.fc, 0.1).unwrap();
    freeze(&mut one.fc, |_| false);
    assert!(one.state().is_empty());
}

#[test]
fn a_layer_of_ones_own_adds_nothing_to_a_frozen_parameter() {
    let mut w = Parameter::new("w", noise([3], 1)).unwrap();
    let dw = noise([3], 2);
    w.accumulate(&dw).unwrap();
    w.accumulate(&dw).unwrap();
    assert_eq!(values(w.main_grad()), values(&ops::scale(&dw, 2.0).unwrap()));
    assert!(error(w.accumulate(&noise([4], 3))).contains("[3] and [4]"));
    w.set_trainable(false).unwrap();
    w.accumulate(&dw).unwrap();
    assert_eq!(w.main_grad().numel(), 0);
}
