//! Safetensors files: written atomically, read with every expectation checked.

use crate::{Error, Result};
use fp8_kernels::{DType, Device, Shape, Tensor, bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

/// The whole file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// Tensors and metadata on their way into a file.
#[derive(Debug, Default)]
pub(super) struct Writer {
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    metadata: BTreeMap<String, String>,
}

impl Writer {
    pub(super) fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let (dtype, bytes) = match tensor.dtype() {
            DType::F32 => (Dtype::F32, le_bytes(&tensor.to_vec::<f32>()?, |v| v.to_le_bytes())),
            DType::BF16 => (Dtype::BF16, le_bytes(&tensor.to_vec::<bf16>()?, |v| v.to_le_bytes())),
            DType::F16 => (Dtype::F16, le_bytes(&tensor.to_vec::<f16>()?, |v| v.to_le_bytes())),
            DType::I32 => (Dtype::I32, le_bytes(&tensor.to_vec::<i32>()?, |v| v.to_le_bytes())),
            DType::U8 => (Dtype::U8, tensor.to_vec::<u8>()?),
        };
        match self.tensors.insert(name.to_owned(), (dtype, tensor.shape().to_vec(), bytes)) {
            None => Ok(()),
            Some(_) => Err(Error::DuplicateParameter(name.into())),
        }
    }

    pub(super) fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = le_bytes(values, |v| v.to_le_bytes());
        self.tensors.insert(name.to_owned(), (Dtype::F32, shape.to_vec(), bytes));
    }

    pub(super) fn metadata(&mut self, key: &str, value: &str) {
        self.metadata.insert(key.to_owned(), value.to_owned());
    }

    /// Beside its place, flushed to disk, renamed.
    pub(super) fn save(mut self, path: &Path) -> Result<()> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let problem = |e: safetensors::SafeTensorError| Error::Checkpoint {
            path: path.to_owned(),
            problem: format!("cannot be written as safetensors: {e}"),
        };
        // Readers of other libraries refuse files without it.
        self.metadata("format", "pt");
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.clone(), view))
        });
        let views = views.collect::<std::result::Result<Vec<_>, _>>().map_err(problem)?;
        let bytes = serialize(views, None).map_err(problem)?;
        let bytes = with_metadata(&bytes, &self.metadata).ok_or_else(|| Error::Checkpoint {
            path: path.to_owned(),
            problem: "has no header".to_owned(),
        })?;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        std::fs::create_dir_all(dir).map_err(io)?;
        let mut temporary = temporary(dir).map_err(io)?;
        temporary.write_all(&bytes).map_err(io)?;
        temporary.as_file().sync_all().map_err(io)?;
        temporary.persist(path).map_err(|error| io(error.error))?;
        // The rename itself lasts once the directory is on disk; where directories cannot be opened, it lasts anyway.
        if let Ok(dir) = std::fs::File::open(dir) {
            dir.sync_all().map_err(io)?;
        }
        Ok(())
    }
}

/// A file with the permissions of any other new file: temporary ones are private by default, and the name is not all that
/// a rename keeps.
fn temporary(dir: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the process's umask
    builder.tempfile_in(dir)
}

/// The same file with metadata in its header: sorted, so that equal contents are equal bytes, which the library's hash
/// map does not give. Header: its length in 8 bytes, JSON, spaces up to a multiple of 8; the data's offsets count from
/// its end.
fn with_metadata(file: &[u8], metadata: &BTreeMap<String, String>) -> Option<Vec<u8>> {
    let (len, rest) = file.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    header.insert("__metadata__".to_owned(), serde_json::to_value(metadata).ok()?);
    let mut header = serde_json::to_vec(&header).ok()?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let len = u64::try_from(header.len()).ok()?.to_le_bytes();
    Some([&len[..], &header, data].concat())
}

/// A parsed file, and which of its tensors were asked for.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
    metadata: BTreeMap<String, String>,
    used: RefCell<BTreeSet<String>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Result<Self> {
        let problem = |e: safetensors::SafeTensorError| Error::Checkpoint {
            path: path.to_owned(),
            problem: format!("not a readable safetensors file: {e}"),
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(problem)?;
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let tensors = SafeTensors::deserialize(bytes).map_err(problem)?;
        Ok(Self { path, tensors, metadata, used: RefCell::default() })
    }

    pub(super) fn all_metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    pub(super) fn problem(&self, problem: String) -> Error {
        Error::Checkpoint { path: self.path.to_owned(), problem }
    }

    /// A tensor of this shape and dtype.
    pub(super) fn tensor(&self, name: &str, shape: &Shape, dtype: DType, device: &Device) -> Result<Tensor> {
        let missing = || self.problem(format!("tensor `{name}` is missing: it was saved from another model"));
        self.optional(name, shape, dtype, device)?.ok_or_else(missing)
    }

    /// The same, or `None` if there is no tensor of this name.
    pub(super) fn optional(
        &self,
        name: &str,
        shape: &Shape,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let Ok(view) = self.tensors.tensor(name) else { return Ok(None) };
        self.used.borrow_mut().insert(name.to_owned());
        if view.shape() != &**shape {
            let found = view.shape();
            return Err(self.problem(format!("`{name}` has shape {found:?}, this model wants {shape}")));
        }
        let data = view.data();
        let tensor = match (view.dtype(), dtype) {
            (Dtype::F32, DType::F32) => Tensor::from_vec(values(data, f32::from_le_bytes), *shape, device)?,
            (Dtype::BF16, DType::BF16) => {
                Tensor::from_vec(values(data, bf16::from_le_bytes), *shape, device)?
            }
            (Dtype::F16, DType::F16) => Tensor::from_vec(values(data, f16::from_le_bytes), *shape, device)?,
            (Dtype::I32, DType::I32) => Tensor::from_vec(values(data, i32::from_le_bytes), *shape, device)?,
            (Dtype::U8, DType::U8) => Tensor::from_vec(data.to_vec(), *shape, device)?,
            (found, _) => {
                return Err(self.problem(format!("`{name}` is {found:?}, this model wants {dtype}")));
            }
        };
        Ok(Some(tensor))
    }

    /// f32 values of a tensor of any shape, and the shape.
    pub(super) fn floats(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let view =
            self.tensors.tensor(name).map_err(|_| self.problem(format!("tensor `{name}` is missing")))?;
        self.used.borrow_mut().insert(name.to_owned());
        if view.dtype() != Dtype::F32 {
            return Err(self.problem(format!("`{name}` is {:?}, expected f32", view.dtype())));
        }
        Ok((view.shape().to_vec(), values(view.data(), f32::from_le_bytes)))
    }

    /// Fails on tensors that nobody asked for: they belong to another model.
    pub(super) fn expect_all_used(&self) -> Result<()> {
        let used = self.used.borrow();
        match self.tensors.names().into_iter().find(|name| !used.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(self.problem(format!("tensor `{name}` has no place in this model"))),
        }
    }
}

fn le_bytes<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

fn values<T, const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
    let whole = data.chunks_exact(N);
    whole.filter_map(|chunk| chunk.try_into().ok()).map(value).collect()
}
