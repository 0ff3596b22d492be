//! The file in which the tokens of samples are kept.
//!
//! | part | contents |
//! |---|---|
//! | tokens | u32 each: the id, [`LEARNED`], [`FIRST`] |
//! | notes | JSON |
//! | ends | u64 for each sample: the tokens up to its end |
//! | learned | u32 for each sample: its learned tokens, without the first |
//! | checksums | u64 for each block of [`BLOCK`] tokens |
//! | trailer | [`MAGIC`], counts of tokens, samples and bytes of notes as u64, SHA-256 of the key and all parts but the tokens |
//!
//! Numbers are little-endian. A file that was truncated has no trailer. Damaged tokens are noticed as they are read, and in files of
//! up to [`CHECKED`] bytes when they are opened.

use crate::positioned;
use crate::{Error, Result};
use fp8_kernels::AtomicFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The bit of a token that is learned.
pub(super) const LEARNED: u32 = 1 << 31;
/// The bit of the first token of a sample.
pub(super) const FIRST: u32 = 1 << 30;
/// The bits of the id.
pub(super) const ID: u32 = FIRST - 1;

const MAGIC: [u8; 8] = *b"fp8data1";
/// The tokens of a block.
const BLOCK: usize = 4096;
/// The bytes of the trailer.
const TRAILER: u64 = 8 + 3 * 8 + 32;
/// Files with at most so many bytes of tokens are checked completely when they are opened.
const CHECKED: u64 = 64 << 20;

/// The facts about samples that are kept beside them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Notes {
    /// The samples without any text, which have no tokens.
    pub(super) empty: u64,
    pub(super) warnings: Vec<String>,
}

/// Writes a file.
#[derive(Debug)]
pub(super) struct Writer {
    path: PathBuf,
    file: AtomicFile,
    tokens: u64,
    ends: Vec<u64>,
    learned: Vec<u32>,
    checksums: Vec<u64>,
    /// The tokens of a block that is not full.
    block: Vec<u32>,
    /// The learned tokens of the sample that is being written; `None` before its first token.
    sample: Option<u32>,
}

impl Writer {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = AtomicFile::create(path).map_err(|error| unwritable(path, &error))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            tokens: 0,
            ends: Vec::new(),
            learned: Vec::new(),
            checksums: Vec::new(),
            block: Vec::with_capacity(BLOCK),
            sample: None,
        })
    }

    /// Appends tokens to the sample.
    pub(super) fn push(&mut self, ids: &[u32]) -> Result<()> {
        for &id in ids {
            let token = match &mut self.sample {
                None => {
                    self.sample = Some(0);
                    id | FIRST
                }
                Some(learned) => {
                    *learned = learned.saturating_add(u32::from(id & LEARNED != 0));
                    id
                }
            };
            self.block.push(token);
            if self.block.len() == BLOCK {
                self.flush()?;
            }
        }
        self.tokens += ids.len() as u64;
        Ok(())
    }

    /// Ends the sample. One without tokens is none.
    pub(super) fn end(&mut self) {
        if let Some(learned) = self.sample.take() {
            self.ends.push(self.tokens);
            self.learned.push(learned);
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.checksums.push(checksum(&self.block));
        let bytes: Vec<u8> = self.block.iter().flat_map(|token| token.to_le_bytes()).collect();
        self.block.clear();
        self.file.write_all(&bytes).map_err(|error| unwritable(&self.path, &error))
    }

    /// Writes the rest, and puts the file in place.
    pub(super) fn commit(mut self, key: &[u8; 32], notes: &Notes) -> Result<()> {
        if !self.block.is_empty() {
            self.flush()?;
        }
        let notes = serde_json::to_vec(notes).unwrap_or_default();
        let mut index = notes.clone();
        index.extend(self.ends.iter().flat_map(|end| end.to_le_bytes()));
        index.extend(self.learned.iter().flat_map(|count| count.to_le_bytes()));
        index.extend(self.checksums.iter().flat_map(|sum| sum.to_le_bytes()));
        let counts = [self.tokens, self.ends.len() as u64, notes.len() as u64];
        let mut trailer: Vec<u8> = MAGIC.to_vec();
        trailer.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        let digest = Sha256::new().chain_update(key).chain_update(&index).chain_update(&trailer).finalize();
        trailer.extend(digest);
        let Self { path, mut file, .. } = self;
        let written = file.write_all(&index).and_then(|()| file.write_all(&trailer));
        written.and_then(|()| file.commit()).map_err(|error| unwritable(&path, &error))
    }
}

/// A checksum of tokens: FNV-1a over words of 32 bits.
fn checksum(tokens: &[u32]) -> u64 {
    let mix = |sum: u64, &token: &u32| (sum ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01B3);
    tokens.iter().fold(0xCBF2_9CE4_8422_2325, mix)
}

pub(super) fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    let problem = format!("tokens cannot be kept here: {error}: expected a folder that can be written to");
    Error::File { path: path.to_owned(), problem }
}

/// An open file of tokens.
#[derive(Debug)]
pub(super) struct Tokens {
    path: PathBuf,
    file: File,
    len: u64,
    ends: Vec<u64>,
    learned: Vec<u32>,
    checksums: Vec<u64>,
    pub(super) notes: Notes,
}

impl Tokens {
    /// Opens a file. Returns `None` for one that is missing, damaged, or has another key.
    pub(super) fn open(path: &Path, key: &[u8; 32]) -> Option<Self> {
        let file = crate::files::open(path).ok()?;
        let size = file.metadata().ok()?.len();
        let mut trailer = [0; TRAILER as usize];
        positioned::read(&file, &mut trailer, size.checked_sub(TRAILER)?).ok()?;
        let [magic, tokens, samples, notes] =
            [0, 1, 2, 3].map(|index| trailer.as_chunks::<8>().0.get(index).copied().unwrap_or_default());
        if magic != MAGIC {
            return None;
        }
        let [len, samples, notes_len] = [tokens, samples, notes].map(u64::from_le_bytes);
        let blocks = len.div_ceil(BLOCK as u64);
        let index_len =
            samples.checked_mul(12)?.checked_add(notes_len)?.checked_add(blocks.checked_mul(8)?)?;
        if len.checked_mul(4)?.checked_add(index_len)?.checked_add(TRAILER)? != size {
            return None;
        }
        // One part after the other, so that memory holds one of them twice.
        let mut digest = Sha256::new().chain_update(key);
        let mut offset = len * 4;
        let mut part = |count: u64, size: u64| {
            let mut bytes = vec![0; usize::try_from(count * size).ok()?];
            positioned::read(&file, &mut bytes, offset).ok()?;
            offset += count * size;
            digest.update(&bytes);
            Some(bytes)
        };
        let numbers = |bytes: &[u8]| {
            bytes.as_chunks::<8>().0.iter().map(|&b| u64::from_le_bytes(b)).collect::<Vec<_>>()
        };
        let notes = part(notes_len, 1)?;
        let ends = numbers(&part(samples, 8)?);
        let learned = part(samples, 4)?.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        let checksums = numbers(&part(blocks, 8)?);
        let (head, expected) = trailer.split_at(trailer.len() - 32);
        if digest.chain_update(head).finalize()[..] != *expected {
            return None;
        }
        let tokens = Self {
            path: path.to_owned(),
            notes: serde_json::from_slice(&notes).ok()?,
            ends,
            learned,
            checksums,
            file,
            len,
        };
        let is_whole = len * 4 > CHECKED || tokens.each_block(|_| ()).is_ok();
        is_whole.then_some(tokens)
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the number of samples.
    pub(super) fn samples(&self) -> usize {
        self.ends.len()
    }

    /// Returns the place of a sample.
    pub(super) fn sample(&self, index: usize) -> Range<u64> {
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before).copied()).unwrap_or(0);
        start..self.ends.get(index).copied().unwrap_or(start)
    }

    /// Returns the number of learned tokens of a sample, without its first token.
    pub(super) fn learned(&self, index: usize) -> u64 {
        u64::from(self.learned.get(index).copied().unwrap_or(0))
    }

    /// Returns true if all tokens of all samples are learned.
    pub(super) fn are_all_learned(&self) -> bool {
        (0..self.samples()).all(|index| {
            let place = self.sample(index);
            self.learned(index) + 1 == place.end - place.start
        })
    }

    /// Returns the number of samples that begin in a range of tokens.
    pub(super) fn starts_in(&self, range: Range<u64>) -> u64 {
        // Sample i + 1 begins at the end of sample i, and sample 0 at 0.
        let before = |at: u64| self.ends.partition_point(|&end| end < at);
        let first = usize::from(range.contains(&0));
        let last = usize::from(range.contains(&self.len) && self.len > 0);
        (before(range.end) - before(range.start) + first - last) as u64
    }

    /// Reads tokens with their marks.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u32>> {
        let block = BLOCK as u64;
        let (start, end) = (range.start.min(self.len), range.end.min(self.len));
        let mut tokens = Vec::new();
        for index in start / block..end.div_ceil(block) {
            let from = index * block;
            let read = self.block(index)?;
            let part = start.saturating_sub(from) as usize..((end - from) as usize).min(read.len());
            tokens.extend_from_slice(read.get(part).unwrap_or_default());
        }
        Ok(tokens)
    }

    /// Reads all tokens in order.
    fn each_block(&self, mut pass: impl FnMut(&[u32])) -> Result<()> {
        (0..self.checksums.len() as u64).try_for_each(|index| {
            pass(&self.block(index)?);
            Ok(())
        })
    }

    fn block(&self, index: u64) -> Result<Vec<u32>> {
        let start = index * BLOCK as u64;
        let count = (self.len - start).min(BLOCK as u64) as usize;
        let mut bytes = vec![0; count * 4];
        let read = positioned::read(&self.file, &mut bytes, start * 4);
        read.map_err(|source| Error::Io { path: self.path.clone(), source })?;
        let tokens: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        if self.checksums.get(index as usize) == Some(&checksum(&tokens)) {
            return Ok(tokens);
        }
        let problem = "the kept tokens are damaged: remove the file and start again, which makes them anew";
        Err(Error::File { path: self.path.clone(), problem: problem.to_owned() })
    }
}
