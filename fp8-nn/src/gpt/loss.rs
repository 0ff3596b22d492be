//! The loss of logits that are whole, or of which each rank has those of some rows of the vocabulary.

use super::Gpt;
use crate::Result;
use crate::placement::share;
use fp8_dist::ReduceOp;
use fp8_kernels::Tensor;
use fp8_kernels::ops::{self, CrossEntropyOptions, CrossEntropySaved, LossScale, Part};

impl Gpt {
    /// Returns the mean loss. Ranks exchange the maximum of each row, then two sums of each: no rank has a whole row of logits.
    pub(super) fn cross_entropy(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<(Tensor, CrossEntropySaved)> {
        let (Some(ranks), Some(part)) = (&self.ranks, self.vocabulary()) else {
            return Ok(ops::cross_entropy(logits, targets, options)?);
        };
        let name = |what: &str| format!("{}: {what}", self.path);
        let of_part = ops::cross_entropy_part(logits, targets, part, options)?;
        let row_max = ranks.group().all_reduce(&name("maxima of logits"), &of_part.row_max, ReduceOp::Max)?;
        let mut sums = ops::cross_entropy_part_sums(&of_part, &row_max)?;
        ranks.group().all_reduce_in_place(&name("sums of exponentials"), &mut sums, ReduceOp::Sum)?;
        Ok(ops::cross_entropy_of_parts(targets, &row_max, &sums, part.total, options)?)
    }

    /// Returns the gradient of the logits, times a factor in the device's memory if there is one.
    pub(super) fn cross_entropy_backward(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        saved: &CrossEntropySaved,
        options: &CrossEntropyOptions,
        scale: Option<&LossScale>,
    ) -> Result<Tensor> {
        Ok(match (self.vocabulary(), scale) {
            (None, None) => ops::cross_entropy_backward(logits, targets, saved, options, 1.0)?,
            (None, Some(scale)) => {
                ops::cross_entropy_backward_scaled(logits, targets, saved, options, scale)?
            }
            (Some(part), None) => {
                ops::cross_entropy_part_backward(logits, targets, part, saved, options, 1.0)?
            }
            (Some(part), Some(scale)) => {
                ops::cross_entropy_part_backward_scaled(logits, targets, part, saved, options, scale)?
            }
        })
    }

    /// The place of this rank's rows of the vocabulary, if it has a part.
    fn vocabulary(&self) -> Option<Part> {
        let ranks = self.ranks.as_ref()?;
        let first = share(self.vocab_size, ranks.rank(), ranks.size());
        Some(Part { first, total: self.vocab_size })
    }
}
