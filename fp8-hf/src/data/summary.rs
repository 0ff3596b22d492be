//! The counts of a data set, which are said before the first step.

use super::options::{DataKind, Pack};
use std::fmt;

/// The counts of one part of a data set. `Display` writes them as sentences.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DataSummary {
    /// The kind of the data.
    pub kind: DataKind,
    /// The packing.
    pub pack: Pack,
    /// The tokens of a sequence.
    pub seq: usize,
    /// The sequences.
    pub sequences: usize,
    /// The samples that were read: documents, prompts with completions, or conversations. For files of tokens, the windows.
    pub samples: u64,
    /// The tokens of these samples.
    pub tokens: u64,
    /// The targets that are learned in one pass over the sequences.
    pub learned: u64,
    /// The tokens of padding in all sequences.
    pub padding: u64,
    /// The samples longer than a sequence whose end was left out.
    pub documents_cut: u64,
    /// The tokens that were left out there.
    pub tokens_cut: u64,
    /// The learned tokens among them.
    pub learned_cut: u64,
    /// The samples longer than a sequence that became several pieces.
    pub samples_split: u64,
    /// The samples longer than a sequence that were left out.
    pub samples_dropped: u64,
    /// The learned tokens of these samples.
    pub learned_dropped: u64,
    /// The samples that were left out because no learned token was in them, or none was left after their end was cut off.
    pub samples_unlearned: u64,
    /// The tokens at the end that fill no whole window, and are not read.
    pub tokens_left: u64,
    /// Sentences about something that may be a mistake.
    pub warnings: Vec<String>,
}

impl DataSummary {
    pub(super) fn new(kind: DataKind, pack: Pack, seq: usize) -> Self {
        Self {
            kind,
            pack,
            seq,
            sequences: 0,
            samples: 0,
            tokens: 0,
            learned: 0,
            padding: 0,
            documents_cut: 0,
            tokens_cut: 0,
            learned_cut: 0,
            samples_split: 0,
            samples_dropped: 0,
            learned_dropped: 0,
            samples_unlearned: 0,
            tokens_left: 0,
            warnings: Vec::new(),
        }
    }
}

impl fmt::Display for DataSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sequences", self.sequences)
    }
}
