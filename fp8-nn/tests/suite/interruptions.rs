//! Random sequences of calls, interrupted by saving and loading at random places, against the same sequences without a break.
//!
//! `FP8_TEST_SEQUENCES` is the number of sequences under each recipe (default: 20), `FP8_TEST_SEED` the first seed (default: 0).

use crate::combinations::number;
use crate::every_device::support::{
    bits, by_name, custom, device, linear, noise, parameter_bits, rng, rows_by_name, short, unless_simulated,
};
use fp8_nn::fp8_recipe::{ArenaState, CustomAmax};
use fp8_nn::prelude::*;
use fp8_nn::rand::Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Two layers. The second runs in a nested scope now and then.
#[derive(Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

composite!(Net { first, second });

impl Net {
    fn new() -> Self {
        // One weight starts at zero, which says nothing about its scale.
        let mut net = Self { first: linear("first", 16, 24, 1), second: linear("second", 24, 16, 2) };
        let zeros = Tensor::zeros([24, 16], DType::F32, &device()).unwrap();
        net.weight("first.weight").set(zeros).unwrap();
        net
    }

    fn weight(&mut self, name: &str) -> &mut Parameter {
        parameters_mut(self).into_iter().find(|parameter| &**parameter.name() == name).unwrap()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    /// Forward and backward under a recipe, the second layer perhaps under another.
    Train {
        recipe: usize,
        nested: Option<usize>,
    },
    /// Forward alone.
    Forward {
        recipe: usize,
    },
    Evaluate {
        recipe: usize,
    },
    /// A forward scope that is dropped; a backward one, if `backward`.
    Drop {
        recipe: usize,
        backward: bool,
    },
    Discard {
        recipe: usize,
    },
    Calibrate {
        recipe: usize,
    },
    Step {
        lr: f32,
    },
    Freeze {
        layer: usize,
        frozen: bool,
    },
    /// A step that changes nothing.
    Skip,
    Interrupt,
}

fn draw(rng: &mut impl Rng) -> Call {
    // The first recipe is the one of the sequence, the others join now and then.
    let recipe = [0, 0, 0, 0, 0, 1, 2][rng.random_range(0..7)];
    let nested = [None, None, None, Some(0), Some(1), Some(2)][rng.random_range(0..6)];
    match rng.random_range(0..100) {
        0..36 => Call::Train { recipe, nested },
        36..42 => Call::Forward { recipe },
        42..52 => Call::Evaluate { recipe },
        52..58 => Call::Drop { recipe, backward: rng.random() },
        58..60 => Call::Discard { recipe },
        60..63 => Call::Calibrate { recipe },
        63..75 => Call::Step { lr: [0.5, 4.0][rng.random_range(0..2)] },
        75..85 => Call::Freeze { layer: rng.random_range(0..2), frozen: rng.random() },
        85..88 => Call::Skip,
        _ => Call::Interrupt,
    }
}

struct Run {
    net: Net,
    scaling: Scaling,
    recipes: [Recipe; 3],
    is_frozen: [bool; 2],
    /// The number of the next call, from which its data comes.
    calls: u64,
    results: Vec<Vec<u32>>,
}

impl Run {
    fn new(recipes: &[Recipe; 3]) -> Self {
        let net = Net::new();
        let scaling = Scaling::new(&net, &device()).unwrap();
        let (is_frozen, results) = ([false; 2], Vec::new());
        Self { net, scaling, recipes: recipes.clone(), is_frozen, calls: 0, results }
    }

    fn call(&mut self, call: Call) {
        self.calls += 1;
        match call {
            Call::Train { recipe, nested } => self.train(recipe, nested, true),
            Call::Forward { recipe } => self.train(recipe, None, false),
            Call::Evaluate { recipe } => {
                let x = self.x();
                let mut cx = self.scaling.eval(&self.recipes[recipe]).unwrap();
                let (h, _) = self.net.first.forward(&mut cx, &x).unwrap();
                let (y, _) = self.net.second.forward(&mut cx, &h).unwrap();
                self.results.push(bits(&y));
            }
            Call::Drop { recipe, backward } => self.leave(recipe, backward),
            Call::Discard { recipe } => {
                let x = self.x();
                let mut cx = self.scaling.autocast(&self.recipes[recipe]).unwrap();
                self.net.first.forward(&mut cx, &x).unwrap();
                cx.discard().unwrap();
            }
            Call::Calibrate { recipe } => {
                let options = AutocastOptions { enabled: false, calibrating: true, ..Default::default() };
                let x = self.x();
                let mut cx = self.scaling.scope(&self.recipes[recipe], &options).unwrap();
                let (y, _) = self.net.first.forward(&mut cx, &x).unwrap();
                cx.commit().unwrap();
                self.results.push(bits(&y));
            }
            Call::Step { lr } => self.step(lr),
            Call::Skip => self.step(0.0),
            Call::Freeze { layer, frozen } => {
                self.is_frozen[layer] = frozen;
                self.set_frozen();
            }
            // Training stops between steps.
            Call::Interrupt => fp8_nn::zero_grad(&mut self.net).unwrap(),
        }
    }

    /// Now and then an outlier, so that scales move.
    fn x(&self) -> Tensor {
        let x = noise([4, 16], self.calls);
        if self.calls.is_multiple_of(5) { ops::scale(&x, 9.0).unwrap() } else { x }
    }

    fn train(&mut self, recipe: usize, nested: Option<usize>, backward: bool) {
        let x = self.x();
        let mut cx = self.scaling.autocast(&self.recipes[recipe]).unwrap();
        let (h, first) = self.net.first.forward(&mut cx, &x).unwrap();
        let (y, second) = match nested {
            Some(recipe) => {
                self.net.second.forward(&mut cx.nested(&self.recipes[recipe]).unwrap(), &h).unwrap()
            }
            None => self.net.second.forward(&mut cx, &h).unwrap(),
        };
        cx.commit().unwrap();
        self.results.push(bits(&y));
        if backward {
            let mut cx = self.scaling.backward().unwrap();
            let dh = self.net.second.backward(&mut cx, second, &noise([4, 16], 7 * self.calls)).unwrap();
            let dx = self.net.first.backward(&mut cx, first, &dh).unwrap();
            cx.commit().unwrap();
            self.results.push(bits(&dx));
        }
    }

    fn leave(&mut self, recipe: usize, backward: bool) {
        let x = self.x();
        let mut cx = self.scaling.autocast(&self.recipes[recipe]).unwrap();
        let (h, saved) = self.net.first.forward(&mut cx, &x).unwrap();
        if backward {
            cx.commit().unwrap();
            let mut cx = self.scaling.backward().unwrap();
            self.net.first.backward(&mut cx, saved, &h).unwrap();
            drop(cx);
            fp8_nn::zero_grad(&mut self.net).unwrap();
        }
    }

    /// SGD, which keeps nothing that would have to be saved.
    fn step(&mut self, lr: f32) {
        for parameter in parameters_mut(&mut self.net) {
            if parameter.is_trainable() && lr > 0.0 {
                let update = |value: &mut Tensor, grad: &Tensor| {
                    *value = ops::add(value, &ops::scale(grad, -lr * 1e-3)?)?;
                    Ok(())
                };
                parameter.update(update).unwrap();
            }
            parameter.shared_version().end_step();
        }
        fp8_nn::zero_grad(&mut self.net).unwrap();
    }

    fn set_frozen(&mut self) {
        for (name, frozen) in ["first.weight", "second.weight"].into_iter().zip(self.is_frozen) {
            self.net.weight(name).set_trainable(!frozen).unwrap();
        }
    }

    /// Continues in a model of its own, from a file.
    fn interrupt(&mut self, dir: &Path) {
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        checkpoint::save(dir, &self.net, &optimizer, &self.scaling, &BTreeMap::new()).unwrap();
        let recipes = self.recipes.clone();
        let before = std::mem::replace(self, Self::new(&recipes));
        (self.is_frozen, self.calls, self.results) = (before.is_frozen, before.calls, before.results);
        self.set_frozen();
        checkpoint::load(dir, &mut self.net, &mut optimizer, &mut self.scaling).unwrap();
    }

    /// The arenas, whatever their order.
    fn arenas(&self) -> Vec<ArenaState> {
        let mut arenas = self.scaling.state().unwrap().arenas;
        arenas.sort_by_key(|of| (of.recipe.clone(), of.direction.name(), of.amax_history.len()));
        arenas
    }
}

fn compare_last(seed: u64, calls: &[Call], undisturbed: &Run, interrupted: &Run) {
    let of = format!("seed {seed} under {} after {calls:#?}", undisturbed.recipes[0]);
    assert_eq!(undisturbed.results.last(), interrupted.results.last(), "results of {of}");
    let [expected, found] = [undisturbed, interrupted].map(Run::arenas);
    assert_eq!(expected.len(), found.len(), "arenas of {of}");
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected, found, "state of {of}");
    }
}

fn compare(recipes: &[Recipe; 3], seed: u64) {
    let (mut rng, dir) = (rng(seed), tempfile::tempdir().unwrap());
    let [mut undisturbed, mut interrupted] = [Run::new(recipes), Run::new(recipes)];
    let mut calls = Vec::new();
    for _ in 0..rng.random_range(4..24) {
        let call = draw(&mut rng);
        calls.push(call);
        undisturbed.call(call);
        interrupted.call(call);
        if call == Call::Interrupt {
            interrupted.interrupt(dir.path());
        }
        compare_last(seed, &calls, &undisturbed, &interrupted);
    }
    assert_eq!(parameter_bits(&undisturbed.net), parameter_bits(&interrupted.net));
}

/// Each recipe, and one that differs in the length of its history alone.
fn pairs() -> Vec<[Recipe; 2]> {
    let lengths = |recipe: DelayedScaling| {
        [3, 6].map(|amax_history_len| DelayedScaling { amax_history_len, ..recipe.clone() }.into())
    };
    let largest = CustomAmax {
        name: "twice the newest".into(),
        function: Arc::new(|window: &[f32]| window.last().map_or(0.0, |newest| 2.0 * newest)),
    };
    let te = DelayedScaling::default().with_te_rules();
    let delayed = [
        DelayedScaling::default(),
        te.clone(),
        DelayedScaling { interval: 3, ..te },
        DelayedScaling::te_v0(),
        DelayedScaling { calibrate_first_step: false, ..Default::default() },
        DelayedScaling { interval: 2, amax_compute_algo: AmaxComputeAlgo::MostRecent, ..Default::default() },
        DelayedScaling { amax_compute_algo: AmaxComputeAlgo::Custom(largest), ..Default::default() },
        DelayedScaling { amax_compute_algo: AmaxComputeAlgo::MaxOfLast(2), ..Default::default() },
        DelayedScaling { amax_compute_algo: AmaxComputeAlgo::Average { decay: 0.75 }, ..Default::default() },
        DelayedScaling::default().with_jax_rules(),
    ];
    let mut pairs: Vec<[Recipe; 2]> = delayed.into_iter().map(lengths).collect();
    let one_row = Recipe::from(DelayedScaling { amax_history_len: 1, ..DelayedScaling::te_v0() });
    pairs.push([one_row, short().into()]);
    let others = ["current", "rowwise", "block", "mxfp8"].map(|name| Recipe::from_name(name).unwrap());
    let others = others.into_iter().chain([custom(), by_name(), rows_by_name()]);
    pairs.extend(others.map(|recipe| [recipe, short().into()]));
    pairs
}

#[test]
fn saving_and_loading_anywhere_changes_no_bit() {
    let first = number("FP8_TEST_SEED", 0);
    let count = number("FP8_TEST_SEQUENCES", unless_simulated(20, 1));
    for [recipe, other] in pairs() {
        let joins = DelayedScaling { margin: 1, ..short() }.into();
        let recipes = [recipe, other, joins];
        (first..first + count).for_each(|seed| compare(&recipes, seed));
    }
}
