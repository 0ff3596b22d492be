//! Adapters that become a part of the weights.

use super::{Adapter, Module};
use crate::{Folder, Result};
use fp8_kernels::{DType, Device, Tensor, ops};
use rayon::prelude::*;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::path::Path;

impl Adapter {
    /// Writes the folder at `out`: the model of `folder` with W + s · B · A in place of each weight W that has an adapter. The sum is
    /// computed in f32 and rounded once, to the dtype of the file. All other tensors keep their bytes, and files are copied as by
    /// [`Folder::save`].
    ///
    /// Needs memory for the weights that change.
    ///
    /// # Errors
    /// A sum that the dtype does not hold; FP8 weights, of which a sum would have to be quantized again; a folder of another model; `out` exists; a file that cannot be
    /// read or written. Nothing is written then.
    pub fn merge(&self, folder: &Folder, out: &Path) -> Result<()> {
        crate::expect_new(out)?;
        let mut merged = BTreeMap::new();
        for module in &self.modules {
            let name = format!("{}.weight", module.name);
            let stored = folder.stored(&name).to_owned();
            if folder.is_quantized(&stored) {
                let problem = format!(
                    "`{stored}` is FP8: merge the adapter into the weights that it was quantized from"
                );
                return Err(folder.problem(problem));
            }
            let info = folder.info(&stored)?;
            let (shape, dtype) = (info.shape.clone(), info.dtype);
            let is_transposed = folder.config.family.is_transposed;
            let expected = if is_transposed { [module.shape[1], module.shape[0]] } else { module.shape };
            if shape != expected {
                return Err(
                    folder.problem(format!("`{stored}` is {shape:?}: the adapter is for {expected:?}"))
                );
            }
            let mut weight = folder.values(&stored)?;
            module.add_to(&mut weight, is_transposed);
            let weight = Tensor::from_vec(weight, expected, &Device::cpu())?;
            let dtype = match dtype {
                Dtype::BF16 => DType::BF16,
                Dtype::F16 => DType::F16,
                Dtype::F32 => DType::F32,
                other => {
                    return Err(folder.problem(format!("`{stored}` is {other:?}: expected F32, BF16 or F16")));
                }
            };
            let sum = ops::cast(&weight, dtype)?;
            let [before, after] = [folder.values(&stored)?, sum.to_f32_vec()?];
            let lost = |(before, after): (&f32, &f32)| before.is_finite() && !after.is_finite();
            if let Some(index) = before.iter().zip(&after).position(lost) {
                let [row, col] = [index / shape[1], index % shape[1]];
                let text = format!(
                    "`{stored}` would be {} at row {row}, column {col}: {dtype} does not hold the sum",
                    after[index]
                );
                return Err(folder.problem(text));
            }
            merged.insert(stored, sum);
        }
        folder.save(out, &merged)
    }
}

impl Module {
    /// Adds s · B · A to a weight, or its transpose.
    fn add_to(&self, weight: &mut [f32], is_transposed: bool) {
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
