//! A case that may panic, and its outcome.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// The exit code of a process that cannot continue because its device is broken.
pub(crate) const BROKEN: u8 = 3;

/// The message and the place of the newest panic.
pub(crate) static PANIC: Mutex<String> = Mutex::new(String::new());

/// The outcome of a case.
pub(crate) struct Done {
    pub(super) family: &'static str,
    pub(super) accepted: usize,
    pub(super) refused: usize,
    pub(super) failures: Vec<String>,
    /// Whether the process can go on.
    pub(super) is_broken: bool,
}

/// Runs `attack`; a panic is an error with its place.
pub(crate) fn caught<T>(attack: impl FnOnce() -> T) -> std::result::Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(attack))
        .map_err(|_| PANIC.lock().unwrap_or_else(PoisonError::into_inner).clone())
}
