//! The tensors in NVFP4 with what they lost in a training, for the report, summary.json and the terminal.

use crate::page::{grouped, percent};
use crate::table::count;
use fp8_nn::fp8_recipe::Nvfp4Report;
use serde::Serialize;

/// One tensor in NVFP4. Blocks were counted in the measured steps, and errors are those of the last of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Nvfp4Tensor {
    pub(crate) tensor: String,
    pub(crate) measured_steps: u64,
    pub(crate) blocks: u64,
    /// Blocks whose values all became 0.
    pub(crate) lost_blocks: u64,
    pub(crate) saturated_blocks: u64,
    pub(crate) nan_blocks: u64,
    pub(crate) infinite_blocks: u64,
    pub(crate) sqnr_db: Option<f64>,
    /// The SQNR of the same tensor in MXFP8.
    pub(crate) mxfp8_sqnr_db: Option<f64>,
    /// The SQNR of the same tensor in FP8 with one scale.
    pub(crate) fp8_sqnr_db: Option<f64>,
}

impl Nvfp4Tensor {
    pub(crate) fn new(tensor: &str) -> Self {
        Self { tensor: tensor.to_owned(), ..Self::default() }
    }

    /// Adds a measured step.
    pub(crate) fn add(&mut self, sqnr: Option<f64>, report: &Nvfp4Report) {
        self.measured_steps += 1;
        self.blocks += report.blocks;
        self.lost_blocks += report.lost;
        self.saturated_blocks += report.saturated;
        self.nan_blocks += report.nan;
        self.infinite_blocks += report.infinite;
        (self.sqnr_db, self.mxfp8_sqnr_db, self.fp8_sqnr_db) = (sqnr, report.mxfp8_sqnr, report.fp8_sqnr);
    }

    /// Returns the share of its blocks.
    pub(crate) fn share(&self, blocks: u64) -> f64 {
        if self.blocks == 0 { 0.0 } else { blocks as f64 / self.blocks as f64 }
    }
}

/// Returns a sentence on all tensors: how many, and what share of their blocks was lost. Empty if there is none.
pub(crate) fn sentence(tensors: &[Nvfp4Tensor]) -> String {
    let sum = |count: fn(&Nvfp4Tensor) -> u64| tensors.iter().map(count).sum::<u64>();
    let blocks = sum(|tensor| tensor.blocks);
    let share = |count| percent(sum(count) as f64 / blocks.max(1) as f64);
    match (tensors.len(), blocks) {
        (0, _) => String::new(),
        (tensors, 0) => format!("{} ran in NVFP4. Their blocks were not measured.", count(tensors, "tensor")),
        (tensors, _) => format!(
            "{} ran in NVFP4. Of {} blocks that were measured, {} % lost all of their values and {} % saturated.",
            count(tensors, "tensor"),
            grouped(blocks),
            share(|tensor| tensor.lost_blocks),
            share(|tensor| tensor.saturated_blocks)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_counts_the_blocks_of_all_tensors() {
        assert_eq!(sentence(&[]), "");
        let plain = Nvfp4Tensor::new("fc.input");
        assert_eq!(
            sentence(std::slice::from_ref(&plain)),
            "1 tensor ran in NVFP4. Their blocks were not measured."
        );
        let measured = Nvfp4Tensor { blocks: 5000, lost_blocks: 50, ..plain.clone() };
        assert_eq!(
            sentence(&[plain, measured]),
            "2 tensors ran in NVFP4. Of 5,000 blocks that were measured, 1.00 % lost all of their values and 0 % saturated."
        );
    }
}
