//! The special tokens of a folder: those with a use, such as the one that ends a text, and all others.

use crate::files::{exists, read_text};
use crate::{Error, Result, json};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

pub(super) const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const TOKENIZER: &str = "tokenizer.json";
/// The end of the names of tokens with a use.
const END: &str = "_token";
/// The fields with a list of further special tokens.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The special tokens of a folder.
#[derive(Debug, Clone, Default)]
pub(super) struct SpecialTokens {
    /// By their use: `bos_token`, `eos_token` and others.
    pub(super) named: BTreeMap<String, String>,
    /// All of them.
    all: BTreeSet<String>,
}

impl SpecialTokens {
    /// Reads the files of a folder. Those that are missing have no tokens.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut tokens = Self::default();
        // The configuration takes precedence.
        for file in [MAP, CONFIG] {
            let map = object(folder, file)?;
            for (name, value) in &map {
                if let Some(content) = content(value).filter(|_| name.ends_with(END)) {
                    tokens.named.insert(name.clone(), content.to_owned());
                }
            }
            for list in LISTS.iter().filter_map(|&list| map.get(list)) {
                let values: Vec<&Value> = match list {
                    Value::Array(values) => values.iter().collect(),
                    Value::Object(values) => values.values().collect(),
                    _ => Vec::new(),
                };
                tokens.all.extend(values.into_iter().filter_map(content).map(str::to_owned));
            }
            if let Some(Value::Object(decoder)) = map.get("added_tokens_decoder") {
                tokens.add_special(decoder.values());
            }
        }
        if let Some(Value::Array(added)) = added(folder)? {
            tokens.add_special(added.iter());
        }
        tokens.all.extend(tokens.named.values().cloned());
        tokens.all.remove("");
        Ok(tokens)
    }

    fn add_special<'a>(&mut self, values: impl Iterator<Item = &'a Value>) {
        let special = values.filter(|value| value.get("special") == Some(&Value::Bool(true)));
        self.all.extend(special.filter_map(content).map(str::to_owned));
    }

    /// Returns true for a text that ends with a special token.
    pub(super) fn is_end_of(&self, text: &str) -> bool {
        self.all.iter().any(|token| text.ends_with(token.as_str()))
    }
}

/// Returns the text of a token, which is a string or an object with flags.
fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Reads an object, which is empty if there is no such file.
pub(super) fn object(folder: &Path, file: &str) -> Result<Map<String, Value>> {
    let path = folder.join(file);
    if !exists(&path) {
        return Ok(Map::new());
    }
    json::object(&read_text(&path)?).map_err(|problem| Error::File { path, problem })
}

/// Reads the tokens that `tokenizer.json` adds to its vocabulary. The file may be large, and all else in it is skipped.
fn added(folder: &Path) -> Result<Option<Value>> {
    #[derive(serde::Deserialize)]
    struct File {
        added_tokens: Option<Value>,
    }
    let path = folder.join(TOKENIZER);
    if !exists(&path) {
        return Ok(None);
    }
    let file = std::io::BufReader::new(crate::files::open(&path)?);
    let read: File = serde_json::from_reader(file)
        .map_err(|error| Error::File { path, problem: format!("not a tokenizer: {error}") })?;
    Ok(read.added_tokens)
}
