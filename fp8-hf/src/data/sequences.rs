//! One part of a data set.

use super::sequence::{Sample, Sequence};
use super::summary::DataSummary;
use crate::{Error, Result};

/// The sequences of one part of a data set, which are read from files one by one.
#[derive(Debug)]
pub struct Sequences {
    summary: DataSummary,
    digest: String,
}

impl Sequences {
    /// Returns the number of sequences.
    #[must_use]
    pub fn len(&self) -> usize {
        self.summary.sequences
    }

    /// Returns true if there is no sequence.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a sequence.
    ///
    /// # Errors
    /// Not yet.
    pub fn read(&self, index: usize) -> Result<Sequence> {
        Err(Error::File { path: "data".into(), problem: format!("sequence {index} cannot be read yet") })
    }

    /// Returns the counts.
    #[must_use]
    pub fn summary(&self) -> &DataSummary {
        &self.summary
    }

    /// Returns a digest of content, tokenizer, template and options, in hexadecimal digits.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Reads one sample for display: the first that is learned from.
    ///
    /// # Errors
    /// Not yet.
    pub fn sample(&self) -> Result<Sample> {
        Err(Error::File { path: "data".into(), problem: "samples cannot be read yet".into() })
    }
}
