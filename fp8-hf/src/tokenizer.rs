//! Text as tokens and tokens as text: the `tokenizer.json` of a folder, and the tokens that its other files add.

mod caught;
mod outside;

use super::files::{open, unreadable};
use crate::{Error, Result};
use caught::caught;
use outside::FILE;
use rayon::prelude::*;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tokenizers::{Encoding, PostProcessorWrapper, Token};

/// The bytes of text for each wanted token that [`Tokenizer::encode_start`] tries first, and how many more.
const BYTES_PER_TOKEN: usize = 8;
const MORE_BYTES: usize = 4096;
/// Longer texts are tokenized in pieces of about this many bytes, as it takes about 200 bytes of memory for each.
const PIECE: usize = 1 << 20;
/// Texts that come in parts are tokenized in smaller pieces, so many at once.
const PART: usize = PIECE / 4;
const PARTS: usize = 4;
/// The bytes on both sides of a cut whose tokens must be the same with and without it.
const CONTEXT: usize = 4096;
/// The cuts that are tried before a piece becomes larger.
const CUTS: usize = 16;
/// Larger files are refused.
const MAX_BYTES: u64 = 256 << 20;

/// The tokenizer of a model: a `tokenizer.json`, read by Hugging Face's tokenizers. Needs the feature `tokenizer`.
///
/// Tokens that `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` add are read as transformers 5 does. What
/// surrounds a text, such as a token that begins it, is that of the `post_processor` in `tokenizer.json`: like transformers 5, it
/// ignores `add_bos_token` and `add_eos_token`. The other steps are those of `tokenizer.json`, too, whatever `tokenizer_class` says.
///
/// Texts are encoded completely: truncation and padding in the file are ignored, as in transformers. Long texts are processed in
/// pieces, with the same tokens.
///
/// ```
/// use fp8_hf::Tokenizer;
/// let place = std::env::temp_dir().join(format!("fp8-tokenizer-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let words = r#"{"model": {"type": "WordLevel", "vocab": {"the": 0, "sea": 1, "?": 2}, "unk_token": "?"},
///     "pre_tokenizer": {"type": "Whitespace"}}"#;
/// std::fs::write(place.join("tokenizer.json"), words)?;
/// let tokenizer = Tokenizer::open(&place, 3)?;
/// assert_eq!(tokenizer.encode("the sea", false)?, [0, 1]);
/// assert_eq!(tokenizer.decode(&[1, 0])?, "sea the");
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    tokenizer: tokenizers::Tokenizer,
    path: PathBuf,
    vocab_size: usize,
}

impl Tokenizer {
    /// Reads the `tokenizer.json` in `folder` and the files with further tokens, for a model with a vocabulary of `vocab_size`
    /// tokens.
    ///
    /// # Errors
    /// [`Error::File`], which names the file: it is missing, more than 256 MiB, or no tokenizer. A file that gives a token
    /// another id than the tokenizer has for it, or an id to another token, is an error that names both.
    pub fn open(folder: &Path, vocab_size: usize) -> Result<Self> {
        let path = folder.join(FILE);
        let problem = |problem: String| Error::File { path: path.clone(), problem };
        let file = open(&path).map_err(|error| {
            error.expecting("expected the tokenizer of the model, as transformers saves it")
        })?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&path, &error))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(problem(format!("more than {} MiB: expected a tokenizer", MAX_BYTES >> 20)));
        }
        let read = || {
            let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes)?;
            tokenizer.with_padding(None).with_truncation(None)?;
            Ok(tokenizer)
        };
        let mut tokenizer =
            caught(read).map_err(|error| problem(format!("not a tokenizer that can be read: {error}")))?;
        outside::add(folder, &bytes, &mut tokenizer)?;
        if let Some(mut processor) = tokenizer.get_post_processor().cloned() {
            keep_spaces(&mut processor);
            tokenizer.with_post_processor(Some(processor));
        }
        Ok(Self { tokenizer, path, vocab_size })
    }

    /// Returns the tokens of a text; if `has_special`, with those that the tokenizer adds to a text, such as one that begins it.
    ///
    /// # Errors
    /// A token outside the vocabulary of the model: the tokenizer belongs to another one.
    pub fn encode(&self, text: &str, has_special: bool) -> Result<Vec<i32>> {
        if has_special {
            let Ok([mut tokens, mut end]) = self.surround() else { return self.encode_at_once(text, true) };
            tokens.append(&mut self.encode(text, false)?);
            tokens.append(&mut end);
            return Ok(tokens);
        }
        let (mut tokens, mut rest, mut size) = (Vec::new(), text, PIECE);
        while rest.len() > 2 * size {
            match self.cut(rest, size)? {
                Some(at) => {
                    tokens.extend(self.encode_at_once(&rest[..at], false)?);
                    (rest, size) = (&rest[at..], PIECE);
                }
                None => size *= 2,
            }
        }
        tokens.extend(self.encode_at_once(rest, false)?);
        Ok(tokens)
    }

    /// Returns the tokens of a text, without those that the tokenizer adds, and the bytes that each stands for. Tokens that share a
    /// character have all of its bytes.
    pub(crate) fn encode_spans(&self, text: &str) -> Result<Vec<(i32, Range<usize>)>> {
        let (mut tokens, mut start, mut size) = (Vec::new(), 0, PIECE);
        loop {
            let rest = &text[start..];
            let cut = if rest.len() > 2 * size { self.cut(rest, size)? } else { Some(rest.len()) };
            let Some(end) = cut else {
                size *= 2;
                continue;
            };
            let encoding = caught(|| self.tokenizer.encode(&rest[..end], false));
            let encoding = encoding.map_err(|error| self.problem(error))?;
            let ids = self.fitting(encoding.get_ids())?;
            let spans = encoding.get_offsets().iter().map(|&(first, last)| start + first..start + last);
            tokens.extend(ids.into_iter().zip(spans));
            (start, size) = (start + end, PIECE);
            if start == text.len() {
                return Ok(tokens);
            }
        }
    }

    /// Passes on the tokens of a text that comes in parts, without those that the tokenizer adds: those that [`encode`](Self::encode)
    /// returns for the whole text. `more` appends to a text, and returns false at its end.
    pub(crate) fn encode_parts(
        &self,
        mut more: impl FnMut(&mut String) -> Result<bool>,
        mut pass: impl FnMut(&[i32]) -> Result<()>,
    ) -> Result<()> {
        let mut encode = |pieces: &mut Vec<String>| {
            let encoded: Vec<_> = pieces.par_iter().map(|piece| self.encode_at_once(piece, false)).collect();
            pieces.clear();
            encoded.into_iter().try_for_each(|tokens| pass(&tokens?))
        };
        let (mut pieces, mut rest, mut size, mut is_whole) = (Vec::new(), String::new(), PART, false);
        loop {
            // A cut looks at so many bytes.
            while !is_whole && rest.len() <= 2 * size + CONTEXT + 4 {
                is_whole = !more(&mut rest)?;
            }
            if rest.len() <= 2 * size {
                pieces.push(rest);
                return encode(&mut pieces);
            }
            match self.cut(&rest, size)? {
                Some(at) => {
                    let behind = rest.split_off(at);
                    pieces.push(std::mem::replace(&mut rest, behind));
                    size = PART;
                    if pieces.len() == PARTS {
                        encode(&mut pieces)?;
                    }
                }
                None => size *= 2,
            }
        }
    }

    /// Returns the id of a token by its text.
    pub(crate) fn id(&self, token: &str) -> Option<i32> {
        let id = self.tokenizer.token_to_id(token)?;
        self.fitting(&[id]).ok()?.first().copied()
    }

    /// Returns the folder that the tokenizer was read from.
    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Returns a place behind `size` bytes where a cut changes no token of the text around it.
    fn cut(&self, text: &str, size: usize) -> Result<Option<usize>> {
        let is_space = |at: usize| text.as_bytes().get(at).is_some_and(u8::is_ascii_whitespace);
        let places = (size..2 * size).filter(|&at| is_space(at) && !is_space(at - 1));
        for at in places.take(CUTS) {
            let begin = (at.saturating_sub(CONTEXT)..at).find(|&begin| text.is_char_boundary(begin));
            let end = (at + CONTEXT..text.len()).find(|&end| text.is_char_boundary(end));
            let (begin, end) = (begin.unwrap_or(at), end.unwrap_or(text.len()));
            let mut parts = self.encode_at_once(&text[begin..at], false)?;
            parts.extend(self.encode_at_once(&text[at..end], false)?);
            if parts == self.encode_at_once(&text[begin..end], false)? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    fn encode_at_once(&self, text: &str, has_special: bool) -> Result<Vec<i32>> {
        let encoding =
            caught(|| self.tokenizer.encode_fast(text, has_special)).map_err(|error| self.problem(error))?;
        self.fitting(encoding.get_ids())
    }

    /// Checks that the model has these tokens.
    fn fitting(&self, ids: &[u32]) -> Result<Vec<i32>> {
        let fits = |&id: &u32| match i32::try_from(id) {
            Ok(token) if (id as usize) < self.vocab_size => Ok(token),
            _ => Err(self.problem(format!(
                "it gives token {id}, but the vocabulary of the model has {}: it belongs to another model",
                self.vocab_size
            ))),
        };
        ids.iter().map(fits).collect()
    }

    /// Returns the tokens that the tokenizer adds in front of every text and behind it. [`encode`](Self::encode) adds them if
    /// `has_special`.
    ///
    /// ```
    /// # use fp8_hf::Tokenizer;
    /// # let place = std::env::temp_dir().join(format!("fp8-tokenizer-surround-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// let words = r#"{"model": {"type": "WordLevel", "vocab": {"<s>": 0, "the": 1, "sea": 2, "?": 3}, "unk_token": "?"},
    ///     "pre_tokenizer": {"type": "Whitespace"},
    ///     "post_processor": {"type": "TemplateProcessing", "pair": [],
    ///         "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    ///         "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}}"#;
    /// # std::fs::write(place.join("tokenizer.json"), words)?;
    /// let tokenizer = Tokenizer::open(&place, 4)?;
    /// assert_eq!(tokenizer.surround()?, [vec![0], vec![]]);
    /// assert_eq!(tokenizer.encode("the sea", true)?, [0, 1, 2]);
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and a tokenizer that repeats the text, or leaves it out.
    pub fn surround(&self) -> Result<[Vec<i32>; 2]> {
        // A text of one token that no tokenizer has.
        let text = || Encoding::from_tokens(vec![Token::new(u32::MAX, "text".to_owned(), (0, 4))], 0);
        let whole = caught(|| self.tokenizer.post_process(text(), None, true))
            .map_err(|error| self.problem(error))?;
        let mut parts = whole.get_ids().split(|&id| id == u32::MAX);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(start), Some(end), None) => Ok([self.fitting(start)?, self.fitting(end)?]),
            _ => {
                Err(self
                    .problem("its post-processor repeats the text or leaves it out: expected it once".into()))
            }
        }
    }

    /// Returns the first `count` tokens of a text, or all if it has fewer, without those that the tokenizer adds. Of a text that is
    /// much longer, it tokenizes two prefixes alone: one of about 8 bytes per token, and one twice as long to check the first.
    ///
    /// ```
    /// # use fp8_hf::Tokenizer;
    /// # let place = std::env::temp_dir().join(format!("fp8-tokenizer-start-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let words = r#"{"model": {"type": "WordLevel", "vocab": {"the": 0, "sea": 1, "?": 2}, "unk_token": "?"},
    /// #     "pre_tokenizer": {"type": "Whitespace"}}"#;
    /// # std::fs::write(place.join("tokenizer.json"), words)?;
    /// let tokenizer = Tokenizer::open(&place, 3)?;
    /// let book = "the sea ".repeat(100_000);
    /// assert_eq!(tokenizer.encode_start(&book, 5)?, [0, 1, 0, 1, 0]);
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_start(&self, text: &str, count: usize) -> Result<Vec<i32>> {
        let mut bytes = count.saturating_mul(BYTES_PER_TOKEN).saturating_add(MORE_BYTES);
        let mut before: Option<Vec<i32>> = None;
        loop {
            let end = (bytes..text.len()).find(|&end| text.is_char_boundary(end)).unwrap_or(text.len());
            let start = &text[..end];
            let mut tokens = self.encode(start, false)?;
            let is_enough = tokens.len() >= count;
            tokens.truncate(count);
            if start.len() == text.len() || (is_enough && before.as_ref() == Some(&tokens)) {
                return Ok(tokens);
            }
            before = is_enough.then_some(tokens);
            bytes = bytes.saturating_mul(2);
        }
    }

    /// Returns the text of tokens, without special ones such as that which ends a text. Bytes that are no whole character, as
    /// at the end of an unfinished text, become U+FFFD.
    ///
    /// # Errors
    /// What the tokenizer's decoder refuses.
    pub fn decode(&self, tokens: &[i32]) -> Result<String> {
        self.decode_with(tokens, true)
    }

    /// Does as [`decode`](Self::decode), but writes special tokens out, too.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_all(&self, tokens: &[i32]) -> Result<String> {
        self.decode_with(tokens, false)
    }

    fn decode_with(&self, tokens: &[i32], skip_special: bool) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
        caught(|| self.tokenizer.decode(&ids, skip_special)).map_err(|error| self.problem(error))
    }

    fn problem(&self, problem: String) -> Error {
        Error::File { path: self.path.clone(), problem }
    }
}

/// Makes the bytes of a token include the white space that belongs to it. No token changes.
fn keep_spaces(processor: &mut PostProcessorWrapper) {
    match processor {
        PostProcessorWrapper::ByteLevel(level) => level.trim_offsets = false,
        PostProcessorWrapper::Roberta(roberta) => roberta.trim_offsets = false,
        PostProcessorWrapper::Sequence(sequence) => {
            let mut index = 0;
            while let Some(part) = sequence.get_mut(index) {
                keep_spaces(part);
                index += 1;
            }
        }
        _ => {}
    }
}

/// The text of tokens that come one by one. Needs the feature `tokenizer`.
///
/// ```
/// use fp8_hf::{TextStream, Tokenizer};
/// # let place = std::env::temp_dir().join(format!("fp8-text-stream-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let words = r#"{"model": {"type": "WordLevel", "vocab": {"the": 0, "sea": 1, "?": 2}, "unk_token": "?"}}"#;
/// # std::fs::write(place.join("tokenizer.json"), words)?;
/// let tokenizer = Tokenizer::open(&place, 3)?;
/// let mut stream = TextStream::new(&tokenizer, &[0]); // behind "the"
/// assert_eq!(stream.push(1)?, " sea");
/// assert_eq!(stream.push(2)?, " ?");
/// assert_eq!(stream.rest()?, "");
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens whose text was returned, which the space before the next word may depend on, and those behind them.
    tokens: Vec<i32>,
    /// The number of tokens at the start of `tokens` whose text was returned.
    returned: usize,
}

impl<'a> TextStream<'a> {
    /// Starts behind the tokens of a prompt, whose text is not returned.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[i32]) -> Self {
        Self { tokenizer, tokens: prompt.to_vec(), returned: prompt.len() }
    }

    /// Adds a token and returns the text that it completes, which is empty in the middle of a character.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, token: i32) -> Result<String> {
        self.tokens.push(token);
        let text = self.rest()?;
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.tokens.drain(..self.returned);
        self.returned = self.tokens.len();
        Ok(text)
    }

    /// Returns the text that is left at the end: bytes that are no whole character, as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn rest(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.tokens[..self.returned])?;
        let all = self.tokenizer.decode(&self.tokens)?;
        // What follows may change earlier text: a stray byte makes a decoder read the bytes before it anew. Text that was
        // returned stays, and as many characters of the new one are skipped.
        Ok(match all.strip_prefix(before.as_str()) {
            Some(text) => text.to_owned(),
            None => all.chars().skip(before.chars().count()).collect(),
        })
    }
}
