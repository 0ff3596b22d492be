//! The files of a folder that are copied when it is written: tokenizer, chat templates, generation, licence.

use super::files::unreadable;
use super::folder::{CONFIG, HF_QUANT_CONFIG};
use crate::{Error, Result};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The ends of the names of weights, which are not copied, and the file with ModelOpt's description of their quantization: the
/// configuration has it, too.
const WEIGHTS: [&str; 16] = [
    HF_QUANT_CONFIG,
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".h5.index.json",
    ".msgpack",
    ".msgpack.index.json",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
];
/// The one folder that belongs to a tokenizer. Its files are copied, and no folder in it.
const TEMPLATES: &str = "additional_chat_templates";

/// The files that will be copied.
#[derive(Debug, Default)]
pub(super) struct Carried {
    /// Each path, and the one that it will have in the new folder.
    files: Vec<(PathBuf, PathBuf)>,
    has_templates: bool,
}

impl Carried {
    /// Finds the files of the folder `from`, but for those named `written`, and checks that they can be read, before work that
    /// would be lost otherwise.
    pub(super) fn find(from: &Path, written: &dyn Fn(&OsStr) -> bool) -> Result<Self> {
        let mut carried = Self::default();
        for name in names(from)? {
            let path = from.join(&name);
            if name == TEMPLATES && is_folder(&path)? {
                carried.has_templates = true;
                for name in names(&path)? {
                    let to = Path::new(TEMPLATES).join(&name);
                    carried.add(path.join(&name), to, written)?;
                }
            } else {
                carried.add(path, name.into(), written)?;
            }
        }
        Ok(carried)
    }

    /// Adds a file, if it is one and is to be copied.
    fn add(&mut self, path: PathBuf, to: PathBuf, written: &dyn Fn(&OsStr) -> bool) -> Result<()> {
        let name = path.file_name().unwrap_or_default();
        // Opening a pipe would wait for a writer.
        if is_carried(name) && !written(name) && is_file(&path)? {
            File::open(&path).map_err(|error| problem(&path, &error))?;
            self.files.push((path, to));
        }
        Ok(())
    }

    /// Copies the files to the folder `to`. Errors of writing name the file in `target`.
    pub(super) fn copy(&self, to: &Path, target: &Path) -> Result<()> {
        let io = |name: &Path, source| Error::Io { path: target.join(name), source };
        if self.has_templates {
            let name = Path::new(TEMPLATES);
            fs::create_dir(to.join(name)).map_err(|source| io(name, source))?;
        }
        for (from, name) in &self.files {
            let mut source = File::open(from).map_err(|error| problem(from, &error))?;
            // Not with the permissions of the source, which may forbid to flush it.
            let copied = File::create(to.join(name)).and_then(|mut file| {
                std::io::copy(&mut source, &mut file)?;
                file.flush()
            });
            copied.map_err(|source| io(name, source))?;
        }
        Ok(())
    }
}

/// Returns the names in a folder, sorted.
fn names(folder: &Path) -> Result<Vec<std::ffi::OsString>> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<std::io::Result<Vec<_>>>()
    });
    let mut names = entries.map_err(|error| problem(folder, &error))?;
    names.sort();
    Ok(names)
}

/// Follows links: a folder in the cache of the Hugging Face hub has nothing else.
fn is_file(path: &Path) -> Result<bool> {
    fs::metadata(path).map(|metadata| metadata.is_file()).map_err(|error| problem(path, &error))
}

fn is_folder(path: &Path) -> Result<bool> {
    fs::metadata(path).map(|metadata| metadata.is_dir()).map_err(|error| problem(path, &error))
}

/// Says that something that would be copied cannot be read.
fn problem(path: &Path, error: &std::io::Error) -> Error {
    let unreadable = unreadable(path, error);
    match error.kind() {
        std::io::ErrorKind::NotFound => unreadable,
        _ => unreadable.expecting("it would be copied to the new folder: make it readable, or remove it"),
    }
}

fn is_carried(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name != CONFIG && !name.starts_with('.') && !WEIGHTS.iter().any(|end| name.ends_with(end))
}
