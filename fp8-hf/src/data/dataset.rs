//! A data set: the sequences to train on, and those to measure the loss on.

use super::options::DataOptions;
use super::sequences::Sequences;
use crate::{Error, Folder, Result, Tokenizer};
use std::path::PathBuf;

/// Training data.
#[derive(Debug)]
pub struct Dataset {
    /// The sequences that the model is trained on.
    pub train: Sequences,
    /// The sequences that the loss is measured on.
    pub validation: Option<Sequences>,
}

impl Dataset {
    /// Opens files or folders.
    ///
    /// # Errors
    /// Not yet.
    pub fn open(
        paths: &[PathBuf],
        _tokenizer: &Tokenizer,
        _folder: &Folder,
        options: &DataOptions,
    ) -> Result<Self> {
        options.check()?;
        let path = paths.first().cloned().unwrap_or_default();
        Err(Error::File { path, problem: "training data cannot be read yet".into() })
    }
}
