//! Values of tensors: widened to f32, dequantized where they are FP8, or as codes with their scales.

use super::config::{GROUP, WeightScales};
use super::folder::{Folder, Scales, is_float, is_of_cache};
use super::jobs;
use super::packed::Packed;
use super::targets::float;
use super::weights::{WeightInfo, Weights};
use crate::{Error, Result};
use fp8_format::{Blocks, E4M3, E5M2, E8M0, TensorScale, slice};
use fp8_kernels::DType;
use half::{bf16, f16};
use safetensors::Dtype;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Elements that a thread reads at a time.
const PART: usize = 1 << 19;
/// Elements of rows that are read at a time for some of their columns.
const COLUMNS: usize = 1 << 22;

/// Rows of a weight in FP8 or NVFP4 as they are stored, from [`Folder::codes`].
///
/// value = code · scale, and (code · scale) · [`TensorScale::decode`] in NVFP4. The example of [`quantize`](crate::quantize) reads one.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Weight {
    /// The codes, row by row. In NVFP4 a byte has two of them, the first in its low half, and a row of an odd number ends with a
    /// zero half.
    pub codes: Vec<u8>,
    /// F8_E4M3, F8_E5M2, or F4 for NVFP4.
    pub dtype: Dtype,
    /// The scales of the whole weight, row by row of their grid.
    pub scales: Vec<f32>,
    /// The factors of the whole weight in NVFP4.
    pub tensor_scale: Option<TensorScale>,
    /// The elements that share a scale.
    pub granularity: WeightScales,
    /// The static scale of the layer's input, if the file has one: in NVFP4 as the file has it, the factor that inputs are multiplied by
    /// (compressed-tensors) or its inverse (ModelOpt).
    pub input_scale: Option<f32>,
}

impl Folder {
    /// Reads rows of a tensor as f32, dequantized if it is FP8 or NVFP4. A vector has rows of one element. The example of
    /// [`save`](crate::save) reads some.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such tensor or row, or a scale is not finite and positive; [`Error::Io`] if the file
    /// cannot be read.
    pub fn rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>> {
        let Some(scales) = self.quantized.get(name) else {
            let info = self.info(name)?;
            if !is_float(info.dtype) {
                return Err(self.problem(format!("`{name}` is {:?}: expected floating point", info.dtype)));
            }
            let bytes = read_rows(&self.weights, name, info, &rows)?;
            let mut values = vec![0.0; elements(info, &rows)];
            widen(&bytes, info.dtype, &mut values);
            return Ok(values);
        };
        if let Some(packed) = &scales.packed {
            return self.packed_values(scales, packed, &rows);
        }
        let weight = self.codes(name, rows.clone())?;
        let [height, cols] = self.info(name)?.matrix();
        let mut values = vec![0.0; weight.codes.len()];
        widen(&weight.codes, weight.dtype, &mut values);
        for (row, values) in rows.zip(values.chunks_mut(cols.max(1))) {
            scale_row(values, &weight.scales, scales.granularity, [height, cols], row);
        }
        Ok(values)
    }

    /// Reads a whole tensor as f32, dequantized if it is FP8. See [`rows`](Self::rows).
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let [rows, _] = self.info(name)?.matrix();
        self.rows(name, 0..rows)
    }

    /// Reads rows of a tensor as f32 into `values`, which has their elements, with the threads of the caller's pool.
    pub(super) fn read_to(&self, name: &str, rows: Range<usize>, values: &mut [f32]) -> Result<()> {
        let info = self.info(name)?;
        let [height, cols] = info.matrix();
        let count = elements(info, &rows);
        if count != values.len() {
            return Err(self.problem(format!("`{name}` has {count} elements, not {}", values.len())));
        }
        if self.is_quantized(name) || !is_float(info.dtype) || rows.end > height {
            values.copy_from_slice(&self.rows(name, rows)?);
            return Ok(());
        }
        let first = rows.start * cols;
        let threads = jobs::threads(None).min(values.len().div_ceil(PART));
        let parts = Mutex::new(values.chunks_mut(PART).enumerate());
        let failed = Mutex::new(None);
        let work = || {
            let mut bytes = Vec::new();
            loop {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((index, part)) = next else { return };
                if let Err(error) = self.read_part(name, info.dtype, first + index * PART, part, &mut bytes) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // With fewer threads than asked for, the work takes longer.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Reads some columns of rows of a tensor as f32 into `values`, which has their elements. Whole rows are read, a few at a time.
    pub(super) fn read_columns_to(
        &self,
        name: &str,
        rows: Range<usize>,
        columns: &[Range<usize>],
        values: &mut [f32],
    ) -> Result<()> {
        let [_, width] = self.info(name)?.matrix();
        let own: usize = columns.iter().map(Range::len).sum();
        let step = (COLUMNS / width.max(1)).max(1);
        let mut rest = values;
        for first in rows.clone().step_by(step) {
            let read = self.rows(name, first..(first + step).min(rows.end))?;
            for row in read.chunks(width.max(1)) {
                let Some((to, behind)) = std::mem::take(&mut rest).split_at_mut_checked(own) else {
                    return Ok(());
                };
                let picked = columns.iter().flat_map(|range| row.get(range.clone()).unwrap_or_default());
                to.iter_mut().zip(picked).for_each(|(to, &from)| *to = from);
                rest = behind;
            }
        }
        Ok(())
    }

    /// Reads the elements from `first` on.
    fn read_part(
        &self,
        name: &str,
        dtype: Dtype,
        first: usize,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let size = dtype.bitsize() / 8;
        if dtype == Dtype::F32 {
            self.weights.read(name, (first * size) as u64, bytemuck::cast_slice_mut(values))?;
            // Files are little-endian.
            values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
            return Ok(());
        }
        bytes.resize(values.len() * size, 0);
        self.weights.read(name, (first * size) as u64, bytes)?;
        widen(bytes, dtype, values);
        Ok(())
    }

    /// Returns true if the tensor is a weight in FP8 or NVFP4, with its scales.
    #[must_use]
    pub fn is_quantized(&self, name: &str) -> bool {
        self.quantized.contains_key(name)
    }

    /// Returns true if the tensor is a scale of a quantized weight, of a layer's input, or of a cache.
    pub(super) fn is_scale(&self, name: &str) -> bool {
        let is_it = |other: &String| other == name;
        let is_of = |scales: &Scales| {
            let of_tensor = scales.packed.as_ref().is_some_and(|packed| is_it(&packed.tensor_scale));
            is_it(&scales.weight) || scales.input.iter().any(is_it) || of_tensor
        };
        (self.config.quantization.is_some() && is_of_cache(name)) || self.quantized.values().any(is_of)
    }

    /// Returns the dtype of the embedding in the files, and f32 if that is no float.
    pub(super) fn main_dtype(&self) -> DType {
        let first = self.config.tensors().into_iter().next();
        let info = first.and_then(|spec| self.weights.info(self.stored(&spec.name)));
        info.and_then(|info| float(info.dtype)).unwrap_or(DType::F32)
    }

    /// Reads rows of a weight in FP8 or NVFP4 as codes, with all scales of the weight.
    ///
    /// # Errors
    /// [`Error::File`] if this is no such weight, a row is not there, or a scale is not finite and positive; [`Error::Io`]
    /// if the file cannot be read.
    pub fn codes(&self, name: &str, rows: Range<usize>) -> Result<Fp8Weight> {
        let info = self.info(name)?;
        let scales = self.quantized.get(name);
        let scales = scales.ok_or_else(|| self.problem(format!("`{name}` is {:?}, not FP8", info.dtype)))?;
        let input_scale = match &scales.input {
            Some(input) => self.scales(input)?.first().copied(),
            None => None,
        };
        let (codes, factors, tensor_scale) = match &scales.packed {
            None => (read_rows(&self.weights, name, info, &rows)?, self.scales(&scales.weight)?, None),
            Some(packed) => {
                let groups = self.group_scales(&scales.weight, &(0..info.matrix()[0]))?;
                let factors = groups.into_iter().map(E4M3::to_f32).collect();
                (self.packed_rows(packed, &rows)?, factors, Some(self.tensor_scale(packed)?))
            }
        };
        Ok(Fp8Weight {
            codes,
            dtype: info.dtype,
            scales: factors,
            tensor_scale,
            granularity: scales.granularity,
            input_scale,
        })
    }

    /// Reads a tensor of scales.
    pub(super) fn scales(&self, name: &str) -> Result<Vec<f32>> {
        let info = self.info(name)?;
        let [rows, _] = info.matrix();
        let bytes = read_rows(&self.weights, name, info, &(0..rows))?;
        let mut values = vec![0.0; elements(info, &(0..rows))];
        widen(&bytes, info.dtype, &mut values);
        match first_wrong_scale(&values) {
            None => Ok(values),
            Some(at) => {
                let value = values[at];
                Err(self.problem(format!(
                    "`{name}` is {value} at element {at}: expected a finite, positive scale"
                )))
            }
        }
    }

    /// Reads the factors of a whole weight in NVFP4.
    pub(super) fn tensor_scale(&self, packed: &Packed) -> Result<TensorScale> {
        Ok(packed.factors(self.scales(&packed.tensor_scale)?.first().copied().unwrap_or(1.0)))
    }

    /// Reads the bytes of rows of a weight's codes in NVFP4.
    pub(super) fn packed_rows(&self, packed: &Packed, rows: &Range<usize>) -> Result<Vec<u8>> {
        let missing = || self.problem(format!("there is no tensor `{}`", packed.codes));
        let info = self.weights.info(&packed.codes).ok_or_else(missing)?;
        read_rows(&self.weights, &packed.codes, info, rows)
    }

    /// Reads the scales of the blocks of rows of a weight in NVFP4. One that is negative or NaN is an error.
    pub(super) fn group_scales(&self, name: &str, rows: &Range<usize>) -> Result<Vec<E4M3>> {
        let info = self.info(name)?;
        let scales: Vec<E4M3> =
            read_rows(&self.weights, name, info, rows)?.into_iter().map(E4M3::from_bits).collect();
        match scales.iter().position(|scale| scale.to_f32() < 0.0 || scale.to_f32().is_nan()) {
            None => Ok(scales),
            Some(at) => Err(self.problem(format!(
                "`{name}` is {} at element {}: expected scales that are 0 or positive",
                scales[at],
                rows.start * info.matrix()[1] + at
            ))),
        }
    }

    /// Reads rows of a weight in NVFP4 as f32: (code · scale) · factor.
    fn packed_values(&self, scales: &Scales, packed: &Packed, rows: &Range<usize>) -> Result<Vec<f32>> {
        let cols = packed.info.shape[1];
        let codes = self.packed_rows(packed, rows)?;
        let groups = self.group_scales(&scales.weight, rows)?;
        let tensor = self.tensor_scale(packed)?;
        let mut values = vec![0.0; rows.len() * cols];
        // The lengths fit, which is all that this checks.
        let read =
            slice::dequantize_nvfp4(&codes, rows.len(), cols, Blocks::B1x16, &groups, tensor, &mut values);
        read.map_err(|error| self.problem(format!("`{}`: {error}", packed.codes)))?;
        Ok(values)
    }
}

/// Returns the place of the first scale that is not finite and positive.
pub(super) fn first_wrong_scale(scales: &[f32]) -> Option<usize> {
    scales.iter().position(|&scale| !scale.is_finite() || scale <= 0.0)
}

/// Multiplies a row of a weight with its scales.
pub(super) fn scale_row(
    values: &mut [f32],
    scales: &[f32],
    granularity: WeightScales,
    shape: [usize; 2],
    row: usize,
) {
    let [_, across] = granularity.grid(shape);
    let (down, width) = match granularity {
        WeightScales::Tensor => (0, usize::MAX),
        WeightScales::Channel => (row, usize::MAX),
        WeightScales::Block([height, width]) => (row / height, width),
        WeightScales::TensorGroup => (row, GROUP),
    };
    let width = width.min(values.len().max(1));
    let scales = scales.iter().skip(down * across);
    for (values, scale) in values.chunks_mut(width).zip(scales) {
        values.iter_mut().for_each(|value| *value *= scale);
    }
}

fn elements(info: &WeightInfo, rows: &Range<usize>) -> usize {
    let [_, cols] = info.matrix();
    rows.len() * cols
}

/// Reads the bytes of rows.
pub(super) fn read_rows(
    weights: &Weights,
    name: &str,
    info: &WeightInfo,
    rows: &Range<usize>,
) -> Result<Vec<u8>> {
    let [height, cols] = info.matrix();
    let row = (cols * info.dtype.bitsize() / 8) as u64;
    if rows.end > height || rows.start > rows.end {
        return Err(Error::File {
            path: weights.path_of(name),
            problem: format!("`{name}` has {height} rows: {} to {} are not there", rows.start, rows.end),
        });
    }
    let mut bytes = vec![0; rows.len() * row as usize];
    weights.read(name, rows.start as u64 * row, &mut bytes)?;
    Ok(bytes)
}

/// Widens little-endian elements to f32, which is exact. Other dtypes than the floating ones leave `values` as they are.
pub(super) fn widen(bytes: &[u8], dtype: Dtype, values: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], values: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        for (to, &from) in values.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *to = value(from);
        }
    }
    match dtype {
        Dtype::F32 => each(bytes, values, f32::from_le_bytes),
        Dtype::BF16 => each(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F16 => each(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        // The lengths are equal, which is all that these functions check.
        Dtype::F8_E4M3 => drop(slice::to_f32::<E4M3>(bytemuck::cast_slice(bytes), values)),
        Dtype::F8_E5M2 => drop(slice::to_f32::<E5M2>(bytemuck::cast_slice(bytes), values)),
        Dtype::F8_E8M0 => each(bytes, values, |[byte]| E8M0::from_bits(byte).to_f32()),
        _ => {}
    }
}
