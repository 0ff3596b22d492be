//! Training in f16 with a loss scaler.

use super::support::*;
use fp8_nn::fp8_dist::local;
use fp8_nn::fp8_kernels::ops::LossScaleState;
use fp8_nn::hand_over_gradients;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

fn options() -> LossScalerOptions {
    LossScalerOptions { init_scale: 1024.0, growth_interval: 3, ..Default::default() }
}

fn scaler(options: LossScalerOptions) -> LossScaler {
    LossScaler::new(options, &device()).unwrap()
}

/// A layer with f16 parameters, and its training.
struct Layers {
    fc: Linear,
    scaling: Scaling,
    optimizer: AdamW,
    scaler: LossScaler,
    options: AutocastOptions,
    recipe: Recipe,
    /// Sums gradients over ranks while backward goes on.
    gradients: Option<Gradients>,
}

impl Layers {
    fn new(recipe: Recipe, options: LossScalerOptions, bias: bool) -> Self {
        let linear = LinearOptions {
            in_features: 16,
            out_features: 16,
            params_dtype: DType::F16,
            bias,
            ..Default::default()
        };
        let fc = Linear::new("fc", linear, &device(), &mut rng(1)).unwrap();
        let scaling = Scaling::new(&fc, &device()).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let (scaler, options) = (scaler(options), Default::default());
        Self { fc, scaling, optimizer, scaler, options, recipe, gradients: None }
    }

    /// A step whose gradient of the output is noise of this size.
    fn step(&mut self, seed: u64, size: f32) {
        self.backward(seed, size);
        self.finish();
    }

    fn backward(&mut self, seed: u64, size: f32) {
        let x = ops::cast(&noise([8, 16], seed), DType::F16).unwrap();
        let dy = ops::scale(&noise([8, 16], 100 + seed), size).unwrap();
        let dy = ops::cast(&dy, DType::F16).unwrap();
        let mut cx = self.scaling.scope(&self.recipe, &self.options).unwrap();
        let (_, saved) = self.fc.forward(&mut cx, &x).unwrap();
        cx.commit().unwrap();
        let (fc, scaler, gradients) = (&mut self.fc, &self.scaler, &mut self.gradients);
        let backward = |cx: &mut Backward<'_>| {
            gradients.as_mut().map_or(Ok(()), |gradients| gradients.watch(cx, fc))?;
            let dy = scaler.scale(cx, &dy)?;
            fc.backward(cx, saved, &dy)?;
            hand_over_gradients(cx, fc)?;
            scaler.check(cx, fc)
        };
        self.scaling.in_backward(backward).unwrap();
    }

    fn finish(&mut self) {
        self.scaler.step(&mut self.optimizer, &mut self.fc, 1e-2).unwrap();
        self.scaler.update().unwrap();
        zero_grad(&mut self.fc).unwrap();
    }

    fn state(&self) -> LossScaleState {
        self.scaler.state().unwrap()
    }

    fn weights(&self) -> Vec<u32> {
        bits(self.fc.weight().tensor())
    }
}

/// So large that it overflows f16 when it is multiplied by the first scale.
const LARGE: f32 = 1000.0;

#[test]
fn an_overflow_skips_the_step_and_halves_the_scale() {
    for bias in [true, false] {
        for recipe in [delayed(), current(), rows()] {
            let mut training = Layers::new(recipe.clone(), options(), bias);
            training.step(0, 0.01);
            let before = training.weights();
            // Quantizing saturates an infinite gradient: products with its codes are finite.
            training.step(1, LARGE);
            assert_eq!(training.weights(), before, "{recipe}, bias: {bias}");
            let counts = (training.optimizer.steps(), training.optimizer.updates().unwrap());
            assert_eq!((counts, training.optimizer.skipped_steps().unwrap()), ((2, 1), 1));
            let state = LossScaleState { scale: 512.0, growth_tracker: 0, skipped_steps: 1 };
            assert_eq!(training.state(), state, "{recipe}, bias: {bias}");
            // Three more without one: it grows.
            for step in 2..5 {
                let before = training.weights();
                training.step(step, 0.01);
                assert_ne!(training.weights(), before);
            }
            assert_eq!(training.state(), LossScaleState { scale: 1024.0, ..state });
            assert_eq!(training.optimizer.updates().unwrap(), 4);
        }
    }
}

fn rows() -> Recipe {
    CurrentScaling::rowwise().into()
}

#[test]
fn the_first_step_may_overflow() {
    for recipe in [delayed(), current(), rows()] {
        let mut training = Layers::new(recipe, options(), false);
        let before = training.weights();
        training.step(0, LARGE);
        assert_eq!((training.weights(), training.state().scale), (before, 512.0));
        assert_eq!(training.optimizer.updates().unwrap(), 0);
    }
}

#[test]
fn high_precision_overflows_too() {
    let mut training = Layers::new(delayed(), options(), false);
    training.options = off();
    training.step(0, 0.01);
    training.step(1, LARGE);
    assert_eq!((training.state().scale, training.state().skipped_steps), (512.0, 1));
}

#[test]
fn a_skipped_step_does_not_count_in_the_bias_correction() {
    let run = |sizes: &[(u64, f32)]| {
        let mut training = Layers::new(delayed(), LossScalerOptions { dynamic: false, ..options() }, true);
        training.options = off();
        sizes.iter().for_each(|&(seed, size)| training.step(seed, size));
        training
    };
    let skipped = run(&[(0, 0.01), (9, LARGE), (1, 0.01), (8, LARGE), (2, 0.01)]);
    let clean = run(&[(0, 0.01), (1, 0.01), (2, 0.01)]);
    assert_eq!(skipped.weights(), clean.weights());
    assert_eq!((skipped.optimizer.steps(), clean.optimizer.steps()), (5, 3));
    assert_eq!((skipped.optimizer.updates().unwrap(), clean.optimizer.updates().unwrap()), (3, 3));
    // A constant scale stays.
    assert_eq!(skipped.state(), LossScaleState { scale: 1024.0, growth_tracker: 0, skipped_steps: 2 });
}

#[test]
fn a_scale_changes_no_bit_where_nothing_is_rounded() {
    // Powers of two in f32: gradients, moments and parameters are those without a scaler.
    let run = |scale: Option<f32>| {
        let (mut fc, x, dy) = (linear("fc", 16, 16, 1), noise([8, 16], 1), noise([8, 16], 2));
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let init_scale = scale.unwrap_or(4.0);
        let scaler = scaler(LossScalerOptions { init_scale, enabled: scale.is_some(), ..options() });
        let mut norms = Vec::new();
        for step in 0..5 {
            let mut cx = scaling.scope(&delayed(), &off()).unwrap();
            let (_, saved) = fc.forward(&mut cx, &x).unwrap();
            cx.commit().unwrap();
            let backward = |cx: &mut Backward<'_>| {
                let dy = scaler.scale(cx, &dy)?;
                fc.backward(cx, saved, &dy)?;
                scaler.check(cx, &fc)
            };
            scaling.in_backward(backward).unwrap();
            match step {
                0 => scaler.step(&mut optimizer, &mut fc, 1e-2).unwrap(),
                1 => {
                    let norm = scaler.clip_grad_norm(&mut fc, 0.5).unwrap();
                    norms.push(norm.item().unwrap().to_bits());
                    scaler.step_with_norm(&mut optimizer, &mut fc, 1e-2, &norm).unwrap();
                }
                2 => {
                    scaler.unscale(&mut fc).unwrap();
                    norms.push(clip_grad_norm(&mut fc, 0.5).unwrap().item().unwrap().to_bits());
                    scaler.step(&mut optimizer, &mut fc, 1e-2).unwrap();
                }
                3 => {
                    scaler.unscale(&mut fc).unwrap();
                    norms.push(scaler.clip_grad_norm(&mut fc, 0.5).unwrap().item().unwrap().to_bits());
                    scaler.step(&mut optimizer, &mut fc, 1e-2).unwrap();
                }
                _ => scaler.step(&mut optimizer, &mut fc, 1e-2).unwrap(),
            }
            scaler.update().unwrap();
            zero_grad(&mut fc).unwrap();
        }
        (parameter_bits(&fc), norms, optimizer.updates().unwrap())
    };
    let without = run(None);
    // It grows after three steps.
    assert!(run(Some(256.0)) == without);
    assert!(run(Some(0.125)) == without);
}

#[test]
fn without_a_check_the_step_checks() {
    let mut training = Layers::new(delayed(), options(), true);
    training.step(0, 0.01);
    let before = training.weights();
    for parameter in parameters_mut(&mut training.fc) {
        let shape = *parameter.tensor().shape();
        *parameter.main_grad_mut() = Tensor::full(f32::NAN, shape, DType::F32, &device()).unwrap();
    }
    training.finish();
    assert_eq!((training.weights(), training.state().scale), (before, 512.0));
}

#[test]
fn microbatches_overflow_together() {
    let mut training = Layers::new(delayed(), options(), false);
    training.step(0, 0.01);
    let before = training.weights();
    training.backward(1, LARGE);
    training.backward(2, 0.01);
    training.finish();
    assert_eq!((training.weights(), training.state().scale), (before, 512.0));
    // Nothing is left of it.
    training.step(3, 0.01);
    assert_eq!((training.state().scale, training.optimizer.updates().unwrap()), (512.0, 2));
}

#[test]
fn ranks_skip_a_step_together() {
    for (recipe, overlap, clips) in [
        (Some(delayed()), false, false),
        (Some(current()), false, false),
        (None, false, false),
        (Some(delayed()), true, false),
        (None, true, false),
        (None, true, true),
    ] {
        let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
        let run = |group: Arc<dyn ProcessGroup>| {
            let mut training = Layers::new(recipe.clone().unwrap_or_else(delayed), options(), false);
            training.scaling.set_group(group.clone());
            if recipe.is_none() {
                training.options = off();
            }
            if overlap {
                let gradients = Gradients::new(&training.fc, group.clone(), GradientsOptions::default());
                training.gradients = Some(gradients.unwrap());
            }
            let mut steps = Vec::new();
            for step in 0..4 {
                // Only the second rank's gradients overflow, in the second step.
                let is_bad = step == 1 && group.rank() == 1;
                training.backward(10 * group.rank() as u64 + step, if is_bad { LARGE } else { 0.01 });
                if let Some(gradients) = &mut training.gradients {
                    let text = error(training.scaler.overflowed());
                    assert!(
                        text.contains("call `LossScaler::clip_grad_norm` before, which checks the sums"),
                        "{text}"
                    );
                    gradients.finish(&mut training.fc).unwrap();
                    if clips {
                        training.scaler.clip_grad_norm(&mut training.fc, f32::MAX).unwrap();
                        assert_eq!(training.scaler.overflowed().unwrap(), step == 1);
                    }
                } else {
                    all_reduce_gradients(&mut training.fc, &*group).unwrap();
                }
                training.finish();
                steps.push((training.weights(), training.state(), training.optimizer.updates().unwrap()));
            }
            agree(&training.fc, &training.optimizer, &training.scaling, &*group).unwrap();
            steps
        };
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ranks[0] == ranks[1]);
        let scales: Vec<f32> = ranks[0].iter().map(|step| step.1.scale).collect();
        let updates: Vec<u64> = ranks[0].iter().map(|step| step.2).collect();
        assert_eq!((scales, updates), (vec![1024.0, 512.0, 512.0, 512.0], vec![1, 1, 2, 3]));
        assert!(ranks[0][0].0 == ranks[0][1].0 && ranks[0][1].0 != ranks[0][2].0);
    }
}

#[test]
fn state_is_sent_to_all_ranks() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: Arc<dyn ProcessGroup>| {
        let mut training = Layers::new(delayed(), options(), true);
        if group.rank() == 1 {
            training.step(0, 0.01);
            training.step(1, LARGE);
        } else {
            training.optimizer.set_loss_scaler(&training.scaler).unwrap();
        }
        let Layers { fc, optimizer, scaling, .. } = &mut training;
        broadcast_state(fc, optimizer, scaling, &*group, 1).unwrap();
        agree(fc, optimizer, scaling, &*group).unwrap();
        (training.state(), training.optimizer.updates().unwrap(), training.optimizer.steps())
    };
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let state = LossScaleState { scale: 512.0, growth_tracker: 0, skipped_steps: 1 };
    assert_eq!(ranks, [(state, 1, 2), (state, 1, 2)]);
}

#[test]
fn training_resumes_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let mut training = Layers::new(delayed(), options(), true);
    for (seed, size) in [(0, 0.01), (1, LARGE), (2, 0.01)] {
        training.step(seed, size);
    }
    let Layers { fc, optimizer, scaling, .. } = &training;
    checkpoint::save(dir.path(), fc, optimizer, scaling, &BTreeMap::new()).unwrap();
    let rest = |training: &mut Layers| {
        for (seed, size) in [(3, 0.01), (4, 0.01), (5, LARGE), (6, 0.01)] {
            training.step(seed, size);
        }
        (parameter_bits(&training.fc), training.state(), training.optimizer.updates().unwrap())
    };
    let load = |training: &mut Layers| {
        let Layers { fc, optimizer, scaling, .. } = training;
        checkpoint::load(dir.path(), fc, optimizer, scaling).unwrap();
        assert_eq!((training.optimizer.steps(), training.optimizer.updates().unwrap()), (3, 2));
    };
    let straight = rest(&mut training);
    // Into a new optimizer with a scaler, into the old one, and with the scaler set after the load.
    let mut other = Layers::new(delayed(), options(), true);
    other.optimizer.set_loss_scaler(&other.scaler).unwrap();
    load(&mut other);
    assert_eq!(other.state(), LossScaleState { scale: 512.0, growth_tracker: 1, skipped_steps: 1 });
    assert!(rest(&mut other) == straight);
    load(&mut training);
    assert!(rest(&mut training) == straight);
    let mut late = Layers::new(delayed(), options(), true);
    load(&mut late);
    late.optimizer.set_loss_scaler(&late.scaler).unwrap();
    assert!(rest(&mut late) == straight);
    // A file without a scaler leaves that of the optimizer alone.
    let plain = Layers::new(delayed(), options(), true);
    checkpoint::save(dir.path(), &plain.fc, &plain.optimizer, &plain.scaling, &BTreeMap::new()).unwrap();
    let before = training.state();
    let Layers { fc, optimizer, scaling, .. } = &mut training;
    checkpoint::load(dir.path(), fc, optimizer, scaling).unwrap();
    assert_eq!((training.state(), training.optimizer.updates().unwrap()), (before, 0));
}

#[test]
fn a_model_trains_in_f16_as_in_bf16() {
    // f16 parameters with f32 copies, and f32 parameters that are cast, each from a scale at which the first steps overflow.
    let train = |params_dtype: DType, compute_dtype: DType, scaler: &LossScaler| {
        let options = GptOptions {
            vocab_size: 20,
            num_layers: 1,
            layer: TransformerLayerOptions {
                hidden_size: 32,
                ffn_hidden_size: 128,
                attention: AttentionOptions {
                    num_attention_heads: 4,
                    max_seq_length: 8,
                    ..Default::default()
                },
                params_dtype,
                ..Default::default()
            },
            ..Default::default()
        };
        let mut model = Gpt::new("gpt", &options, &device(), &mut rng(3)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let mut losses = Vec::new();
        let steps = unless_simulated(40, 6);
        // A step that is skipped is repeated.
        while optimizer.updates().unwrap() < steps {
            let step = optimizer.updates().unwrap();
            let text = ids([4, 9], 20, step % 4).to_vec::<i32>().unwrap();
            let part = |from: usize| text.chunks(9).flat_map(|row| row[from..from + 8].to_vec()).collect();
            let ids = Tensor::from_vec::<i32>(part(0), [4, 8], &device()).unwrap();
            let targets = Tensor::from_vec::<i32>(part(1), [4, 8], &device()).unwrap();
            let mut cx = scaling.scope(&delayed(), &in_dtype(compute_dtype)).unwrap();
            let (loss, saved) = model.loss(&mut cx, &ids, &targets).unwrap();
            cx.commit().unwrap();
            scaling.in_backward(|cx| model.loss_backward_scaled(cx, saved, scaler)).unwrap();
            let norm = scaler.clip_grad_norm(&mut model, 1.0).unwrap();
            scaler.step_with_norm(&mut optimizer, &mut model, 3e-3, &norm).unwrap();
            scaler.update().unwrap();
            zero_grad(&mut model).unwrap();
            losses.push(f64::from(loss.item().unwrap()));
        }
        let state = scaler.state().unwrap();
        assert_eq!(optimizer.steps(), steps + state.skipped_steps);
        // The mean over the four batches.
        (losses.iter().rev().take(4).sum::<f64>() / 4.0, state)
    };
    let disabled = scaler(LossScalerOptions { enabled: false, ..Default::default() });
    let (bf16, _) = train(DType::BF16, DType::BF16, &disabled);
    for params in [DType::F16, DType::F32] {
        let options = LossScalerOptions { init_scale: 2f32.powi(20), ..Default::default() };
        let (f16, state) = train(params, DType::F16, &scaler(options));
        assert!((f16 / bf16 - 1.0).abs() < 0.01, "{params}: {f16} and {bf16}");
        assert!(state.skipped_steps > 0, "{params}: {state:?}");
    }
}

#[test]
fn parameters_in_f16_work_in_every_layer() {
    let (x, dy) = (noise([2, 8, 32], 2), noise([2, 8, 32], 3));
    let half = |t: &Tensor| ops::cast(t, DType::F16).unwrap();
    fn compare<M: Module>(what: &str, make: impl Fn(DType) -> M, inputs: [&Tensor; 2], halves: [&Tensor; 2]) {
        for options in [off(), AutocastOptions::default()] {
            let (mut narrow, mut wide) = (make(DType::F16), make(DType::F32));
            let (y, dx) = first_step(&delayed(), &options, &mut narrow, halves[0], halves[1]).unwrap();
            let (want_y, want_dx) = first_step(&delayed(), &off(), &mut wide, inputs[0], inputs[1]).unwrap();
            assert_eq!((y.dtype(), dx.dtype()), (DType::F16, DType::F16));
            let most = if options.enabled { 0.2 } else { 0.01 };
            let error = |want: &Tensor, got: &Tensor| relative_rms(&values(want), &values(got));
            assert!(error(&want_y, &y) < most, "{what}: y");
            assert!(error(&want_dx, &dx) < most, "{what}: dx");
            for (narrow, wide) in parameters(&narrow).into_iter().zip(parameters(&wide)) {
                assert_eq!((narrow.dtype(), narrow.main_grad().dtype()), (DType::F16, DType::F32));
                let error = error(wide.main_grad(), narrow.main_grad());
                assert!(error < 1.5 * most, "{what}: {}: {error}", narrow.name());
            }
        }
    }
    let (inputs, halves) = ([&x, &dy], [&half(&x), &half(&dy)]);
    let init = InitOptions { init_std: 0.1, output_layer_init_std: 0.1 };
    let linear = |params_dtype| {
        let options = LinearOptions { in_features: 32, out_features: 32, params_dtype, ..Default::default() };
        Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
    };
    compare("Linear", linear, inputs, halves);
    let layer_norm_linear = |params_dtype| {
        let options =
            LayerNormLinearOptions { in_features: 32, out_features: 32, params_dtype, ..Default::default() };
        LayerNormLinear::new("fc", options, &device(), &mut rng(1)).unwrap()
    };
    compare("LayerNormLinear", layer_norm_linear, inputs, halves);
    let mlp = |params_dtype| {
        let options = LayerNormMlpOptions {
            hidden_size: 32,
            ffn_hidden_size: 48,
            params_dtype,
            init,
            ..Default::default()
        };
        LayerNormMlp::new("mlp", options, &device(), &mut rng(1)).unwrap()
    };
    compare("LayerNormMlp", mlp, inputs, halves);
    let attention = |params_dtype| {
        let options = MultiheadAttentionOptions {
            hidden_size: 32,
            attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
            params_dtype,
            init,
            ..Default::default()
        };
        MultiheadAttention::new("attention", options, &device(), &mut rng(1)).unwrap()
    };
    compare("MultiheadAttention", attention, inputs, halves);
    let block = |params_dtype| {
        let options = TransformerLayerOptions { params_dtype, ..block_options() };
        TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap()
    };
    compare("TransformerLayer", block, inputs, halves);
    compare("Recompute", |params_dtype| Recompute::new(block(params_dtype)), inputs, halves);
    let norms = NormLayerOptions { hidden_size: 32, ..Default::default() };
    let layer_norm = |params_dtype| {
        LayerNorm::new("norm", &NormLayerOptions { params_dtype, ..norms.clone() }, &device()).unwrap()
    };
    compare("LayerNorm", layer_norm, inputs, halves);
    let rms_norm = |params_dtype| {
        RmsNorm::new("norm", &NormLayerOptions { params_dtype, ..norms.clone() }, &device()).unwrap()
    };
    compare("RmsNorm", rms_norm, inputs, halves);
}

#[test]
fn what_is_out_of_order_or_range_is_refused() {
    let refused = |change: fn(&mut LossScalerOptions)| {
        let mut options = options();
        change(&mut options);
        error(LossScaler::new(options, &device()))
    };
    for (text, found) in [
        ("growth_factor = 1: give a finite number greater than 1", refused(|o| o.growth_factor = 1.0)),
        ("backoff_factor = 1: give a number between 0 and 1", refused(|o| o.backoff_factor = 1.0)),
        ("growth_interval = 0: give at least 1", refused(|o| o.growth_interval = 0)),
        ("init_scale = 0: expected a finite number", refused(|o| o.init_scale = 0.0)),
        ("init_scale = inf: expected a finite number", refused(|o| o.init_scale = f32::INFINITY)),
    ] {
        assert!(found.starts_with("LossScaler: ") && found.contains(text), "{found}");
    }
    let mut training = Layers::new(delayed(), options(), true);
    training.backward(0, 0.01);
    training.scaler.unscale(&mut training.fc).unwrap();
    assert_eq!(
        error(training.scaler.unscale(&mut training.fc)),
        "LossScaler: the gradients are already divided by the scale: call `unscale` once between two calls of `update`"
    );
    training.scaler.step(&mut training.optimizer, &mut training.fc, 1e-2).unwrap();
    let mut cx = training.scaling.backward().unwrap();
    let check = training.scaler.check(&mut cx, &training.fc);
    let text =
        "LossScaler: an optimizer has taken a step since the last update: call `update` once after each step";
    assert_eq!(error(check), text);
    drop(cx);
    let other = scaler(options());
    assert_eq!(
        error(other.step(&mut training.optimizer, &mut training.fc, 1e-2)),
        "LossScaler: the optimizer has another scaler: use that one, or replace it with `AdamW::set_loss_scaler`"
    );
}
