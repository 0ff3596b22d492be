//! The objects behind cuBLASLt's handles.

use std::collections::BTreeMap;

use super::types::{Layout, Operation, Preference};
use crate::code::{Code, Outcome};

/// The objects that were created and not destroyed, by handle.
#[derive(Debug, Default)]
pub(crate) struct Blas {
    pub(super) libraries: BTreeMap<u64, ()>,
    pub(super) operations: BTreeMap<u64, Operation>,
    pub(super) layouts: BTreeMap<u64, Layout>,
    pub(super) preferences: BTreeMap<u64, Preference>,
}

impl Blas {
    /// One line for each kind of handle with its count.
    pub(crate) fn live(&self) -> String {
        let counts = [
            ("cublasLt handles", self.libraries.len()),
            ("cublasLt matmul descriptors", self.operations.len()),
            ("cublasLt layouts", self.layouts.len()),
            ("cublasLt preferences", self.preferences.len()),
        ];
        let live = counts.iter().filter(|(_, count)| *count > 0);
        live.map(|(kind, count)| format!("{kind} {count}\n")).collect()
    }
}

/// cuBLAS documentation, cublasStatus_t: CUBLAS_STATUS_INVALID_VALUE for a pointer that is null and must not be, and for a
/// handle that is none.
pub(super) fn invalid<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|_| Code::BLAS_INVALID_VALUE)
}

pub(super) fn find<T>(all: &BTreeMap<u64, T>, handle: u64) -> Outcome<&T> {
    all.get(&handle).ok_or(Code::BLAS_INVALID_VALUE)
}
