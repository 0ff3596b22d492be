//! The kernels that products run on: measured once, kept in a file, exchanged as [`TunedProducts`].
//!
//! The library's first choice is good, not always the best. With tuning on, a product's first use times several of its
//! choices ([`trial`](super::trial)). A file keeps what was found, for the same GPU and version of cuBLAS; a choice that the
//! library no longer takes is measured anew.

use super::cublaslt::Algo;
use super::product::Product;
use crate::tuned_products::Choice;
use crate::{AtomicFile, Error, Result, TunedProducts};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Whether and how the kernels of matrix products are tuned: [`CudaOptions::gemm_tuning`](crate::CudaOptions::gemm_tuning).
///
/// See [`CudaOptions`](crate::CudaOptions) for an example.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GemmTuning {
    /// The number of cuBLASLt's choices that are timed, up to [`MOST_CANDIDATES`](Self::MOST_CANDIDATES). With 0 or 1 its first
    /// choice is taken without timing. Default: 0.
    pub candidates: usize,
    /// The JSON file in which results are stored. It is created if it does not exist, with a file `….lock` beside it.
    /// Without a file, results are lost when the device is dropped. Default: `None`.
    pub file: Option<PathBuf>,
}

impl GemmTuning {
    /// The largest number of candidates: opening a device with more is an error. No product has as many kernels.
    pub const MOST_CANDIDATES: usize = 1024;

    pub(super) fn check(&self) -> Result<()> {
        if self.candidates <= Self::MOST_CANDIDATES {
            return Ok(());
        }
        Err(Error::Option {
            op: "device",
            option: "gemm_tuning.candidates",
            value: self.candidates.to_string(),
            remedy: format!("expected at most {}, 0 for no tuning", Self::MOST_CANDIDATES),
        })
    }
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    gpu: String,
    cublaslt: usize,
    product: String,
    /// Hexadecimal words.
    algo: Vec<String>,
    microseconds: f32,
}

impl Entry {
    fn new(choice: &Choice) -> Self {
        let Choice { gpu, cublaslt, product, algo, microseconds } = choice.clone();
        Self { gpu, cublaslt, product, algo: algo.map(|word| format!("{word:016x}")).to_vec(), microseconds }
    }

    /// `None` if its words are not those of a kernel.
    fn choice(self) -> Option<Choice> {
        let Self { gpu, cublaslt, product, algo, microseconds } = self;
        let words: Vec<u64> = algo.iter().filter_map(|word| u64::from_str_radix(word, 16).ok()).collect();
        Some(Choice { gpu, cublaslt, product, algo: words.try_into().ok()?, microseconds })
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Entries {
    entries: Vec<Entry>,
}

/// The kernels chosen so far on one device.
#[derive(Debug)]
pub(super) struct Tuner {
    tuning: GemmTuning,
    gpu: String,
    cublaslt: usize,
    /// One for each product, on this GPU and library.
    choices: Vec<Choice>,
}

impl Tuner {
    pub(super) fn new(tuning: &GemmTuning, gpu: &str, cublaslt: usize) -> Result<Self> {
        let entries = match &tuning.file {
            // Written back at once, so that a file that cannot be written is an error before anything is timed.
            Some(file) if tuning.candidates > 1 => change(file, |_| ())?,
            Some(file) => read(file)?,
            None => Vec::new(),
        };
        let mut tuner = Self { tuning: tuning.clone(), gpu: gpu.to_owned(), cublaslt, choices: Vec::new() };
        entries.into_iter().filter_map(Entry::choice).for_each(|choice| {
            tuner.put(choice);
        });
        Ok(tuner)
    }

    pub(super) fn candidates(&self) -> usize {
        self.tuning.candidates.max(1)
    }

    /// Returns the stored kernel of a product, if there is one.
    pub(super) fn stored(&self, product: &Product) -> Option<Algo> {
        if self.choices.is_empty() {
            return None;
        }
        let name = product.name();
        self.choices.iter().find(|choice| choice.product == name).map(|choice| Algo(choice.algo))
    }

    /// Returns all choices.
    pub(super) fn choices(&self) -> TunedProducts {
        TunedProducts(self.choices.clone())
    }

    /// Takes the choices that are for this GPU and library, and returns their number.
    pub(super) fn take(&mut self, tuned: &TunedProducts) -> usize {
        let taken = tuned.0.iter().filter(|choice| self.put((*choice).clone())).count();
        let ignored = tuned.len() - taken;
        if ignored > 0 {
            let (gpu, cublaslt) = (&self.gpu, self.cublaslt);
            tracing::info!(%gpu, cublaslt, taken, ignored, "tuned products for another GPU or library are not used");
        }
        taken
    }

    /// Adds a choice in place of an older one for the same product. Returns false if it is for another GPU or library.
    fn put(&mut self, choice: Choice) -> bool {
        let is_mine = (&*choice.gpu, choice.cublaslt) == (&*self.gpu, self.cublaslt);
        if is_mine {
            self.choices.retain(|old| !old.is_for_the_same(&choice));
            self.choices.push(choice);
        }
        is_mine
    }

    /// Stores a result here and in the file, to which other processes may have added in the meantime. A failed write, as on a
    /// full disk, is not an error of this step: the next process measures again.
    pub(super) fn store(&mut self, product: &Product, algo: Algo, microseconds: f32) {
        let (gpu, cublaslt) = (self.gpu.clone(), self.cublaslt);
        let choice = Choice { gpu, cublaslt, product: product.name(), algo: algo.0, microseconds };
        let entry = Entry::new(&choice);
        self.put(choice);
        let Some(file) = &self.tuning.file else { return };
        let replace = |entries: &mut Vec<Entry>| {
            entries.retain(|old| {
                (&old.product, &old.gpu, old.cublaslt) != (&entry.product, &entry.gpu, entry.cublaslt)
            });
            entries.push(entry);
        };
        drop(change(file, replace));
    }
}

/// Reads, changes and writes the file under a lock, since the ranks of a machine share it. Returns its new entries.
fn change(file: &Path, edit: impl FnOnce(&mut Vec<Entry>)) -> Result<Vec<Entry>> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut lock = file.as_os_str().to_owned();
    lock.push(".lock");
    let lock = || {
        fs::create_dir_all(folder)?;
        let lock = File::create(&lock)?;
        lock.lock().map(|()| lock)
    };
    // Unlocked when it is dropped.
    let _lock = lock().map_err(|error| unusable(file, &error.to_string()))?;
    let mut all = Entries { entries: read(file)? };
    edit(&mut all.entries);
    write(file, &all)?;
    Ok(all.entries)
}

/// Returns the entries of the file, or none if it does not exist.
fn read(file: &Path) -> Result<Vec<Entry>> {
    let text = match fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unusable(file, &error.to_string())),
    };
    let entries = serde_json::from_slice::<Entries>(&text);
    entries.map(|all| all.entries).map_err(|error| unusable(file, &error.to_string()))
}

/// Writes the file atomically.
fn write(file: &Path, entries: &Entries) -> Result<()> {
    let attempt = || -> std::io::Result<()> {
        let mut out = AtomicFile::create(file)?;
        serde_json::to_writer_pretty(&mut out, entries)?;
        out.write_all(b"\n")?;
        out.commit()
    };
    attempt().map_err(|error| unusable(file, &error.to_string()))
}

fn unusable(file: &Path, why: &str) -> Error {
    Error::Option {
        op: "gemm",
        option: "tuning file",
        value: file.display().to_string(),
        remedy: format!("{why}: make it a file that can be read and written, remove it, or give another"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cublaslt::Type;
    use super::*;

    fn product(m: usize) -> Product {
        Product {
            m,
            n: 16,
            k: 32,
            left_transposed: false,
            right_transposed: true,
            left: Type::E4m3,
            right: Type::E4m3,
            out: Type::Bf16,
            bias: None,
            addend: false,
            fast: true,
            device_alpha: false,
            factors: [super::super::product::FactorLayout::Tensor; 2],
        }
    }

    #[test]
    fn what_was_found_is_kept_for_the_same_gpu_and_library() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/gemm.json");
        let tuning = GemmTuning { candidates: 4, file: Some(file) };
        let mut tuner = Tuner::new(&tuning, "H100", 130_100).unwrap();
        assert_eq!(tuner.stored(&product(16)), None);
        tuner.store(&product(16), Algo([1; 8]), 2.5);
        tuner.store(&product(32), Algo([u64::MAX; 8]), 3.5);
        tuner.store(&product(16), Algo([7; 8]), 1.5);
        assert_eq!(tuner.stored(&product(16)), Some(Algo([7; 8])));
        let again = Tuner::new(&tuning, "H100", 130_100).unwrap();
        assert_eq!(again.choices().len(), 2);
        assert_eq!(again.stored(&product(16)), Some(Algo([7; 8])));
        assert_eq!(again.stored(&product(32)), Some(Algo([u64::MAX; 8])));
        assert_eq!(again.stored(&Product { fast: false, ..product(16) }), None);
        for (gpu, version) in [("H200", 130_100), ("H100", 130_101)] {
            assert_eq!(Tuner::new(&tuning, gpu, version).unwrap().stored(&product(16)), None);
        }
    }

    #[test]
    fn a_write_removes_what_killed_processes_left() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join(format!("{}1-0-gemm.json", AtomicFile::PREFIX));
        fs::write(&left, "{ \"entr").unwrap();
        let tuning = GemmTuning { candidates: 4, file: Some(folder.path().join("gemm.json")) };
        Tuner::new(&tuning, "H100", 130_100).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gemm.json");
        fs::write(&file, "no json").unwrap();
        let tuning = GemmTuning { candidates: 4, file: Some(file) };
        let error = Tuner::new(&tuning, "H100", 1).unwrap_err().to_string();
        assert!(error.contains("gemm.json") && error.contains("remove it"), "{error}");
    }
}
