//! Chooses the kernel that a product runs on: measured once, kept in a file.
//!
//! The library's first choice is good, not always the best. With tuning on, a product's first use times several of its
//! choices on random data (zeros flatter: they cost less power), over operands that together exceed the L2 cache, and
//! keeps the fastest. A file keeps what was found, for the same GPU and version of cuBLAS; a choice that the library no
//! longer takes is measured anew.

use super::cublaslt::{Algo, Found, Type};
use super::memory::Buffer;
use super::product::{Places, Product};
use super::queue::Queue;
use crate::{AtomicFile, DType, Error, Result};
use cudarc::driver::{result, sys};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The number of launches between two events, and the number of times that is measured.
const LAUNCHES: usize = 10;
const ROUNDS: usize = 3;
/// The largest number of copies of the operands.
const COPIES: usize = 8;

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

#[derive(Debug, Default, Serialize, Deserialize)]
struct Entries {
    entries: Vec<Entry>,
}

/// The fastest kernels found so far on one device.
#[derive(Debug)]
pub(super) struct Tuner {
    tuning: GemmTuning,
    gpu: String,
    cublaslt: usize,
    entries: Vec<Entry>,
}

impl Tuner {
    pub(super) fn new(tuning: &GemmTuning, gpu: &str, cublaslt: usize) -> Result<Self> {
        let entries = match &tuning.file {
            // Written back at once, so that a file that cannot be written is an error before anything is timed.
            Some(file) if tuning.candidates > 1 => change(file, |_| ())?,
            Some(file) => read(file)?,
            None => Vec::new(),
        };
        Ok(Self { tuning: tuning.clone(), gpu: gpu.to_owned(), cublaslt, entries })
    }

    pub(super) fn candidates(&self) -> usize {
        self.tuning.candidates.max(1)
    }

    /// Returns the stored kernel of a product, if there is one.
    pub(super) fn stored(&self, product: &Product) -> Option<Algo> {
        let name = product.name();
        let is_it = |entry: &&Entry| {
            (&*entry.product, &*entry.gpu, entry.cublaslt) == (&*name, &*self.gpu, self.cublaslt)
        };
        let words = self.entries.iter().rev().find(is_it)?.algo.iter();
        let words: Vec<u64> = words.filter_map(|word| u64::from_str_radix(word, 16).ok()).collect();
        words.try_into().ok().map(Algo)
    }

    /// Stores a result here and in the file, to which other processes may have added in the meantime. A failed write, as on a
    /// full disk, is not an error of this step: the next process measures again.
    pub(super) fn store(&mut self, product: &Product, algo: Algo, microseconds: f32) {
        let entry = Entry {
            gpu: self.gpu.clone(),
            cublaslt: self.cublaslt,
            product: product.name(),
            algo: algo.0.iter().map(|word| format!("{word:016x}")).collect(),
            microseconds,
        };
        self.entries.push(entry.clone());
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

/// Returns the fastest of `found` and its microseconds, or `None` if there is no memory for operands or no kernel runs. Waits
/// for the device.
pub(super) fn fastest(
    queue: &Queue,
    product: &Product,
    found: &[Found],
    mut run: impl FnMut(&Found, &Places) -> Result<()>,
) -> Result<Option<(Found, f32)>> {
    let Some(inputs) = Inputs::new(queue, product)? else { return Ok(None) };
    let (start, end) = (Event::new(queue)?, Event::new(queue)?);
    let mut best: Option<(Found, f32)> = None;
    let mut time = |candidate| -> Result<f32> {
        let mut shortest = f32::INFINITY;
        for round in 0..=ROUNDS {
            start.record(queue)?;
            for launch in 0..LAUNCHES {
                run(candidate, &inputs.places[launch % inputs.places.len()])?;
            }
            end.record(queue)?;
            let elapsed = end.since(queue, &start)?;
            // The first round warms up.
            if round > 0 {
                shortest = shortest.min(elapsed / LAUNCHES as f32);
            }
        }
        Ok(shortest)
    };
    for candidate in found {
        let Ok(shortest) = time(candidate) else {
            // A kernel that cannot run is skipped, unless the device itself has failed.
            queue.ready()?;
            continue;
        };
        if best.as_ref().is_none_or(|(_, time)| shortest < *time) {
            best = Some((*candidate, shortest));
        }
    }
    Ok(best)
}

/// Operands of random numbers, in enough copies that no launch finds its operands in the cache.
struct Inputs {
    places: Vec<Places>,
    _buffers: Vec<Buffer>,
}

impl Inputs {
    /// Returns `None` if there is no memory for a single copy.
    fn new(queue: &Queue, product: &Product) -> Result<Option<Self>> {
        let mut all = Self { places: Vec::new(), _buffers: Vec::new() };
        match all.fill(queue, product) {
            Ok(()) | Err(Error::OutOfMemory { .. }) => Ok((!all.places.is_empty()).then_some(all)),
            Err(error) => Err(error),
        }
    }

    fn fill(&mut self, queue: &Queue, product: &Product) -> Result<()> {
        let Product { m, n, k, .. } = *product;
        let bytes = |count: usize, kind: Type| count * kind.size();
        let sizes = [bytes(m * k, product.left), bytes(n * k, product.right), bytes(m * n, product.out)];
        let l2 = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        let l2 = queue.stream().context().attribute(l2).unwrap_or(0);
        let wanted = 2 * usize::try_from(l2).unwrap_or(0) / sizes.iter().sum::<usize>().max(1);
        let scale = queue.filled_f32(1.0, 1)?;
        let amax = queue.filled_f32(0.0, 1)?;
        let bias = queue.zeros(DType::U8, n * product.bias.map_or(0, Type::size))?;
        let [left_factors, right_factors] = [(0, m), (1, n)].map(|(side, rows)| {
            let (dtype, count) = product.factors[side].size(rows, k);
            match dtype {
                // E8M0: 2 to the power of 0.
                DType::U8 => queue.upload(&vec![127u8; count]),
                _ => queue.filled_f32(1.0, count),
            }
        });
        let (left_factors, right_factors) = (left_factors?, right_factors?);
        let (left_scale, right_scale) = (left_factors.ptr(), right_factors.ptr());
        self._buffers.extend([&scale, &amax, &bias, &left_factors, &right_factors].map(Clone::clone));
        for copy in 0..(wanted + 1).min(COPIES) {
            let [left, right, out] =
                [(0, product.left), (1, product.right), (2, product.out)].map(|(i, kind)| {
                    let buffer = queue.alloc(DType::U8, sizes[i])?;
                    fill(queue, &buffer, kind, (copy * 3 + i) as u64)?;
                    Ok::<_, Error>(buffer)
                });
            let buffers = [left?, right?, out?];
            let [left, right, out] = buffers.each_ref().map(Buffer::ptr);
            self.places.push(Places {
                left,
                right,
                out,
                bias: bias.ptr(),
                left_scale,
                right_scale,
                out_scale: scale.ptr(),
                out_amax: amax.ptr(),
            });
            self._buffers.extend(buffers);
        }
        Ok(())
    }
}

/// Fills the buffer by repeating a block of finite values of either sign that span a few powers of two.
fn fill(queue: &Queue, buffer: &Buffer, kind: Type, seed: u64) -> Result<()> {
    const BLOCK: usize = 1 << 16;
    let mut state = seed;
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    // The bits that vary and the bits that are always set, for magnitudes from 1/8 to 2.
    let (mask, base, words): (u64, u64, usize) = match kind {
        Type::F32 => (0x81ff_ffff, 0x3e00_0000, 4),
        Type::Bf16 => (0x81ff, 0x3e00, 2),
        Type::F16 => (0x8fff, 0x3000, 2),
        Type::E4m3 => (0x9f, 0x20, 1),
        Type::E5m2 => (0x8f, 0x30, 1),
    };
    let len = buffer.bytes().min(BLOCK);
    let block: Vec<u8> = (0..len.div_ceil(words))
        .flat_map(|_| (next() & mask | base).to_le_bytes().into_iter().take(words))
        .collect();
    queue.write(buffer.ptr(), &block[..len])?;
    let mut done = len;
    while done < buffer.bytes() {
        let more = done.min(buffer.bytes() - done);
        queue.copy(buffer.ptr() + done as u64, buffer.ptr(), more)?;
        done += more;
    }
    Ok(())
}

/// A driver event with timing.
struct Event(sys::CUevent);

impl Event {
    fn new(queue: &Queue) -> Result<Self> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map(Self)
            .map_err(|error| queue.driver_error("cuEventCreate", "gemm tuning", error))
    }

    fn record(&self, queue: &Queue) -> Result<()> {
        // SAFETY: both are this device's and alive.
        unsafe { result::event::record(self.0, queue.raw_stream()) }
            .map_err(|error| queue.driver_error("cuEventRecord", "gemm tuning", error))
    }

    /// Returns the microseconds since `start`. Waits until both events have happened.
    fn since(&self, queue: &Queue, start: &Self) -> Result<f32> {
        queue.wait("gemm tuning")?;
        // SAFETY: both events are alive, were made with timing and recorded, and have happened.
        let elapsed = unsafe { result::event::elapsed(start.0, self.0) };
        elapsed
            .map(|milliseconds| milliseconds * 1e3)
            .map_err(|error| queue.driver_error("cuEventElapsedTime", "gemm tuning", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

#[cfg(test)]
mod tests {
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
            accumulate: false,
            fast: true,
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
        assert_eq!(again.entries.len(), 2);
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
