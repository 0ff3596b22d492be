//! Files of tokens, which are read in place.

use super::options::Resolved;
use crate::{Result, TokenFile, TokenFormat};

/// Files of tokens and the windows in them. No window crosses the end of a file.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<TokenFile>,
    /// For each file the number of windows up to its end.
    ends: Vec<u64>,
    seq: u64,
    vocab_size: usize,
    /// The token between documents.
    eos: Option<i32>,
}

/// The tokens of a window and the one behind it.
#[derive(Debug, PartialEq)]
pub(super) struct Window {
    pub(super) ids: Vec<i32>,
    /// Whether a document begins with the token.
    pub(super) firsts: Vec<bool>,
    /// Whether the token is learned although a document begins with it: it says that the one before has ended.
    pub(super) ends_documents: bool,
}

impl Shards {
    pub(super) fn new(
        files: Vec<TokenFile>,
        options: &Resolved,
        vocab_size: usize,
        eos: Option<i32>,
    ) -> Self {
        let seq = options.seq as u64;
        let ends = files.iter().scan(0, |end, file| {
            *end += (file.len() - 1) / seq;
            Some(*end)
        });
        Self { ends: ends.collect(), files, seq, vocab_size, eos }
    }

    /// Returns the number of windows.
    pub(super) fn windows(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> u64 {
        self.files.iter().map(TokenFile::len).sum()
    }

    /// Returns the number of tokens that are in no window.
    pub(super) fn left(&self) -> u64 {
        self.files
            .iter()
            .map(|file| {
                let rest = (file.len() - 1) % self.seq;
                if file.len() > self.seq { rest } else { file.len() }
            })
            .sum()
    }

    /// Returns true if documents cannot be told apart.
    pub(super) fn is_one_document(&self) -> bool {
        self.eos.is_none()
    }

    /// Returns whether the token between documents is among the first tokens of every file.
    pub(super) fn has_ends(&self) -> Result<bool> {
        let Some(eos) = self.eos else { return Ok(false) };
        for tokens in &self.files {
            if !tokens.read(0..tokens.len().min(SAMPLED), self.vocab_size)?.contains(&eos) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a window.
    pub(super) fn read(&self, window: u64) -> Result<Option<Window>> {
        let file = self.ends.partition_point(|&end| end <= window);
        let before = file.checked_sub(1).and_then(|before| self.ends.get(before).copied()).unwrap_or(0);
        let Some(tokens) = self.files.get(file) else { return Ok(None) };
        let start = (window - before) * self.seq;
        let ids = tokens.read(start..start + self.seq + 1, self.vocab_size)?;
        let is_leading = is_leading(tokens.format());
        let mut firsts = self.firsts(&ids, tokens.format());
        // What is before a window does not matter: a piece begins there anyway.
        if let Some(first) = firsts.first_mut() {
            *first = true;
        }
        Ok(Some(Window { ids, firsts, ends_documents: is_leading }))
    }

    /// Returns where documents begin, except that nothing is known of the first token of files that have the token behind documents.
    fn firsts(&self, ids: &[i32], format: TokenFormat) -> Vec<bool> {
        let is_end = |id: &i32| Some(*id) == self.eos;
        if is_leading(format) {
            return ids.iter().map(is_end).collect();
        }
        let behind = ids.iter().map(is_end).take(ids.len().saturating_sub(1));
        [false].into_iter().chain(behind).take(ids.len()).collect()
    }

    /// Reads all tokens, and checks that they are in the vocabulary.
    pub(super) fn check(&self) -> Result<()> {
        self.scan(true, |_| ())
    }

    /// Reads all tokens, and passes on the number of targets that are learned in each window, in order. Checks that all are in the
    /// vocabulary.
    pub(super) fn scan(&self, cross: bool, mut pass: impl FnMut(u64)) -> Result<()> {
        for tokens in &self.files {
            // The token behind one that ends a document is not learned.
            let end = self.eos.filter(|_| !cross && !is_leading(tokens.format()));
            let mut windows = (tokens.len() - 1) / self.seq;
            tokens.scan(self.vocab_size, end, self.seq, |ends| {
                // The last window of the file may have no target for its last token.
                if windows > 0 {
                    windows -= 1;
                    pass(self.seq - ends);
                }
            })?;
        }
        Ok(())
    }
}

/// The tokens at the beginning of a file in which the one between documents is looked for.
const SAMPLED: u64 = 1 << 20;

/// Whether the token between documents begins one: llm.c puts it in front, nanoGPT behind.
fn is_leading(format: TokenFormat) -> bool {
    format != TokenFormat::RawU16
}
