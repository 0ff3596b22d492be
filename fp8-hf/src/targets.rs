//! The tensors of a folder, as parts of the parameters of a model.

use super::config::Config;
use super::output::{Output, Spot};
use super::source::{Info, Source};
use crate::{Error, Result};
use fp8_kernels::DType;
use half::{bf16, f16};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// The values of one tensor of the files: rows of a parameter, or all of it transposed.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) parameter: String,
    /// Rows and columns of the tensor; a vector has one column.
    pub(super) matrix: [usize; 2],
    pub(super) shape: Vec<usize>,
    pub(super) info: Info,
    /// The row of the parameter that is the tensor's first.
    first: usize,
    is_transposed: bool,
}

/// Returns the tensors of a model of this configuration by their names. The parameters of `source` must be those of such a
/// model: all of them, with their shapes, and no others.
pub(super) fn targets(config: &Config, source: &dyn Source) -> Result<BTreeMap<String, Target>, String> {
    let specs: BTreeMap<String, Vec<usize>> =
        config.tensors().into_iter().map(|spec| (spec.name, spec.shape.to_vec())).collect();
    let family = config.family.model_type;
    let (mut targets, mut known) = (BTreeMap::new(), BTreeSet::new());
    for parameter in config.parameters() {
        let name = parameter.parameter;
        let info = source.info(&name);
        let info = info.ok_or_else(|| {
            format!("the model has no parameter `{name}`, which a {family} model of this configuration has")
        })?;
        let mut first = 0;
        let mut parts = Vec::new();
        for tensor in parameter.tensors {
            let shape = specs.get(&tensor).cloned().unwrap_or_default();
            let matrix = matrix(&shape);
            let target = Target {
                parameter: name.clone(),
                matrix,
                shape,
                info: info.clone(),
                first,
                is_transposed: parameter.is_transposed,
            };
            first += matrix[0];
            parts.push((tensor, target));
        }
        let cols = parts.first().map_or(0, |(_, target)| target.matrix[1]);
        let expected = if parameter.is_transposed { [cols, first] } else { [first, cols] };
        if matrix(&info.shape) != expected {
            let expected = match parts.first() {
                Some((_, target)) if target.shape.len() == 1 => format!("[{first}]"),
                _ => format!("{expected:?}"),
            };
            let found = &info.shape;
            return Err(format!(
                "parameter `{name}` has shape {found:?}: a {family} model of this configuration has {expected}"
            ));
        }
        known.insert(name);
        targets.extend(parts);
    }
    match source.names().into_iter().find(|name| !known.contains(name)) {
        None => Ok(targets),
        Some(name) if name.contains(".lora.") => Err(format!(
            "parameter `{name}` is one of an adapter: write adapters with `save_adapter`, and merge them into the base's folder"
        )),
        Some(name) => Err(format!(
            "parameter `{name}` has no place in a {family} model of this configuration: expected one of its options"
        )),
    }
}

fn matrix(shape: &[usize]) -> [usize; 2] {
    match shape.split_first() {
        Some((&rows, rest)) => [rows, rest.iter().product()],
        None => [1, 1],
    }
}

impl Target {
    /// Returns the rows that are read at a time.
    pub(super) fn parts(&self) -> Vec<Range<usize>> {
        let [rows, cols] = self.matrix;
        let step = match self.is_transposed || !self.info.is_by_row {
            true => rows.max(1),
            false => (CHUNK / (cols * size_of::<f32>()).max(1)).max(1),
        };
        (0..rows).step_by(step).map(|first| first..(first + step).min(rows)).collect()
    }

    /// Reads rows of the tensor.
    pub(super) fn read(&self, source: &dyn Source, rows: Range<usize>) -> Result<Vec<f32>> {
        if !self.is_transposed {
            return source.rows(&self.parameter, self.first + rows.start..self.first + rows.end);
        }
        let [height, cols] = self.matrix;
        let values = source.rows(&self.parameter, 0..cols)?;
        let column = |row: usize| values.iter().skip(row).step_by(height.max(1)).copied();
        Ok(rows.flat_map(column).collect())
    }

    /// Writes the tensor, part by part; `done` is told the bytes of each and may stop it. The error for a value that the dtype
    /// cannot hold is made by `problem`, from a text without the tensor's name.
    pub(super) fn write(
        &self,
        source: &dyn Source,
        output: &Output,
        spot: Spot,
        dtype: DType,
        problem: &dyn Fn(String) -> Error,
        done: &dyn Fn(u64) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for rows in self.parts() {
            let offset = rows.start * self.matrix[1] * dtype.size();
            let first = rows.start * self.matrix[1];
            let values = self.read(source, rows)?;
            if let Some((at, text)) = unwritable(&values, dtype, source.file().is_some()) {
                let [row, column] =
                    [(first + at) / self.matrix[1].max(1), (first + at) % self.matrix[1].max(1)];
                return Err(problem(text.replacen("{}", &format!("row {row}, column {column}"), 1)));
            }
            encode(&values, dtype, &mut bytes);
            output.write(spot, offset as u64, &bytes)?;
            done(bytes.len() as u64)?;
        }
        Ok(())
    }

    /// The bytes of the tensor in this dtype.
    pub(super) fn bytes(&self, dtype: DType) -> u64 {
        (self.matrix[0] * self.matrix[1] * dtype.size()) as u64
    }
}

/// Returns the place of the first value that cannot be written, and what is wrong with it, with `{}` for the place: one that is
/// finite and that rounding to the dtype makes infinite, or, if values are to be finite, one that is not.
fn unwritable(values: &[f32], dtype: DType, are_finite: bool) -> Option<(usize, String)> {
    // The smallest magnitudes that are rounded to infinity, and the largest values.
    let (limit, largest) = match dtype {
        DType::F16 => (65520.0, f16::MAX.to_f32()),
        DType::BF16 => (f32::from_bits(0x7F7F_8000), bf16::MAX.to_f32()),
        _ => (f32::INFINITY, f32::MAX),
    };
    let is_wrong = |value: &f32| if value.is_finite() { value.abs() >= limit } else { are_finite };
    let at = values.iter().position(is_wrong)?;
    let text = match values[at] {
        value if value.is_finite() => format!(
            "is {value} in {{}}, which {dtype} cannot hold: its largest value is {largest}: write it in another dtype"
        ),
        _ => "is infinite or NaN in {}: expected finite weights".to_owned(),
    };
    Some((at, text))
}

/// Rounds values to a float dtype and writes their bytes, little-endian.
fn encode(values: &[f32], dtype: DType, bytes: &mut Vec<u8>) {
    bytes.clear();
    match dtype {
        DType::BF16 => bytes.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
        DType::F16 => bytes.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
        _ => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
    }
}

/// Returns a value as a parameter of this dtype holds it.
pub(super) fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Returns the dtype of tensors that files store in this one, if it is a float of 16 or 32 bits.
pub(super) fn float(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}
