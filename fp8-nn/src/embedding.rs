//! Rows of a table by id: `y[i] = table[ids[i]]`.

use crate::arguments::{Argument, Output};
use crate::{Layer, Parameter, Result, init, precision};
use fp8_kernels::{DType, Device, Shape, Tensor, ops};
use fp8_recipe::{Forward, SlotName, Slots};
use rand::Rng;
use std::sync::Arc;

/// How an [`Embedding`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct EmbeddingOptions {
    /// Rows of the table.
    pub num_embeddings: usize,
    /// Its columns.
    pub hidden_size: usize,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// Standard deviation of the initial values.
    pub init_std: f32,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self { num_embeddings: 0, hidden_size: 0, params_dtype: DType::F32, init_std: 0.023 }
    }
}

/// See the module's text. Parameter: `<path>.weight` `[num_embeddings, hidden_size]`.
#[derive(Debug)]
pub struct Embedding {
    path: Arc<str>,
    weight: Parameter,
}

/// What its backward needs.
#[derive(Debug)]
pub struct EmbeddingSaved {
    ids: Tensor,
    output: Output,
}

impl Embedding {
    /// A table at `path`.
    ///
    /// # Errors
    /// A size of 0, a table that no memory holds, a dtype other than f32 and bf16.
    pub fn new(path: &str, options: &EmbeddingOptions, device: &Device, rng: &mut impl Rng) -> Result<Self> {
        let EmbeddingOptions { num_embeddings, hidden_size, params_dtype, init_std } = *options;
        init::check_params_dtype(path, params_dtype)?;
        init::check_positive(path, &[("num_embeddings", num_embeddings), ("hidden_size", hidden_size)])?;
        init::check_parameter(path, "weight", [num_embeddings, hidden_size])?;
        let table = init::normal([num_embeddings, hidden_size], init_std, params_dtype, device, rng)?;
        Ok(Self { path: path.into(), weight: Parameter::new(format!("{path}.weight"), table)? })
    }

    /// `ids` (i32) of up to five dimensions → `[…, hidden_size]`.
    ///
    /// # Errors
    /// Ids that are not i32, on another device, or out of range.
    pub fn forward(&self, cx: &Forward<'_>, ids: &Tensor) -> Result<(Tensor, EmbeddingSaved)> {
        let dtype = precision::compute_dtype(cx, &self.path, self.weight.dtype(), &[])?;
        let argument = Argument::new(&self.path, "ids", ids).integer()?.on(self.weight.tensor().device())?;
        argument.shape(ids.shape().len() < Shape::MAX_RANK, || {
            format!("at most {} dimensions: the output has one more", Shape::MAX_RANK - 1)
        })?;
        let y = ops::cast(&ops::embedding(ids, self.weight.tensor())?, dtype)?;
        let output = Output::of(&self.path, &y);
        Ok((y, EmbeddingSaved { ids: ids.clone(), output }))
    }

    /// Adds the rows' gradients to the table's.
    ///
    /// # Errors
    /// A gradient of another shape than the output's, or on another device.
    pub fn backward(&mut self, saved: &EmbeddingSaved, dy: &Tensor) -> Result<()> {
        saved.output.check(dy)?;
        let name = self.weight.name().clone();
        Ok(ops::embedding_backward(dy, &saved.ids, self.weight.main_grad_mut(), &name)?)
    }
}

impl Slots for Embedding {
    fn slots(&self, _f: &mut dyn FnMut(&SlotName)) {}
}

impl Layer for Embedding {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        f(&self.weight);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        f(&mut self.weight);
    }
}
