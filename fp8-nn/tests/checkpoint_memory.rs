//! Measures the memory that a checkpoint needs besides what it stores: the peak of this process, which runs no other test.
//!
//! `FP8_TEST_CHECKPOINT_MIB` sets the checkpoint's size.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_nn::fp8_dist::{Mesh, MeshOptions, local};
use fp8_nn::prelude::*;
use fp8_nn::{TensorParallel, TensorParallelOptions};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const MIB: usize = 1 << 20;
/// The bytes that a save or a load may need besides its largest tensor.
const SLACK: usize = 64 * MIB;
const LAYERS: usize = 8;

/// Bytes of a line of /proc/self/status.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// Returns by how many bytes memory rose while `f` ran, above what was in use before, and the result of `f`.
fn extra<T>(f: impl FnOnce() -> T) -> (usize, T) {
    // From here on the peak is what is in use now. Where the kernel cannot do that, it stays what it was, or more.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS");
    let result = f();
    (status("VmHWM").saturating_sub(before), result)
}

#[test]
fn saving_and_loading_take_one_tensor_of_extra_memory() {
    let wanted = std::env::var("FP8_TEST_CHECKPOINT_MIB").ok().map_or(192, |mib| mib.parse().unwrap());
    // Each weight and its two moments.
    let (in_features, largest) = (1024, wanted * MIB / LAYERS / 3);
    let options = LinearOptions {
        in_features,
        out_features: largest / in_features / 4,
        bias: false,
        ..Default::default()
    };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut layer =
        |i: usize| Linear::new(&format!("fc{i}"), options.clone(), &Device::cpu(), &mut rng).unwrap();
    let mut model: Vec<Linear> = (0..LAYERS).map(&mut layer).collect();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    optimizer.step(&mut model, 0.1).unwrap();
    let mut scaling = Scaling::new(&model[0], &Device::cpu()).unwrap();
    let dir = tempfile::tempdir().unwrap();

    let (save, saved) =
        extra(|| checkpoint::save(dir.path(), &model, &optimizer, &scaling, &BTreeMap::new()));
    saved.unwrap();
    let file = std::fs::metadata(checkpoint::path(dir.path())).unwrap().len() as usize;
    assert!(file.abs_diff(wanted * MIB) < MIB, "{file} bytes");
    let (load, loaded) = extra(|| checkpoint::load(dir.path(), &mut model, &mut optimizer, &mut scaling));
    loaded.unwrap();
    let (metadata, read) = extra(|| checkpoint::metadata(dir.path()));
    read.unwrap();
    let mib = |bytes: usize| bytes / MIB;
    let numbers = format!(
        "a checkpoint of {} MiB, largest tensor {} MiB: extra memory {} MiB to save, {} MiB to load, {} MiB for its metadata",
        mib(file),
        mib(largest),
        mib(save),
        mib(load),
        mib(metadata)
    );
    writeln!(std::io::stderr(), "{numbers}").unwrap();
    assert!(save <= largest + SLACK && load <= largest + SLACK && metadata <= 8 * MIB, "{numbers}");
    drop((model, optimizer));
    for [save, load] in of_ranks(&options, file) {
        let [save_mib, load_mib] = [save, load].map(mib);
        let numbers =
            format!("on two ranks: extra memory of both {save_mib} MiB to save, {load_mib} MiB to load");
        writeln!(std::io::stderr(), "{numbers}").unwrap();
        // The whole that is written, and the half that is received as it was sent. To load, each rank has a whole and its half.
        assert!(save <= 2 * largest + SLACK && load <= 3 * largest + SLACK, "{numbers}");
    }
}

/// Measures saving and loading on two ranks that have half of each weight and moment. The file has so many bytes.
fn of_ranks(options: &LinearOptions, bytes: usize) -> Vec<[usize; 2]> {
    let dir = tempfile::tempdir().unwrap();
    let rank = |world: Arc<dyn ProcessGroup>| {
        let mesh = Mesh::new(world, &MeshOptions { dp: 1, tp: 2 }).unwrap();
        let tensor_parallel =
            TensorParallel::new(mesh.tp().clone(), &TensorParallelOptions::default()).unwrap();
        let options = LinearOptions { tensor_parallel, ..options.clone() };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut layer =
            |i: usize| Linear::new(&format!("fc{i}"), options.clone(), &Device::cpu(), &mut rng).unwrap();
        let mut model: Vec<Linear> = (0..LAYERS).map(&mut layer).collect();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        optimizer.step(&mut model, 0.1).unwrap();
        let mut scaling = Scaling::new(&model[0], &Device::cpu()).unwrap();
        let measure = |f: &mut dyn FnMut() -> Result<()>| {
            mesh.world().barrier().unwrap();
            let (extra, result) = extra(|| {
                f().unwrap();
                mesh.world().barrier()
            });
            result.unwrap();
            extra
        };
        let save = measure(&mut || {
            checkpoint::save_on(&mesh, dir.path(), &model, &optimizer, &scaling, &BTreeMap::new())
        });
        let load = measure(&mut || {
            checkpoint::load_on(&mesh, dir.path(), &mut model, &mut optimizer, &mut scaling).map(drop)
        });
        [save, load]
    };
    let measured = thread::scope(|scope| {
        let worlds = local("world", 2, Duration::from_secs(60)).unwrap().into_iter();
        let ranks: Vec<_> = worlds.map(|world| scope.spawn(|| rank(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    let saved = std::fs::metadata(checkpoint::path(dir.path())).unwrap().len() as usize;
    assert_eq!(saved, bytes);
    measured
}
