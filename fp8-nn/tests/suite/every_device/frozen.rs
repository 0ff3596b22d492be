//! Frozen parameters: training through weights that are codes, what the optimizer has of them, and checkpoints of them.

use super::fp8_weights::{Job, batch, stateless};
use super::support::{
    bits, device, error, linear, noise, recipes, relative_rms, step, unless_simulated, values,
};
use fp8_nn::fp8_kernels::fp8_format::Blocks;
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

/// The gradients of all parameters after a forward and a backward pass.
fn gradients(job: &mut Job) -> Vec<f32> {
    let (ids, targets) = batch(0);
    job.backward(&ids, &targets).unwrap();
    let all = parameters(&job.model).into_iter().flat_map(|p| values(p.main_grad())).collect();
    zero_grad(&mut job.model).unwrap();
    all
}

#[test]
fn training_passes_through_codes_under_every_recipe() {
    for recipe in recipes() {
        let is_weight = |p: &Parameter| p.name().contains(".blocks.") && p.shape().len() == 2;
        let [mut plain, mut once, mut twice] = [(); 3].map(|()| Job::plain(3, &recipe));
        [&mut plain, &mut once].into_iter().for_each(|job| freeze(&mut job.model, is_weight));
        assert_eq!(once.optimizer.quantize_weights(&mut once.model, &recipe).unwrap(), 8, "{recipe}");
        assert_eq!(quantize_weights(&mut twice.model, &recipe).unwrap(), 8, "{recipe}");
        // Without a history, codes are those of the scope itself. Codes with one factor are transposed exactly.
        let has_history = !stateless().iter().any(|other| other.to_string() == recipe.to_string());
        let is_exact = |job: &Job| {
            let codes = parameters(&job.model).into_iter().filter_map(Parameter::fp8);
            codes.into_iter().all(|codes| {
                codes.columnwise().is_some()
                    || codes.blocks().is_none_or(|b| matches!(b, Blocks::B128x128 | Blocks::B16x16))
            })
        };
        assert!(is_exact(&once), "{recipe}");
        let again = if is_exact(&twice) { 0.0 } else { 0.1 };
        let [expected, of_once, of_twice] = [&mut plain, &mut once, &mut twice].map(gradients);
        let found = [relative_rms(&expected, &of_once), relative_rms(&of_once, &of_twice)];
        assert!(found[0] <= if has_history { 0.2 } else { 0.0 } && found[1] <= again, "{recipe}: {found:?}");
        for job in [&mut once, &mut twice] {
            let before = job.codes();
            let first = job.step(0);
            let last = (1..unless_simulated(10, 3)).map(|_| job.step(0)).last().unwrap();
            assert!(last < first, "{recipe}: {last} after {first}");
            assert!(before == job.codes(), "{recipe}: frozen codes have changed");
            assert!(parameters(&job.model).into_iter().all(|p| p.fp8().is_none() || !p.is_trainable()));
        }
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

    fn load(&mut self, dir: &Path) {
        checkpoint::load(dir, &mut self.fc, &mut self.optimizer, &mut self.scaling).unwrap();
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
fn a_training_scope_makes_the_codes_that_dgrad_reads() {
    for name in Recipe::NAMES {
        let recipe = Recipe::from_name(name).unwrap();
        let [mut once, mut twice] = [(); 2].map(|()| One::new(1, &recipe));
        once.freeze(true);
        once.quantize();
        assert_eq!(quantize_weights(&mut twice.fc, &recipe).unwrap(), 1);
        let dx =
            [&mut once, &mut twice].map(|one| one.step().into_iter().map(f32::from_bits).collect::<Vec<_>>());
        let found = relative_rms(&dx[0], &dx[1]);
        assert!(found < 0.05, "{name}: {found}");
        // They last as long as the operand.
        assert!(twice.fc.weight().fp8().unwrap().columnwise().is_none(), "{name}");
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
fn a_weight_that_was_quantized_without_its_optimizer_is_trained_when_it_is_unfrozen() {
    let mut one = One::new(1, &turned());
    one.step();
    assert_eq!(one.state(), ["exp_avg", "exp_avg_sq"]);
    quantize_weights(&mut one.fc, &one.recipe).unwrap();
    one.freeze(false);
    let before = one.weight();
    one.step();
    assert_ne!(before, one.weight());
    assert_eq!(one.state(), ["exp_avg", "exp_avg_sq", "main_param"]);
}

#[test]
fn new_values_of_a_frozen_weight_keep_the_codes_that_dgrad_reads() {
    let dir = tempfile::tempdir().unwrap();
    let has_turned = |one: &One| one.fc.weight().fp8().unwrap().columnwise().is_some();
    let mut one = One::new(1, &turned());
    one.quantize();
    one.freeze(true);
    one.step();
    one.save(dir.path());
    let (dx, codes) = (one.step(), one.fc.weight().fp8().unwrap().codes().unwrap());
    parameters_mut(&mut one.fc)[0].set(noise([32, 32], 9)).unwrap();
    assert!(has_turned(&one));
    assert_ne!(one.step(), dx);
    one.load(dir.path());
    assert!(has_turned(&one));
    // The file has the codes of fprop. They stay as they are; those of dgrad are rounded a second time.
    assert_eq!(one.fc.weight().fp8().unwrap().codes().unwrap(), codes);
    one.step();
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
fn what_was_frozen_or_trained_in_a_file_may_be_either_in_the_model() {
    let [frozen, trained] = [true, false].map(|is_frozen| {
        let dir = tempfile::tempdir().unwrap();
        let mut one = One::new(1, &turned());
        one.step();
        one.freeze(is_frozen);
        one.step();
        // Unfrozen and not stepped yet.
        one.freeze(false);
        one.save(dir.path());
        (dir, one)
    });
    for (dir, mut one) in [frozen, trained] {
        for is_frozen in [false, true] {
            for fp8_weights in [false, true] {
                let mut resumed = One::new(2, &turned());
                resumed.freeze(is_frozen);
                if fp8_weights {
                    resumed.quantize();
                }
                resumed.load(dir.path());
                assert_eq!(resumed.optimizer.steps(), 2);
                assert!(!is_frozen || resumed.state().is_empty());
                // Once more, from what it saves.
                let again = tempfile::tempdir().unwrap();
                resumed.save(again.path());
                resumed.freeze(false);
                resumed.load(again.path());
                resumed.step();
                assert_eq!(resumed.state().len(), if fp8_weights { 3 } else { 2 });
            }
        }
        // Resumed training has the bits of training that went on.
        let mut resumed = One::new(2, &turned());
        resumed.load(dir.path());
        for _ in 0..2 {
            assert_eq!(one.step(), resumed.step());
            assert_eq!(one.weight(), resumed.weight());
        }
    }
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

/// The values that an f32 copy of the optimizer had before do not come back.
#[test]
fn a_frozen_weight_is_quantized_from_its_value() {
    let recipe = Recipe::from_name("current").unwrap();
    let weight = |set_before: bool| {
        let options = LinearOptions {
            in_features: 32,
            out_features: 32,
            params_dtype: DType::BF16,
            ..Default::default()
        };
        let mut fc = Linear::new("fc", options, &device(), &mut super::support::rng(1)).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        optimizer.step(&mut fc, 0.0).unwrap();
        let new = ops::cast(&noise([32, 32], 5), DType::BF16).unwrap();
        if set_before {
            parameters_mut(&mut fc)[0].set(new.clone()).unwrap();
        }
        parameters_mut(&mut fc)[0].set_trainable(false).unwrap();
        if !set_before {
            parameters_mut(&mut fc)[0].set(new).unwrap();
        }
        assert_eq!(optimizer.quantize_weights(&mut fc, &recipe).unwrap(), 1);
        values(&fc.weight().values(DType::F32).unwrap())
    };
    let expected = values(&noise([32, 32], 5));
    for set_before in [true, false] {
        let error = relative_rms(&expected, &weight(set_before));
        assert!(error < 0.05, "{error}");
    }
}

#[test]
fn two_parameters_of_one_name_are_refused_although_one_is_frozen() {
    #[derive(Debug)]
    struct Two {
        one: RmsNorm,
        other: RmsNorm,
    }
    composite!(Two { one, other });
    let options = fp8_nn::NormLayerOptions { hidden_size: 8, ..Default::default() };
    let norm = || RmsNorm::new("norm", &options, &device()).unwrap();
    let mut two = Two { one: norm(), other: norm() };
    parameters_mut(&mut two)[0].set_trainable(false).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let refused = error(optimizer.step(&mut two, 0.1));
    assert!(refused.contains("norm.weight"), "{refused}");
    assert_eq!(optimizer.steps(), 0);
}

#[test]
fn a_frozen_parameter_gets_no_gradient_from_zero_grad() {
    let mut w = Parameter::new("w", noise([4, 4], 1)).unwrap();
    w.set_trainable(false).unwrap();
    let shared = w.main_grad().clone();
    w.zero_grad().unwrap();
    assert_eq!((w.main_grad().numel(), shared.numel()), (0, 0));
}

/// Parameters that are trained get the same gradients, bit for bit, as in a model without frozen parameters, whatever is
/// recomputed or delayed.
#[test]
fn frozen_parameters_change_no_other_gradient() {
    let levels = unless_simulated(&RecomputeLevel::ALL[..], &[RecomputeLevel::Attention]);
    let recipe = Recipe::from_name("current").unwrap();
    for (&recompute, delay) in levels.iter().flat_map(|level| [(level, false), (level, true)]) {
        let run = |is_frozen: &dyn Fn(&Parameter) -> bool| {
            let options = GptOptions {
                tie_word_embeddings: true,
                layer: TransformerLayerOptions { recompute, ..super::support::gpt_options().layer },
                ..super::support::gpt_options()
            };
            let mut model = Gpt::new("gpt", &options, &device(), &mut super::support::rng(2)).unwrap();
            freeze(&mut model, is_frozen);
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            let (ids, targets) = batch(0);
            let (_, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &ids, &targets)).unwrap();
            let mut cx = scaling.backward().unwrap();
            if delay {
                cx.delay_wgrad();
            }
            model.loss_backward(&mut cx, saved).unwrap();
            let wgrads = cx.take_wgrads();
            cx.commit().unwrap();
            fp8_nn::backward_dw(&mut model, wgrads).unwrap();
            let gradients: BTreeMap<String, Vec<u32>> = parameters(&model)
                .into_iter()
                .filter(|p| p.is_trainable())
                .map(|p| (p.name().to_string(), bits(p.main_grad())))
                .collect();
            // Clipping reads what is trained alone.
            let expected = gradients.values().flatten().map(|&b| f64::from(f32::from_bits(b)).powi(2));
            let expected = expected.sum::<f64>().sqrt();
            let norm = f64::from(clip_grad_norm(&mut model, 1e-3).unwrap().item().unwrap());
            assert!((norm - expected).abs() < 1e-5 * expected, "{norm}, expected {expected}");
            gradients
        };
        let all = run(&|_| false);
        for part in ["qkv", "proj", "fc1", "fc2", "embedding", "norm", "bias"] {
            let some = run(&|p| p.name().contains(part));
            assert!(some.len() < all.len(), "{part}");
            for (name, gradient) in some {
                assert!(all[&name] == gradient, "{part} frozen, {recompute:?}, delayed {delay}: {name}");
            }
        }
    }
}
