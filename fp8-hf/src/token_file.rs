//! Files of tokens, as llm.c and nanoGPT write them.

use crate::files::{open, unreadable};
use crate::positioned;
use crate::{Error, Result};
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes of llm.c's header: 256 integers.
const HEADER: u64 = 1024;
/// The tokens that a scan reads at once.
#[cfg(feature = "tokenizer")]
const PART: usize = 1 << 19;

/// The way in which a file of tokens is written.
///
/// ```
/// use fp8_hf::TokenFormat;
/// assert_eq!((TokenFormat::LlmCU32.bytes(), TokenFormat::RawU16.to_string()), (4, "raw u16".to_owned()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenFormat {
    /// llm.c's header, then u16.
    LlmCU16,
    /// llm.c's header, then u32.
    LlmCU32,
    /// u16 without a header, as nanoGPT writes them.
    RawU16,
}

impl TokenFormat {
    /// Returns the bytes that a token takes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::LlmCU16 | Self::RawU16 => 2,
            Self::LlmCU32 => 4,
        }
    }

    /// The format of a header with this first number, and its version.
    const fn of_magic(magic: i32) -> Option<(Self, i32)> {
        match magic {
            20_240_520 => Some((Self::LlmCU16, 1)),
            20_240_801 => Some((Self::LlmCU32, 7)),
            _ => None,
        }
    }
}

impl std::fmt::Display for TokenFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::LlmCU16 => "llm.c, u16",
            Self::LlmCU32 => "llm.c, u32",
            Self::RawU16 => "raw u16",
        })
    }
}

/// Returns the name of the contents of another file of llm.c, by its first number.
const fn other_file(magic: i32) -> Option<&'static str> {
    match magic {
        20_240_522 => Some("multiple-choice questions"),
        20_240_326 => Some("a model's weights"),
        _ => None,
    }
}

/// A file of token ids, which are read by range: llm.c's `.bin` with its header, or raw u16 as nanoGPT writes them. The formats are told
/// apart by their first number, which no text encoded by GPT-2's tokenizer begins with. Numbers are little-endian.
///
/// ```
/// use fp8_hf::{TokenFile, TokenFormat};
///
/// let path = std::env::temp_dir().join(format!("fp8-tokens-{}.bin", std::process::id()));
/// let ids: Vec<u8> = [50256u16, 464, 5417].iter().flat_map(|id| id.to_le_bytes()).collect();
/// std::fs::write(&path, ids)?;
/// let tokens = TokenFile::open(&path)?;
/// assert_eq!((tokens.len(), tokens.format()), (3, TokenFormat::RawU16));
/// assert_eq!(tokens.read(1..3, 50257)?, [464, 5417]);
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    format: TokenFormat,
    len: u64,
}

impl TokenFile {
    /// Opens a file and checks its header and size.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is empty, has fewer than two tokens, has another number of them than its header says, has a
    /// header of another version, or is another file of llm.c; [`Error::Io`] if it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let problem = |problem: String| Error::File { path: path.to_owned(), problem };
        let file = open(path).map_err(|error| error.expecting("expected a file of tokens"))?;
        let size = file.metadata().map_err(|error| unreadable(path, &error))?.len();
        let mut header = Vec::new();
        let read = (&file).take(HEADER).read_to_end(&mut header);
        read.map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let numbers: Vec<i32> =
            header.as_chunks::<4>().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect();
        let magic = numbers.first().copied().unwrap_or_default();
        if let Some(what) = other_file(magic) {
            let text = format!("it begins with {magic}: llm.c's file of {what}: expected one of tokens");
            return Err(problem(text));
        }
        let (format, len) = match TokenFormat::of_magic(magic) {
            Some((format, version)) => {
                if (header.len() as u64) < HEADER {
                    let found = header.len();
                    return Err(problem(format!(
                        "its header has {found} bytes: expected {HEADER}, as llm.c writes"
                    )));
                }
                let [found, count] = [1, 2].map(|index| numbers.get(index).copied().unwrap_or_default());
                if found != version {
                    let text =
                        format!("version {found} of the format that begins with {magic}: expected {version}");
                    return Err(problem(text));
                }
                let len = u64::try_from(count).map_err(|_| {
                    problem(format!("its header says {count} tokens: expected a positive number"))
                })?;
                let bytes = size.saturating_sub(HEADER);
                if bytes != len * format.bytes() as u64 {
                    let held = bytes / format.bytes() as u64;
                    return Err(problem(format!(
                        "its header says {len} tokens, but the file holds {held} ({bytes} bytes): copy or write it again"
                    )));
                }
                (format, len)
            }
            None if size % 2 != 0 => {
                let text =
                    format!("it has {size} bytes, and no header of llm.c: raw u16 tokens take 2 bytes each");
                return Err(problem(text));
            }
            None => (TokenFormat::RawU16, size / 2),
        };
        match len {
            0 => Err(problem("it holds no token: expected at least 2".into())),
            1 => {
                Err(problem("it holds one token, so there is nothing to predict: expected at least 2".into()))
            }
            _ => Ok(Self { path: path.to_owned(), file, format, len }),
        }
    }

    /// Returns the number of tokens: at least 2.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns how the tokens are stored.
    #[must_use]
    pub fn format(&self) -> TokenFormat {
        self.format
    }

    /// Reads the tokens of a range, which must be ids of a vocabulary of this size. Reads no more of the file than these.
    ///
    /// # Errors
    /// [`Error::File`] for a range that is not in the file, or an id that is not in the vocabulary; [`Error::Io`] if the file cannot
    /// be read.
    pub fn read(&self, range: Range<u64>, vocab_size: usize) -> Result<Vec<i32>> {
        let problem = |problem: String| Error::File { path: self.path.clone(), problem };
        if range.start > range.end || range.end > self.len {
            let text = format!("there are no tokens {range:?}: it holds {}", self.len);
            return Err(problem(text));
        }
        let too_many = || problem(format!("tokens {range:?} do not fit in memory"));
        let count = usize::try_from(range.end - range.start).map_err(|_| too_many())?;
        let mut bytes = Vec::new();
        let size = self.format.bytes();
        bytes.try_reserve_exact(count.checked_mul(size).ok_or_else(too_many)?).map_err(|_| too_many())?;
        bytes.resize(count * size, 0);
        self.read_bytes(&mut bytes, range.start)?;
        let mut ids = Vec::new();
        ids.try_reserve_exact(count).map_err(|_| too_many())?;
        for (position, bytes) in (range.start..).zip(bytes.chunks_exact(size)) {
            let id = match *bytes {
                [a, b] => u32::from(u16::from_le_bytes([a, b])),
                [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
                _ => u32::MAX,
            };
            match i32::try_from(id) {
                Ok(known) if (id as usize) < vocab_size => ids.push(known),
                _ => {
                    let last = vocab_size.saturating_sub(1);
                    return Err(problem(format!(
                        "token {id} at position {position}: expected 0 to {last}, the vocabulary of {vocab_size} tokens"
                    )));
                }
            }
        }
        Ok(ids)
    }
    /// Fills `bytes` with the tokens from `start` on.
    fn read_bytes(&self, bytes: &mut [u8], start: u64) -> Result<()> {
        let header = if self.format == TokenFormat::RawU16 { 0 } else { HEADER };
        positioned::read(&self.file, bytes, header + start * self.format.bytes() as u64)
            .map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Reads all tokens, which must be ids of a vocabulary of this size. Passes on for each window of `window` tokens how often `id`
    /// occurs in it. The tokens at the end that fill no window are checked, too.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[cfg(feature = "tokenizer")]
    pub(crate) fn scan(
        &self,
        vocab_size: usize,
        id: Option<i32>,
        window: u64,
        mut pass: impl FnMut(u64),
    ) -> Result<()> {
        let size = self.format.bytes();
        let mut buffer = vec![0; PART * size];
        let (mut start, mut count) = (0, 0);
        while start < self.len {
            let end = (start + PART as u64).min(self.len);
            let bytes = &mut buffer[..(end - start) as usize * size];
            self.read_bytes(bytes, start)?;
            if largest(bytes, size) as usize >= vocab_size {
                // Says which.
                self.read(start..end, vocab_size)?;
            }
            let mut at = start;
            while at < end {
                let next = (at / window + 1) * window;
                let until = next.min(end);
                let part = (at - start) as usize * size..(until - start) as usize * size;
                count += id.map_or(0, |id| occurrences(&bytes[part], size, id.unsigned_abs()));
                if until == next {
                    pass(std::mem::take(&mut count));
                }
                at = until;
            }
            start = end;
        }
        Ok(())
    }
}

/// The largest of the numbers of `size` bytes.
#[cfg(feature = "tokenizer")]
fn largest(bytes: &[u8], size: usize) -> u32 {
    let largest = match size {
        2 => bytes.as_chunks::<2>().0.iter().map(|&two| u16::from_le_bytes(two)).max().map(u32::from),
        _ => bytes.as_chunks::<4>().0.iter().map(|&four| u32::from_le_bytes(four)).max(),
    };
    largest.unwrap_or(0)
}

/// Counts a number among those of `size` bytes.
#[cfg(feature = "tokenizer")]
fn occurrences(bytes: &[u8], size: usize, number: u32) -> u64 {
    let count = match (size, u16::try_from(number)) {
        (2, Ok(number)) => {
            bytes.as_chunks::<2>().0.iter().filter(|&&two| u16::from_le_bytes(two) == number).count()
        }
        (2, Err(_)) => 0,
        _ => bytes.as_chunks::<4>().0.iter().filter(|&&four| u32::from_le_bytes(four) == number).count(),
    };
    count as u64
}
