//! Measures the memory that a checkpoint needs besides what it stores: the peak of this process, which runs no other test.
//!
//! `FP8_TEST_CHECKPOINT_MIB` sets the checkpoint's size.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_nn::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::collections::BTreeMap;
use std::io::Write;

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
}
