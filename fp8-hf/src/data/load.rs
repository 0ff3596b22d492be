//! The tokens of files: kept ones, or made anew.

use super::digest;
use super::encoder::{Encoder, Failure, Ids};
use super::lines::{Document, Lines};
use super::options::{DataKind, DataOptions, Resolved, TooLong};
use super::row::Row;
use super::shards::Shards;
use super::sources::{Format, Sources};
use super::template::threads;
use super::tokens::{LEARNED, Notes, Tokens, Writer, unwritable};
use crate::{Config, Result, TokenFile, Tokenizer};
use rayon::prelude::*;
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Changes whenever the same files give other tokens.
const VERSION: &str = "fp8-data-1";
/// The lines that are tokenized at once, and their bytes.
const LINES: usize = 512;
const BYTES: usize = 4 << 20;

/// The place of the tokens.
#[derive(Debug)]
pub(super) enum Store {
    /// Those of samples.
    Kept {
        tokens: Tokens,
        /// The folder that is removed with the data set.
        _temporary: Option<TempDir>,
    },
    /// Files of tokens.
    Shards(Shards),
}

/// The tokens of the files of a part.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) store: Store,
    pub(super) options: Resolved,
    pub(super) pad: i32,
    pub(super) warnings: Vec<String>,
    /// A digest of what the tokens are made from. It does not change as files are copied.
    pub(super) content: [u8; 32],
    /// One that changes with the time at which a large file was changed.
    pub(super) changed: [u8; 32],
    /// The file that was made now.
    pub(super) made: Option<Made>,
}

/// Reads the tokens of files, or makes and keeps them.
pub(super) fn load(
    sources: &Sources,
    tokenizer: &Tokenizer,
    config: &Config,
    options: &DataOptions,
) -> Result<Loaded> {
    let kind = match sources.format {
        Format::Text => DataKind::Text,
        Format::Shards => DataKind::Shards,
        Format::Lines => first_kind(sources)?,
    };
    let resolved = options.resolve(kind)?;
    let encoder = Encoder::new(tokenizer, config, kind == DataKind::Messages)?;
    let splits = resolved.too_long == TooLong::Split;
    let template = encoder.template.as_ref().map(|template| template.identity()).unwrap_or_default();
    let tokenizer_digest = digest::of_tokenizer(tokenizer.folder())?;
    let how = format!(
        "{VERSION} {kind} {:?} {splits} {} {:?} {}",
        resolved.loss, config.vocab_size, encoder.eos, encoder.pad
    );
    let [content, changed] = digest::of_files(&sources.files)?
        .map(|files| digest::of_parts(&[how.as_bytes(), &tokenizer_digest, template.as_bytes(), &files]));
    let (store, warnings, made) = if kind == DataKind::Shards {
        let files = sources.files.iter().map(|path| TokenFile::open(path)).collect::<Result<_>>()?;
        let shards = Shards::new(files, &resolved, config.vocab_size, encoder.eos);
        let warning = "the tokenizer has no eos_token, so all tokens of a file are taken for one document";
        let none = "the tokenizer's eos_token is not among the first million tokens of a file, so that its documents read each other";
        let warnings = match (resolved.cross, shards.is_one_document()) {
            (true, _) => Vec::new(),
            (false, true) => vec![warning.to_owned()],
            (false, false) if shards.has_ends()? => Vec::new(),
            (false, false) => vec![none.to_owned()],
        };
        (Store::Shards(shards), warnings, None)
    } else {
        let temporary = match options.cache {
            Some(_) => None,
            None => {
                let made = tempfile::Builder::new().prefix("fp8-data-").tempdir();
                Some(made.map_err(|error| unwritable(&std::env::temp_dir(), &error))?)
            }
        };
        let folder = options.cache.as_deref().or(temporary.as_ref().map(TempDir::path));
        let path = folder.unwrap_or(Path::new(".")).join(format!("{}.tokens", &digest::hex(&changed)[..32]));
        let (tokens, made) =
            kept(&path, &changed, || write(&path, &changed, sources, &encoder, &resolved, splits))?;
        let warnings = tokens.notes.warnings.clone();
        (Store::Kept { tokens, _temporary: temporary }, warnings, made)
    };
    Ok(Loaded { store, options: resolved, pad: encoder.pad, warnings, content, changed, made })
}

/// Returns the kind of the first line.
fn first_kind(sources: &Sources) -> Result<DataKind> {
    for path in &sources.files {
        let mut lines = Lines::open(path)?;
        if let Some((number, line)) = lines.read()? {
            let row = Row::parse(&line, None).map_err(|problem| lines.problem(number, &problem))?;
            return Ok(row.kind());
        }
    }
    Err(sources
        .problem("it has no line: expected JSON lines with `text`, `prompt` and `completion`, or `messages`"))
}

/// A file that was made, and the folders that were made for it. Unless it is kept, all are removed.
#[derive(Debug)]
pub(super) struct Made {
    file: PathBuf,
    folders: Vec<PathBuf>,
    is_kept: bool,
}

impl Made {
    /// Notes which folders are missing, before the file is made.
    fn new(file: &Path) -> Self {
        let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        let folders = file.ancestors().skip(1).take_while(missing).map(Path::to_owned).collect();
        Self { file: file.to_owned(), folders, is_kept: false }
    }

    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = std::fs::remove_file(&self.file);
            // Those that are empty.
            let _ = self.folders.iter().try_for_each(std::fs::remove_dir);
        }
    }
}

/// Opens kept tokens; makes them if they are missing or damaged. Of several processes one makes them, and the others wait.
fn kept(path: &Path, key: &[u8; 32], make: impl FnOnce() -> Result<()>) -> Result<(Tokens, Option<Made>)> {
    if let Some(tokens) = Tokens::open(path, key) {
        return Ok((tokens, None));
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let made = Made::new(path);
    let (tokens, is_new) = locked(path, key, folder, make)?;
    if is_new {
        return Ok((tokens, Some(made)));
    }
    // Another process has made it in the meantime.
    made.keep();
    Ok((tokens, None))
}

/// Makes the tokens, unless another process has made them in the meantime. Returns whether they are new.
fn locked(
    path: &Path,
    key: &[u8; 32],
    folder: &Path,
    make: impl FnOnce() -> Result<()>,
) -> Result<(Tokens, bool)> {
    let lock = path.with_extension("lock");
    let file = std::fs::create_dir_all(folder).and_then(|()| File::create(&lock));
    let file = file.map_err(|error| unwritable(folder, &error))?;
    // Where there are no locks, each process makes them. The last one wins, and all are the same. So they are if the lock is removed
    // while another process waits for it.
    let _ = file.lock();
    let made = match Tokens::open(path, key) {
        Some(tokens) => Ok((tokens, false)),
        None => make().and_then(|()| {
            Tokens::open(path, key).map(|tokens| (tokens, true)).ok_or_else(|| {
                let error = std::io::Error::other("what was written cannot be read again");
                unwritable(path, &error)
            })
        }),
    };
    let _ = std::fs::remove_file(&lock);
    made
}

/// Tokenizes all files.
fn write(
    path: &Path,
    key: &[u8; 32],
    sources: &Sources,
    encoder: &Encoder<'_>,
    options: &Resolved,
    splits: bool,
) -> Result<()> {
    let mut writer = Writer::create(path)?;
    let (mut samples, mut empty) = (0, 0);
    for file in &sources.files {
        let [some, none] = match sources.format {
            Format::Lines => write_lines(file, encoder, options, splits, &mut writer)?,
            _ => write_document(file, encoder, &mut writer)?,
        };
        samples += some;
        empty += none;
    }
    if samples == 0 {
        return Err(sources.problem(match sources.format {
            Format::Text => "the text is empty: there is nothing to learn",
            _ => "all samples are empty: there is nothing to learn",
        }));
    }
    let mut warnings = encoder.warnings();
    if encoder.eos.is_none() && options.kind != DataKind::Messages {
        warnings
            .push("the tokenizer has no eos_token, so the model does not learn where a text ends".to_owned());
    }
    writer.commit(key, &Notes { empty, warnings })
}

/// Writes a file that is one document. Returns how many samples it has, and how many of them are empty.
fn write_document(path: &Path, encoder: &Encoder<'_>, writer: &mut Writer) -> Result<[u64; 2]> {
    let mut document = Document::open(path)?;
    let mut first = String::new();
    let mut is_whole = false;
    while first.is_empty() && !is_whole {
        is_whole = !document.read(&mut first)?;
    }
    if first.is_empty() {
        return Ok([0, 1]);
    }
    writer.push(&encoder.start())?;
    let mut last = None;
    let more = |text: &mut String| match first.is_empty() {
        true => document.read(text),
        false => {
            text.push_str(&std::mem::take(&mut first));
            Ok(true)
        }
    };
    let pass = |ids: &[i32]| {
        let ids: Ids = ids.iter().map(|&id| id.unsigned_abs() | LEARNED).collect();
        last = ids.last().copied().or(last);
        writer.push(&ids)
    };
    encoder.tokenizer.encode_parts(more, pass)?;
    writer.push(&encoder.end(last))?;
    writer.end();
    Ok([1, 0])
}

/// Writes the samples of JSON lines. Returns the number of samples with tokens, and of empty ones.
fn write_lines(
    path: &Path,
    encoder: &Encoder<'_>,
    options: &Resolved,
    splits: bool,
    writer: &mut Writer,
) -> Result<[u64; 2]> {
    let mut lines = Lines::open(path)?;
    let mut counts = [0; 2];
    // Without them, each conversation has a thread of its own.
    let threads = (options.kind == DataKind::Messages).then(|| threads().ok()).flatten();
    loop {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < LINES && bytes < BYTES {
            let Some((number, line)) = lines.read()? else { break };
            bytes += line.len();
            batch.push((number, line));
        }
        if batch.is_empty() {
            return Ok(counts);
        }
        let encode = |(number, line): &(u64, Vec<u8>)| {
            let encoded = Row::parse(line, Some(options.kind)).map_err(Failure::Line).and_then(|row| {
                if row.is_empty() { Ok(Vec::new()) } else { encoder.encode(&row, options.loss, splits) }
            });
            (*number, encoded)
        };
        let run = || batch.par_iter().map(encode).collect::<Vec<_>>();
        let encoded = threads.as_ref().map_or_else(run, |threads| threads.install(run));
        for (number, samples) in encoded {
            let samples = samples.map_err(|failure| match failure {
                Failure::Line(problem) => lines.problem(number, &problem),
                Failure::Other(error) => error,
            })?;
            if samples.is_empty() {
                counts[1] += 1;
            }
            for ids in samples {
                writer.push(&ids)?;
                writer.end();
                counts[0] += 1;
            }
        }
    }
}
