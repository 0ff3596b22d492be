//! A new Hugging Face folder, which appears whole: safetensors files whose layout is known before their bytes.

use super::carried::Carried;
use super::folder::CONFIG;
use super::positioned::{self, Cursor};
use super::weights::{INDEX, SINGLE, Weights};
use crate::{AtomicFolder, Error, Result};
use fp8_kernels::Tensor;
use fp8_nn::checkpoint::stream::Elements;
use fp8_nn::checkpoint::stream::Header;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bytes of a file that are flushed to disk at a time, at least.
const FLUSHED: u64 = 32 << 20;
/// The interval at which the thread that flushes checks the files.
const INTERVAL: Duration = Duration::from_millis(5);
/// A tensor that will be written.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

/// The place of a tensor in the output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) file: usize,
    pub(super) offset: u64,
}

#[derive(Debug)]
pub(super) struct Output {
    folder: AtomicFolder,
    target: PathBuf,
    files: Vec<OutFile>,
    carried: Carried,
}

#[derive(Debug)]
struct OutFile {
    name: String,
    file: File,
    header: Header,
    start: u64,
    /// Bytes that were written and not flushed to disk yet.
    dirty: AtomicU64,
}

/// The files and their headers, before anything is created.
#[derive(Debug, Default)]
pub(super) struct Layout {
    headers: BTreeMap<String, Header>,
}

impl Layout {
    /// Assigns each tensor its place. `metadata` goes into every file.
    pub(super) fn new(entries: &[Entry]) -> Result<Self, String> {
        let mut headers = BTreeMap::<String, Header>::new();
        for entry in entries {
            let header = headers.entry(entry.file.clone()).or_default();
            let info = TensorInfo { dtype: entry.dtype, shape: entry.shape.clone(), data_offsets: (0, 0) };
            header.tensors.insert(entry.name.clone(), info);
        }
        for (file, header) in &mut headers {
            // Readers of other libraries refuse files without it.
            header.metadata.insert("format".into(), "pt".into());
            header.layout().ok_or_else(|| format!("{file} would have too many bytes to count"))?;
        }
        Ok(Self { headers })
    }

    /// Creates the folder and the files, empty. The files of the folder `carried` that are neither weights nor configuration
    /// will be copied; one that cannot be read is an error now.
    pub(super) fn create(self, target: &Path, carried: Option<&Path>) -> Result<Output> {
        let is_written = |name: &OsStr| self.headers.keys().any(|own| name == OsStr::new(own));
        let carried = carried.map(|from| Carried::find(from, &is_written)).transpose()?.unwrap_or_default();
        let folder = atomic_folder(target)?;
        let mut files = Vec::new();
        for (name, header) in self.headers {
            let io = |source| Error::Io { path: target.join(&name), source };
            let bytes =
                header.to_bytes().map_err(|problem| Error::File { path: target.join(&name), problem })?;
            let data = header.tensors.values().map(|info| info.data_offsets.1).max().unwrap_or(0);
            let file = File::create(folder.path().join(&name)).map_err(io)?;
            positioned::write(&file, &bytes, 0).map_err(io)?;
            let start = bytes.len() as u64;
            file.set_len(start + data as u64).map_err(io)?;
            files.push(OutFile { name, file, header, start, dirty: AtomicU64::new(0) });
        }
        Ok(Output { folder, target: target.to_owned(), files, carried })
    }
}

/// Checks that a new folder can be written at `path`, before work that would be lost otherwise.
///
/// ```
/// use fp8_hf as hf;
/// let place = std::env::temp_dir().join(format!("fp8-expect-new-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// hf::expect_new(&place.join("model"))?;
/// assert!(hf::expect_new(&place.join("no/model")).is_err());
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Something else than an empty folder exists at `path`; the folder around it does not exist or cannot be written to.
pub fn expect_new(path: &Path) -> Result<()> {
    atomic_folder(path).map(drop)
}

/// Begins a folder that appears whole.
pub(super) fn atomic_folder(target: &Path) -> Result<AtomicFolder> {
    AtomicFolder::create(target).map_err(|error| match error.kind() {
        // What the caller can change is an input that is wrong; a disk that fails is not.
        std::io::ErrorKind::AlreadyExists
        | std::io::ErrorKind::NotFound
        | std::io::ErrorKind::InvalidInput
        | std::io::ErrorKind::InvalidFilename
        | std::io::ErrorKind::PermissionDenied
        | std::io::ErrorKind::ReadOnlyFilesystem => {
            Error::File { path: target.to_owned(), problem: error.to_string() }
        }
        _ => Error::Io { path: target.to_owned(), source: error },
    })
}

impl Output {
    /// Returns the place of a tensor of the layout.
    pub(super) fn spot(&self, name: &str) -> Option<Spot> {
        self.files.iter().enumerate().find_map(|(file, out)| {
            let info = out.header.tensors.get(name)?;
            Some(Spot { file, offset: out.start + info.data_offsets.0 as u64 })
        })
    }

    /// Runs `work` while another thread flushes to disk what it writes, so that neither the disk nor the cores wait for the
    /// other.
    pub(super) fn flush_during(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_done = AtomicBool::new(false);
        let flush = || -> Result<()> {
            while !is_done.load(Relaxed) {
                std::thread::sleep(INTERVAL);
                for out in &self.files {
                    if out.dirty.load(Relaxed) >= FLUSHED {
                        out.dirty.store(0, Relaxed);
                        out.file.sync_data().map_err(|source| self.io(out, source))?;
                    }
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            // Without this thread, everything is flushed at the end.
            let flusher = std::thread::Builder::new().spawn_scoped(scope, flush);
            // Also after a panic, as the scope waits for the thread.
            let result = {
                let _done = OnDrop(&is_done);
                work()
            };
            // An error of the disk is reported to one call alone.
            let flushed = flusher.ok().and_then(|flusher| flusher.join().ok()).unwrap_or(Ok(()));
            result.and(flushed)
        })
    }

    pub(super) fn write(&self, spot: Spot, offset: u64, bytes: &[u8]) -> Result<()> {
        let out = &self.files[spot.file];
        out.dirty.fetch_add(bytes.len() as u64, Relaxed);
        positioned::write(&out.file, bytes, spot.offset + offset).map_err(|source| self.io(out, source))
    }

    /// Writes the elements of a tensor of any device.
    pub(super) fn tensor(&self, spot: Spot, tensor: &Tensor) -> Result<()> {
        let out = &self.files[spot.file];
        let mut cursor = Cursor { file: &out.file, offset: spot.offset };
        Elements::of(tensor)?.write(&mut cursor).map_err(|source| self.io(out, source))
    }

    fn io(&self, out: &OutFile, source: std::io::Error) -> Error {
        Error::Io { path: self.target.join(&out.name), source }
    }

    /// Writes the configuration, the index, and the files that are carried along, and makes the folder appear.
    pub(super) fn commit(self, config: &str) -> Result<()> {
        let io = |name: &str, source| Error::Io { path: self.target.join(name), source };
        let text = |name: &str, text: &str| {
            fs::write(self.folder.path().join(name), text).map_err(|source| io(name, source))
        };
        text(CONFIG, config)?;
        if self.files.len() != 1 || self.files.iter().any(|out| out.name != SINGLE) {
            text(INDEX, &format!("{:#}\n", self.index()))?;
        }
        self.carried.copy(self.folder.path(), &self.target)?;
        let target = self.target;
        // Windows renames no folder with open files.
        drop(self.files);
        self.folder.commit().map_err(|source| Error::Io { path: target, source })
    }

    fn index(&self) -> Value {
        let mut map = BTreeMap::new();
        let mut bytes = 0;
        for out in &self.files {
            for (name, info) in &out.header.tensors {
                map.insert(name, &out.name);
                bytes += info.data_offsets.1 - info.data_offsets.0;
            }
        }
        json!({ "metadata": { "total_size": bytes }, "weight_map": map })
    }
}

/// Sets a flag when it is dropped.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// A part of a tensor that is copied as it is.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    pub(super) name: String,
    pub(super) to: Spot,
    pub(super) offset: u64,
    pub(super) bytes: usize,
}

impl Copy {
    /// Returns the jobs that copy a tensor in parts of at most `chunk` bytes; one if it is empty.
    pub(super) fn parts(weights: &Weights, name: &str, to: Spot, chunk: usize) -> Vec<Self> {
        let bytes = weights.info(name).map_or(0, |info| info.bytes);
        let part = |offset: u64| {
            let left = bytes - offset;
            let bytes = usize::try_from(left).map_or(chunk, |left| left.min(chunk));
            Self { name: name.to_owned(), to, offset, bytes }
        };
        (0..bytes.div_ceil(chunk as u64).max(1)).map(|index| part(index * chunk as u64)).collect()
    }

    pub(super) fn run(&self, weights: &Weights, output: &Output, buffer: &mut Vec<u8>) -> Result<()> {
        buffer.resize(self.bytes, 0);
        weights.read(&self.name, self.offset, buffer)?;
        output.write(self.to, self.offset, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_the_thread_that_flushes_and_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let output = Layout::new(&[]).unwrap().create(&place.path().join("out"), None).unwrap();
        let work = || output.flush_during(|| panic!("the work of a test panics"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err());
        drop(output);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
