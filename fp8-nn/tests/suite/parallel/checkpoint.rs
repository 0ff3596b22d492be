//! Checkpoints of models that are cut over ranks: one file, whatever the layout that saves and the one that loads.

use super::golden::{gpt, llama};
use super::rig::*;
use crate::every_device::support::{ParameterBits, device, ids, noise, parameter_bits, rng, short};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use fp8_nn::{LoraOptions, ParallelMode, Placement, agree, broadcast_state};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// A model of a kind, with what a checkpoint has besides.
pub(super) struct Job {
    pub(super) model: Gpt,
    pub(super) optimizer: AdamW,
    pub(super) scaling: Scaling,
}

/// A kind of model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Learned positions and biases.
    Gpt,
    /// Tied embeddings, groups of heads that share keys and values, norms of queries and keys.
    Llama,
    /// The same in bf16 with f32 copies and moments in bf16, where adapters are trained, and some parameters are frozen.
    Adapted,
}

pub(super) const KINDS: [Kind; 3] = [Kind::Gpt, Kind::Llama, Kind::Adapted];

impl Job {
    pub(super) fn new(kind: Kind, rank: &Rank, seed: u64) -> Self {
        let moments = if kind == Kind::Adapted { MomentDtype::BF16 } else { MomentDtype::F32 };
        Self::with_moments(kind, rank, seed, moments)
    }

    fn with_moments(kind: Kind, rank: &Rank, seed: u64, moments: MomentDtype) -> Self {
        let mut options = if kind == Kind::Gpt { gpt(rank) } else { llama(rank) };
        if kind == Kind::Adapted {
            options.layer.params_dtype = DType::BF16;
        }
        let mut model = Gpt::new("gpt", &options, &device(), &mut rng(seed)).unwrap();
        if kind == Kind::Adapted {
            adapt(&mut model, seed);
        }
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        scaling.set_group(rank.mesh.amax_group());
        Self {
            model,
            optimizer: AdamW::new(AdamWOptions { moments, ..Default::default() }).unwrap(),
            scaling,
        }
    }

    /// Trains for some steps and returns the bits of the losses of this replica.
    pub(super) fn train(&mut self, rank: &Rank, steps: std::ops::Range<u64>) -> Vec<u32> {
        let step = |step| {
            let [ids, targets] = [1, 2].map(|seed| rank.of_batch(&ids([4, 8], 50, 10 * step + seed)));
            let Self { model, optimizer, scaling } = &mut *self;
            let recipe = short().into();
            let (loss, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &ids, &targets)).unwrap();
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
            all_reduce_gradients(model, &**rank.mesh.dp()).unwrap();
            let norm = clip_grad_norm(model, 1.0).unwrap();
            optimizer.step_with_norm(model, 1e-2, &norm).unwrap();
            zero_grad(model).unwrap();
            loss.item().unwrap().to_bits()
        };
        steps.map(step).collect()
    }

    /// [`step`](Self::step) on one replica, where no gradient is a part of a sum.
    fn step_alone(&mut self) {
        self.optimizer.step(&mut self.model, 1e-2).unwrap();
    }

    /// Takes a step with gradients that are the same in each layout: three times the values.
    fn step(&mut self, rank: &Rank) {
        for parameter in parameters_mut(&mut self.model) {
            let is_sum = *parameter.placement() == Placement::Partial;
            let parts = rank.mesh.dp().world_size() * if is_sum { rank.mesh.tp().world_size() } else { 1 };
            let share = 3.0 / parts as f32;
            let value = ops::cast(parameter.tensor(), DType::F32).unwrap();
            parameter.accumulate(&ops::scale(&value, share).unwrap()).unwrap();
        }
        all_reduce_gradients(&mut self.model, &**rank.mesh.dp()).unwrap();
        self.optimizer.step(&mut self.model, 1e-2).unwrap();
        zero_grad(&mut self.model).unwrap();
    }

    pub(super) fn save(&self, rank: &Rank, dir: &Path) -> Result<()> {
        let metadata = BTreeMap::from([("note".to_owned(), "ten ≤ steps".to_owned())]);
        checkpoint::save_on(&rank.mesh, dir, &self.model, &self.optimizer, &self.scaling, &metadata)
    }

    pub(super) fn load(&mut self, rank: &Rank, dir: &Path) -> Result<checkpoint::Loaded> {
        let Self { model, optimizer, scaling } = self;
        checkpoint::load_on(&rank.mesh, dir, model, optimizer, scaling)
    }

    /// All of this rank's state but the optimizer's.
    pub(super) fn everything(&self) -> (ParameterBits, ScalingState, u64) {
        (parameter_bits(&self.model), self.scaling.state().unwrap(), self.optimizer.steps())
    }
}

/// Adds adapters to q, k and v, to the projection and to the first layer of the MLP. Of the rest, norms alone are trained.
fn adapt(model: &mut Gpt, seed: u64) {
    let mut rng = rng(seed + 100);
    let options = LoraOptions { rank: 4, ..Default::default() };
    model.visit_loras_mut(&mut |loras| {
        let [rows, _] = loras.weight_shape();
        let parts = match loras.path().rsplit('.').next().unwrap() {
            // 8 heads that share 4 groups of keys and values.
            "qkv" => vec![("q", 0..rows / 2), ("k", rows / 2..rows * 3 / 4), ("v", rows * 3 / 4..rows)],
            "proj" | "fc1" => vec![("all", 0..rows)],
            _ => Vec::new(),
        };
        for (name, rows) in parts {
            loras.add(name, rows, &options, &mut rng).unwrap();
        }
    });
    for (number, parameter) in parameters_mut(model).into_iter().enumerate() {
        let is_trained = parameter.is_adapter() || parameter.shape().len() == 1;
        parameter.set_trainable(is_trained).unwrap();
        if parameter.is_adapter() {
            // B is 0 at first.
            let whole = noise(*parameter.global_shape(), seed + number as u64);
            parameter.set_part_of(&ops::cast(&whole, parameter.dtype()).unwrap()).unwrap();
        }
    }
}

/// The bytes of the file in a folder.
fn file(dir: &Path) -> Vec<u8> {
    std::fs::read(checkpoint::path(dir)).unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn ranks_write_the_file_of_one_device() {
    for kind in KINDS {
        // Moments in bf16 are rounded with other random numbers where an element is another one of a rank's part.
        let new = |rank: &Rank| Job::with_moments(kind, rank, 1, MomentDtype::F32);
        let saved = |layout| {
            let folder = folder();
            ranks(layout, |rank| {
                let mut job = new(rank);
                job.step(rank);
                job.step(rank);
                job.save(rank, folder.path()).unwrap();
            });
            file(folder.path())
        };
        let one = folder();
        ranks(ONE, |rank| {
            let mut job = new(rank);
            job.step(rank);
            job.step(rank);
            let Job { model, optimizer, scaling } = &job;
            let metadata = BTreeMap::from([("note".to_owned(), "ten ≤ steps".to_owned())]);
            checkpoint::save(one.path(), model, optimizer, scaling, &metadata).unwrap();
        });
        for layout in [ONE, TP2, TP4_SP, DP2_TP2_SP] {
            assert!(saved(layout) == file(one.path()), "{kind:?}, {layout:?}");
        }
    }
}

#[test]
fn a_checkpoint_goes_from_layout_to_layout() {
    for kind in KINDS {
        let first = folder();
        // Losses of the steps behind the checkpoint, and all that there is after them.
        let go_on = |rank: &Rank, job: &mut Job| (job.train(rank, 3..5), job.everything());
        let went_on = ranks(TP2_SP, |rank| {
            let mut job = Job::new(kind, rank, 1);
            job.train(rank, 0..3);
            job.save(rank, first.path()).unwrap();
            go_on(rank, &mut job)
        });
        let mut before = first.path().to_owned();
        let folders = [(); 6].map(|()| folder());
        for (layout, folder) in [TP4, ONE, TP2_SP, DP2_TP2_SP, TP4_SP, TP2].into_iter().zip(&folders) {
            ranks(layout, |rank| {
                let mut job = Job::new(kind, rank, 2);
                let loaded = job.load(rank, &before).unwrap();
                assert_eq!((loaded.metadata["note"].as_str(), job.optimizer.steps()), ("ten ≤ steps", 3));
                job.save(rank, folder.path()).unwrap();
                if layout == TP2_SP {
                    let rank_of = rank.mesh.tp().rank();
                    assert!(go_on(rank, &mut job) == went_on[rank_of], "{kind:?}");
                } else {
                    assert!(job.train(rank, 3..5).iter().all(|&loss| f32::from_bits(loss).is_finite()));
                }
            });
            assert!(file(folder.path()) == file(first.path()), "{kind:?}, {layout:?}");
            before = folder.path().to_owned();
        }
        // The functions for one device.
        ranks(ONE, |rank| {
            let Job { mut model, mut optimizer, mut scaling } = Job::new(kind, rank, 3);
            let loaded = checkpoint::load(first.path(), &mut model, &mut optimizer, &mut scaling).unwrap();
            assert!(loaded.scaling.recomputed.is_empty() && loaded.without_gradients.is_empty());
            checkpoint::save(folders[0].path(), &model, &optimizer, &scaling, &loaded.metadata).unwrap();
        });
        assert!(file(folders[0].path()) == file(first.path()), "{kind:?}");
    }
}

#[test]
fn replicas_of_a_cut_model_get_the_state_of_one() {
    let folders = [(); 2].map(|()| folder());
    ranks(DP2_TP2_SP, |rank| {
        let group = &**rank.mesh.dp();
        let mut job = Job::new(Kind::Llama, rank, 1);
        if group.rank() == 1 {
            job = Job::new(Kind::Llama, rank, 2);
            job.step_alone();
        }
        let Job { model, optimizer, scaling } = &mut job;
        let error = agree(model, optimizer, scaling, group).unwrap_err().to_string();
        assert!(error.contains("differs between rank 1 and rank 0"), "{error}");
        broadcast_state(model, optimizer, scaling, group, 1).unwrap();
        agree(model, optimizer, scaling, group).unwrap();
        job.save(rank, folders[0].path()).unwrap();
    });
    ranks(ONE, |rank| {
        let mut job = Job::new(Kind::Llama, rank, 2);
        job.step_alone();
        job.save(rank, folders[1].path()).unwrap();
    });
    assert!(file(folders[0].path()) == file(folders[1].path()));
}

/// Linears whose rows and columns are cut, with moments in FP8.
#[derive(Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

composite!(Pair { first, second });

#[test]
fn moments_in_fp8_are_joined_where_ranks_have_whole_blocks() {
    let saved = |layout: Layout, bias: bool| {
        let folder = folder();
        let results = ranks(layout, |rank| {
            let linear = |path, in_features, out_features, parallel_mode| {
                let options = LinearOptions {
                    in_features,
                    out_features,
                    bias,
                    parallel_mode,
                    tensor_parallel: rank.tensor_parallel.clone(),
                    ..Default::default()
                };
                Linear::new(path, options, &device(), &mut rng(1)).unwrap()
            };
            let first = linear("first", 200, 384, ParallelMode::Column);
            let second = linear("second", 512, 24, ParallelMode::Row);
            let mut model = Pair { first, second };
            let options = AdamWOptions { moments: MomentDtype::Fp8, ..Default::default() };
            let mut optimizer = AdamW::new(options.clone()).unwrap();
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            // Blocks differ in their largest element.
            for parameter in parameters_mut(&mut model) {
                let value = |i: i32| 2f32.powi(i / 64 % 11) * (1.0 + (i % 7) as f32 / 8.0);
                let whole = (0..parameter.global_shape().numel() as i32).map(value);
                let whole = Tensor::from_vec(whole.collect(), *parameter.global_shape(), &device()).unwrap();
                parameter.set_part_of(&whole).unwrap();
                let gradient = ops::cast(parameter.tensor(), DType::F32).unwrap();
                parameter.accumulate(&gradient).unwrap();
            }
            optimizer.step(&mut model, 1e-3).unwrap();
            zero_grad(&mut model).unwrap();
            checkpoint::save_on(&rank.mesh, folder.path(), &model, &optimizer, &scaling, &BTreeMap::new())?;
            let mut resumed = AdamW::new(options).unwrap();
            checkpoint::load_on(&rank.mesh, folder.path(), &mut model, &mut resumed, &mut scaling)?;
            let before = file(folder.path());
            rank.mesh.world().barrier()?;
            checkpoint::save_on(&rank.mesh, folder.path(), &model, &resumed, &scaling, &BTreeMap::new())?;
            assert!(before == file(folder.path()), "what was loaded is what was saved");
            Ok(before)
        });
        results.into_iter().collect::<Result<Vec<_>>>()
    };
    let [one, two] = [ONE, TP2].map(|layout| saved(layout, false).unwrap().remove(0));
    let [one, two] = [&one, &two].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let mut joined = 0;
    for (name, one) in one.tensors().into_iter().filter(|(name, _)| name.starts_with("optimizer.")) {
        let two = two.tensor(&name).unwrap();
        assert_eq!(one.shape(), two.shape());
        if name.ends_with("scale_inv") {
            assert!(one.data() == two.data(), "{name}");
            joined += 1;
            continue;
        }
        // Ranks round with other random numbers: up or down.
        let differs = |(one, two): (&u8, &u8)| one.abs_diff(*two) > 1;
        assert_eq!(one.data().iter().zip(two.data()).position(differs), None, "{name}");
    }
    assert_eq!(joined, 4);
    let error = saved(TP2, true).unwrap_err().to_string();
    let expected = "`first.bias` is cut over ranks inside of blocks of 128 elements, which share a scale of its moments in FP8: set \
                    AdamWOptions::moments to MomentDtype::BF16 or MomentDtype::F32";
    assert!(error.ends_with(expected), "{error}");
}
