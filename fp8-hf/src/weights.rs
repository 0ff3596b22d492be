//! The safetensors files of a folder, read by range.

use super::family::Family;
use super::files::{exists, open, unreadable};
use super::positioned;
use crate::json;
use crate::{Error, Result};
use fp8_nn::checkpoint::stream::{Header, HeaderError, distinct_strings};
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Larger indexes are refused: as for headers, so that a hostile file costs no more memory.
const MAX_INDEX: u64 = 100_000_000;
/// The beginning of the files that Git LFS puts in place of large ones.
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The tensors of a folder or file: their places, not their values.
///
/// Opening reads the headers alone and checks them: offsets, sizes, names that occur twice, and that the index and the files
/// agree. Values are read by range, so that a rank or a program with little memory reads only its part. The example of
/// [`save`](crate::save) reads some.
#[derive(Debug)]
pub struct Weights {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Place>,
    metadata: BTreeMap<String, String>,
    bytes_read: AtomicU64,
}

/// An open file.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    name: String,
    file: File,
}

/// The place of a tensor in the files.
#[derive(Debug)]
struct Place {
    shard: usize,
    info: WeightInfo,
    offset: u64,
}

/// The dtype and shape of a tensor in a file, from [`Weights::info`]. The example of [`save`](crate::save) reads one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightInfo {
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Vec<usize>,
    /// The size in bytes.
    pub bytes: u64,
}

impl WeightInfo {
    /// Returns the tensor as a matrix: the first dimension, and the product of the others.
    pub(super) fn matrix(&self) -> [usize; 2] {
        // The other extents of an empty tensor may be anything.
        if self.bytes == 0 {
            return [0, 0];
        }
        match self.shape.split_first() {
            Some((&rows, rest)) => [rows, rest.iter().product()],
            None => [1, 1],
        }
    }
}

impl Weights {
    /// Opens `model.safetensors` of the folder at `path`, or the files that its index names. A path to a file opens that file.
    ///
    /// # Errors
    /// [`Error::File`] if a file is missing or malformed, or the index and the files disagree.
    pub fn open(path: &Path) -> Result<Self> {
        let problem = |problem: String| Error::File { path: path.to_owned(), problem };
        let metadata = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
        if metadata.is_file() {
            let folder = path.parent().unwrap_or(Path::new(""));
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| problem("its name is not UTF-8".into()))?;
            return Self::of_files(folder, &[name.to_owned()]);
        }
        if exists(&path.join(SINGLE)) {
            return Self::of_files(path, &[SINGLE.to_owned()]);
        }
        let index = path.join(INDEX);
        if !exists(&index) {
            return Err(problem(nothing(path)));
        }
        let map = read_index(&index)?;
        let mut files: Vec<String> = map.values().cloned().collect();
        files.sort();
        files.dedup();
        let weights = Self::of_files(path, &files)?;
        let disagreement = |problem| Err(Error::File { path: index.clone(), problem });
        for (name, file) in &map {
            match weights.tensors.get(name) {
                Some(place) if weights.shards[place.shard].name == *file => {}
                Some(place) => {
                    let found = &weights.shards[place.shard].name;
                    return disagreement(format!("it has `{name}` in {file}, but the tensor is in {found}"));
                }
                None => {
                    return disagreement(format!("it has `{name}` in {file}, but no file has this tensor"));
                }
            }
        }
        match weights.tensors.iter().find(|(name, _)| !map.contains_key(*name) && !is_spare(name)) {
            None => Ok(weights),
            Some((name, place)) => {
                let file = &weights.shards[place.shard].name;
                disagreement(format!("{file} has a tensor `{name}` that the index does not have"))
            }
        }
    }

    fn of_files(folder: &Path, files: &[String]) -> Result<Self> {
        let mut weights = Self {
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
            bytes_read: AtomicU64::new(0),
        };
        for name in files {
            let path = folder.join(name);
            let problem = |problem: String| Error::File { path: path.clone(), problem };
            let mut file = open(&path).map_err(|error| error.expecting("expected safetensors"))?;
            let metadata = file.metadata().map_err(|error| unreadable(&path, &error))?;
            let read = Header::read(&mut file, metadata.len());
            let (header, start) = read.map_err(|error| match error {
                HeaderError::Io(error) => unreadable(&path, &error),
                why => match other_content(&path) {
                    Some(content) => {
                        problem(format!("not a readable safetensors file: {content}"))
                    },
                    None if matches!(why, HeaderError::Length { .. }) => problem(format!(
                        "not a readable safetensors file: {why}: the file is incomplete or damaged, so copy or download it again"
                    )),
                    None => problem(format!("not a readable safetensors file: {why}")),
                },
            })?;
            weights.metadata.extend(header.metadata);
            let shard = weights.shards.len();
            for (name, info) in header.tensors {
                let (begin, end) = info.data_offsets;
                let bytes = (end - begin) as u64;
                let info = WeightInfo { dtype: info.dtype, shape: info.shape, bytes };
                let place = Place { shard, info, offset: start + begin as u64 };
                if let Some(other) = weights.tensors.get(&name) {
                    let first = &weights.shards[other.shard].name;
                    return Err(problem(format!("`{name}` is in {first}, too: a tensor has one place")));
                }
                weights.tensors.insert(name, place);
            }
            weights.shards.push(Shard { path: path.clone(), name: name.clone(), file });
        }
        Ok(weights)
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns dtype and shape of a tensor, or `None` if there is none of this name.
    #[must_use]
    pub fn info(&self, name: &str) -> Option<&WeightInfo> {
        self.tensors.get(name).map(|place| &place.info)
    }

    /// Returns the number of files.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.shards.len()
    }

    /// Reads the bytes of a tensor from byte `offset` on. The example of [`save`](crate::save) does it.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such tensor, or the range ends behind it; [`Error::Io`] if the file cannot be read.
    pub fn read(&self, name: &str, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let place = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        let shard = &self.shards[place.shard];
        let len = bytes.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > place.info.bytes) {
            return Err(Error::File {
                path: shard.path.clone(),
                problem: format!(
                    "`{name}` has {} bytes: {len} from {offset} on are not there",
                    place.info.bytes
                ),
            });
        }
        self.bytes_read.fetch_add(len, Relaxed);
        positioned::read(&shard.file, bytes, place.offset + offset).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => Error::File {
                path: shard.path.clone(),
                problem: format!("it became shorter while `{name}` was read: another program writes to it"),
            },
            _ => Error::Io { path: shard.path.clone(), source },
        })
    }

    /// Returns how many bytes of tensors have been read so far. The example of
    /// [`Folder::load_on_ranks`](crate::Folder::load_on_ranks) counts them.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Relaxed)
    }

    /// Returns the name of the file that has the tensor.
    pub(super) fn file_of(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|place| self.shards[place.shard].name.as_str())
    }

    /// Returns the path of the file that has the tensor.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.tensors.get(name).map(|place| self.shards[place.shard].path.clone()).unwrap_or_default()
    }

    /// Returns the strings in the headers of all files.
    pub(super) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn missing(&self, name: &str) -> Error {
        let path = self.shards.first().map(|shard| shard.path.clone()).unwrap_or_default();
        Error::File { path, problem: format!("there is no tensor `{name}`") }
    }
}

/// Says what a file is that is no safetensors file, if that can be told from its first bytes.
fn other_content(path: &Path) -> Option<&'static str> {
    let mut start = Vec::new();
    File::open(path).and_then(|file| file.take(64).read_to_end(&mut start)).ok()?;
    if start.starts_with(LFS) {
        return Some("it is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder");
    }
    let text = start.trim_ascii_start().to_ascii_lowercase();
    let is_page = ["<!doctype", "<html", "<?xml"].iter().any(|tag| text.starts_with(tag.as_bytes()));
    is_page.then_some(
        "it is an HTML or XML page, as a server sends when it refuses a download: download the file again",
    )
}

/// Returns true for a tensor that some files have and no model needs.
fn is_spare(name: &str) -> bool {
    Family::ALL.iter().any(|family| family.is_spare(name, true))
}

/// Says what a folder without safetensors files lacks.
fn nothing(folder: &Path) -> String {
    for other in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        if folder.join(other).exists() {
            return format!(
                "it has {other} alone: convert it with transformers' `save_pretrained`, which writes {SINGLE}"
            );
        }
    }
    format!("neither {SINGLE} nor {INDEX} is there: expected a Hugging Face folder")
}

/// Returns the file of each tensor.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let problem = |problem: String| Error::File { path: path.to_owned(), problem };
    let file = open(path)?;
    let mut text = String::new();
    let read =
        file.take(MAX_INDEX + 1).read_to_string(&mut text).map_err(|error| unreadable(path, &error))?;
    if read as u64 > MAX_INDEX {
        return Err(problem(format!("more than {MAX_INDEX} bytes")));
    }
    let index: Index = serde_json::from_str(&json::standard(&text))
        .map_err(|error| problem(format!("not an index: {error}")))?;
    if index.weight_map.is_empty() {
        return Err(problem("`weight_map` is empty: expected the file of each tensor".into()));
    }
    for (name, file) in &index.weight_map {
        let mut parts = Path::new(file).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(only)), None) if only == OsStr::new(file) => {}
            _ => {
                let found = format!("`{name}` is in \"{file}\": expected the name of a file in this folder");
                return Err(problem(found));
            }
        }
    }
    Ok(index.weight_map)
}

/// The index of several files. Other fields are skipped, so that a hostile one costs no memory.
#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "distinct_strings")]
    weight_map: BTreeMap<String, String>,
}
