//! The chat template of a model.

use crate::{Error, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
}

impl ChatTemplate {
    /// Reads the template of a folder, if it has one.
    ///
    /// # Errors
    /// Not yet.
    pub fn open(_folder: &Path) -> Result<Option<Self>> {
        Ok(None)
    }

    /// Renders messages.
    ///
    /// # Errors
    /// Not yet.
    pub fn render(&self, _messages: &[serde_json::Value], _add_generation_prompt: bool) -> Result<String> {
        Err(Error::File { path: self.path.clone(), problem: "templates cannot be rendered yet".into() })
    }

    /// Renders a conversation, and returns its answers as ranges of bytes.
    ///
    /// # Errors
    /// Not yet.
    pub fn conversation(&self, _messages: &[serde_json::Value]) -> Result<(String, Vec<Range<usize>>)> {
        Err(Error::File { path: self.path.clone(), problem: "templates cannot be rendered yet".into() })
    }
}
