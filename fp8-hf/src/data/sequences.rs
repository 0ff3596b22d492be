//! One part of a data set.

use super::load::Store;
use super::options::{Resolved, TooLong, refused};
use super::plan::{Plan, length};
use super::sequence::{IGNORED, Sample, Sequence};
use super::summary::DataSummary;
use super::tokens::{FIRST, ID, LEARNED, Tokens};
use crate::Result;
use std::ops::Range;
use std::sync::Arc;

/// The sequences of one part of a data set, which are read from files one by one: memory holds no tokens, but a few bytes for each
/// sample. They may be read by several threads at once. The example of [`Dataset`](super::Dataset) reads some.
#[derive(Debug)]
pub struct Sequences {
    pub(super) store: Arc<Store>,
    pub(super) layout: Layout,
    pub(super) options: Resolved,
    pub(super) pad: i32,
    pub(super) summary: DataSummary,
    pub(super) digest: String,
}

/// The tokens of each sequence.
#[derive(Debug)]
pub(super) enum Layout {
    /// Windows over all tokens: these, or all.
    Windows(Option<Vec<u32>>),
    /// Whole samples.
    Plan(Plan),
}

/// A token with what is known about it.
#[derive(Debug, Clone, Copy)]
struct Token {
    id: i32,
    /// Whether a document begins with it.
    is_first: bool,
    /// Whether it is learned if the token before it belongs to its document.
    is_learned: bool,
    /// Whether it is learned if the token before it belongs to another one, too.
    ends_document: bool,
}

impl Token {
    fn kept(token: u32) -> Self {
        Self {
            // An id has 30 bits.
            id: (token & ID) as i32,
            is_first: token & FIRST != 0,
            is_learned: token & LEARNED != 0,
            ends_document: false,
        }
    }
}

impl Sequences {
    /// Returns the number of sequences.
    #[must_use]
    pub fn len(&self) -> usize {
        self.summary.sequences
    }

    /// Returns true if there is no sequence. [`Dataset::open`](super::Dataset::open) returns none of these.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a sequence of [`DataOptions::seq`](super::DataOptions) tokens.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for an index that is not below [`len`](Self::len). [`Error::File`](crate::Error::File)
    /// or [`Error::Io`](crate::Error::Io), which names the file, if it cannot be read, or the kept tokens are damaged.
    pub fn read(&self, index: usize) -> Result<Sequence> {
        if index >= self.len() {
            let remedy = format!("expected a sequence below {}", self.len());
            return Err(refused("index", index, &remedy));
        }
        match (&self.layout, &*self.store) {
            (Layout::Windows(selected), store) => {
                let chosen = selected.as_ref().and_then(|selected| selected.get(index).copied());
                let window = chosen.map_or(index as u64, u64::from);
                Ok(self.window(&window_tokens(store, window, self.options.seq)?))
            }
            (Layout::Plan(plan), Store::Kept { tokens, .. }) => self.planned(plan, tokens, index),
            (Layout::Plan(_), Store::Shards(_)) => Ok(self.window(&[])),
        }
    }

    /// Returns the counts.
    #[must_use]
    pub fn summary(&self) -> &DataSummary {
        &self.summary
    }

    /// Returns a digest of 64 hexadecimal digits. It changes with the contents of the files, the tokenizer, the chat template and
    /// the options, but not with the names of files or the cache. Of files larger than 64 MiB it covers the length and samples.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Reads one sample to show what is learned: the first one, without what does not fit in a sequence.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn sample(&self) -> Result<Sample> {
        let seq = self.options.seq as u64;
        let tokens = match &*self.store {
            Store::Kept { tokens, .. } => {
                let sample = match &self.layout {
                    Layout::Plan(plan) => plan.pieces(0).first().map_or(0, |&(sample, _)| sample as usize),
                    Layout::Windows(_) => 0,
                };
                let place = tokens.sample(sample);
                let read = tokens.read(place.start..place.end.min(place.start + seq))?;
                read.into_iter().map(Token::kept).collect()
            }
            store @ Store::Shards(_) => window_tokens(store, 0, self.options.seq)?,
        };
        let mut learned: Vec<Range<usize>> = Vec::new();
        for (at, _) in tokens.iter().enumerate().filter(|(_, token)| token.is_learned) {
            match learned.last_mut() {
                Some(last) if last.end == at => last.end = at + 1,
                _ => learned.push(at..at + 1),
            }
        }
        Ok(Sample { ids: tokens.iter().map(|token| token.id).collect(), learned })
    }

    /// Makes a sequence of the tokens of a window.
    fn window(&self, tokens: &[Token]) -> Sequence {
        let seq = self.options.seq;
        let cross = self.options.cross;
        let ids: Vec<i32> = tokens.iter().take(seq).map(|token| token.id).collect();
        let target = |token: &Token| {
            let is_reached = cross || !token.is_first || token.ends_document;
            if token.is_learned && is_reached { token.id } else { IGNORED }
        };
        let targets = tokens.iter().skip(1).map(target).collect();
        let mut lengths = Vec::new();
        for (at, token) in tokens.iter().take(seq).enumerate() {
            match lengths.last_mut() {
                Some(last) if at > 0 && (cross || !token.is_first) => *last += 1,
                _ => lengths.push(1),
            }
        }
        Sequence { ids, targets, lengths }
    }

    /// Makes a sequence of whole samples.
    fn planned(&self, plan: &Plan, tokens: &Tokens, index: usize) -> Result<Sequence> {
        let seq = self.options.seq;
        let mut sequence =
            Sequence { ids: Vec::with_capacity(seq), targets: Vec::with_capacity(seq), lengths: Vec::new() };
        for &(sample, part) in plan.pieces(index) {
            let length = length(tokens, &self.options, (sample, part));
            let place = tokens.sample(sample as usize);
            let start = place.start + u64::from(part) * seq as u64;
            let more = u64::from(self.options.too_long == TooLong::Split);
            let read = tokens.read(start..(start + length as u64 + more).min(place.end))?;
            let read: Vec<Token> = read.into_iter().map(Token::kept).collect();
            sequence.ids.extend(read.iter().take(length).map(|token| token.id));
            let next = (1..=length).map(|at| read.get(at).filter(|token| token.is_learned));
            sequence.targets.extend(next.map(|token| token.map_or(IGNORED, |token| token.id)));
            sequence.lengths.push(length);
        }
        sequence.ids.resize(seq, self.pad);
        sequence.targets.resize(seq, IGNORED);
        Ok(sequence)
    }
}

/// Reads the tokens of a window and the one behind it.
fn window_tokens(store: &Store, window: u64, seq: usize) -> Result<Vec<Token>> {
    match store {
        Store::Kept { tokens, .. } => {
            let start = window * seq as u64;
            let read = tokens.read(start..start + seq as u64 + 1)?;
            Ok(read.into_iter().map(Token::kept).collect())
        }
        Store::Shards(shards) => {
            let Some(read) = shards.read(window)? else { return Ok(Vec::new()) };
            let token = |(id, is_first): (i32, bool)| Token {
                id,
                is_first,
                is_learned: true,
                ends_document: read.ends_documents,
            };
            Ok(read.ids.iter().copied().zip(read.firsts.iter().copied()).map(token).collect())
        }
    }
}

/// Returns the number of targets that are learned in each window, in order.
pub(super) fn count_windows(
    store: &Store,
    options: &Resolved,
    windows: u64,
    mut pass: impl FnMut(u64),
) -> Result<()> {
    let seq = options.seq as u64;
    match store {
        Store::Shards(shards) => shards.scan(options.cross, pass),
        Store::Kept { tokens, .. } if tokens.are_all_learned() => {
            for window in 0..windows {
                let targets = window * seq + 1..(window + 1) * seq + 1;
                pass(seq - if options.cross { 0 } else { tokens.starts_in(targets) });
            }
            Ok(())
        }
        Store::Kept { .. } => {
            for window in 0..windows {
                let read = window_tokens(store, window, options.seq)?;
                let is_target = |token: &&Token| token.is_learned && (options.cross || !token.is_first);
                pass(read.iter().skip(1).filter(is_target).count() as u64);
            }
            Ok(())
        }
    }
}
