//! Safetensors files that are read with every expectation checked, one tensor in memory at a time.

use super::stream::{Header, HeaderError, file_dtype};
use crate::{Cut, Error, Result};
use fp8_dist::StateDigest;
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16, f16};
use safetensors::tensor::Dtype;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// Returns the name of a dtype in errors: that of the library, if it has the dtype.
fn dtype_name(dtype: Dtype) -> String {
    let all = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U8];
    let own = all.into_iter().find(|&own| file_dtype(own) == dtype);
    own.map_or_else(|| format!("{dtype:?}"), |own| own.to_string())
}

/// An open file whose header has been read, with a record of the tensors that were requested. It stays the same file when a
/// save replaces it.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    path: &'a Path,
    file: File,
    header: Header,
    /// The offset at which the data begins.
    start: u64,
    used: RefCell<BTreeSet<String>>,
    /// A hash of each tensor's bytes, since [`read_through`](Self::read_through).
    hashes: RefCell<BTreeMap<String, u64>>,
    /// Whether loading has already changed the model.
    loading: Cell<bool>,
}

impl<'a> Reader<'a> {
    /// Opens the file and reads only its header.
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let (header, start) = Header::read(&mut file, len).map_err(|error| match error {
            HeaderError::Io(source) => io(source),
            why => Error::Checkpoint {
                path: path.to_owned(),
                problem: format!("not a readable safetensors file: {why}"),
            },
        })?;
        let (used, hashes, loading) = (RefCell::default(), RefCell::default(), Cell::new(false));
        Ok(Self { path, file, header, start, used, hashes, loading })
    }

    pub(super) fn all_metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    pub(super) fn problem(&self, problem: String) -> Error {
        Error::Checkpoint { path: self.path.to_owned(), problem }
    }

    /// Returns the dtype of a tensor in the file.
    pub(super) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.header.tensors.get(name).map(|info| info.dtype)
    }

    /// Returns the shape of a tensor in the file.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.header.tensors.get(name).map(|info| info.shape.clone())
    }

    /// Returns an error unless there is a tensor of this name, shape and dtype.
    pub(super) fn expect_tensor(&self, name: &str, shape: &Shape, dtype: DType) -> Result<()> {
        self.expect_tensor_as(name, shape, file_dtype(dtype))
    }

    /// [`expect_tensor`](Self::expect_tensor) for a dtype that only files have.
    pub(super) fn expect_tensor_as(&self, name: &str, shape: &Shape, dtype: Dtype) -> Result<()> {
        let missing = || self.problem(format!("it has no tensor `{name}`: it was saved from another model"));
        if self.has_as(name, shape, dtype)? { Ok(()) } else { Err(missing()) }
    }

    /// Returns whether there is a tensor of this name. Another shape or dtype is an error.
    pub(super) fn has(&self, name: &str, shape: &Shape, dtype: DType) -> Result<bool> {
        self.has_as(name, shape, file_dtype(dtype))
    }

    pub(super) fn has_as(&self, name: &str, shape: &Shape, dtype: Dtype) -> Result<bool> {
        let Some(info) = self.header.tensors.get(name) else { return Ok(false) };
        self.used.borrow_mut().insert(name.to_owned());
        if info.shape != **shape {
            let found = &info.shape;
            return Err(self.problem(format!("`{name}` has shape {found:?}: expected {shape}, as in this model; make it with the options it was saved with")));
        }
        if info.dtype != dtype {
            let (found, expected) = (info.dtype, dtype_name(dtype));
            return Err(self.problem(format!("`{name}` is {found:?}: expected {expected}, as in this model; make it with the options it was saved with")));
        }
        Ok(true)
    }

    /// Reads a tensor that [`expect_tensor`](Self::expect_tensor) or [`has`](Self::has) has found.
    pub(super) fn tensor(&self, name: &str, shape: &Shape, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensor_as(name, shape, file_dtype(dtype), dtype, device)
    }

    /// [`tensor`](Self::tensor) for elements whose dtype in the file is `stored`.
    pub(super) fn tensor_as(
        &self,
        name: &str,
        shape: &Shape,
        stored: Dtype,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.part_as(name, shape, None, stored, dtype, device)
    }

    /// [`tensor_as`](Self::tensor_as) for this rank's part of a tensor of shape `whole`, if there is a `cut`.
    pub(super) fn part_as(
        &self,
        name: &str,
        whole: &Shape,
        cut: Option<&Cut>,
        stored: Dtype,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        fn of<T: Element>(
            elements: Vec<T>,
            whole: &Shape,
            cut: Option<&Cut>,
            device: &Device,
        ) -> Result<Tensor> {
            Ok(match cut {
                None => Tensor::from_vec(elements, *whole, device)?,
                Some(cut) => Tensor::from_vec(cut.part_of(&elements), cut.shape(), device)?,
            })
        }
        self.expect_tensor_as(name, whole, stored)?;
        match dtype {
            DType::F32 => of(self.values(name, f32::from_le_bytes)?, whole, cut, device),
            DType::BF16 => of(self.values(name, bf16::from_le_bytes)?, whole, cut, device),
            DType::F16 => of(self.values(name, f16::from_le_bytes)?, whole, cut, device),
            DType::I32 => of(self.values(name, i32::from_le_bytes)?, whole, cut, device),
            DType::U8 => of(self.values(name, u8::from_le_bytes)?, whole, cut, device),
        }
    }

    /// f32 values of a tensor of any shape, and the shape.
    pub(super) fn floats(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let info = self.header.tensors.get(name);
        let info = info.ok_or_else(|| self.problem(format!("tensor `{name}` is missing")))?;
        self.used.borrow_mut().insert(name.to_owned());
        if info.dtype != Dtype::F32 {
            return Err(self.problem(format!("`{name}` is {:?}, expected f32", info.dtype)));
        }
        Ok((info.shape.clone(), self.values(name, f32::from_le_bytes)?))
    }

    /// Returns an error if there are tensors that were not requested, because they belong to another model.
    pub(super) fn expect_all_used(&self) -> Result<()> {
        self.unused(|_| true).first().map_or(Ok(()), |name| Err(self.without_place(name)))
    }

    /// Returns the names of the selected tensors that were not requested, sorted.
    pub(super) fn unused(&self, is_selected: impl Fn(&str) -> bool) -> Vec<String> {
        let used = self.used.borrow();
        let is_unused = |name: &&String| is_selected(name) && !used.contains(*name);
        self.header.tensors.keys().filter(is_unused).cloned().collect()
    }

    pub(super) fn without_place(&self, name: &str) -> Error {
        self.problem(format!("tensor `{name}` has no place in this model"))
    }

    /// Reads every byte of the data once, so that a file that cannot be read is refused before anything changes, and notes
    /// what it holds: tensors that are read later must be the same.
    pub(super) fn read_through(&self) -> Result<()> {
        self.header.tensors.keys().try_for_each(|name| self.read_once(name))
    }

    /// [`read_through`](Self::read_through) for the tensors that were requested.
    pub(super) fn read_through_used(&self) -> Result<()> {
        self.used.borrow().iter().try_for_each(|name| self.read_once(name))
    }

    fn read_once(&self, name: &str) -> Result<()> {
        let hash = self.chunks(name, |_| {})?;
        self.hashes.borrow_mut().insert(name.to_owned(), hash);
        Ok(())
    }

    /// Digests of the tensors that were read, and of the metadata, for ranks to compare.
    pub(super) fn digests(&self) -> Vec<StateDigest> {
        let hashes = self.hashes.borrow();
        let metadata = self.header.metadata.iter();
        let metadata =
            metadata.map(|(key, value)| StateDigest::new(format!("metadata `{key}` of the file"), [value]));
        let tensor = |(name, hash): (&String, &u64)| {
            StateDigest::new(format!("tensor `{name}` of the file"), [hash.to_le_bytes()])
        };
        hashes.iter().map(tensor).chain(metadata).collect()
    }

    /// The hash of a tensor's bytes, since [`read_through`](Self::read_through).
    pub(super) fn hash(&self, name: &str) -> Option<u64> {
        self.hashes.borrow().get(name).copied()
    }

    /// Notes that the model is changed from here on, so that errors say that a part of the file has been loaded.
    pub(super) fn begin_loading(&self) {
        self.loading.set(true);
    }

    fn values<T, const N: usize>(&self, name: &str, value: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let bytes = self.header.tensors.get(name).map_or(0, |info| info.data_offsets.1 - info.data_offsets.0);
        let mut values = Vec::new();
        values.try_reserve_exact(bytes / N).map_err(|_| {
            self.problem(format!("`{name}` has {bytes} bytes, more than there is memory for"))
        })?;
        let hash = self.chunks(name, |chunk| {
            values.extend(chunk.as_chunks::<N>().0.iter().map(|&element| value(element)));
        })?;
        match self.hashes.borrow().get(name) {
            Some(&before) if before != hash => Err(self.interrupted(name, &"it has other bytes than before")),
            _ => Ok(values),
        }
    }

    /// Passes the bytes of a tensor to `f` chunk by chunk and returns their hash.
    fn chunks(&self, name: &str, mut f: impl FnMut(&[u8])) -> Result<u64> {
        let (begin, end) = self.header.tensors.get(name).map_or((0, 0), |info| info.data_offsets);
        let mut file = &self.file;
        let failed = |source: std::io::Error| match self.loading.get() {
            true => self.interrupted(name, &source),
            false => Error::Io { path: self.path.to_owned(), source },
        };
        file.seek(SeekFrom::Start(self.start + begin as u64)).map_err(failed)?;
        let mut chunk = vec![0; CHUNK.min(end - begin)];
        let mut hasher = DefaultHasher::new();
        let mut left = end - begin;
        while left > 0 {
            let chunk = &mut chunk[..left.min(CHUNK)];
            file.read_exact(chunk).map_err(failed)?;
            hasher.write(chunk);
            f(chunk);
            left -= chunk.len();
        }
        Ok(hasher.finish())
    }

    fn interrupted(&self, name: &str, why: &dyn std::fmt::Display) -> Error {
        let changed = match self.loading.get() {
            true => "a part of the file has been loaded",
            false => "nothing has been loaded",
        };
        self.problem(format!(
            "`{name}` changed while the file was being read ({why}), and {changed}: load a file that no other program \
             writes to"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::writer::Writer;
    use super::*;

    fn written(path: &Path) -> Tensor {
        let values = (0..3 * CHUNK / 8).map(|i| i as f32).collect();
        let tensor = Tensor::from_vec(values, [3, CHUNK / 8], &Device::cpu()).unwrap();
        let mut writer = Writer::default();
        writer.tensor("x", &tensor).unwrap();
        writer.floats("y", &[2], &[1.0, 2.0]);
        writer.save(path).unwrap();
        tensor
    }

    fn read(reader: &Reader<'_>, like: &Tensor) -> Result<Tensor> {
        reader.tensor("x", like.shape(), like.dtype(), like.device())
    }

    #[test]
    fn a_file_that_is_replaced_meanwhile_stays_the_one_that_was_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let tensor = written(&path);
        let reader = Reader::open(&path).unwrap();
        reader.read_through().unwrap();
        Writer::default().save(&path).unwrap();
        reader.begin_loading();
        let values = |tensor: &Tensor| tensor.to_vec::<f32>().unwrap();
        assert_eq!(values(&read(&reader, &tensor).unwrap()), values(&tensor));
        assert!(Reader::open(&path).unwrap().expect_tensor("x", tensor.shape(), tensor.dtype()).is_err());
    }

    #[test]
    fn a_file_that_is_written_to_meanwhile_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (loading, end) in
            [(false, "nothing has been loaded"), (true, "a part of the file has been loaded")]
        {
            let tensor = written(&path);
            let bytes = std::fs::read(&path).unwrap();
            let reader = Reader::open(&path).unwrap();
            reader.read_through().unwrap();
            if loading {
                reader.begin_loading();
            }
            let mut other = bytes.clone();
            *other.last_mut().unwrap() ^= 1; // in `y`
            other[bytes.len() / 2] ^= 1; // in `x`
            std::fs::write(&path, &other).unwrap();
            let refused = read(&reader, &tensor).unwrap_err().to_string();
            let text = format!(
                "`x` changed while the file was being read (it has other bytes than before), and {end}: load a file that no \
                 other program writes to"
            );
            assert_eq!(refused, format!("{}: {text}", path.display()));
            assert!(reader.floats("y").is_err());
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            assert!(read(&reader, &tensor).is_err(), "a file that was cut");
        }
    }
}
