//! The simulated device, used in turns.

use crate::fault::Fault;
use cudarc::driver::result;
use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::{CudaAllocator, CudaOptions};
use fp8_nn::prelude::Device;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

static TURN: Mutex<()> = Mutex::new(());

/// The right to use the simulated driver, and a folder for checkpoints.
pub(crate) struct Rig {
    pub(crate) control: Control,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::open(&library_path().unwrap()).unwrap();
        for key in ["clear_fail", "reset", "reset_calls"] {
            control.set(key, "").unwrap();
        }
        // The tests of the kernels look for them.
        control.set("races", "0").unwrap();
        Self { control, folder: tempfile::tempdir().unwrap(), _turn: turn }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Each with a stream of its own; no kernel is cached, so that every device compiles.
    pub(crate) fn open(&self) -> Device {
        open("/proc/nowhere".into())
    }

    pub(crate) fn fail(&self, fault: &Fault) {
        self.control.set("clear_fail", "").unwrap();
        self.control.fail(&fault.function, fault.count, fault.code).unwrap();
    }

    pub(crate) fn stop_failing(&self) {
        self.control.set("clear_fail", "").unwrap();
    }

    /// Returns the functions that `f` calls, with the number of calls of each, and the result of `f`.
    pub(crate) fn calls<T>(&self, f: impl FnOnce() -> T) -> (BTreeMap<String, u64>, T) {
        self.control.set("reset_calls", "").unwrap();
        let made = f();
        (self.control.calls(), made)
    }

    /// Makes up for a release that failed: nobody else can any more.
    pub(crate) fn release_context(&self) {
        // SAFETY: a device that is gone has retained it and not released it.
        unsafe { result::primary_ctx::release(0) }.unwrap();
    }

    /// Everything was dropped: what is left, a line each.
    pub(crate) fn left(&self) -> Vec<String> {
        self.stop_failing();
        let live = self.control.live();
        assert_eq!(self.control.reports(), "");
        self.control.reset().unwrap();
        live.lines().map(str::to_owned).collect()
    }
}

pub(crate) fn open(kernels: PathBuf) -> Device {
    let options = CudaOptions {
        library: library_path(),
        cache_dir: Some(kernels),
        allocator: Some(CudaAllocator::Caching),
        ..CudaOptions::default()
    };
    Device::cuda_with_options(&options).unwrap()
}
