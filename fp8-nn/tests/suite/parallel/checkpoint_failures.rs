//! Errors of one rank in a checkpoint of a cut model: all ranks get one, the old file stays, and the next try works.

use super::checkpoint::{Job, KINDS, Kind};
use super::rig::*;
use crate::every_device::support::{device, error, linear, rng};
use fp8_nn::fp8_dist::{Mesh, MeshOptions};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn file(dir: &Path) -> Vec<u8> {
    std::fs::read(checkpoint::path(dir)).unwrap()
}

/// The errors of all ranks.
fn errors<T>(layout: Layout, f: impl Fn(&Rank) -> Result<T> + Sync) -> Vec<String>
where
    T: Send,
{
    ranks(layout, |rank| error(f(rank)))
}

#[test]
fn a_folder_that_cannot_be_written() {
    let folder = folder();
    let below = folder.path().join("file/below");
    std::fs::write(folder.path().join("file"), "no folder").unwrap();
    let errors = errors(DP2_TP2_SP, |rank| {
        let mut job = Job::new(Kind::Llama, rank, 1);
        job.train(rank, 0..1);
        let refused = job.save(rank, &below);
        // The next save works, and training goes on.
        job.save(rank, folder.path()).unwrap();
        job.train(rank, 1..2);
        refused
    });
    let own = errors[0].clone();
    assert!(own.starts_with(&format!("{}: ", checkpoint::path(&below).display())), "{own}");
    assert_eq!(errors[1..], [(); 3].map(|()| format!("save_on: rank 0 failed: {own}")));
    assert!(file(folder.path()).len() > 1000);
}

#[test]
fn a_rank_that_cannot_save() {
    let folder = folder();
    ranks(TP2_SP, |rank| Job::new(Kind::Gpt, rank, 1).save(rank, folder.path()).unwrap());
    let before = file(folder.path());
    let errors = errors(DP2_TP2_SP, |rank| {
        let mut job = Job::new(Kind::Gpt, rank, 2);
        if rank.mesh.world().rank() == 3 {
            let norm = parameters_mut(&mut job.model).pop().unwrap();
            norm.accumulate(&Tensor::full(1.0, *norm.shape(), DType::F32, &device()).unwrap()).unwrap();
        }
        job.save(rank, folder.path())
    });
    assert!(errors[3].contains("was added to since the last optimizer step"), "{}", errors[3]);
    for other in &errors[..3] {
        assert_eq!(*other, format!("save_on: rank 3 failed: {}", errors[3]));
    }
    assert!(before == file(folder.path()));
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "temporary files");
}

#[test]
fn state_that_differs_is_not_saved() {
    let folders = [folder(), folder()];
    for (seed, folder) in (1..).zip(&folders) {
        ranks(TP2, |rank| {
            let mut job = Job::new(Kind::Gpt, rank, seed);
            job.train(rank, 0..1);
            job.save(rank, folder.path()).unwrap();
        });
    }
    let before = file(folders[0].path());
    let errors = errors(TP2, |rank| {
        let mut job = Job::new(Kind::Gpt, rank, 1);
        job.load(rank, folders[0].path()).unwrap();
        if rank.mesh.tp().rank() == 1 {
            let (_, state) = checkpoint::describe(&checkpoint::path(folders[1].path())).unwrap().unwrap();
            job.scaling.load_state(&state).unwrap();
        }
        job.save(rank, folders[0].path())
    });
    for error in &errors {
        let expected = "agree_on_state `save_on`: the scale of `gpt.";
        assert!(
            error.starts_with(expected) && error.contains("differs between rank 1 and rank 0"),
            "{error}"
        );
    }
    assert!(before == file(folders[0].path()));
}

#[test]
fn files_that_cannot_be_loaded() {
    for kind in KINDS {
        let good = folder();
        ranks(TP2_SP, |rank| {
            let mut job = Job::new(kind, rank, 1);
            job.train(rank, 0..2);
            job.save(rank, good.path()).unwrap();
        });
        let bytes = file(good.path());
        let (missing, cut, changed) = (folder(), folder(), folder());
        std::fs::write(checkpoint::path(cut.path()), &bytes[..bytes.len() - 100]).unwrap();
        // A valid file with another value.
        let mut other = bytes.clone();
        let middle = other.len() - 3000;
        other[middle] ^= 1;
        std::fs::write(checkpoint::path(changed.path()), other).unwrap();
        for (dir, is_alone) in [(&missing, true), (&cut, true), (&changed, false)] {
            let errors = errors(DP2_TP2_SP, |rank| {
                let mut job = Job::new(kind, rank, 2);
                let before = job.everything();
                let dir = if rank.mesh.world().rank() == 2 { dir } else { &good };
                let refused = job.load(rank, dir.path());
                assert!(before == job.everything(), "nothing has changed");
                // The next try works.
                job.load(rank, good.path()).unwrap();
                assert!(job.optimizer.steps() == 2);
                refused
            });
            for rank in [0, 1, 3] {
                let expected = match is_alone {
                    true => format!("load_on: rank 2 failed: {}", errors[2]),
                    false => errors[2].clone(),
                };
                assert_eq!(errors[rank], expected);
            }
            if !is_alone {
                let text = &errors[0];
                assert!(text.starts_with("agree_on_state `load_on`: tensor `"), "{text}");
                assert!(text.contains("` of the file differs between rank 2 and rank 0"), "{text}");
            }
        }
    }
}

#[test]
fn a_file_of_another_model() {
    let folder = folder();
    ranks(TP2, |rank| Job::new(Kind::Gpt, rank, 1).save(rank, folder.path()).unwrap());
    for layout in [ONE, TP2_SP, TP4] {
        let errors = errors(layout, |rank| Job::new(Kind::Llama, rank, 1).load(rank, folder.path()));
        for error in errors {
            assert!(error.contains("in this model") || error.contains("another model"), "{error}");
        }
    }
}

#[test]
fn functions_for_whole_parameters_refuse_parts() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    ranks(TP2, |rank| {
        let Job { mut model, mut optimizer, mut scaling } = Job::new(Kind::Gpt, rank, 1);
        let name = "`gpt.embedding.weight` is cut over ranks";
        let saved = checkpoint::save(folder.path(), &model, &optimizer, &scaling, &BTreeMap::new());
        assert_eq!(
            error(saved),
            format!("save: {name}: call `checkpoint::save_on`, which writes whole tensors")
        );
        let loaded = checkpoint::load(folder.path(), &mut model, &mut optimizer, &mut scaling);
        assert_eq!(
            error(loaded),
            format!("load: {name}: call `checkpoint::load_on`, which reads this rank's part")
        );
        assert_eq!(
            error(checkpoint::save_parameters(&path, &model)),
            format!("save_parameters: {name}: call `checkpoint::save_on`, which writes whole tensors")
        );
        checkpoint::save_parameters(&path, &linear("fc", 4, 4, 1)).unwrap();
        rank.mesh.world().barrier().unwrap();
        let options = checkpoint::LoadParametersOptions { allow_extra: true, ..Default::default() };
        assert_eq!(
            error(checkpoint::load_parameters_with_options(&path, &mut model, &options)),
            format!("load_parameters: {name}: call `checkpoint::load_on`, which reads this rank's part")
        );
        let expected = "quantize_weights: `gpt.blocks.0.attention.qkv.weight` is cut over ranks: weights stored in codes would have scales \
                        of their own on each rank: keep it in high precision";
        let recipe = Recipe::from(CurrentScaling::default());
        assert_eq!(error(quantize_weights(&mut model, &recipe)), expected);
        assert_eq!(error(optimizer.quantize_weights(&mut model, &recipe)), expected);
        assert!(
            parameters(&model).iter().all(|parameter| parameter.fp8().is_none() && parameter.is_trainable())
        );
    });
}

#[test]
fn codes_are_not_stored_in_a_part() {
    ranks(TP2, |rank| {
        let tensor_parallel = rank.tensor_parallel.clone();
        let options =
            LinearOptions { in_features: 32, out_features: 32, tensor_parallel, ..Default::default() };
        let mut fc = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
        let quantizers = Recipe::from(CurrentScaling::default()).weight_quantizers(&fc).unwrap();
        let codes = Tensor::from_vec(vec![0x38u8; 512], [16, 32], &device()).unwrap();
        let factor = Tensor::full(0.5, [], DType::F32, &device()).unwrap();
        let codes = Fp8Tensor::from_codes(codes, [16, 32], Encoding::E4M3, factor).unwrap();
        let stored = parameters_mut(&mut fc).swap_remove(0).store_codes(codes, &quantizers["fc.weight"]);
        let expected = "store_codes: `fc.weight` is cut over ranks: weights stored in codes would have scales of their own on each rank: \
                        keep it in high precision";
        assert_eq!(error(stored), expected);
    });
}

#[test]
fn a_mesh_of_other_ranks() {
    let folder = folder();
    let errors = errors(TP2, |rank| {
        let job = Job::new(Kind::Gpt, rank, 1);
        let mesh = Mesh::new(rank.mesh.world().clone(), &MeshOptions { dp: 2, tp: 1 }).unwrap();
        let Job { model, optimizer, scaling } = &job;
        checkpoint::save_on(&mesh, folder.path(), model, optimizer, scaling, &BTreeMap::new())
    });
    for (rank, error) in errors.iter().enumerate() {
        let expected = format!(
            "save_on: mesh = one whose tp group has ranks [{rank}]: `gpt.embedding.weight` is cut over others: pass the mesh that its \
             layer was made with"
        );
        assert_eq!(*error, expected);
    }
}

#[cfg(target_os = "linux")]
mod full_disk {
    use super::*;
    use std::process::Command;

    const FOLDER: &str = "FP8_TEST_FULL_DISK";

    /// Saves where it was started to do so, in a process whose files may have 20 KiB: one that fails when it is put in its place, and
    /// one that fails in its first tensor, of 4 MiB.
    #[test]
    fn child() {
        let Some(dir) = std::env::var_os(FOLDER) else { return };
        let dir = Path::new(&dir);
        let small = errors(DP2_TP2_SP, |rank| Job::new(Kind::Gpt, rank, 1).save(rank, dir));
        let large = errors(DP2_TP2_SP, |rank| {
            let tensor_parallel = rank.tensor_parallel.clone();
            let options = LinearOptions {
                in_features: 1024,
                out_features: 1024,
                tensor_parallel,
                ..Default::default()
            };
            let fc = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
            let (optimizer, scaling) =
                (AdamW::new(AdamWOptions::default()).unwrap(), Scaling::new(&fc, &device()).unwrap());
            checkpoint::save_on(&rank.mesh, dir, &fc, &optimizer, &scaling, &BTreeMap::new())
        });
        for errors in [small, large] {
            let own = &errors[0];
            assert!(own.contains("File too large"), "{own}");
            assert_eq!(errors[1..], [(); 3].map(|()| format!("save_on: rank 0 failed: {own}")));
        }
    }

    #[test]
    fn a_disk_that_becomes_full() {
        let folder = folder();
        ranks(TP2, |rank| Job::new(Kind::Gpt, rank, 2).save(rank, folder.path()).unwrap());
        let before = file(folder.path());
        assert!(before.len() > 1 << 16);
        // Blocks of 512 bytes, or of 1024.
        let script = "trap '' XFSZ; ulimit -f 20; exec \"$0\" full_disk::child --nocapture";
        let mut child = Command::new("sh");
        child.args(["-c", script]).arg(std::env::current_exe().unwrap()).env(FOLDER, folder.path());
        // Over a pipe, since the limit holds for a file of this process's output, too.
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(before == file(folder.path()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "temporary files");
    }
}
