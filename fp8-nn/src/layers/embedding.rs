//! Embedding tables.

use crate::arguments::{Argument, Output};
use crate::placement::share;
use crate::{Cut, Error, Layer, Parameter, Placement, Result, TensorParallel, init, precision};
use fp8_kernels::ops::Part;
use fp8_kernels::{DType, Device, Shape, Tensor, ops};
use fp8_recipe::{Forward, SlotName, Slots};
use rand::Rng;
use std::sync::Arc;

/// Options of an [`Embedding`]. The two sizes are required.
///
/// See [`Embedding`] for an example.
#[derive(Debug, Clone)]
pub struct EmbeddingOptions {
    /// The number of rows. Ids run from 0 to `num_embeddings − 1`. Required.
    pub num_embeddings: usize,
    /// The length of a row. Required.
    pub hidden_size: usize,
    /// The dtype of the parameters: f32, bf16, or f16 with a [`LossScaler`](crate::LossScaler). Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Standard deviation of the initial values, which are normally distributed with mean 0. Default: 0.023.
    /// PyTorch's `Embedding` has 1.
    pub init_std: f32,
    /// The ranks that share the table: each has some of its rows, up to one more on some than on others. With sequence parallelism, the
    /// output is that of this rank's tokens, `[tokens / ranks, hidden_size]`. Default: `None`, this rank has all of it.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self {
            num_embeddings: 0,
            hidden_size: 0,
            params_dtype: DType::F32,
            init_std: 0.023,
            tensor_parallel: None,
        }
    }
}

/// A table whose rows are looked up by id: `y[i] = table[ids[i]]`.
///
/// It runs in high precision under every recipe. Ids are i32 of any shape up to five dimensions. The output has one more
/// dimension, `[…, hidden_size]`, in the scope's `compute_dtype` or, if the scope has none, in `params_dtype`. The input is
/// not a float tensor, so this is a [`Layer`] with its own forward and backward and not a [`Module`](crate::Module).
///
/// | parameter | shape | initial value |
/// |---|---|---|
/// | `<path>.weight` | `[num_embeddings, hidden_size]` | normal with deviation `init_std` |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = EmbeddingOptions { num_embeddings: 10, hidden_size: 4, ..Default::default() };
/// let mut table = Embedding::new("tokens", &options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&table, &device)?;
/// let ids = Tensor::from_vec(vec![7i32, 7, 2], [1, 3], &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| table.forward(cx, &ids))?;
/// assert_eq!(&**y.shape(), [1, 3, 4]);
/// table.backward(&saved, &Tensor::full(1.0, [1, 3, 4], DType::F32, &device)?)?;
/// let gradient = parameters(&table)[0].main_grad().to_f32_vec()?;
/// assert_eq!((gradient[7 * 4], gradient[2 * 4], gradient[0]), (2.0, 1.0, 0.0)); // id 7 occurs twice
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Embedding {
    path: Arc<str>,
    weight: Parameter,
    /// The ranks that have other rows of the table, and the place of this rank's.
    rows: Option<(TensorParallel, Part)>,
}

/// The values that the backward pass of [`Embedding`] needs.
#[derive(Debug)]
pub struct EmbeddingSaved {
    ids: Tensor,
    output: Output,
    /// The recipe of the scope whose scales differ between ranks.
    lone_recipe: Option<Arc<str>>,
}

impl Embedding {
    /// Creates a table at `path`, with values drawn from `rng`.
    ///
    /// # Errors
    /// A size of 0, a table that is too large for a tensor, a `params_dtype` that is not a float; fewer rows than ranks.
    pub fn new(path: &str, options: &EmbeddingOptions, device: &Device, rng: &mut impl Rng) -> Result<Self> {
        let EmbeddingOptions { num_embeddings, hidden_size, params_dtype, init_std, .. } = *options;
        init::check_params_dtype(path, params_dtype)?;
        init::check_positive(path, &[("num_embeddings", num_embeddings), ("hidden_size", hidden_size)])?;
        init::check_parameter(path, "weight", [num_embeddings, hidden_size])?;
        let shape = [num_embeddings, hidden_size];
        let ranks = options.tensor_parallel.as_ref();
        let cut = ranks.map(|ranks| vocabulary(path, "num_embeddings", shape, ranks)).transpose()?;
        let table = init::normal(shape, cut.as_ref(), init_std, params_dtype, device, rng)?;
        let weight = Parameter::new(format!("{path}.weight"), table)?;
        let (weight, rows) = match (ranks, cut) {
            (Some(ranks), Some(cut)) => {
                let first = share(num_embeddings, ranks.rank(), ranks.size());
                let part = Part { first, total: num_embeddings };
                (weight.placed(Placement::Cut(cut), ranks), Some((ranks.clone(), part)))
            }
            _ => (weight, None),
        };
        Ok(Self { path: path.into(), weight, rows })
    }

    /// Notes that each of `ranks` looks up the rows of the tokens that it has.
    pub(crate) fn of_tokens(self, ranks: Option<&TensorParallel>) -> Self {
        match ranks {
            Some(ranks) => Self { weight: self.weight.placed(ranks.placement_by_tokens(), ranks), ..self },
            None => self,
        }
    }

    /// Returns the table, `[num_embeddings, hidden_size]`, or with tensor parallelism this rank's rows of it.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// Returns the table, for a head that is tied to it.
    pub(crate) fn weight_mut(&mut self) -> &mut Parameter {
        &mut self.weight
    }

    /// Returns the rows of `ids` (i32, up to five dimensions) as `[…, hidden_size]`.
    ///
    /// # Errors
    /// Ids that are not i32, on another device, or out of range.
    pub fn forward(&self, cx: &Forward<'_>, ids: &Tensor) -> Result<(Tensor, EmbeddingSaved)> {
        let dtype = precision::compute_dtype(cx, &self.path, self.weight.dtype(), [])?;
        let argument = Argument::new(&self.path, "ids", ids).integer()?.on(self.weight.device())?;
        argument.shape(ids.shape().len() < Shape::MAX_RANK, || {
            format!("at most {} dimensions: the output has one more", Shape::MAX_RANK - 1)
        })?;
        let y = match &self.rows {
            None => ops::cast(&ops::embedding(ids, self.weight.tensor())?, dtype)?,
            Some((ranks, part)) => {
                if ranks.is_sequence_parallel() {
                    ranks.tokens_of_rank(&self.path, ids.numel(), self.weight.shape().last_dim())?;
                }
                // Each row is on one rank and zeros on the others, so that the sum is exact in any dtype.
                let rows = ops::cast(&ops::embedding_part(ids, self.weight.tensor(), *part)?, dtype)?;
                ranks.sum(&format!("{}.output", self.path), rows, dtype)?
            }
        };
        let output = Output::of(&self.path, &y);
        Ok((y, EmbeddingSaved { ids: ids.clone(), output, lone_recipe: cx.lone_recipe() }))
    }

    /// Adds the gradient of each row to that of the table.
    ///
    /// # Errors
    /// A gradient of another shape than the output's, or on another device.
    pub fn backward(&mut self, saved: &EmbeddingSaved, dy: &Tensor) -> Result<()> {
        saved.output.check(dy)?;
        let Some((ranks, part)) = &self.rows else {
            return self.weight.fill(saved.lone_recipe.clone(), |grad, name| {
                Ok(ops::embedding_backward(dy, &saved.ids, grad, name)?)
            });
        };
        if !self.weight.is_trainable() {
            return Ok(());
        }
        let gathered;
        let dy = if ranks.is_sequence_parallel() {
            let mut shape = saved.ids.shape().to_vec();
            shape.push(dy.shape().last_dim());
            let whole = ranks.gather(&format!("{}.grad_output", self.path), dy)?;
            gathered = whole.reshape(Shape::from_slice(&shape).unwrap_or(*whole.shape()))?;
            &gathered
        } else {
            dy
        };
        self.weight.fill(saved.lone_recipe.clone(), |grad, name| {
            Ok(ops::embedding_part_backward(dy, &saved.ids, grad, *part, name)?)
        })
    }
}

/// The rows of a vocabulary, `shape[0]` in all, that a rank has.
pub(crate) fn vocabulary(
    path: &str,
    option: &'static str,
    shape: [usize; 2],
    ranks: &TensorParallel,
) -> Result<Cut> {
    let (rows, n) = (shape[0], ranks.size());
    if rows < n {
        let remedy = format!("{n} ranks of tensor parallelism share the rows: expected {n} at least");
        return Err(Error::Option { part: path.to_owned(), option, value: rows.to_string(), remedy });
    }
    Ok(Cut::of_parts(0, shape.into(), &[rows], ranks.rank(), n))
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
