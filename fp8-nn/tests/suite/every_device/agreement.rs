//! Replicas that must have one state: what is compared, when, and how all get the state of one.

use super::counting::Counting;
use super::support::{delayed, device, error, noise, off, rng, unless_simulated};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

/// `f` on every rank, with its handle.
fn ranks<T: Send>(world_size: usize, f: impl Fn(Arc<Counting>) -> T + Sync) -> Vec<T> {
    let groups = local("dp", world_size, Duration::from_secs(60)).unwrap();
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || f(Counting::new(group)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn fp8() -> AutocastOptions {
    AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() }
}

fn high_precision() -> AutocastOptions {
    AutocastOptions { compute_dtype: Some(DType::BF16), ..off() }
}

/// A bf16 layer in training, with f32 copies in the optimizer.
struct Replica {
    model: Linear,
    optimizer: AdamW,
    scaling: Scaling,
    group: Option<Arc<Counting>>,
}

impl Replica {
    fn new(group: Option<&Arc<Counting>>, path: &str, out_features: usize) -> Self {
        let rank = group.map_or(0, |group| group.rank());
        let options = LinearOptions {
            in_features: 16,
            out_features,
            params_dtype: DType::BF16,
            init_std: 0.2,
            ..Default::default()
        };
        let model = Linear::new(path, options, &device(), &mut rng(rank as u64)).unwrap();
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        if let Some(group) = group {
            scaling.set_group(group.clone());
        }
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        Self { model, optimizer, scaling, group: group.cloned() }
    }

    fn of(group: &Arc<Counting>) -> Self {
        Self::new(Some(group), "fc", 16)
    }

    fn step(&mut self, step: u64, options: &AutocastOptions) -> Result<()> {
        let rank = self.group.as_ref().map_or(0, |group| group.rank() as u64);
        let [x, dy] = [0, 500].map(|seed| noise([4, 16], seed + 10 * step + rank));
        super::support::step(&mut self.scaling, &delayed(), options, &mut self.model, &x, &dy)?;
        if let Some(group) = &self.group {
            all_reduce_gradients(&mut self.model, &**group)?;
        }
        self.optimizer.step(&mut self.model, 0.01)?;
        zero_grad(&mut self.model)
    }

    fn save(&self, dir: &Path) {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
    }

    fn load(&mut self, dir: &Path) {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).unwrap();
    }

    /// Parameters, moments, f32 copies, counts and scaling state: the bytes of a checkpoint.
    fn bytes(&self) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        self.save(folder.path());
        std::fs::read(checkpoint::path(folder.path())).unwrap()
    }

    fn broadcast(&mut self, root: usize) -> Result<()> {
        let group = self.group.clone().unwrap();
        broadcast_state(&mut self.model, &mut self.optimizer, &mut self.scaling, &*group, root)
    }

    fn agree(&self) -> Result<()> {
        agree(&self.model, &self.optimizer, &self.scaling, &**self.group.as_ref().unwrap())
    }

    fn set_all(&mut self, value: f32) {
        for parameter in parameters_mut(&mut self.model) {
            let (shape, dtype) = (*parameter.tensor().shape(), parameter.dtype());
            parameter.set(Tensor::full(value, shape, dtype, &device()).unwrap()).unwrap();
        }
    }

    /// Returns how often state was compared since the last call.
    fn comparisons(&self) -> usize {
        self.group.as_ref().unwrap().comparisons.swap(0, Relaxed)
    }
}

/// A checkpoint after three steps of one process.
fn trained() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Replica::new(None, "fc", 16);
    for step in 0..3 {
        alone.step(step, &fp8()).unwrap();
    }
    alone.save(folder.path());
    folder
}

#[test]
fn a_checkpoint_that_one_rank_loads_is_an_error_on_all() {
    let folder = trained();
    let cases = [
        (fp8(), "the scale of `fc.input` differs between rank 1 and rank 0: "),
        (
            high_precision(),
            "`exp_avg` of `fc.weight`, as it was loaded, is missing on rank 1, and rank 0 has it: ",
        ),
    ];
    for (options, difference) in cases {
        let errors = ranks(3, |group| {
            let mut replica = Replica::of(&group);
            if group.rank() == 0 {
                replica.load(folder.path());
            }
            broadcast_parameters(&mut replica.model, &*group).unwrap();
            error((0..10).try_for_each(|step| replica.step(step, &options)))
        });
        for error in errors {
            assert!(
                error.contains(difference) && error.contains("`broadcast_state`, or load the same"),
                "{error}"
            );
        }
    }
}

#[test]
fn ranks_that_got_the_state_of_one_train_like_ranks_that_loaded_it() {
    let folder = trained();
    let steps = unless_simulated(10, 3);
    let run = |loads: &(dyn Fn(usize) -> bool + Sync), root: Option<usize>| {
        ranks(3, |group| {
            let mut replica = Replica::of(&group);
            if loads(group.rank()) {
                replica.load(folder.path());
            }
            if let Some(root) = root {
                replica.broadcast(root).unwrap();
                replica.agree().unwrap();
            }
            for step in 3..3 + steps {
                replica.step(step, &fp8()).unwrap();
            }
            assert_eq!(replica.optimizer.steps(), 3 + steps);
            replica.agree().unwrap();
            replica.bytes()
        })
    };
    let expected = run(&|_| true, None);
    assert!(expected.iter().all(|bytes| *bytes == expected[0]), "ranks differ");
    for root in [0, 1] {
        let found = run(&|rank| rank == root, Some(root));
        assert!(found == expected, "from rank {root}");
    }
}

#[test]
fn the_state_of_a_rank_in_training_replaces_that_of_others() {
    let steps = unless_simulated(4, 2);
    let all = ranks(2, |group| {
        let mut replica = Replica::of(&group);
        if group.rank() == 1 {
            let alone = local("dp", 1, Duration::from_secs(60)).unwrap().remove(0);
            replica = Replica::of(&Counting::new(alone));
            (0..2).for_each(|step| replica.step(step, &fp8()).unwrap());
            replica.scaling.set_group(group.clone());
            replica.group = Some(group);
        }
        replica.broadcast(0).unwrap(); // of a rank that has not trained
        let before = replica.optimizer.steps();
        (0..steps).for_each(|step| replica.step(step, &fp8()).unwrap());
        (before, replica.bytes())
    });
    assert_eq!(all[0].0, 0);
    assert!(all[0] == all[1], "ranks differ");
}

/// Flips the lowest bit of the first element of a tensor in a checkpoint, or replaces a text of its header by one as long.
fn change(dir: &Path, what: &str) {
    let path = checkpoint::path(dir);
    let mut bytes = std::fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    if let Some((old, new)) = what.split_once('→') {
        let header = String::from_utf8(bytes[8..8 + len].to_vec()).unwrap();
        assert!(header.contains(old), "{header}");
        bytes[8..8 + len].copy_from_slice(header.replace(old, new).as_bytes());
    } else {
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let begin = header[what]["data_offsets"][0].as_u64().unwrap() as usize;
        bytes[8 + len + begin] ^= 1;
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn moments_of_frozen_parameters_are_not_sent() {
    let folder = trained();
    let sent = ranks(2, |group| {
        [false, true].map(|is_frozen| {
            let mut replica = Replica::of(&group);
            if group.rank() == 0 {
                replica.load(folder.path());
            }
            parameters_mut(&mut replica.model)[0].set_trainable(!is_frozen).unwrap();
            let before = group.broadcasts_left.load(Relaxed);
            replica.broadcast(0).unwrap();
            let sent = before - group.broadcasts_left.load(Relaxed);
            replica.agree().unwrap();
            replica.step(3, &fp8()).unwrap();
            replica.agree().unwrap();
            sent
        })
    });
    for [all, without] in sent {
        assert_eq!(all - without, 3, "two moments and an f32 copy");
    }
}

#[test]
fn each_kind_of_state_that_differs_alone_is_named() {
    // What is changed on rank 1, what `agree` calls it, and what a step does.
    let loaded = |part: &str| format!("`{part}` of `fc.weight`, as it was loaded,");
    let both = |name: &str| [name.to_owned(), name.to_owned()];
    let cases = [
        ("model.fc.weight", both("the value of `fc.weight`")),
        ("optimizer.fc.weight.exp_avg", ["`exp_avg` of `fc.weight`".to_owned(), loaded("exp_avg")]),
        ("optimizer.fc.weight.exp_avg_sq", ["`exp_avg_sq` of `fc.weight`".to_owned(), loaded("exp_avg_sq")]),
        ("optimizer.fc.weight.main_param", ["`main_param` of `fc.weight`".to_owned(), loaded("main_param")]),
        (r#""fp8.optimizer.step":"3"→"fp8.optimizer.step":"4""#, both("the optimizer's number of steps")),
        (
            r#""fp8.optimizer.skipped":"0"→"fp8.optimizer.skipped":"1""#,
            both("the optimizer's number of skipped steps"),
        ),
        ("scaling.0.scale", both("the scale of `fc.input`")),
        ("scaling.1.amax_history", both("the amax history of `fc.grad_output`")),
    ];
    for (what, [by_agree, by_step]) in &cases {
        let [ours, theirs] = [trained(), trained()];
        change(theirs.path(), what);
        let errors = ranks(2, |group| {
            let mut replica = Replica::of(&group);
            replica.load([&ours, &theirs][group.rank()].path());
            // After an error of `agree` the group is still of use.
            [error(replica.agree()), error(replica.step(3, &fp8()))]
        });
        for [agreed, stepped] in errors {
            assert!(agreed.starts_with("agree_on_state `training state`: "), "{agreed}");
            assert!(
                agreed.contains(by_agree) && agreed.contains("differs between rank 1 and rank 0"),
                "{agreed}"
            );
            assert!(stepped.contains(&format!("{by_step} differs between rank 1 and rank 0")), "{stepped}");
        }
    }
}

#[test]
fn a_parameter_that_one_rank_sets_in_training_is_an_error_on_all() {
    for alone in [true, false] {
        let errors = ranks(3, |group| {
            let mut replica = Replica::of(&group);
            broadcast_parameters(&mut replica.model, &*group).unwrap();
            (0..2).for_each(|step| replica.step(step, &fp8()).unwrap());
            if group.rank() == 1 || !alone {
                replica.set_all(group.rank() as f32);
            }
            error(replica.step(2, &fp8()))
        });
        let expected = match alone {
            true => {
                "were loaded or set on rank 1 and not on rank 0; load or set them on all ranks, or call `broadcast_state`"
            }
            false => "the value of `fc.weight` differs between rank 1 and rank 0",
        };
        assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    }
}

#[test]
fn state_is_compared_once_and_again_after_each_load_or_set() {
    let folder = trained();
    let all = ranks(2, |group| {
        let mut replica = Replica::of(&group);
        broadcast_parameters(&mut replica.model, &*group).unwrap();
        let mut counts = Vec::new();
        let mut steps = |replica: &mut Replica| {
            let mut count = || {
                replica.step(1, &fp8()).unwrap();
                replica.comparisons()
            };
            counts.push([count(), count(), count()]);
        };
        steps(&mut replica); // forward and backward arenas, and parameters
        replica.load(folder.path());
        steps(&mut replica);
        replica.set_all(0.5);
        steps(&mut replica);
        broadcast_parameters(&mut replica.model, &*group).unwrap();
        steps(&mut replica);
        replica.broadcast(1).unwrap();
        steps(&mut replica);
        counts
    });
    for counts in all {
        assert_eq!(counts, [[3, 0, 0], [3, 0, 0], [1, 0, 0], [1, 0, 0], [3, 0, 0]]);
    }
}

#[test]
fn two_groups_by_turns_compare_once_each() {
    let [first, second] = ["dp", "cp"].map(|id| local(id, 2, Duration::from_secs(60)).unwrap());
    thread::scope(|scope| {
        for groups in first.into_iter().zip(second) {
            scope.spawn(move || {
                let groups = [Counting::new(groups.0), Counting::new(groups.1)];
                let mut model = super::support::linear("fc", 16, 16, 1);
                for _ in 0..3 {
                    groups.iter().for_each(|group| all_reduce_gradients(&mut model, &**group).unwrap());
                    zero_grad(&mut model).unwrap();
                }
                assert_eq!(groups.map(|group| group.comparisons.load(Relaxed)), [1, 1]);
            });
        }
    });
}

#[test]
fn equal_nans_agree() {
    for result in ranks(2, |group| {
        let mut replica = Replica::of(&group);
        replica.set_all(f32::NAN);
        replica.agree()
    }) {
        result.unwrap();
    }
}

#[test]
fn moments_of_an_optimizer_that_was_dropped_are_not_compared() {
    let folder = trained();
    let results = ranks(2, |group| {
        let mut replica = Replica::of(&group);
        if group.rank() == 0 {
            replica.load(folder.path());
            // The weights alone are wanted.
            replica.optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        }
        broadcast_parameters(&mut replica.model, &*group).unwrap();
        replica.step(0, &high_precision())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn ranks_with_different_models_do_not_agree_and_get_no_state() {
    let cases = [("fd", 16, "fd.weight: bf16 [16, 16]"), ("fc", 32, "fc.weight: bf16 [32, 16]")];
    for (path, out_features, theirs) in cases {
        let all = ranks(2, |group| {
            let mut replica = match group.rank() {
                0 => Replica::of(&group),
                _ => Replica::new(Some(&group), path, out_features),
            };
            let agreed = error(replica.agree());
            let before = replica.bytes();
            let received = error(replica.broadcast(0));
            assert!(before == replica.bytes(), "some state was replaced");
            (agreed, received)
        });
        for (agreed, received) in all {
            let difference = match path {
                "fd" => "the value of `fc.weight` is missing on rank 1, and rank 0 has it",
                _ => "the value of `fc.weight` differs between rank 1 and rank 0",
            };
            assert!(agreed.contains(difference), "{agreed}");
            let names = format!("name 1 is `{theirs}` on rank 1 and `fc.weight: bf16 [16, 16]` on rank 0");
            assert!(received.contains(&names), "{received}");
        }
    }
}

#[test]
fn a_broadcast_of_state_that_fails_half_way_changes_nothing() {
    let folder = trained();
    // Lengths, text and numbers, and of weight and bias the value, two moments and the f32 copy.
    for passed in 0..3 + 2 * 4 {
        let errors = ranks(2, |group| {
            let mut replica = Replica::of(&group);
            if group.rank() == 0 {
                replica.load(folder.path());
            } else {
                group.broadcasts_left.store(passed, Relaxed);
            }
            let before = replica.bytes();
            let error = error(replica.broadcast(0));
            assert!(before == replica.bytes(), "some state was replaced after {passed} broadcasts");
            error
        });
        assert!(errors.iter().all(|error| error.contains("rank 1 gave up: on purpose")), "{errors:?}");
    }
}

#[test]
fn a_root_that_is_no_rank_is_an_error_on_all_and_the_group_lives_on() {
    for world_size in [1, 2] {
        let errors = ranks(world_size, |group| {
            let mut replica = Replica::of(&group);
            let error = error(replica.broadcast(2));
            replica.broadcast(0).unwrap();
            replica.agree().unwrap();
            error
        });
        let expected =
            format!("broadcast_state: root 2 is not a rank of this group: expected 0..{world_size}");
        assert!(errors.iter().all(|error| *error == expected), "{errors:?}");
    }
}

#[test]
fn one_rank_has_nothing_to_compare() {
    ranks(1, |group| {
        let mut replica = Replica::of(&group);
        replica.step(0, &fp8()).unwrap();
        replica.agree().unwrap();
        assert_eq!(replica.comparisons(), 0);
    });
}

#[test]
fn optimizers_with_other_options_get_no_state() {
    let errors = ranks(2, |group| {
        let mut replica = Replica::of(&group);
        if group.rank() == 1 {
            let options = AdamWOptions { beta1: 0.5, ..AdamWOptions::default() };
            replica.optimizer = AdamW::new(options).unwrap();
        }
        error(replica.broadcast(0))
    });
    for error in errors {
        assert!(error.contains("AdamWOptions") && error.contains("beta1: 0.5"), "{error}");
    }
}
