//! Shared parts of the CUDA backend's tests: the simulated driver, used in turns, a training step on it, and processes.
//!
//! A process has one simulated driver whose counts and faults are global, so tests of one binary take turns.

#![allow(dead_code, reason = "every test binary uses a part")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step is a failed test")]

pub(crate) mod child;
pub(crate) mod step;

use fp8_cuda_sim::{Control, library_path};
use fp8_kernels::{CudaAllocator, CudaOptions, Device, Error};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

static TURN: Mutex<()> = Mutex::new(());

/// Undoes what an earlier test did to the driver.
const DEFAULTS: [(&str, &str); 10] = [
    ("stub", "0"),
    ("product_times", ""),
    ("clear_fail", ""),
    ("memory_limit", "2147483648"),
    ("seed", "0"),
    ("reset", ""),
    ("arch", "90"),
    ("cublas", "130100"),
    ("cudnn", "92801"),
    ("reset_calls", ""),
];

/// The right to use the simulated driver, in its default settings, and a folder for compiled kernels.
pub(crate) struct Rig {
    pub(crate) control: Control,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Returns the path of the simulated driver.
pub(crate) fn library() -> PathBuf {
    library_path().unwrap()
}

/// Returns the options of a device: the simulated driver, a cache of its own, a separate allocation for each tensor, and
/// attention by this crate's kernels.
pub(crate) fn options(cache: &Path) -> CudaOptions {
    CudaOptions {
        library: Some(library()),
        cache_dir: Some(cache.to_owned()),
        allocator: Some(CudaAllocator::Exact),
        cudnn: Some(false),
        ..CudaOptions::default()
    }
}

impl Rig {
    pub(crate) fn new() -> Self {
        // A test that failed in its turn says so itself.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::open(&library()).unwrap();
        for (key, value) in DEFAULTS {
            control.set(key, value).unwrap();
        }
        Self { control, folder: tempfile::tempdir().unwrap(), _turn: turn }
    }

    /// Returns the folder of compiled kernels.
    pub(crate) fn cache(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn options(&self) -> CudaOptions {
        options(self.cache())
    }

    pub(crate) fn open(&self) -> Device {
        Device::cuda_with_options(&self.options()).unwrap()
    }

    /// Returns the number of calls of `function` since the turn began.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        self.control.calls().get(function).copied().unwrap_or(0)
    }

    /// The calls since `before`, by function.
    pub(crate) fn calls_since(&self, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let since = |(name, count): (String, u64)| {
            let count = count - before.get(&name).copied().unwrap_or(0);
            (count > 0).then_some((name, count))
        };
        self.control.calls().into_iter().filter_map(since).collect()
    }

    /// Once all devices are gone: nothing lives, and nothing was found wrong.
    pub(crate) fn finish(self) {
        assert_eq!(self.control.live(), "");
        assert_eq!(self.control.reports(), "");
    }
}

/// That the device is poisoned, for a reason that holds `reason`.
#[track_caller]
pub(crate) fn expect_poisoned<T: std::fmt::Debug>(result: Result<T, Error>, reason: &str) {
    match result {
        Err(Error::Poisoned { device, reason: found }) => {
            assert!(device == "cuda:0" && found.contains(reason), "{device}: {found}");
        }
        other => panic!("expected a poisoned device, found {other:?}"),
    }
}
