//! A sequence as the trainer takes it.

use std::ops::Range;

/// The target of a position from which nothing is learned: −100, as in PyTorch.
///
/// ```
/// assert_eq!(fp8_hf::data::IGNORED, -100);
/// ```
pub const IGNORED: i32 = -100;

/// A sequence: the ids of its tokens, and the next token of each as its target. All vectors have the sequence's length, but
/// `lengths`.
///
/// ```
/// use fp8_hf::data::{IGNORED, Sequence};
/// // Two samples of 3 and 2 tokens, and one token of padding.
/// let sequence = Sequence {
///     ids: vec![5, 6, 7, 8, 9, 0],
///     targets: vec![6, 7, IGNORED, 9, IGNORED, IGNORED],
///     lengths: vec![3, 2],
/// };
/// assert_eq!(sequence.positions(), [0, 1, 2, 0, 1, 0]);
/// assert_eq!(sequence.learned(), 3);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens; padding at the end.
    pub ids: Vec<i32>,
    /// The token that the model learns to predict at each position, or [`IGNORED`].
    pub targets: Vec<i32>,
    /// The tokens of each piece that reads no other piece. Padding follows them and belongs to none.
    pub lengths: Vec<usize>,
}

impl Sequence {
    /// Returns the position of each token in its piece. Those of padding count from 0, too.
    #[must_use]
    pub fn positions(&self) -> Vec<i32> {
        let used: usize = self.lengths.iter().sum();
        let padding = self.ids.len().saturating_sub(used);
        let pieces = self.lengths.iter().copied().chain([padding]);
        pieces.flat_map(|length| (0..).take(length)).collect()
    }

    /// Returns the number of targets that are learned.
    #[must_use]
    pub fn learned(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }
}

/// A sample as it was tokenized: a document, a prompt with its completion, or a conversation.
///
/// ```
/// use fp8_hf::data::Sample;
/// let sample = Sample { ids: vec![4, 5, 6], learned: vec![1..3] };
/// assert_eq!(sample.ids[sample.learned[0].clone()], [5, 6]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<i32>,
    /// The tokens that are learned. The first token of a sample counts for nothing, as nothing predicts it.
    pub learned: Vec<Range<usize>>,
}
