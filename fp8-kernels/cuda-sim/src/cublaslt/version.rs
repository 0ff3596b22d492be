//! The version that the library says it has, which decides the scale modes that it knows.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// 10000 · major + 100 · minor + patch.
static VERSION: AtomicUsize = AtomicUsize::new(13_01_00);

pub(super) fn version() -> usize {
    VERSION.load(Relaxed)
}

/// Changes the version, for all libraries of the process.
pub(crate) fn set_version(version: usize) {
    VERSION.store(version, Relaxed);
}
