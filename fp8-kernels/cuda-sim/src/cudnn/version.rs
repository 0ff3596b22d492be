//! The version of the simulated cuDNN.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// 10000 · major + 100 · minor + patch; 0 for no library.
static VERSION: AtomicUsize = AtomicUsize::new(0);

/// Changes the version, for all libraries of the process.
pub(crate) fn set_version(version: usize) {
    VERSION.store(version, Relaxed);
}

pub(super) fn version() -> usize {
    VERSION.load(Relaxed)
}
