//! Adapters that become a part of the weights.

use super::{Adapter, Module};
use crate::output::{Copy, Entry, Layout};
use crate::save::CHUNK;
use crate::save_model::expect_float;
use crate::targets::{float, rounded};
use crate::{Folder, Result};
use fp8_kernels::{DType, Device, Shape, Tensor, ops};
use fp8_nn::checkpoint::stream::file_dtype;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor of the folder that is written.
struct Target<'a> {
    name: &'a str,
    shape: &'a [usize],
    /// The dtype that it is written in, or `None` if it keeps its bytes.
    dtype: Option<DType>,
    /// The adapter that is added to it.
    module: Option<&'a Module>,
}

impl Adapter {
    /// Writes the folder at `out`: the model of `folder` with W + s · B · A in place of each weight W that has an adapter.
    ///
    /// With `dtype` `None`, the sums are computed in f32 and rounded once to the dtype of the file, and all other tensors keep their
    /// bytes. With a `dtype` (f32, bf16 or f16), all tensors are written in it, and W is rounded to it before the sum, so that
    /// the result is what peft merges into a model that was loaded in that dtype. FP8 weights are dequantized, to `dtype` or that of
    /// the embedding, and those with an adapter are rounded only after the sum; `config.json` is then without a
    /// `quantization_config`. Other files are copied as by [`Folder::save`].
    ///
    /// Tensors are written one by one, which needs memory for the largest in f32, a few times.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a dtype that is no float. [`Error::File`](crate::Error::File) for a folder of
    /// another model, for a finite value that its dtype cannot hold, and if something exists at `out`;
    /// [`Error::Io`](crate::Error::Io) if a file cannot be read or written. Nothing is left at `out` then.
    pub fn merge(&self, folder: &Folder, out: &Path, dtype: Option<DType>) -> Result<()> {
        expect_float("merge", dtype)?;
        let targets = self.targets(folder, dtype)?;
        let entries: Vec<Entry> = targets.iter().map(|target| target.entry(folder)).collect::<Result<_>>()?;
        let mut config = folder.config.clone();
        if config.quantization.is_some() {
            config = config.with_quantization(None)?;
        }
        if let Some(dtype) = dtype {
            config = config.with_dtype(dtype)?;
        }
        let output = Layout::new(&entries)
            .map_err(|problem| folder.problem(problem))?
            .create(out, Some(folder.path()))?;
        output.flush_during(|| {
            let mut buffer = Vec::new();
            for target in &targets {
                let Some(spot) = output.spot(target.name) else { continue };
                if let Some(dtype) = target.dtype {
                    output.tensor(spot, &target.tensor(folder, dtype)?)?;
                    continue;
                }
                for copy in Copy::parts(&folder.weights, target.name, spot, CHUNK) {
                    copy.run(&folder.weights, &output, &mut buffer)?;
                }
            }
            Ok(())
        })?;
        output.commit(config.json())
    }

    /// Returns the tensors of the folder that is written: all but the scales of FP8 weights.
    fn targets<'a>(&'a self, folder: &'a Folder, dtype: Option<DType>) -> Result<Vec<Target<'a>>> {
        let mut modules = BTreeMap::new();
        for module in &self.modules {
            let name = format!("{}.weight", module.name);
            let stored = folder.stored(&name).to_owned();
            let [rows, cols] = module.shape;
            let expected = if folder.config.family.is_transposed { [cols, rows] } else { [rows, cols] };
            let shape = &folder.info(&stored)?.shape;
            if *shape != expected {
                let problem = format!("`{stored}` is {shape:?}: the adapter is for {expected:?}");
                return Err(folder.problem(problem));
            }
            modules.insert(stored, module);
        }
        let is_fp8 = folder.config.quantization.is_some();
        let main = folder.main_dtype();
        let mut targets = Vec::new();
        let names = folder.weights.names().filter(|name| !(is_fp8 && folder.is_scale(name)));
        for name in names.map(|name| folder.logical(name)) {
            let info = folder.info(name)?;
            let (stored, module) = (float(info.dtype), modules.get(name).copied());
            if module.is_some() && stored.is_none() && !folder.is_quantized(name) {
                let problem =
                    format!("`{name}` is {:?}: expected F32, BF16, F16 or FP8 with scales", info.dtype);
                return Err(folder.problem(problem));
            }
            let written = match (stored, folder.is_quantized(name)) {
                (None, false) => None,
                _ => Some(dtype.or(stored).unwrap_or(main)),
            };
            let keeps = module.is_none() && written == stored;
            targets.push(Target { name, shape: &info.shape, dtype: written.filter(|_| !keeps), module });
        }
        Ok(targets)
    }
}

impl Target<'_> {
    fn entry(&self, folder: &Folder) -> Result<Entry> {
        let file = folder.weights.file_of(folder.codes_of(self.name)).unwrap_or_default().to_owned();
        let dtype = self.dtype.map_or(folder.info(self.name)?.dtype, file_dtype);
        Ok(Entry { file, name: self.name.to_owned(), dtype, shape: self.shape.to_vec() })
    }

    /// Returns the values that are written.
    fn tensor(&self, folder: &Folder, dtype: DType) -> Result<Tensor> {
        let name = self.name;
        let shape = Shape::from_slice(self.shape)
            .ok_or_else(|| folder.problem(format!("`{name}` has too many dimensions: {:?}", self.shape)))?;
        let before = folder.values(name)?;
        let mut values = before.clone();
        if let Some(module) = self.module {
            if !folder.is_quantized(name) {
                values.iter_mut().for_each(|value| *value = rounded(*value, dtype));
            }
            module.add_to(&mut values, folder.config.family.is_transposed);
        }
        let written = ops::cast(&Tensor::from_vec(values, shape, &Device::cpu())?, dtype)?;
        let after = written.to_f32_vec()?;
        let lost = |(before, after): (&f32, &f32)| before.is_finite() && !after.is_finite();
        if let Some(index) = before.iter().zip(&after).position(lost) {
            let cols = self.shape.last().copied().unwrap_or(1).max(1);
            return Err(folder.problem(format!(
                "`{name}` would be {} at row {}, column {}: {dtype} does not hold the {}",
                after[index],
                index / cols,
                index % cols,
                if self.module.is_some() { "sum" } else { "value" },
            )));
        }
        Ok(written)
    }
}

impl Module {
    /// Adds s · B · A to a weight, or its transpose.
    pub(super) fn add_to(&self, weight: &mut [f32], is_transposed: bool) {
        let [rows, cols] = self.shape;
        let scale = self.scale as f32;
        if is_transposed {
            for row in 0..rows {
                let added = self.row(row);
                added.iter().enumerate().for_each(|(col, x)| weight[col * rows + row] += scale * x);
            }
            return;
        }
        weight.par_chunks_mut(cols.max(1)).enumerate().for_each(|(row, weight)| {
            weight.iter_mut().zip(self.row(row)).for_each(|(w, x)| *w += scale * x);
        });
    }

    /// A row of B · A, in f32.
    fn row(&self, row: usize) -> Vec<f32> {
        let cols = self.shape[1];
        let mut sum = vec![0.0; cols];
        for (b, a) in self.b[row * self.rank..(row + 1) * self.rank].iter().zip(self.a.chunks(cols.max(1))) {
            sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
        }
        sum
    }
}
