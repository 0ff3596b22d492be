//! The parameters of a training checkpoint, as values.

use super::config::WeightScales;
use super::folder::{is_float, is_fp8};
use super::source::{Info, Source};
use super::targets::float;
use super::values::{first_wrong_scale, read_rows, scale_row, widen};
use super::weights::{WeightInfo, Weights};
use crate::{Error, Result};
use fp8_kernels::DType;
use fp8_kernels::fp8_format::slice::Codec;
use fp8_kernels::fp8_format::{Blocks, E4M3, TensorScale};
use safetensors::Dtype;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The parameter that every model has.
const TABLE: &str = ".embedding.weight";

/// The parameters of a checkpoint's file.
pub(super) struct CheckpointSource {
    file: PathBuf,
    weights: Weights,
    /// The model's path.
    pub(super) path: String,
    /// The prefix of the names of all parameters. `prefix` is that of the model's own.
    any: &'static str,
    prefix: String,
    /// Whether the optimizer's f32 copies are read where they are finer than the parameter.
    prefers_copies: bool,
    /// The dtype of the embedding, in which FP8 weights are written.
    pub(super) dtype: DType,
}

impl CheckpointSource {
    pub(super) fn new(
        file: &Path,
        weights: Weights,
        has_optimizer: bool,
        dtype: Option<DType>,
    ) -> Result<Self, String> {
        let any = if has_optimizer { "model." } else { "" };
        let path = |name: &str| Some(name.strip_prefix(any)?.strip_suffix(TABLE)?.to_owned());
        let paths: Vec<String> = weights.names().filter_map(path).collect();
        let path = match <[String; 1]>::try_from(paths) {
            Ok([path]) => path,
            Err(paths) if paths.is_empty() => {
                return Err(format!("it has no tensor `{any}…{TABLE}`: expected the parameters of a Gpt"));
            }
            Err(paths) => {
                let paths = paths.join(", ");
                return Err(format!("it has several models: {paths}: expected the parameters of one Gpt"));
            }
        };
        let table = weights.info(&format!("{any}{path}{TABLE}")).and_then(|info| float(info.dtype));
        let prefix = format!("{any}{path}.");
        let prefers_copies = dtype == Some(DType::F32);
        let dtype = table.unwrap_or(DType::F32);
        let file = file.to_owned();
        Ok(Self { file, weights, path, any, prefix, prefers_copies, dtype })
    }

    fn problem(&self, name: &str, problem: &str) -> Error {
        Error::File { path: self.file.clone(), problem: format!("`{name}` {problem}") }
    }

    /// Reads rows of a weight in NVFP4.
    fn packed_rows(&self, name: &str, info: &WeightInfo, rows: &Range<usize>) -> Result<Vec<f32>> {
        let find = |end: &str| {
            let name = format!("{name}{end}");
            let info = self.weights.info(&name).ok_or_else(|| self.problem(&name, "is not there"))?;
            Ok::<_, Error>((name, info))
        };
        let (scales_name, scales) = find(SCALE_INV)?;
        let (tensor_name, tensor) = find(TENSOR_SCALE)?;
        let [height, bytes] = info.matrix();
        let cols = 2 * bytes;
        let fits = |blocks: &Blocks| blocks.is_fp4() && blocks.grid(height, cols)[..] == scales.shape[..];
        let blocks = Blocks::ALL.into_iter().find(fits).filter(|_| scales.dtype == Dtype::F8_E4M3);
        let (Some(blocks), (Dtype::F32, &[2])) = (blocks, (tensor.dtype, &tensor.shape[..])) else {
            let text = format!(
                "is {:?} {:?}, or `{tensor_name}` {:?} {:?}: expected the scales of [{height}, {cols}] in NVFP4",
                scales.dtype, scales.shape, tensor.dtype, tensor.shape
            );
            return Err(self.problem(&scales_name, &text));
        };
        let down = blocks.size(cols)[0];
        let strips = rows.start / down..rows.end.div_ceil(down);
        let codes = read_rows(&self.weights, name, info, rows)?;
        let read = read_rows(&self.weights, &scales_name, scales, &strips)?;
        let groups: Vec<E4M3> = read.into_iter().map(E4M3::from_bits).collect();
        let mut factors = [0.0; 2];
        widen(&read_rows(&self.weights, &tensor_name, tensor, &(0..2))?, Dtype::F32, &mut factors);
        if let Some(at) = first_wrong_scale(&factors) {
            let text = format!("is {} at element {at}: expected a finite, positive factor", factors[at]);
            return Err(self.problem(&tensor_name, &text));
        }
        let across = cols.div_ceil(16);
        let mut values = vec![0.0; rows.len() * cols];
        for (row, (codes, values)) in
            rows.clone().zip(codes.chunks(bytes.max(1)).zip(values.chunks_mut(cols.max(1))))
        {
            let first = (row / down - strips.start) * across;
            let own = groups.get(first..first + across).unwrap_or_default();
            let scale = TensorScale::from_encode(factors[0]);
            Codec::new()
                .dequantize_nvfp4(codes, 1, cols, Blocks::B1x16, own, scale, values)
                .map_err(|error| self.problem(name, &error.to_string()))?;
        }
        Ok(values)
    }

    /// Returns the name and description of the tensor to read for a parameter.
    fn find(&self, parameter: &str) -> Option<(String, &WeightInfo)> {
        let name = format!("{}{parameter}", self.prefix);
        let info = self.weights.info(&name)?;
        if is_codes(info.dtype) || self.prefers_copies {
            let copy = format!("optimizer.{}.{parameter}.main_param", self.path);
            let shape = values_shape(info);
            if let Some(info) = self.weights.info(&copy).filter(|copy| copy.shape == shape) {
                return Some((copy, info));
            }
        }
        Some((name, info))
    }
}

impl Source for CheckpointSource {
    fn file(&self) -> Option<&Path> {
        Some(&self.file)
    }

    fn names(&self) -> Vec<String> {
        let is_scale = |name: &str| {
            let of = name.strip_suffix(SCALE_INV).or_else(|| name.strip_suffix(TENSOR_SCALE));
            of.and_then(|name| self.weights.info(name)).is_some_and(|info| is_codes(info.dtype))
        };
        let of_model = self.weights.names().filter(|name| name.starts_with(self.any) && !is_scale(name));
        of_model.map(|name| name.strip_prefix(&self.prefix).unwrap_or(name).to_owned()).collect()
    }

    fn info(&self, parameter: &str) -> Option<Info> {
        let own = self.weights.info(&format!("{}{parameter}", self.prefix))?;
        let dtype = float(own.dtype).unwrap_or(self.dtype);
        Some(Info { shape: values_shape(own), dtype, exact: DType::F32, is_by_row: true })
    }

    fn rows(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<f32>> {
        let found = self.find(parameter);
        let (name, info) = found.ok_or_else(|| self.problem(parameter, "is not there"))?;
        if info.dtype == Dtype::U8 {
            return self.packed_rows(&name, info, &rows);
        }
        if float(info.dtype).is_none() && !is_fp8(info.dtype) {
            return Err(self.problem(&name, &format!("is {:?}: expected a float", info.dtype)));
        }
        let [height, cols] = info.matrix();
        let mut values = vec![0.0; rows.len() * cols];
        widen(&read_rows(&self.weights, &name, info, &rows)?, info.dtype, &mut values);
        if !is_fp8(info.dtype) {
            return Ok(values);
        }
        let factors = format!("{name}{SCALE_INV}");
        let of_factors = self.weights.info(&factors);
        let of_factors = of_factors.ok_or_else(|| self.problem(&name, "is FP8 without factors"))?;
        if !is_float(of_factors.dtype) {
            return Err(self.problem(&factors, &format!("is {:?}: expected a float", of_factors.dtype)));
        }
        let granularity = granularity(&of_factors.shape, [height, cols]);
        let granularity = granularity.ok_or_else(|| {
            let shape = &of_factors.shape;
            self.problem(&factors, &format!("has shape {shape:?}, which is no grid of [{height}, {cols}]"))
        })?;
        let [down, across] = of_factors.matrix();
        let mut scales = vec![0.0; down * across];
        let bytes = read_rows(&self.weights, &factors, of_factors, &(0..down))?;
        widen(&bytes, of_factors.dtype, &mut scales);
        if let Some(at) = first_wrong_scale(&scales) {
            let text = format!("is {} at element {at}: expected a finite, positive factor", scales[at]);
            return Err(self.problem(&factors, &text));
        }
        for (row, values) in rows.zip(values.chunks_mut(cols.max(1))) {
            scale_row(values, &scales, granularity, [height, cols], row);
        }
        Ok(values)
    }
}

/// The ends of the names of a stored weight's factors.
const SCALE_INV: &str = "_scale_inv";
const TENSOR_SCALE: &str = "_tensor_scale";

/// Returns true for the dtypes of codes: those of 4 bits are two a byte.
fn is_codes(dtype: Dtype) -> bool {
    is_fp8(dtype) || dtype == Dtype::U8
}

/// Returns the shape of the values of a tensor of a checkpoint.
fn values_shape(info: &WeightInfo) -> Vec<usize> {
    let mut shape = info.shape.clone();
    if let (Dtype::U8, Some(last)) = (info.dtype, shape.last_mut()) {
        *last = last.saturating_mul(2);
    }
    shape
}

/// Returns what shares a factor in a checkpoint's FP8 weight.
fn granularity(shape: &[usize], [rows, cols]: [usize; 2]) -> Option<WeightScales> {
    if shape.is_empty() {
        return Some(WeightScales::Tensor);
    }
    let fits = |blocks: &Blocks| !blocks.is_fp4() && blocks.grid(rows, cols) == shape;
    let blocks = Blocks::ALL.into_iter().find(fits)?;
    Some(WeightScales::Block(blocks.size(cols.max(1))))
}
