//! Quantization of a folder to FP8 or NVFP4, streaming: memory is bounded whatever the size of the model.

use super::config::{GROUP, WeightScales};
use super::encode::{self, Divisor, Encoder, Fp4Rows};
use super::folder::Folder;
use super::jobs::{self, Countdown, Monitor};
use super::output::{Copy, Entry, Layout, Output, Spot};
use super::plan::{Matrix, Plan, module};
use super::quantize_options::QuantizeOptions;
use super::scheme::{BLOCK, Part, Scheme};
use crate::Result;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bytes that a thread reads at a time: few enough to stay in its cache until they are converted.
const CHUNK: usize = 1 << 20;

impl QuantizeOptions {
    /// Checks that [`quantize`] can quantize the model of `folder` with these options, before work such as a
    /// [`calibrate`](super::calibrate()) that is lost otherwise.
    ///
    /// # Errors
    /// Those of [`quantize`] that do not depend on values of weights or on the output.
    pub fn check(&self, folder: &Folder) -> Result<()> {
        Plan::new(folder, self).map(drop)
    }
}

/// The results of [`quantize`], whose example reads one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantized {
    /// The number of matrices that were quantized.
    pub matrices: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The layers that were not quantized, `lm_head` included.
    pub ignored: Vec<String>,
    /// The matrices whose blocks are ragged.
    pub ragged: Vec<String>,
    /// The groups of layers (q, k and v; gate and up) that vLLM computes as one and of which
    /// [`ignore`](QuantizeOptions::ignore) leaves only a part in high precision. Each entry names all layers of a group.
    /// transformers and this library read such a folder; vLLM refuses it.
    pub split_groups: Vec<Vec<String>>,
    /// The bytes of all tensors before.
    pub bytes_before: u64,
    /// The bytes of all tensors after.
    pub bytes_after: u64,
}

/// Writes the model of `folder` to the new folder `out` with weights in FP8 or NVFP4.
///
/// The projections of each layer are quantized; embeddings, norms, biases and `lm_head` keep their bytes. For all elements that
/// share a scale, scale = amax / 448 and code = E4M3(x / scale), both in f32, which gives the bytes of compressed-tensors, and
/// of transformers' own layouts. In NVFP4 codes, scales and factors are those of
/// [`quantize_nvfp4`](fp8_format::slice::Codec::quantize_nvfp4), as compressed-tensors writes them for f32 weights but for blocks whose
/// scale is 0, for which it writes 0.125. `config.json` keeps its fields and gets a `quantization_config`; tokenizer, chat template and
/// generation files are copied. The folder appears whole or not at all ([`AtomicFolder`](crate::AtomicFolder)).
///
/// Each thread needs 2 MiB of memory, or a row of blocks if that is more. Weights are read once, and those of more than 1 MiB
/// twice where they have one scale.
///
/// ```
/// use fp8_hf::{self as hf, Folder, Fp8Weight, InputScales, Monitor, QuantMethod, Quantization, QuantizeOptions};
/// use fp8_hf::{Quantized, Scheme, WeightScales};
/// use fp8_nn::prelude::*;
/// let place = std::env::temp_dir().join(format!("fp8-quantize-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let config = hf::Config::from_json(
///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
///         "num_attention_heads": 2}"#,
/// )?;
/// let ones = |spec: &hf::TensorSpec| {
///     let ones = vec![1.0_f32; spec.shape.iter().product()];
///     Ok::<_, Error>((spec.name.clone(), Tensor::from_vec(ones, spec.shape, &Device::cpu())?))
/// };
/// hf::save(&place.join("model"), &config, &config.tensors().iter().map(ones).collect::<Result<_>>()?)?;
///
/// let folder = Folder::open(&place.join("model"))?;
/// let options = QuantizeOptions { scheme: Scheme::Tensor, ignore: vec!["down_proj".into()], ..Default::default() };
/// options.check(&folder)?;
/// let monitor = Monitor::default(); // for a progress bar
/// let done: Quantized = hf::quantize(&folder, &place.join("fp8"), &options, &monitor)?;
/// assert_eq!((done.matrices, &done.ignored[0][..]), (6, "model.layers.0.mlp.down_proj"));
///
/// let fp8 = Folder::open(&place.join("fp8"))?;
/// let Some(Quantization { method, weights, inputs, .. }) = &fp8.config.quantization else { panic!("not FP8") };
/// assert_eq!((*method, method.name()), (QuantMethod::CompressedTensors, "compressed-tensors"));
/// assert_eq!((*weights, *inputs), (WeightScales::Tensor, InputScales::Tensor));
/// let name = "model.layers.0.self_attn.q_proj.weight";
/// let Fp8Weight { codes, scales, .. } = fp8.codes(name, 0..1)?;
/// assert_eq!((&codes[..], &scales[..]), (&[0x7E; 8][..], &[1.0 / 448.0][..]));
/// assert_eq!(fp8.rows(name, 0..1)?, [1.0; 8]);
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::File`](crate::Error::File) if the model is quantized already, is of a family that no FP8 format can
/// store, has an element that is not finite, is tied although its files have a head that is not the embedding, or if something
/// exists at `out`. [`Error::Option`](crate::Error::Option) for a pattern that matches nothing, for ragged blocks, and for input
/// scales that do not fit the layers. [`Error::Io`](crate::Error::Io) if a file cannot be read or written. Nothing is left at
/// `out` then.
pub fn quantize(
    folder: &Folder,
    out: &Path,
    options: &QuantizeOptions,
    monitor: &Monitor,
) -> Result<Quantized> {
    let plan = Plan::new(folder, options)?;
    folder.expect_tied()?;
    let mut entries = Vec::new();
    let by_name: BTreeMap<&str, &Matrix> =
        plan.units.iter().flatten().map(|matrix| (matrix.name.as_str(), matrix)).collect();
    for name in folder.weights.names() {
        let info = folder.info(name)?;
        let file = folder.weights.file_of(name).unwrap_or_default().to_owned();
        let entry = |name: String, dtype, shape| Entry { file: file.clone(), name, dtype, shape };
        if let Some(matrix) = by_name.get(name) {
            if !options.input_scales.is_empty() {
                let Part { end, dtype, shape } = options.scheme.input();
                entries.push(entry(format!("{}.{end}", module(name)), dtype, shape));
            }
            for Part { end, dtype, shape } in options.scheme.parts(matrix.shape) {
                entries.push(entry(format!("{}.{end}", module(name)), dtype, shape));
            }
        } else {
            entries.push(entry(name.to_owned(), info.dtype, info.shape.clone()));
        }
    }
    let layout = Layout::new(&entries).map_err(|problem| folder.problem(problem))?;
    let config = folder
        .config
        .with_quantization(Some(&options.scheme.config(&plan.ignored, !options.input_scales.is_empty())))?;
    let output = layout.create(out, Some(folder.path()))?;
    for name in by_name.keys() {
        let scale = options.input_scales.get(module(name));
        let input = format!("{}.{}", module(name), options.scheme.input().end);
        if let (Some(spot), Some(&scale)) = (output.spot(&input), scale) {
            output.write(spot, 0, &options.scheme.input_value(scale).to_le_bytes())?;
        }
    }
    let threads = jobs::threads(options.threads);
    let work = Work::new(folder, &plan, options.scheme, &output)?;
    monitor.start(work.jobs.iter().map(|job| work.bytes(job)).sum());
    let state = || State { encoder: Encoder::new(), bytes: Vec::new(), codes: Vec::new() };
    let one = |run: &jobs::Run<'_>, state: &mut State, job: &Job| {
        work.run(run, state, job, &output)?;
        monitor.add(work.bytes(job));
        Ok(())
    };
    output.flush_during(|| jobs::run(&work.jobs, threads, monitor, state, one))?;
    output.commit(config.json())?;
    let size = |entry: &Entry| (entry.shape.iter().product::<usize>() * entry.dtype.bitsize() / 8) as u64;
    Ok(Quantized {
        matrices: by_name.len(),
        elements: by_name.values().map(|matrix| matrix.shape.iter().product::<usize>() as u64).sum(),
        bytes_before: folder
            .weights
            .names()
            .filter_map(|name| folder.weights.info(name))
            .map(|info| info.bytes)
            .sum(),
        bytes_after: entries.iter().map(size).sum(),
        ignored: plan.ignored,
        ragged: plan.ragged,
        split_groups: plan.split_groups,
    })
}

/// All jobs of a quantization.
struct Work<'a> {
    folder: &'a Folder,
    scheme: Scheme,
    units: Vec<Unit<'a>>,
    jobs: Vec<Job>,
}

/// Matrices that share a scale, or one matrix.
struct Unit<'a> {
    matrices: Vec<Target<'a>>,
    /// The bits of the amax of all matrices so far.
    amax: AtomicU32,
    /// The jobs that still read for the amax.
    reading: Countdown,
}

/// A matrix with its place in the output.
struct Target<'a> {
    matrix: &'a Matrix,
    codes: Spot,
    scales: Spot,
    /// The place of the factor of the whole in NVFP4.
    tensor_scale: Option<Spot>,
}

enum Job {
    /// Copies a part of a tensor that is not quantized.
    Copy(Copy),
    /// Reads all matrices of a unit at once, and writes them.
    Whole(usize),
    /// Finds the amax of some rows.
    Amax(usize, usize, Range<usize>),
    /// Writes the codes of some rows, after the amax of the unit is known if it has one scale.
    Codes(usize, usize, Range<usize>),
}

/// The buffers of a thread.
struct State {
    encoder: Encoder,
    bytes: Vec<u8>,
    codes: Vec<u8>,
}

impl<'a> Work<'a> {
    fn new(folder: &'a Folder, plan: &'a Plan, scheme: Scheme, output: &Output) -> Result<Self> {
        let spot = |name: &str| {
            output.spot(name).ok_or_else(|| folder.problem(format!("`{name}` has no place in the output")))
        };
        let target = |matrix: &'a Matrix| {
            let parts = scheme.parts(matrix.shape);
            let part = |index: usize| {
                let end = parts.get(index).map(|part| part.end)?;
                Some(spot(&format!("{}.{end}", module(&matrix.name))))
            };
            let missing =
                || folder.problem(format!("`{}` has no codes or scales in the output", matrix.name));
            let of = |index: usize| part(index).unwrap_or_else(|| Err(missing()));
            Ok(Target { matrix, codes: of(0)?, scales: of(1)?, tensor_scale: part(2).transpose()? })
        };
        let mut work = Self { folder, scheme, units: Vec::new(), jobs: Vec::new() };
        let has_one_scale = matches!(scheme.granularity(), WeightScales::Tensor | WeightScales::TensorGroup);
        // The amax of a unit is read while the codes of the one before are written.
        let mut behind = Vec::new();
        for (index, unit) in plan.units.iter().enumerate() {
            let bytes = unit.iter().map(Matrix::bytes).fold(0usize, usize::saturating_add);
            let mut reads = 0;
            if has_one_scale && bytes <= CHUNK {
                work.jobs.push(Job::Whole(index));
            } else {
                for (at, matrix) in unit.iter().enumerate() {
                    for rows in parts(matrix, scheme) {
                        if has_one_scale {
                            work.jobs.push(Job::Amax(index, at, rows.clone()));
                            reads += 1;
                        }
                        behind.push((index, Job::Codes(index, at, rows)));
                    }
                }
            }
            let keep = if has_one_scale { index } else { index + 1 };
            let ready = behind.extract_if(.., |(of, _)| *of < keep).map(|(_, job)| job);
            work.jobs.extend(ready);
            let matrices = unit.iter().map(target).collect::<Result<_>>()?;
            work.units.push(Unit { matrices, amax: AtomicU32::new(0), reading: Countdown::new(reads) });
        }
        work.jobs.extend(behind.into_iter().map(|(_, job)| job));
        let quantized: Vec<&str> = plan.units.iter().flatten().map(|matrix| matrix.name.as_str()).collect();
        let quantized: std::collections::BTreeSet<&str> = quantized.into_iter().collect();
        for name in folder.weights.names().filter(|name| !quantized.contains(name)) {
            let parts = Copy::parts(&folder.weights, name, spot(name)?, CHUNK);
            work.jobs.extend(parts.into_iter().map(Job::Copy));
        }
        Ok(work)
    }

    /// The bytes that a job reads.
    fn bytes(&self, job: &Job) -> u64 {
        match job {
            Job::Copy(copy) => copy.bytes as u64,
            Job::Whole(unit) => {
                self.units[*unit].matrices.iter().map(|target| target.matrix.bytes() as u64).sum()
            }
            Job::Amax(unit, at, rows) | Job::Codes(unit, at, rows) => {
                (self.units[*unit].matrices[*at].matrix.row() * rows.len()) as u64
            }
        }
    }

    fn run(&self, run: &jobs::Run<'_>, state: &mut State, job: &Job, output: &Output) -> Result<()> {
        let State { encoder, bytes, codes } = state;
        match job {
            Job::Copy(copy) => copy.run(&self.folder.weights, output, bytes),
            Job::Whole(unit) => {
                let unit = &self.units[*unit];
                bytes.clear();
                let mut amax = 0f32;
                for Target { matrix, .. } in &unit.matrices {
                    let begin = bytes.len();
                    bytes.resize(begin + matrix.bytes(), 0);
                    self.folder.weights.read(&matrix.name, 0, &mut bytes[begin..])?;
                    amax = amax.max(self.amax(matrix, 0, &bytes[begin..])?);
                }
                let mut begin = 0;
                for target in &unit.matrices {
                    let end = begin + target.matrix.bytes();
                    self.with_amax(target, 0, &bytes[begin..end], amax, encoder, codes, output)?;
                    begin = end;
                }
                Ok(())
            }
            Job::Amax(unit, at, rows) => {
                let unit = &self.units[*unit];
                let Target { matrix, .. } = &unit.matrices[*at];
                self.read(matrix, rows, bytes)?;
                // Bits of positive numbers have the order of the numbers.
                unit.amax.fetch_max(self.amax(matrix, rows.start, bytes)?.to_bits(), Relaxed);
                unit.reading.finish_one();
                Ok(())
            }
            Job::Codes(unit, at, rows) => {
                let unit = &self.units[*unit];
                let target = &unit.matrices[*at];
                self.read(target.matrix, rows, bytes)?;
                match self.scheme.granularity() {
                    WeightScales::Tensor | WeightScales::TensorGroup => {
                        if !run.wait(&unit.reading) {
                            return Ok(());
                        }
                        let amax = f32::from_bits(unit.amax.load(Relaxed));
                        self.with_amax(target, rows.start, bytes, amax, encoder, codes, output)
                    }
                    WeightScales::Channel => {
                        self.many_scales(target, rows, [1, usize::MAX], bytes, encoder, codes, output)
                    }
                    WeightScales::Block(block) => {
                        self.many_scales(target, rows, block, bytes, encoder, codes, output)
                    }
                }
            }
        }
    }

    fn read(&self, matrix: &Matrix, rows: &Range<usize>, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.resize(matrix.row() * rows.len(), 0);
        self.folder.weights.read(&matrix.name, (matrix.row() * rows.start) as u64, bytes)
    }

    /// The amax of rows from `first` on. An element that is not finite is an error.
    fn amax(&self, matrix: &Matrix, first: usize, bytes: &[u8]) -> Result<f32> {
        encode::amax(bytes, matrix.dtype).map_err(|at| self.not_finite(matrix, first * matrix.shape[1] + at))
    }

    fn not_finite(&self, matrix: &Matrix, element: usize) -> crate::Error {
        let [row, column] = [element / matrix.shape[1].max(1), element % matrix.shape[1].max(1)];
        self.folder.problem(format!(
            "`{}` is infinite or NaN in row {row}, column {column}: expected finite weights",
            matrix.name
        ))
    }

    /// Writes rows of a matrix whose codes need the amax of the whole.
    #[expect(clippy::too_many_arguments, reason = "the buffers of a thread are borrowed one by one")]
    fn with_amax(
        &self,
        target: &Target<'_>,
        first: usize,
        bytes: &[u8],
        amax: f32,
        encoder: &mut Encoder,
        codes: &mut Vec<u8>,
        output: &Output,
    ) -> Result<()> {
        let Some(tensor_scale) = target.tensor_scale else {
            let divisor = self.scheme.rule().divisor(amax);
            return self.one_scale(target, first, bytes, divisor, encoder, codes, output);
        };
        let [_, cols] = target.matrix.shape;
        let Fp4Rows { codes, scales, tensor } =
            encode::nvfp4_rows(bytes, target.matrix.dtype, cols, amax, codes)
                .map_err(|error| self.folder.problem(format!("`{}`: {error}", target.matrix.name)))?;
        output.write(target.codes, (first * cols.div_ceil(2)) as u64, codes)?;
        output.write(target.scales, (first * cols.div_ceil(GROUP)) as u64, &scales)?;
        if first == 0 {
            output.write(tensor_scale, 0, &tensor.encode().to_le_bytes())?;
        }
        Ok(())
    }

    /// Writes rows of a matrix with one scale.
    #[expect(clippy::too_many_arguments, reason = "the buffers of a thread are borrowed one by one")]
    fn one_scale(
        &self,
        target: &Target<'_>,
        first: usize,
        bytes: &[u8],
        divisor: Divisor,
        encoder: &mut Encoder,
        codes: &mut Vec<u8>,
        output: &Output,
    ) -> Result<()> {
        let matrix = target.matrix;
        codes.resize(bytes.len() / (matrix.dtype.bitsize() / 8), 0);
        encoder.row(bytes, matrix.dtype, &[divisor], usize::MAX, codes);
        output.write(target.codes, (first * matrix.shape[1]) as u64, codes)?;
        if first == 0 {
            output.write(target.scales, 0, &divisor.scale.to_le_bytes())?;
        }
        Ok(())
    }

    /// Writes rows of a matrix with a scale for each block of `height` × `width`.
    #[expect(clippy::too_many_arguments, reason = "the buffers of a thread are borrowed one by one")]
    fn many_scales(
        &self,
        target: &Target<'_>,
        rows: &Range<usize>,
        [height, width]: [usize; 2],
        bytes: &[u8],
        encoder: &mut Encoder,
        codes: &mut Vec<u8>,
        output: &Output,
    ) -> Result<()> {
        let matrix = target.matrix;
        let (row, cols) = (matrix.row().max(1), matrix.shape[1]);
        let size = matrix.dtype.bitsize() / 8;
        let width = width.min(cols.max(1));
        codes.resize(rows.len() * cols, 0);
        let mut scales = Vec::new();
        let strips = bytes.chunks(row * height).zip(codes.chunks_mut((cols * height).max(1)));
        for (strip, (bytes, codes)) in strips.enumerate() {
            let mut amaxes = vec![0f32; cols.div_ceil(width)];
            for (line, bytes) in bytes.chunks(row).enumerate() {
                for (block, bytes) in bytes.chunks(width * size).enumerate() {
                    let amax = encode::amax(bytes, matrix.dtype).map_err(|at| {
                        let line = rows.start + strip * height + line;
                        self.not_finite(matrix, line * cols + block * width + at)
                    })?;
                    amaxes[block] = amaxes[block].max(amax);
                }
            }
            let divisors: Vec<Divisor> =
                amaxes.iter().map(|&amax| self.scheme.rule().divisor(amax)).collect();
            for (bytes, codes) in bytes.chunks(row).zip(codes.chunks_mut(cols.max(1))) {
                encoder.row(bytes, matrix.dtype, &divisors, width, codes);
            }
            scales.extend(divisors.iter().flat_map(|divisor| divisor.scale.to_le_bytes()));
        }
        let across = cols.div_ceil(width);
        output.write(target.codes, (rows.start * cols) as u64, codes)?;
        output.write(target.scales, (rows.start / height * across * size_of::<f32>()) as u64, &scales)
    }
}

/// Returns the rows of each job: about [`CHUNK`] bytes, and whole blocks.
fn parts(matrix: &Matrix, scheme: Scheme) -> Vec<Range<usize>> {
    let unit = if scheme == Scheme::Block128 { BLOCK } else { 1 };
    let rows = (CHUNK / (matrix.row() * unit).max(1)).max(1) * unit;
    let height = matrix.shape[0];
    (0..height).step_by(rows).map(|first| first..(first + rows).min(height)).collect()
}
