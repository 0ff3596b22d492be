//! Low-rank adapters beside the weight of a Linear.

use crate::layers::Part;
use crate::{Cut, Error, ParallelMode, Parameter, Placement, Result, TensorParallel, init};
use fp8_kernels::ops::{self, Accumulation};
use fp8_kernels::{DType, Device, Operand, Tensor};
use fp8_recipe::Backward;
use rand::Rng;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Options of an adapter of a [`Linear`](crate::Linear): see [`Loras::add`].
#[derive(Debug, Clone)]
pub struct LoraOptions {
    /// r, the columns of B and the rows of A. Required.
    pub rank: usize,
    /// s, the factor of the product B · A: α / r for LoRA, α / √r for rank-stabilized LoRA. Default: 2.
    pub scale: f32,
    /// The dtype of A and B: f32, bf16 or f16. They are cast to the dtype that the layer computes in. Default: [`DType::F32`].
    pub params_dtype: DType,
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self { rank: 0, scale: 2.0, params_dtype: DType::F32 }
    }
}

/// An adapter of a [`Linear`](crate::Linear), which adds s · B · A to some rows of the weight: see [`Loras::add`].
///
/// ```
/// use fp8_nn::LoraOptions;
/// use fp8_nn::prelude::*;
///
/// let mut rng = fp8_nn::rand::rng();
/// let options = LinearOptions { in_features: 8, out_features: 6, ..Default::default() };
/// let mut qkv = Linear::new("qkv", options, &Device::cpu(), &mut rng)?;
/// qkv.loras_mut().add("k", 2..4, &LoraOptions { rank: 4, ..Default::default() }, &mut rng)?;
/// let lora = &qkv.loras().all()[0];
/// assert_eq!((lora.a().shape().to_string(), lora.b().shape().to_string()), ("[4, 8]".into(), "[2, 4]".into()));
/// assert_eq!((lora.rows(), lora.scale()), (2..4, 2.0));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Lora {
    a: Parameter,
    b: Parameter,
    rows: Range<usize>,
    /// Those that this rank has, among this rank's rows of the weight.
    local_rows: Range<usize>,
    scale: f32,
}

/// The values that the backward pass of adapters needs.
#[derive(Debug)]
pub(crate) struct LoraSaved {
    /// The input, if an A is trained: with sequence parallelism, this rank's tokens of it until backward gathers them.
    x: Option<Tensor>,
    /// The rows of each adapter, and s · x · Aᵀ if its B is trained.
    h: Vec<(Range<usize>, Option<Tensor>)>,
}

impl LoraSaved {
    /// Keeps this rank's tokens of the input in place of all, if there is a tensor of them.
    pub(crate) fn with_shard(mut self, shard: Option<&Tensor>) -> Self {
        if let (Some(x), Some(shard)) = (&mut self.x, shard) {
            *x = shard.clone();
        }
        self
    }

    /// Gathers the input's tokens of all ranks.
    pub(crate) fn gather_input(&mut self, ranks: &TensorParallel, what: &str) -> Result<()> {
        if let Some(x) = &mut self.x {
            *x = ranks.gather(what, x)?;
        }
        Ok(())
    }
}

impl Lora {
    /// Returns A, `[rank, in_features]`.
    pub fn a(&self) -> &Parameter {
        &self.a
    }

    /// Returns B, `[rows, rank]`.
    pub fn b(&self) -> &Parameter {
        &self.b
    }

    /// Returns the rows of the weight, which are features of the output, that the adapter adds to.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns s, the factor of B · A.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    fn operands(&self, dtype: DType) -> Result<[Operand; 2]> {
        Ok([Operand::High(self.a.values(dtype)?), Operand::High(self.b.values(dtype)?)])
    }
}

/// The adapters of a [`Linear`](crate::Linear), from [`Linear::loras`](crate::Linear::loras), or of all Linears of a model, from
/// [`Layer::visit_loras_mut`](crate::Layer::visit_loras_mut). Its example adds some.
pub struct Loras {
    /// The layer's path.
    path: Arc<str>,
    /// The shape of the whole weight.
    features: usize,
    in_features: usize,
    part: Part,
    device: Device,
    /// In the order of their rows.
    all: Vec<Lora>,
}

/// Short, since it is part of each Linear's.
impl fmt::Debug for Loras {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loras({}", self.path)?;
        for lora in &self.all {
            write!(f, ", {:?}: {} {}", lora.rows, lora.a.name(), lora.a.shape())?;
        }
        write!(f, ")")
    }
}

impl Loras {
    /// No adapters yet, of a layer at `path` with a weight `[features, in_features]`.
    pub(crate) fn new(
        path: &Arc<str>,
        [features, in_features]: [usize; 2],
        part: &Part,
        device: &Device,
    ) -> Self {
        let (path, part, device) = (path.clone(), part.clone(), device.clone());
        Self { path, features, in_features, part, device, all: Vec::new() }
    }

    /// Returns the path of the layer, which its weight's name begins with.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the shape of the layer's weight, `[out_features, in_features]`, of which this rank may have a part.
    pub fn weight_shape(&self) -> [usize; 2] {
        [self.features, self.in_features]
    }

    /// Returns the adapters, in the order of their rows.
    pub fn all(&self) -> &[Lora] {
        &self.all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.all.iter().flat_map(|lora| [&lora.a, &lora.b])
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter> {
        self.all.iter_mut().flat_map(|lora| [&mut lora.a, &mut lora.b])
    }

    /// Adds a low-rank adapter (LoRA) to the rows `rows` of the weight: `y[rows] += s · B · (A · x)`. A is `[rank, in_features]`,
    /// uniform in ±1/√in_features; B is `[rows, rank]` and 0, so that nothing changes at first (but for a rounding more where a layer
    /// that computes in 16 bits writes FP8, as under `fp8_mha`). A layer that fuses several Linears,
    /// such as q, k and v, takes one for each. Adapters compute in high precision, whatever the recipe.
    ///
    /// The parameters are `<path>.lora.<name>.a` and `<path>.lora.<name>.b`. Create optimizers and [`Scaling`](fp8_recipe::Scaling)
    /// behind the last adapter. Freeze the rest of the model to train adapters alone ([`Parameter::set_trainable`]).
    ///
    /// Adapters read the layer's input in high precision, so a layer keeps it for backward, and an operation that quantizes its result
    /// (a norm, an activation, fused attention) computes its values once more.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::LoraOptions;
    ///
    /// let mut rng = fp8_nn::rand::rng();
    /// let options = LinearOptions { in_features: 2, out_features: 2, bias: false, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
    /// fc.loras_mut().add("all", 0..2, &LoraOptions { rank: 1, scale: 2.0, ..Default::default() }, &mut rng)?;
    /// let values = [vec![1.0, 0.0, 0.0, 1.0], vec![1.0, 1.0], vec![0.5, 0.0]]; // W, A and B
    /// for (parameter, values) in parameters_mut(&mut fc).into_iter().zip(values) {
    ///     parameter.set(Tensor::from_vec(values, *parameter.shape(), &Device::cpu())?)?;
    /// }
    /// let mut scaling = Scaling::new(&fc, &Device::cpu())?;
    /// let x = Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &Device::cpu())?;
    /// let (y, _) = scaling.in_autocast(&Recipe::off(), |cx| fc.forward(cx, &x))?;
    /// assert_eq!(y.to_f32_vec()?, [3.0 + 2.0 * 0.5 * 7.0, 4.0]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// A rank of 0; a scale that is not finite; no rows, rows that the weight does not have, or that another adapter has; with tensor
    /// parallelism, rows of which a rank has none; a name that another adapter has; a `params_dtype` that is not a float.
    pub fn add(
        &mut self,
        name: &str,
        rows: Range<usize>,
        options: &LoraOptions,
        rng: &mut impl Rng,
    ) -> Result<()> {
        let LoraOptions { rank, scale, params_dtype } = *options;
        let (features, in_features) = (self.features, self.in_features);
        let path = format!("{}.lora.{name}", self.path);
        let refused = |option, value: String, remedy: String| {
            Err(Error::Option { part: path.clone(), option, value, remedy })
        };
        init::check_params_dtype(&path, params_dtype)?;
        init::check_positive(&path, &[("rank", rank)])?;
        if !scale.is_finite() {
            return refused("scale", scale.to_string(), "expected a finite number".to_owned());
        }
        if rows.is_empty() || rows.end > features {
            let remedy = format!("expected a part of 0..{features}, the rows of the weight");
            return refused("rows", format!("{rows:?}"), remedy);
        }
        let overlaps = |other: &&Lora| other.rows.start < rows.end && rows.start < other.rows.end;
        if let Some(other) = self.all.iter().find(overlaps) {
            let remedy = format!("{:?} has an adapter: expected other rows", other.rows);
            return refused("rows", format!("{rows:?}"), remedy);
        }
        let a_name = format!("{path}.a");
        if self.all.iter().any(|other| **other.a.name() == *a_name) {
            let remedy = "expected a name that no other adapter of the layer has".to_owned();
            return refused("name", name.to_owned(), remedy);
        }
        init::check_parameter(&path, "a", [rank, in_features])?;
        init::check_parameter(&path, "b", [rows.len(), rank])?;
        let bound = 1.0 / (in_features as f32).sqrt();
        let (local_rows, [of_a, of_b]) = self.cuts(rank, &rows);
        if let Some(rank) = of_b.as_ref().and_then(Cut::rank_without_any) {
            let remedy = format!(
                "rank {rank} of tensor parallelism has none of them: expected some rows of each rank"
            );
            return refused("rows", format!("{rows:?}"), remedy);
        }
        let a = init::uniform([rank, in_features], of_a.as_ref(), bound, params_dtype, &self.device, rng)?;
        let b = Tensor::zeros([local_rows.len(), rank], params_dtype, &self.device)?;
        let a = self.place(Parameter::new(a_name, a)?, of_a);
        let b = self.place(Parameter::new(format!("{path}.b"), b)?, of_b);
        self.all.push(Lora { a, b, rows, local_rows, scale });
        self.all.sort_by_key(|lora| lora.rows.start);
        Ok(())
    }

    /// Returns this rank's rows of an adapter, among its rows of the weight, and how A and B are cut. The other factor is whole on all
    /// ranks, which have parts of its gradient.
    fn cuts(&self, rank: usize, rows: &Range<usize>) -> (Range<usize>, [Option<Cut>; 2]) {
        match (self.part.weight(), self.part.ranks()) {
            (Some(cut), Some((_, ParallelMode::Column))) => {
                let b = cut.within(0, [rows.len(), rank].into(), rows);
                (cut.local_range(rows), [None, Some(b)])
            }
            (Some(cut), Some((_, ParallelMode::Row))) => {
                let a = cut.within(1, [rank, self.in_features].into(), &(0..self.in_features));
                (rows.clone(), [Some(a), None])
            }
            _ => (rows.clone(), [None, None]),
        }
    }

    fn place(&self, parameter: Parameter, cut: Option<Cut>) -> Parameter {
        let parameter = parameter.of_adapter();
        match self.part.ranks() {
            Some((ranks, _)) => parameter.placed(cut.map_or(Placement::Partial, Placement::Cut), ranks),
            None => parameter,
        }
    }

    /// Adds what the adapters make of `x` to `y`, in `dtype`.
    pub(crate) fn forward(&self, x: Tensor, y: &Tensor, dtype: DType) -> Result<(Tensor, LoraSaved)> {
        let sizes = self.sizes();
        let mut parts = ops::split(y, &sizes)?;
        let input = Operand::High(x.clone());
        let mut h = Vec::with_capacity(self.all.len());
        for (lora, part) in self.all.iter().zip(parts.iter_mut().skip(1).step_by(2)) {
            let [a, b] = lora.operands(dtype)?;
            let product = ops::fprop(&input, &a, None, dtype, Accumulation::Split)?;
            let scaled = ops::scale(&product, lora.scale)?;
            let sum = ops::fprop(&Operand::High(scaled.clone()), &b, None, dtype, Accumulation::Split)?;
            *part = ops::add(part, &sum.reshape(*part.shape())?)?;
            h.push((lora.rows(), lora.b.is_trainable().then_some(scaled)));
        }
        let x = self.all.iter().any(|lora| lora.a.is_trainable()).then_some(x);
        Ok((ops::concat(&parts.iter().collect::<Vec<_>>())?, LoraSaved { x, h }))
    }

    /// Adds the gradients of the adapters' parameters, and what the adapters contribute to `dx`, the gradient of the input.
    pub(crate) fn backward(
        &mut self,
        cx: &Backward<'_>,
        saved: LoraSaved,
        dy: &Tensor,
        mut dx: Tensor,
        dtype: DType,
    ) -> Result<Tensor> {
        let parts = ops::split(dy, &self.sizes())?;
        let (input, lone_recipe) = (saved.x.map(Operand::High), cx.lone_recipe());
        for ((lora, dy), h) in self.all.iter_mut().zip(parts.into_iter().skip(1).step_by(2)).zip(saved.h) {
            let [a, b] = lora.operands(dtype)?;
            let dy = Operand::High(dy);
            let dh = ops::scale(&ops::dgrad(&dy, &b, dtype, Accumulation::Split)?, lora.scale)?;
            let dh = Operand::High(dh);
            let of_x = ops::dgrad(&dh, &a, dtype, Accumulation::Split)?;
            dx = ops::add(&dx, &of_x.reshape(*dx.shape())?)?;
            let h = h.1.map(Operand::High);
            let wgrad = |of: [&Operand; 2], parameter: &mut Parameter| {
                let [dy, x] = of;
                parameter.store(lone_recipe.clone(), |grad, update, name| {
                    Ok(ops::wgrad_into(dy, x, grad, update, name, Accumulation::Split)?)
                })
            };
            if let Some(h) = &h {
                wgrad([&dy, h], &mut lora.b)?;
            }
            if let Some(input) = &input {
                wgrad([&dh, input], &mut lora.a)?;
            }
        }
        Ok(dx)
    }

    /// Returns an error unless these are the adapters that the forward pass had, as far as they are trained.
    pub(crate) fn expect_saved(&self, saved: Option<&LoraSaved>) -> Result<()> {
        let h = saved.map_or(&[][..], |saved| &saved.h);
        let has_same_rows =
            self.all.len() == h.len() && self.all.iter().zip(h).all(|(lora, (rows, _))| lora.rows == *rows);
        if !has_same_rows {
            let found = "a layer with other adapters".to_owned();
            return Err(fp8_recipe::Error::Origin { layer: self.path.to_string(), found }.into());
        }
        let has_input = saved.is_some_and(|saved| saved.x.is_some());
        for (lora, (_, h)) in self.all.iter().zip(h) {
            for (parameter, is_kept) in [(&lora.a, has_input), (&lora.b, h.is_some())] {
                if parameter.is_trainable() && !is_kept {
                    return Err(parameter.was_frozen(&self.path));
                }
            }
        }
        Ok(())
    }

    /// The features of the output in front of each adapter's, those, and the rest.
    fn sizes(&self) -> Vec<usize> {
        let mut start = 0;
        let mut sizes = Vec::with_capacity(2 * self.all.len() + 1);
        for lora in &self.all {
            sizes.extend([lora.local_rows.start - start, lora.local_rows.len()]);
            start = lora.local_rows.end;
        }
        let features = match (self.part.weight(), self.part.ranks()) {
            (Some(cut), Some((_, ParallelMode::Column))) => cut.shape().first().copied().unwrap_or_default(),
            _ => self.features,
        };
        sizes.push(features - start);
        sizes
    }
}
