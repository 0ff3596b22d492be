//! Weights that are stored in FP8: the same training as with weights in f32, from codes alone.

use super::support::{
    bits, block_options, current, delayed, device, error, gpt, ids, in_dtype, linear, noise, off,
    relative_rms, rng, short, step, unless_simulated, values,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// A model in training.
pub(crate) struct Job {
    pub(crate) model: Gpt,
    pub(crate) optimizer: AdamW,
    pub(crate) scaling: Scaling,
    recipe: Recipe,
    pub(crate) lr: f32,
}

impl Job {
    pub(crate) fn plain(seed: u64, recipe: &Recipe) -> Self {
        let model = gpt(seed);
        let scaling = Scaling::new(&model, &device()).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        Self { model, optimizer, scaling, recipe: recipe.clone(), lr: 0.01 }
    }

    pub(crate) fn fp8(seed: u64, recipe: &Recipe) -> Self {
        let mut job = Self::plain(seed, recipe);
        assert_eq!(job.optimizer.quantize_weights(&mut job.model, recipe).unwrap(), 8);
        assert_eq!(job.optimizer.quantize_weights(&mut job.model, recipe).unwrap(), 0, "they are");
        job
    }

    fn new(fp8_weights: bool, seed: u64, recipe: &Recipe) -> Self {
        if fp8_weights { Self::fp8(seed, recipe) } else { Self::plain(seed, recipe) }
    }

    /// The bits of each step's loss.
    fn run(&mut self, steps: std::ops::Range<u64>) -> Vec<u32> {
        steps.map(|i| self.step(i).to_bits()).collect()
    }

    pub(crate) fn step(&mut self, i: u64) -> f32 {
        let (ids, targets) = batch(i);
        self.queue(&ids, &targets).unwrap().item().unwrap()
    }

    /// Computes the gradients and returns the loss.
    pub(crate) fn backward(&mut self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (loss, saved) = self.scaling.in_autocast(&self.recipe, |cx| self.model.loss(cx, ids, targets))?;
        self.scaling.in_backward(|cx| self.model.loss_backward(cx, saved))?;
        Ok(loss)
    }

    /// Queues a step and returns its loss.
    pub(crate) fn queue(&mut self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let loss = self.backward(ids, targets)?;
        self.optimizer.step(&mut self.model, self.lr)?;
        zero_grad(&mut self.model)?;
        Ok(loss)
    }

    fn evaluate(&mut self) -> u32 {
        let (ids, targets) = (ids([2, 8], 20, 50), ids([2, 8], 20, 51));
        let mut cx = self.scaling.eval(&self.recipe).unwrap();
        self.model.loss(&mut cx, &ids, &targets).unwrap().0.item().unwrap().to_bits()
    }

    fn save(&self, dir: &Path) {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
    }

    fn load(&mut self, dir: &Path) -> Result<()> {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).map(drop)
    }

    /// The bytes of all codes and factors.
    pub(crate) fn codes(&self) -> Vec<(Vec<u8>, Vec<u32>)> {
        let codes = parameters(&self.model).into_iter().filter_map(Parameter::fp8);
        codes.map(|codes| (codes.codes().unwrap(), factors(codes.scale_inv()))).collect()
    }
}

/// Ids and targets of step `i`.
pub(crate) fn batch(i: u64) -> (Tensor, Tensor) {
    (ids([2, 8], 20, i), ids([2, 8], 20, 100 + i))
}

fn factors(scale_inv: &Tensor) -> Vec<u32> {
    match scale_inv.dtype() {
        DType::U8 => scale_inv.to_vec::<u8>().unwrap().into_iter().map(u32::from).collect(),
        _ => bits(scale_inv),
    }
}

/// Recipes without a history: the scale of a weight is that of its values, wherever it is quantized.
pub(crate) fn stateless() -> Vec<Recipe> {
    let names = unless_simulated(
        vec!["current", "rowwise", "rowwise-gw-hp", "block", "deepseek", "mxfp8", "nvfp4"],
        vec!["current", "block", "nvfp4"],
    );
    let known = |name: &&str| Recipe::NAMES.contains(name);
    let recipes: Vec<_> =
        names.into_iter().filter(known).map(|name| Recipe::from_name(name).unwrap()).collect();
    assert!(recipes.len() >= 2);
    recipes
}

#[test]
fn training_has_the_bits_of_weights_in_f32() {
    for recipe in stateless() {
        let (mut plain, mut fp8) = (Job::plain(3, &recipe), Job::fp8(3, &recipe));
        assert_eq!(plain.run(0..4), fp8.run(0..4), "{recipe}");
        assert_eq!(plain.evaluate(), fp8.evaluate(), "{recipe}");
    }
}

#[test]
fn delayed_scaling_trains_alike_and_its_weight_slots_do_not_run() {
    let (mut plain, mut fp8) = (Job::plain(3, &delayed()), Job::fp8(3, &delayed()));
    let first = [plain.step(0), fp8.step(0)];
    assert_eq!(first[0], first[1], "the first scale is that of the tensor");
    for i in 1..8 {
        let losses = [plain.step(i), fp8.step(i)];
        assert!((losses[0] - losses[1]).abs() < 0.03 * losses[0], "{i}: {losses:?}");
    }
    let slots = fp8.scaling.slot_reports().unwrap();
    let ran = |end: &str| slots.iter().filter(|slot| slot.name.ends_with(end) && slot.calibrated).count();
    assert_eq!((ran(".weight"), ran(".input")), (0, 8));
}

#[test]
fn a_weight_takes_a_quarter_of_f32() {
    for recipe in stateless().into_iter().chain([delayed()]) {
        let job = Job::fp8(3, &recipe);
        let weights = parameters(&job.model).into_iter().filter_map(|p| p.fp8().map(|codes| (p, codes)));
        let (mut bytes, mut f32_bytes) = (0, 0);
        for (parameter, codes) in weights {
            let factors = codes.scale_inv();
            bytes += codes.codes().unwrap().len() + factors.shape().numel() * factors.dtype().size();
            f32_bytes += 4 * parameter.shape().numel();
            assert_eq!(parameter.tensor().dtype(), DType::U8);
            assert_eq!(parameter.dtype(), DType::F32);
        }
        // Rows of 32 values have a factor of four bytes each.
        let most = match recipe.to_string().as_str() {
            "nvfp4" => 0.13,
            _ if codes_have_rows(&job) => 0.29,
            _ => 0.27,
        };
        assert!(bytes as f64 <= most * f32_bytes as f64, "{recipe}: {bytes} of {f32_bytes}");
    }
}

fn codes_have_rows(job: &Job) -> bool {
    parameters(&job.model).into_iter().filter_map(Parameter::fp8).any(|codes| codes.scale_inv().numel() > 64)
}

#[test]
fn inference_has_codes_alone() {
    for recipe in stateless() {
        let (mut plain, mut fp8) = (Job::plain(3, &recipe), Job::plain(3, &recipe));
        assert_eq!(quantize_weights(&mut fp8.model, &recipe).unwrap(), 8);
        assert_eq!(plain.evaluate(), fp8.evaluate(), "{recipe}");
        for parameter in parameters(&fp8.model) {
            let Some(codes) = parameter.fp8() else { continue };
            assert!(!parameter.is_trainable());
            assert!(parameter.main_grad().numel() == 0 && codes.columnwise().is_none());
        }
    }
}

#[test]
fn checkpoints_continue_in_either_kind_of_model() {
    for recipe in stateless() {
        let mut uninterrupted = Job::plain(3, &recipe);
        uninterrupted.run(0..3);
        let rest = uninterrupted.run(3..6);
        for [from, to] in [[false, true], [true, false], [true, true]] {
            let dir = tempfile::tempdir().unwrap();
            let mut job = Job::new(from, 3, &recipe);
            job.run(0..3);
            job.save(dir.path());
            let mut resumed = Job::new(to, 4, &recipe);
            resumed.load(dir.path()).unwrap();
            if from && to {
                assert!(job.codes() == resumed.codes(), "{recipe}");
            }
            assert_eq!(resumed.run(3..6), rest, "{recipe}: from FP8 {from} to FP8 {to}");
        }
    }
}

#[test]
fn parameters_alone_are_saved_and_loaded_both_ways() {
    for recipe in stateless() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let (mut plain, mut fp8) = (Job::plain(3, &recipe), Job::plain(3, &recipe));
        quantize_weights(&mut fp8.model, &recipe).unwrap();
        checkpoint::save_parameters(&file("f32"), &plain.model).unwrap();
        checkpoint::save_parameters(&file("fp8"), &fp8.model).unwrap();
        let expected = plain.evaluate();
        let load = |fp8_weights: bool, name: &str| {
            let mut job = Job::plain(9, &recipe);
            if fp8_weights {
                quantize_weights(&mut job.model, &recipe).unwrap();
            }
            checkpoint::load_parameters(&file(name), &mut job.model).unwrap();
            job
        };
        let mut from_values = load(true, "f32");
        assert_eq!((from_values.evaluate(), from_values.codes()), (expected, fp8.codes()), "{recipe}");
        let mut from_codes = load(true, "fp8");
        assert_eq!((from_codes.evaluate(), from_codes.codes()), (expected, fp8.codes()), "{recipe}");
        let mut dequantized = load(false, "fp8");
        for (ours, theirs) in parameters(&dequantized.model).into_iter().zip(parameters(&fp8.model)) {
            let values = theirs.values(DType::F32).unwrap();
            assert_eq!(bits(ours.tensor()), bits(&values), "{recipe} {}", ours.name());
        }
        dequantized.evaluate();
    }
}

#[test]
fn files_of_another_format_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    Job::fp8(3, &current()).save(dir.path());
    let block = Recipe::from_name("block").unwrap();
    let mut job = Job::fp8(3, &block);
    let before = job.codes();
    let text = error(job.load(dir.path()));
    assert!(
        text.ends_with(
            "`model.gpt.blocks.0.attention.qkv.weight` is stored in E4M3 with one factor: expected E4M3 with a factor for each \
             128x128, as in this model; quantize its weights with the recipe they were saved with"
        ),
        "{text}"
    );
    assert!(before == job.codes());
}

#[test]
fn a_scope_of_another_granularity_is_refused() {
    let mut fc = linear("fc", 32, 16, 1);
    assert_eq!(quantize_weights(&mut fc, &current()).unwrap(), 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let x = noise([16, 32], 1);
    let block = Recipe::from_name("block").unwrap();
    let text = error(scaling.in_autocast(&block, |cx| fc.forward(cx, &x)));
    assert_eq!(
        text,
        "slot `fc.weight`: the weight is stored in E4M3 with one scale, but this scope's recipe quantizes it in E4M3 with a \
         scale for each 128x128: use the recipe that the weight was quantized with, or keep its values in high precision"
    );
    // High precision dequantizes, and per-tensor recipes read the codes as they are.
    let codes = fc.weight().values(DType::F32).unwrap();
    let mut other = linear("fc", 32, 16, 1);
    parameters_mut(&mut other)[0].set(codes).unwrap();
    let forward = |fc: &Linear, scaling: &mut Scaling, recipe: &Recipe, options: &AutocastOptions| {
        let mut cx = scaling.scope(recipe, options).unwrap();
        let y = bits(&fc.forward(&mut cx, &x).unwrap().0);
        cx.commit().unwrap();
        y
    };
    let mut others = Scaling::new(&other, &device()).unwrap();
    let high = forward(&fc, &mut scaling, &current(), &off());
    assert_eq!(high, forward(&other, &mut others, &current(), &off()));
    assert_ne!(high, forward(&fc, &mut scaling, &delayed(), &AutocastOptions::default()));
}

#[test]
fn recipes_say_which_weights_are_stored() {
    let count = |recipe: &Recipe| quantize_weights(&mut gpt(1), recipe);
    assert_eq!(count(&Recipe::off()).unwrap(), 0);
    assert_eq!(count(&Recipe::by_name([("*.fc1", Recipe::off())], short())).unwrap(), 6);
    assert_eq!(count(&Recipe::by_name([("gpt.blocks.0.*.weight", Recipe::off())], current())).unwrap(), 4);
    for (fprop, dgrad) in [(true, false), (false, true)] {
        let overrides = DelayedScaling { override_linear_precision: (fprop, dgrad, false), ..short() };
        assert_eq!(count(&overrides.into()).unwrap(), 0, "a GEMM reads the values");
    }
    let wgrad = DelayedScaling { override_linear_precision: (false, false, true), ..short() };
    assert_eq!(count(&wgrad.into()).unwrap(), 8);
    assert!(error(count(&Recipe::by_name([("nothing", current())], current()))).contains("matches no slot"));
    assert!(error(count(&DelayedScaling { interval: 0, ..short() }.into())).contains("interval = 0"));
}

#[test]
fn an_optimizer_of_ones_own_is_refused() {
    let mut fc = linear("fc", 32, 16, 1);
    quantize_weights(&mut fc, &current()).unwrap();
    let text = error(parameters_mut(&mut fc)[0].update(|_, _| Ok(())));
    assert_eq!(
        text,
        "`fc.weight` is stored in codes, which round small updates away: train it with an AdamW whose quantize_weights stored \
         it, which keeps f32 copies"
    );
}

#[test]
fn what_backward_needs_survives_a_step() {
    let recipe = current();
    let (x, dy) = (noise([16, 32], 1), noise([16, 16], 2));
    let dx = |steps_between: bool| {
        let mut fc = linear("fc", 32, 16, 1);
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        optimizer.quantize_weights(&mut fc, &recipe).unwrap();
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let (_, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x)).unwrap();
        if steps_between {
            step(&mut scaling, &recipe, &AutocastOptions::default(), &mut fc, &x, &dy).unwrap();
            optimizer.step(&mut fc, 0.5).unwrap();
        }
        bits(&scaling.in_backward(|cx| fc.backward(cx, saved, &dy)).unwrap())
    };
    assert_eq!(dx(false), dx(true));
}

#[test]
fn a_block_that_is_computed_again_reads_the_same_codes() {
    for recipe in [current(), delayed()] {
        let run = |recompute| {
            let options = TransformerLayerOptions { recompute, ..block_options() };
            let mut block = TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap();
            let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
            assert_eq!(optimizer.quantize_weights(&mut block, &recipe).unwrap(), 4);
            let mut scaling = Scaling::new(&block, &device()).unwrap();
            let mut results = Vec::new();
            for i in 0..3 {
                let (x, dy) = (noise([2, 6, 32], i), noise([2, 6, 32], 9 + i));
                let options = AutocastOptions::default();
                let (y, dx) = step(&mut scaling, &recipe, &options, &mut block, &x, &dy).unwrap();
                results.extend([bits(&y), bits(&dx)]);
                optimizer.step(&mut block, 0.01).unwrap();
                zero_grad(&mut block).unwrap();
            }
            results
        };
        assert!(run(RecomputeLevel::None) == run(RecomputeLevel::Block), "{recipe}");
    }
}

#[test]
fn parameters_of_16_bits_keep_their_f32_copies() {
    for dtype in [DType::BF16, DType::F16] {
        let options =
            LinearOptions { in_features: 32, out_features: 16, params_dtype: dtype, ..Default::default() };
        let run = |fp8_weights: bool| {
            let mut fc = Linear::new("fc", options.clone(), &device(), &mut rng(1)).unwrap();
            let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
            let mut scaling = Scaling::new(&fc, &device()).unwrap();
            let mut outputs = Vec::new();
            for i in 0..4 {
                if fp8_weights && i == 2 {
                    assert_eq!(optimizer.quantize_weights(&mut fc, &current()).unwrap(), 1);
                    assert_eq!(fc.weight().dtype(), dtype);
                }
                let (x, dy) = (noise([16, 32], i), noise([16, 16], 9 + i));
                let (y, _) = step(&mut scaling, &current(), &in_dtype(dtype), &mut fc, &x, &dy).unwrap();
                outputs.push(values(&y));
                optimizer.step(&mut fc, 0.01).unwrap();
                zero_grad(&mut fc).unwrap();
            }
            outputs
        };
        // The codes are those of the f32 copy, not of the copy rounded to 16 bits.
        let (plain, fp8) = (run(false), run(true));
        assert_eq!(plain[..2], fp8[..2]);
        assert!(relative_rms(&plain[3], &fp8[3]) < 0.02);
    }
}

#[test]
fn a_step_that_overflows_leaves_the_codes() {
    let mut job = Job::fp8(3, &current());
    job.run(0..2);
    let before = job.codes();
    let infinite = Tensor::full(f32::INFINITY, [32], DType::F32, &device()).unwrap();
    let norm = parameters_mut(&mut job.model).into_iter().find(|p| p.shape().len() == 1).unwrap();
    *norm.main_grad_mut() = infinite;
    job.optimizer.step(&mut job.model, 0.01).unwrap();
    assert_eq!(job.optimizer.skipped_steps().unwrap(), 1);
    assert!(before == job.codes());
    checkpoint::expect_finite(&job.model, &job.optimizer).unwrap();
}

#[test]
fn ranks_exchange_codes() {
    let run = |group: std::sync::Arc<dyn ProcessGroup>| -> Result<()> {
        let mut fc = linear("fc", 32, 16, group.rank() as u64);
        let (mut optimizer, mut scaling) =
            (AdamW::new(AdamWOptions::default())?, Scaling::new(&fc, &device())?);
        optimizer.quantize_weights(&mut fc, &current())?;
        let text = error(agree(&fc, &optimizer, &scaling, &*group));
        assert!(text.contains("the value of `fc.weight` differs between rank 1 and rank 0"), "{text}");
        broadcast_state(&mut fc, &mut optimizer, &mut scaling, &*group, 1)?;
        agree(&fc, &optimizer, &scaling, &*group)?;
        for i in 0..2 {
            let (x, dy) = (noise([16, 32], group.rank() as u64), noise([16, 16], i));
            step(&mut scaling, &current(), &AutocastOptions::default(), &mut fc, &x, &dy)?;
            all_reduce_gradients(&mut fc, &*group)?;
            optimizer.step(&mut fc, 0.01)?;
            zero_grad(&mut fc)?;
            agree(&fc, &optimizer, &scaling, &*group)?;
        }
        let mut fresh = linear("fc", 32, 16, group.rank() as u64);
        quantize_weights(&mut fresh, &current())?;
        broadcast_parameters(&mut fresh, &*group)?;
        let first = linear("fc", 32, 16, 0);
        let expected = first.weight().values(DType::F32)?;
        assert!(relative_rms(&values(&expected), &values(&fresh.weight().values(DType::F32)?)) < 0.04);
        // A rank whose weight is frozen would not take part in the sum.
        parameters_mut(&mut fc)[0].set_trainable(false)?;
        if group.rank() == 1 {
            parameters_mut(&mut fc)[0].set_trainable(true)?;
        }
        let text = error(all_reduce_gradients(&mut fc, &*group));
        assert!(text.contains("whether `fc.weight` is frozen"), "{text}");
        Ok(())
    };
    thread::scope(|scope| {
        let groups = local("dp", 2, Duration::from_secs(20)).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
    .unwrap();
}
