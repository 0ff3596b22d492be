//! Moments in bf16 and FP8, and parameters that are rounded stochastically.

use super::support::{
    block_options, current, delayed, device, error, linear, noise, parameter_bits, rng, values,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

const ALL: [MomentDtype; 3] = [MomentDtype::F32, MomentDtype::BF16, MomentDtype::Fp8];

fn with(moments: MomentDtype) -> AdamWOptions {
    AdamWOptions { moments, ..Default::default() }
}

/// A model in training with gradients of noise.
struct Job {
    model: TransformerLayer,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new(seed: u64, params_dtype: DType, options: AdamWOptions) -> Self {
        let layer = TransformerLayerOptions { params_dtype, ..block_options() };
        let model = TransformerLayer::new("block", layer, &device(), &mut rng(seed)).unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        Self { model, optimizer: AdamW::new(options).unwrap(), scaling }
    }

    fn set_gradients(&mut self, step: u64) {
        for (index, parameter) in (0..).zip(parameters_mut(&mut self.model)) {
            if parameter.is_trainable() {
                *parameter.main_grad_mut() = noise(*parameter.shape(), 100 * step + index);
            }
        }
    }

    fn run(&mut self, steps: std::ops::Range<u64>) {
        for step in steps {
            self.set_gradients(step);
            self.optimizer.step(&mut self.model, 0.01).unwrap();
        }
    }

    fn save(&self, dir: &Path) {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
    }

    fn load(&mut self, dir: &Path) -> Result<()> {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).map(drop)
    }

    /// All that training continues from.
    fn bytes(&self) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        self.save(dir.path());
        std::fs::read(checkpoint::path(dir.path())).unwrap()
    }
}

#[test]
fn the_first_step_is_that_of_f32_moments_and_later_ones_are_near() {
    let run = |moments, steps| {
        let mut job = Job::new(1, DType::F32, with(moments));
        job.run(0..steps);
        job
    };
    for moments in [MomentDtype::BF16, MomentDtype::Fp8] {
        assert!(parameter_bits(&run(moments, 1).model) == parameter_bits(&run(MomentDtype::F32, 1).model));
        let (job, exact) = (run(moments, 5), run(MomentDtype::F32, 5));
        assert!(parameter_bits(&job.model) != parameter_bits(&exact.model), "{moments}");
        for (got, want) in parameters(&job.model).iter().zip(parameters(&exact.model)) {
            let (got, want) = (values(got.tensor()), values(want.tensor()));
            let differences: f32 = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).sum();
            // Five steps are 0.05 long, at most.
            let limit = if moments == MomentDtype::BF16 { 2e-4 } else { 6e-3 };
            assert!(differences / (got.len() as f32) < limit, "{moments}: {differences} of {}", got.len());
        }
    }
}

#[test]
fn training_resumes_bit_for_bit() {
    for (moments, dtype) in [(MomentDtype::BF16, DType::F32), (MomentDtype::Fp8, DType::BF16)] {
        let mut whole = Job::new(1, dtype, with(moments));
        let dir = tempfile::tempdir().unwrap();
        whole.run(0..2);
        whole.save(dir.path());
        whole.run(2..4);

        let mut resumed = Job::new(2, dtype, with(moments));
        resumed.load(dir.path()).unwrap();
        resumed.run(2..4);
        assert!(whole.bytes() == resumed.bytes(), "{moments}");

        // In place, into an optimizer that has state of its own.
        resumed.load(dir.path()).unwrap();
        resumed.run(2..4);
        assert!(whole.bytes() == resumed.bytes(), "{moments}");
    }
}

#[test]
fn checkpoints_have_codes_and_scales() {
    let mut job = Job::new(1, DType::F32, with(MomentDtype::Fp8));
    job.run(0..1);
    let bytes = job.bytes();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for parameter in parameters(&job.model) {
        let (name, [rows, cols]) = (parameter.name(), parameter.shape().matrix());
        for moment in ["exp_avg", "exp_avg_sq"] {
            let codes = file.tensor(&format!("optimizer.{name}.{moment}")).unwrap();
            assert_eq!((codes.dtype(), codes.shape()), (Dtype::F8_E4M3, &**parameter.shape()));
            let scales = file.tensor(&format!("optimizer.{name}.{moment}_scale_inv")).unwrap();
            assert_eq!((scales.dtype(), scales.shape()), (Dtype::F32, &[rows, cols.div_ceil(128)][..]));
        }
    }
}

#[test]
fn moments_in_another_format_are_refused() {
    for saved in ALL {
        let mut job = Job::new(1, DType::F32, with(saved));
        job.run(0..1);
        let dir = tempfile::tempdir().unwrap();
        job.save(dir.path());
        for loaded in ALL.into_iter().filter(|loaded| *loaded != saved) {
            let mut other = Job::new(2, DType::F32, with(loaded));
            let before = parameter_bits(&other.model);
            let refused = error(other.load(dir.path()));
            let want = format!(
                "has moments in {saved}, and this optimizer stores them in {loaded}: set AdamWOptions::moments as it was"
            );
            assert!(refused.contains(&want), "{refused}");
            assert!(before == parameter_bits(&other.model) && other.optimizer.steps() == 0);
        }
        // Moments of frozen parameters are not kept, whatever their format.
        let mut frozen = Job::new(2, DType::F32, with(MomentDtype::F32));
        for parameter in parameters_mut(&mut frozen.model) {
            parameter.set_trainable(false).unwrap();
        }
        frozen.load(dir.path()).unwrap();
    }
}

/// The tensors of a file: each with its dtype, shape and bytes.
fn edited(bytes: &[u8], edit: impl Fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) -> Vec<u8> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).unwrap();
    let file = SafeTensors::deserialize(bytes).unwrap();
    let part = |view: &safetensors::tensor::TensorView<'_>| {
        (view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut parts = file.iter().map(|(name, view)| (name.to_owned(), part(&view))).collect();
    edit(&mut parts);
    let views = parts.iter().map(|(name, (dtype, shape, data))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize(views, metadata.metadata().clone()).unwrap()
}

#[test]
fn codes_without_scales_are_refused_and_codes_of_nan_are_noticed() {
    let mut job = Job::new(1, DType::F32, with(MomentDtype::Fp8));
    job.run(0..1);
    checkpoint::expect_finite(&job.model, &job.optimizer).unwrap();
    let (bytes, dir) = (job.bytes(), tempfile::tempdir().unwrap());
    let name = parameters(&job.model)[0].name().clone();
    let scales = format!("optimizer.{name}.exp_avg_sq_scale_inv");
    std::fs::write(checkpoint::path(dir.path()), edited(&bytes, |parts| drop(parts.remove(&scales))))
        .unwrap();
    let refused = error(job.load(dir.path()));
    let want = format!("`optimizer.{name}.exp_avg_sq` is in FP8, and its scales `{scales}` are missing");
    assert!(refused.ends_with(&want), "{refused}");

    let codes = format!("optimizer.{name}.exp_avg");
    let nan = edited(&bytes, |parts| parts.get_mut(&codes).unwrap().2[3] = 0xFF);
    std::fs::write(checkpoint::path(dir.path()), nan).unwrap();
    job.load(dir.path()).unwrap();
    let refused = error(checkpoint::expect_finite(&job.model, &job.optimizer));
    assert!(refused.starts_with(&format!("`{name}.exp_avg` is NaN at element 3 of ")), "{refused}");
}

#[test]
fn fp8_moments_need_a_quarter_of_the_memory() {
    let bytes = |moments| {
        let job = || {
            let options = LinearOptions { in_features: 256, out_features: 64, ..Default::default() };
            Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
        };
        let (mut model, mut optimizer) = (job(), AdamW::new(with(moments)).unwrap());
        optimizer.step(&mut model, 0.1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let scaling = Scaling::new(&model, &device()).unwrap();
        checkpoint::save(dir.path(), &model, &optimizer, &scaling, &BTreeMap::new()).unwrap();
        let bytes = std::fs::read(checkpoint::path(dir.path())).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let moments = file.iter().filter(|(name, _)| name.starts_with("optimizer."));
        moments.map(|(_, view)| view.data().len()).sum::<usize>()
    };
    let count = 256 * 64 + 64;
    assert_eq!(bytes(MomentDtype::F32), 8 * count);
    assert_eq!(bytes(MomentDtype::BF16), 4 * count);
    // Two scales for each row of the weight, and one for the bias.
    assert_eq!(bytes(MomentDtype::Fp8), 2 * count + 2 * 4 * (2 * 64 + 1));
    assert!(bytes(MomentDtype::Fp8) as f64 <= 0.27 * bytes(MomentDtype::F32) as f64);
}

#[test]
fn a_skipped_step_changes_no_moment() {
    for moments in ALL {
        let mut job = Job::new(1, DType::BF16, with(moments));
        job.run(0..2);
        let before = job.bytes();
        job.set_gradients(7);
        let first = parameters_mut(&mut job.model).swap_remove(0);
        *first.main_grad_mut() = Tensor::full(f32::INFINITY, *first.shape(), DType::F32, &device()).unwrap();
        job.optimizer.step(&mut job.model, 0.01).unwrap();
        assert_eq!((job.optimizer.steps(), job.optimizer.skipped_steps().unwrap()), (3, 1));
        let after = job.bytes();
        let (before, after) =
            (SafeTensors::deserialize(&before).unwrap(), SafeTensors::deserialize(&after).unwrap());
        for (name, view) in before.iter() {
            assert!(view.data() == after.tensor(name).unwrap().data(), "{moments}: {name}");
        }
    }
}

#[test]
fn a_loss_scaler_divides_gradients_and_skips() {
    for moments in ALL {
        let options = LossScalerOptions { init_scale: 8.0, ..Default::default() };
        let scaler = LossScaler::new(options, &device()).unwrap();
        let (mut scaled, mut plain) =
            (Job::new(1, DType::F32, with(moments)), Job::new(1, DType::F32, with(moments)));
        scaler.step(&mut scaled.optimizer, &mut scaled.model, 0.0).unwrap();
        scaler.update().unwrap();
        plain.optimizer.step(&mut plain.model, 0.0).unwrap();
        for step in 0..2 {
            scaled.set_gradients(step);
            for parameter in parameters_mut(&mut scaled.model) {
                let grad = ops::scale(parameter.main_grad(), 8.0).unwrap();
                *parameter.main_grad_mut() = grad;
            }
            scaler.step(&mut scaled.optimizer, &mut scaled.model, 0.01).unwrap();
            scaler.update().unwrap();
        }
        plain.run(0..2);
        for (got, want) in parameters(&scaled.model).iter().zip(parameters(&plain.model)) {
            // Factors may differ by an ulp.
            super::support::assert_close(got.name(), &values(want.tensor()), &values(got.tensor()), 1e-5);
        }
        let held = |job: &Job| parameters(&job.model).iter().map(|p| values(p.tensor())).collect::<Vec<_>>();
        let before = held(&scaled);
        let first = parameters_mut(&mut scaled.model).swap_remove(0);
        *first.main_grad_mut() = Tensor::full(f32::NAN, *first.shape(), DType::F32, &device()).unwrap();
        scaler.step(&mut scaled.optimizer, &mut scaled.model, 0.01).unwrap();
        scaler.update().unwrap();
        assert!(before == held(&scaled));
        assert_eq!((scaler.loss_scale().unwrap(), scaled.optimizer.updates().unwrap()), (4.0, 3));
    }
}

#[test]
fn weights_in_fp8_are_those_of_their_f32_copies() {
    for moments in [MomentDtype::BF16, MomentDtype::Fp8] {
        let run = |fp8: bool| {
            let mut job = Job::new(1, DType::F32, with(moments));
            if fp8 {
                job.optimizer.quantize_weights(&mut job.model, &current()).unwrap();
            }
            job.run(0..3);
            job
        };
        let (fp8, high) = (run(true), run(false));
        let copies = fp8.bytes();
        let copies = SafeTensors::deserialize(&copies).unwrap();
        let mut compared = 0;
        for (stored, parameter) in parameters(&fp8.model).iter().zip(parameters(&high.model)) {
            let want = values(parameter.tensor());
            let Some(codes) = stored.fp8() else {
                assert!(values(stored.tensor()) == want, "{}", stored.name());
                continue;
            };
            let copy = copies.tensor(&format!("optimizer.{}.main_param", stored.name())).unwrap();
            let copy: Vec<f32> =
                copy.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
            assert!(copy == want, "{}", stored.name());
            let got = values(&codes.dequantize(DType::F32).unwrap());
            assert!(super::support::relative_rms(&want, &got) < 0.04);
            compared += 1;
        }
        assert!(compared >= 4, "{compared}");
    }
}

#[test]
fn groups_have_their_own_rates() {
    let groups = vec![ParameterGroup { pattern: "*.bias".to_owned(), lr_factor: 0.0, ..Default::default() }];
    let mut job = Job::new(1, DType::F32, AdamWOptions { groups, ..with(MomentDtype::Fp8) });
    let before = parameter_bits(&job.model);
    job.run(0..2);
    for (before, parameter) in before.iter().zip(parameters(&job.model)) {
        let is_kept = before.1 == super::support::bits(parameter.tensor());
        assert_eq!(is_kept, parameter.name().ends_with(".bias"), "{}", parameter.name());
    }
}

#[test]
fn ranks_share_the_state_of_one() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: std::sync::Arc<dyn ProcessGroup>| {
        let rank = group.rank() as u64;
        let mut job = Job::new(rank, DType::BF16, with(MomentDtype::Fp8));
        job.run(10 * rank..10 * rank + 2);
        let differ = agree(&job.model, &job.optimizer, &job.scaling, &*group);
        assert!(error(differ).contains("differs between rank 1 and rank 0"));
        let Job { model, optimizer, scaling } = &mut job;
        broadcast_state(model, optimizer, scaling, &*group, 0).unwrap();
        agree(&job.model, &job.optimizer, &job.scaling, &*group).unwrap();
        job.run(30..32);
        agree(&job.model, &job.optimizer, &job.scaling, &*group).unwrap();
        job.bytes()
    };
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut alone = Job::new(0, DType::BF16, with(MomentDtype::Fp8));
    alone.run(0..2);
    alone.run(30..32);
    assert!(all[0] == all[1] && all[0] == alone.bytes());
}

#[test]
fn ranks_with_other_formats_are_told() {
    let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
    let run = |group: std::sync::Arc<dyn ProcessGroup>| {
        let moments = if group.rank() == 0 { MomentDtype::F32 } else { MomentDtype::Fp8 };
        let job = Job::new(1, DType::F32, with(moments));
        error(agree(&job.model, &job.optimizer, &job.scaling, &*group))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        for thread in threads {
            let text = thread.join().unwrap();
            assert!(text.contains("the options of AdamW differs between rank 1 and rank 0"), "{text}");
        }
    });
}

#[test]
fn parameters_that_are_unfrozen_start_with_moments_of_zero() {
    let mut job = Job::new(1, DType::F32, with(MomentDtype::Fp8));
    parameters_mut(&mut job.model)[0].set_trainable(false).unwrap();
    job.run(0..2);
    let name = parameters(&job.model)[0].name().clone();
    let has_state = |job: &Job| {
        SafeTensors::deserialize(&job.bytes())
            .unwrap()
            .tensor(&format!("optimizer.{name}.exp_avg_scale_inv"))
            .is_ok()
    };
    assert!(!has_state(&job));
    parameters_mut(&mut job.model)[0].set_trainable(true).unwrap();
    job.run(2..3);
    assert!(has_state(&job));
}

/// Without f32 copies an update that is less than half an ulp is lost, or right in the mean.
#[test]
fn small_updates_survive_stochastic_rounding() {
    let run = |stochastic_rounding| {
        let options = LinearOptions {
            in_features: 64,
            out_features: 64,
            bias: false,
            params_dtype: DType::BF16,
            ..Default::default()
        };
        let mut model = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
        let weight = parameters_mut(&mut model).swap_remove(0);
        weight.set(Tensor::full(1.0, [64, 64], DType::BF16, &device()).unwrap()).unwrap();
        *weight.main_grad_mut() = Tensor::full(1.0, [64, 64], DType::F32, &device()).unwrap();
        let options =
            AdamWOptions { main_params: false, stochastic_rounding, weight_decay: 0.0, ..Default::default() };
        let mut optimizer = AdamW::new(options).unwrap();
        (0..100).for_each(|_| optimizer.step(&mut model, 1e-4).unwrap());
        let values = values(model.weight().tensor());
        values.iter().sum::<f32>() / values.len() as f32
    };
    assert_eq!(run(false), 1.0);
    // The deviation of the mean of 4096 weights, each of a hundred steps of an ulp with probability 0.0256, is 1e-4.
    assert!((run(true) - 0.99).abs() < 5e-4, "{}", run(true));
}

#[test]
fn stochastic_rounding_leaves_other_parameters_alone() {
    for dtype in [DType::F32, DType::F16] {
        let run = |stochastic_rounding| {
            let options = AdamWOptions { main_params: false, stochastic_rounding, ..Default::default() };
            let mut job = Job::new(1, dtype, options);
            job.run(0..3);
            parameter_bits(&job.model)
        };
        assert!(run(true) == run(false), "{dtype}");
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let options = AdamWOptions { stochastic_rounding: true, ..Default::default() };
    assert_eq!(
        error(AdamW::new(options)),
        "AdamW: stochastic_rounding = true: bf16 parameters have f32 copies, which are rounded to nearest: set main_params to \
         false"
    );
}

/// The random numbers of a parameter do not depend on which others there are.
#[test]
fn a_parameter_trains_alike_in_another_model() {
    let train = |model: &mut dyn Layer, optimizer: &mut AdamW| {
        for step in 0..3 {
            for parameter in parameters_mut(model) {
                let seed = 10 * step + parameter.shape().len() as u64;
                *parameter.main_grad_mut() = noise(*parameter.shape(), seed);
            }
            optimizer.step(model, 0.01).unwrap();
        }
    };
    let optimizer = || AdamW::new(with(MomentDtype::Fp8)).unwrap();
    let mut alone = linear("fc", 40, 24, 1);
    train(&mut alone, &mut optimizer());
    let mut stack = Stack(vec![Box::new(linear("other", 24, 40, 2)), Box::new(linear("fc", 40, 24, 1))]);
    train(&mut stack, &mut optimizer());
    let all = parameter_bits(&stack);
    let alone = parameter_bits(&alone);
    assert!(all[2..] == alone[..]);
    // And another name, other numbers.
    let mut renamed = linear("fd", 40, 24, 1);
    train(&mut renamed, &mut optimizer());
    assert!(parameter_bits(&renamed)[0].1 != alone[0].1);
}

#[test]
fn a_training_step_in_fp8_works_with_fp8_moments() {
    let mut model = super::support::gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(with(MomentDtype::Fp8)).unwrap();
    let (ids, targets) = (super::support::ids([2, 8], 20, 1), super::support::ids([2, 8], 20, 2));
    let mut losses = Vec::new();
    for _ in 0..4 {
        let (loss, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &ids, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        let norm = clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step_with_norm(&mut model, 0.01, &norm).unwrap();
        zero_grad(&mut model).unwrap();
        losses.push(loss.item().unwrap());
    }
    assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?}");
}
