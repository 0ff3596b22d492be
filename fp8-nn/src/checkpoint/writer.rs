//! Safetensors files that are written atomically, one tensor in memory at a time.

use super::stream::{Elements, Header, file_dtype};
use super::whole::Part;
use crate::{Cut, Error, Parameter, Result};
use fp8_kernels::{AtomicFile, Tensor};
use safetensors::tensor::{Dtype, TensorInfo};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Tensors and metadata that will be written to a file. The tensors share their storage with the model's.
#[derive(Debug, Default)]
pub(super) struct Writer {
    tensors: BTreeMap<String, Source>,
    header: Header,
}

/// The source of a tensor's elements.
#[derive(Debug)]
pub(super) enum Source {
    Tensor(Tensor),
    /// A part of one. The first of the ranks that have the others writes the whole.
    Part(Part),
    Floats(Vec<f32>),
}

impl Writer {
    pub(super) fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.tensor_as(name, file_dtype(tensor.dtype()), tensor)
    }

    /// Adds a tensor whose elements have this dtype in the file, such as the codes of FP8 in a tensor of u8.
    pub(super) fn tensor_as(&mut self, name: &str, dtype: Dtype, tensor: &Tensor) -> Result<()> {
        self.add(name, dtype, tensor.shape().to_vec(), Source::Tensor(tensor.clone()))
    }

    /// Adds a tensor of a parameter's value or state, of which this rank has a part if there is a `cut`.
    pub(super) fn of_parameter(
        &mut self,
        name: &str,
        dtype: Dtype,
        tensor: &Tensor,
        parameter: &Parameter,
        cut: Option<Cut>,
    ) -> Result<()> {
        let Some((cut, ranks)) = cut.zip(parameter.tensor_parallel()) else {
            return self.tensor_as(name, dtype, tensor);
        };
        let whole = cut.global().to_vec();
        self.add(name, dtype, whole, Source::Part(Part::new(tensor.clone(), cut, ranks.group().clone())))
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: Vec<usize>, source: Source) -> Result<()> {
        match self.tensors.insert(name.to_owned(), source) {
            None => {
                self.describe(name, dtype, shape);
                Ok(())
            }
            Some(_) => Err(Error::DuplicateParameter(name.into())),
        }
    }

    pub(super) fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        self.tensors.insert(name.to_owned(), Source::Floats(values.to_vec()));
        self.describe(name, Dtype::F32, shape.to_vec());
    }

    pub(super) fn metadata(&mut self, key: &str, value: &str) {
        self.header.metadata.insert(key.to_owned(), value.to_owned());
    }

    fn describe(&mut self, name: &str, dtype: Dtype, shape: Vec<usize>) {
        self.header.tensors.insert(name.to_owned(), TensorInfo { dtype, shape, data_offsets: (0, 0) });
    }

    /// Returns what each tensor will be in the file.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (&str, String)> {
        let shape = |info: &TensorInfo| format!("{:?} {:?}", info.dtype, info.shape);
        self.header.tensors.iter().map(move |(name, info)| (name.as_str(), shape(info)))
    }

    /// Writes everything to a temporary file, which then replaces the file at `path`.
    pub(super) fn save(self, path: &Path) -> Result<()> {
        let Plan { header, sources } = self.plan(path)?;
        let mut output = Output::create(path, &header)?;
        for (name, source) in sources {
            if let Some(elements) = source.elements(&name)? {
                output.write(&elements)?;
            }
        }
        output.commit()
    }

    /// Returns what a file at `path` has, in order.
    pub(super) fn plan(mut self, path: &Path) -> Result<Plan> {
        let unwritable = |why: &dyn std::fmt::Display| Error::Checkpoint {
            path: path.to_owned(),
            problem: format!("cannot be written as safetensors: {why}"),
        };
        // Readers of other libraries refuse files without it.
        self.metadata("format", "pt");
        let order = self.header.layout();
        let order = order.ok_or_else(|| unwritable(&"its tensors have too many bytes to count"))?;
        let header = self.header.to_bytes().map_err(|why| unwritable(&why))?;
        let mut tensors = self.tensors;
        let sources = order.into_iter().filter_map(|name| tensors.remove_entry(&name)).collect();
        Ok(Plan { header, sources })
    }
}

/// A file that will be written: its header, and the sources of its tensors in their order.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) header: Vec<u8>,
    pub(super) sources: Vec<(String, Source)>,
}

impl Source {
    /// Returns the elements of a tensor in host memory; `None` on ranks that send theirs to the one that writes.
    pub(super) fn elements(&self, name: &str) -> Result<Option<Elements<'_>>> {
        match self {
            Self::Tensor(tensor) => Elements::of(tensor).map(Some),
            Self::Floats(values) => Ok(Some(Elements::F32(Cow::Borrowed(values)))),
            Self::Part(part) => part.join(name),
        }
    }

    /// Returns whether ranks have parts of the tensor, and all take part in [`elements`](Self::elements).
    pub(super) const fn is_joined(&self) -> bool {
        matches!(self, Self::Part(_))
    }
}

/// A temporary file that is written tensor by tensor, and then replaces the file at its path.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: AtomicFile,
}

impl Output {
    /// Begins the file that will be at `path`.
    pub(super) fn create(path: &Path, header: &[u8]) -> Result<Self> {
        let created = AtomicFile::create(path).and_then(|mut file| file.write_all(header).map(|()| file));
        let path = path.to_owned();
        match created {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// Writes the elements of the next tensor.
    pub(super) fn write(&mut self, elements: &Elements<'_>) -> Result<()> {
        elements.write(&mut self.file).map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Puts the file in its place.
    pub(super) fn commit(self) -> Result<()> {
        self.file.commit().map_err(|source| Error::Io { path: self.path, source })
    }
}
