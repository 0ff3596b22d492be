//! The entry points of cuBLASLt that FP8 training calls: descriptors, heuristics, and the product itself in f32.
//!
//! Sums run over k in order, in f32; hardware orders them otherwise. What the documentation refuses is refused, each
//! refusal with its source. Row- and column-scaled types, grouped and batched products, epilogues other than the bias and
//! on-stack descriptors (`…Init_internal`) are not simulated: CUBLAS_STATUS_NOT_SUPPORTED.
//!
//! Source of numbers: cuBLAS documentation, "Using the cuBLASLt API", and the header `cublasLt.h`.

mod check;
mod descriptors;
mod matmul;
mod product;
mod types;

use std::collections::BTreeMap;

use crate::code::{Code, Outcome};
pub(crate) use product::Product;
use types::{Layout, Operation, Preference};

/// Names of the entry points below this module.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    descriptors::NAMES.iter().chain(matmul::NAMES).copied()
}

/// What was created and not destroyed, by handle.
#[derive(Debug, Default)]
pub(crate) struct Blas {
    libraries: BTreeMap<u64, ()>,
    operations: BTreeMap<u64, Operation>,
    layouts: BTreeMap<u64, Layout>,
    preferences: BTreeMap<u64, Preference>,
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
fn invalid<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|_| Code::BLAS_INVALID_VALUE)
}

fn find<T>(all: &BTreeMap<u64, T>, handle: u64) -> Outcome<&T> {
    all.get(&handle).ok_or(Code::BLAS_INVALID_VALUE)
}
