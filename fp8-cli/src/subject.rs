//! The texts that the table and the page of `fp8 inspect` share.

use crate::page::percent;
use crate::table::{bytes, count, decibels, printable, scales, shape, short, shortened};
use fp8_hf::{Inspection, TensorInspection};
use std::fmt::Write as _;

/// The description of the inspected folder or file in the heading.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) path: String,
    /// The family of models.
    pub(crate) family: Option<String>,
    pub(crate) scheme: Option<String>,
    /// Why the model is not understood.
    pub(crate) note: Option<String>,
    pub(crate) against: Option<String>,
}

impl Subject {
    /// One line about the whole.
    pub(crate) fn summary(&self, found: &Inspection) -> String {
        // Each weight of FP8 has a tensor of scales beside it, and perhaps one more for its input.
        let scales = |tensor: &TensorInspection| {
            usize::from(tensor.scales.is_some()) + usize::from(tensor.input_scale.is_some())
        };
        let scales: usize = found.tensors.iter().map(scales).sum();
        let (mut tensors, files) = (count(found.tensors.len(), "tensor"), count(found.files, "file"));
        if scales > 0 {
            let _ = write!(tensors, ", plus {scales} with scales");
        }
        let mut line = format!("{tensors}, {} in {files}", bytes(found.bytes));
        for part in [&self.family, &self.scheme].into_iter().flatten() {
            let _ = write!(line, "; {part}");
        }
        line
    }

    /// Names the first tensors that only the original has, and counts the others.
    pub(crate) fn only_in_original(&self, found: &Inspection) -> Option<String> {
        const NAMED: usize = 5;
        let against = self.against.as_ref().filter(|_| !found.missing.is_empty())?;
        let mut names: Vec<String> = found.missing.iter().take(NAMED).map(|name| shortened(name)).collect();
        if found.missing.len() > NAMED {
            names.push(format!("and {} more", found.missing.len() - NAMED));
        }
        Some(format!("only {against} has {}", names.join(", ")))
    }
}

/// Says that there is no FP8 weight whose error could be measured.
pub(crate) fn without_fp8(against: &str) -> String {
    format!(
        "compared with {against}: there are no FP8 weights, so there is an SQNR for each tensor but none overall"
    )
}

/// The cells of a tensor.
pub(crate) fn row(tensor: &TensorInspection) -> Vec<String> {
    vec![
        shortened(&printable(&tensor.name)),
        format!("{:?}", tensor.dtype),
        shortened(&shape(&tensor.shape)),
        bytes(tensor.bytes),
        scales(tensor),
        tensor.amax.map(short).unwrap_or_default(),
        tensor.saturated.map(percent).unwrap_or_default(),
        tensor.underflowed.map(percent).unwrap_or_default(),
        decibels(tensor.sqnr),
    ]
}
