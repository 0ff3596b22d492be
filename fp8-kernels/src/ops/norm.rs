//! LayerNorm and RMSNorm over the last dimension, fused with quantization.
//!
//! The variance is computed in a second pass over the row, so a large mean costs no precision. Sums may be ordered differently
//! on each backend; given equal statistics, the codes are equal.

use super::GradientMut;
use crate::backend::dispatch;
use crate::{DType, Error, Operand, Result, Shape, Slot, Tensor};
use std::fmt;
use std::str::FromStr;

/// The kind of a norm, parsed from and displayed as `LayerNorm` or `RMSNorm`, Transformer Engine's names.
///
/// ```
/// use fp8_kernels::ops::Norm;
/// assert_eq!("RMSNorm".parse::<Norm>()?, Norm::RmsNorm);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// Subtracts the mean and divides by the standard deviation; has γ and β.
    LayerNorm,
    /// Divides by the root of the mean square; has γ alone.
    RmsNorm,
}

impl Norm {
    const ALL: [Self; 2] = [Self::LayerNorm, Self::RmsNorm];

    /// Returns `LayerNorm` or `RMSNorm`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LayerNorm => "LayerNorm",
            Self::RmsNorm => "RMSNorm",
        }
    }
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Norm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| Error::Option {
            op: "norm",
            option: "name",
            value: name.to_owned(),
            remedy: "expected LayerNorm or RMSNorm".to_owned(),
        })
    }
}

/// A normalization and its options, for [`norm`](norm()) and for layers that normalize.
///
/// | field | default | PyTorch's default |
/// |---|---|---|
/// | `normalization` | `Norm::LayerNorm` | |
/// | `eps` | 1e-5 | 1e-5 in `LayerNorm`; the dtype's epsilon in `RMSNorm` |
/// | `zero_centered_gamma` | false | PyTorch always stores γ itself |
///
/// ```
/// use fp8_kernels::ops::{Norm, NormOptions};
///
/// let llama = NormOptions { normalization: Norm::RmsNorm, eps: 1e-6, ..Default::default() };
/// assert!(!llama.zero_centered_gamma);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOptions {
    /// LayerNorm, with γ and β, or RMSNorm, with only γ. Default: [`Norm::LayerNorm`].
    pub normalization: Norm,
    /// ε, which is added to the variance or the mean square. Finite and greater than 0. Default: 1e-5. PyTorch's `RMSNorm` uses
    /// the epsilon of the dtype.
    pub eps: f32,
    /// Whether the stored weight is γ − 1, so that weight decay pulls γ to 1 instead of 0. Default: false.
    pub zero_centered_gamma: bool,
}

impl Default for NormOptions {
    fn default() -> Self {
        Self { normalization: Norm::LayerNorm, eps: 1e-5, zero_centered_gamma: false }
    }
}

/// The statistics that [`norm`](norm()) returns and [`norm_backward`] needs, f32 `[rows]` each; zeros if `x` has no columns.
#[derive(Debug, Clone)]
pub struct NormStats {
    /// The mean of each row; `None` for RMSNorm.
    pub mean: Option<Tensor>,
    /// `1 / √(var + eps)` of each row.
    pub rsigma: Tensor,
}

/// Normalizes each row of `x` and quantizes the result as `slot` says, without rounding it in between.
///
/// `x` is `[.., cols]`; `gamma` and `beta` are `[cols]`; each is f32, bf16 or f16. In f32, for every row:
///
/// | | rsigma | y |
/// |---|---|---|
/// | LayerNorm | `1 / √(var(x) + eps)`, the biased variance | `fma((x − mean)·rsigma, γ, β)` |
/// | LayerNorm without β | the same | `((x − mean)·rsigma)·γ` |
/// | RMSNorm | `1 / √(mean(x²) + eps)` | `(x·rsigma)·γ` |
///
/// Returns y, with the shape of `x`, and the statistics that [`norm_backward`] needs. If the slot is off, y stays in high
/// precision and has the dtype of `x`. Backends may order the sums of a row differently; for equal statistics, codes and
/// amaxes have equal bits.
///
/// # Errors
/// A γ or β whose length is not the last dimension; a β for RMSNorm; an eps that is not finite and greater than 0; dtypes
/// that are not floats; a custom scale policy that returns an unusable scale.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Slot, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2], &Device::cpu())?;
/// let gamma = Tensor::from_vec(vec![1.0f32, 1.0], [2], &Device::cpu())?;
/// let options = ops::NormOptions::default();
/// let (y, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
/// let ops::NormStats { mean, rsigma } = stats;
/// assert_eq!(mean.map(|mean| mean.to_vec::<f32>()).transpose()?, Some(vec![2.0]));
/// assert_eq!(rsigma.to_vec::<f32>()?, [0.999995]); // 1 / sqrt(1 + 1e-5)
/// assert_eq!(y.dequantize(x.dtype())?.to_vec::<f32>()?, [-0.999995, 0.999995]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn norm(
    x: &Tensor,
    gamma: &Tensor,
    beta: Option<&Tensor>,
    options: &NormOptions,
    slot: &Slot<'_>,
) -> Result<(Operand, NormStats)> {
    check("norm", x, gamma, options)?;
    slot.expect_device("norm", x.device())?;
    if let Some(beta) = beta {
        check_parameter("norm", "beta and the last dimension", beta, x)?;
        if options.normalization == Norm::RmsNorm {
            let remedy = "RMSNorm has none: pass no beta, or use LayerNorm".to_owned();
            return Err(Error::Option {
                op: "norm",
                option: "beta",
                value: beta.shape().to_string(),
                remedy,
            });
        }
    }
    if slot.nvfp4().is_some() {
        let (y, stats) = norm(x, gamma, beta, options, &Slot::off(slot.encoding))?;
        return Ok((super::quantize(&y.dequantize(x.dtype())?, slot)?, stats));
    }
    dispatch!(x.device(), norm::norm(x, gamma, beta, options, slot))
}

/// Returns the gradients of [`norm`](norm())'s inputs, given `dy`, the gradient of its output: `(dx, dγ, dβ)`.
///
/// With `g = dy·γ`, `x̂ = (x − mean)·rsigma` and means over the row, `dx = rsigma·(g − mean(g) − x̂·mean(g·x̂))`; RMSNorm has
/// no `mean(x)` and no `mean(g)`. `dγ = Σ dy·x̂` and `dβ = Σ dy` over all rows. `dx` has the shape and dtype of `x`; the other two
/// are f32 `[cols]`, and `dβ` is `None` for RMSNorm. Pass the inputs and options of the forward call and the statistics that
/// it returned.
///
/// # Errors
/// Those of [`norm`](norm()); a `dy` whose shape is not that of `x`; statistics of another norm or number of rows.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Slot, Tensor, ops};
/// let row = |values: [f32; 2]| Tensor::from_vec(values.to_vec(), [1, 2], &Device::cpu());
/// let (x, gamma, options) = (row([1.0, 3.0])?, row([1.0, 1.0])?.reshape([2])?, ops::NormOptions::default());
/// let (_, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
/// let (dx, dgamma, dbeta) = ops::norm_backward(&row([5.0, 5.0])?, &x, &gamma, &stats, &options)?;
/// assert_eq!(dx.to_vec::<f32>()?, [0.0, 0.0]); // adding a constant to y does not change x
/// assert_eq!(dgamma.to_vec::<f32>()?, [5.0 * -0.999995, 5.0 * 0.999995]); // dy·x̂
/// assert_eq!(dbeta.map(|dbeta| dbeta.to_vec::<f32>()).transpose()?, Some(vec![5.0, 5.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn norm_backward(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    check_backward("norm_backward", dy, x, gamma, stats, options, None)?;
    dispatch!(x.device(), norm::norm_backward(dy, x, gamma, stats, options, None))
}

/// Computes [`norm_backward`] and adds `residual` to `dx` before it is rounded.
///
/// In a block `x + f(norm(x))`, the gradient of `x` is that of the norm's input plus that of the residual connection. This
/// adds the two in one pass over memory and with one rounding.
///
/// # Errors
/// Those of [`norm_backward`]; a `residual` whose shape is not that of `x`, or that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Slot, Tensor, ops};
/// let row = |values: [f32; 2]| Tensor::from_vec(values.to_vec(), [1, 2], &Device::cpu());
/// let (x, gamma, options) = (row([1.0, 3.0])?, row([1.0, 1.0])?.reshape([2])?, ops::NormOptions::default());
/// let (_, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
/// let (dy, residual) = (row([5.0, 5.0])?, row([2.0, 7.0])?);
/// let (dx, _, _) = ops::norm_backward_add(&dy, &x, &gamma, &stats, &options, &residual)?;
/// assert_eq!(dx.to_vec::<f32>()?, [2.0, 7.0]); // the norm adds 0: its dy is constant
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn norm_backward_add(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: &Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    check_backward("norm_backward_add", dy, x, gamma, stats, options, Some(residual))?;
    dispatch!(x.device(), norm::norm_backward(dy, x, gamma, stats, options, Some(residual)))
}

/// Returns the `dx` of [`norm_backward`], or with a `residual` that of [`norm_backward_add`], and writes dγ and dβ to gradients
/// or adds them.
///
/// A gradient that is `None` is not computed, as that of a frozen parameter.
///
/// # Errors
/// Those of [`norm_backward_add`]; a gradient that is not f32 `[cols]`, is on another device or shares its storage; a `dbeta` for
/// RMSNorm.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};
/// let row = |values: [f32; 2]| Tensor::from_vec(values.to_vec(), [1, 2], &Device::cpu());
/// let (x, gamma, options) = (row([1.0, 3.0])?, row([1.0, 1.0])?.reshape([2])?, ops::NormOptions::default());
/// let (_, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
/// let mut main_grad = Tensor::full(1.0, [2], DType::F32, &Device::cpu())?;
/// let mut dbeta = ops::GradientMut::new(&mut main_grad, "norm.bias", ops::Update::Add);
/// let dy = row([5.0, 5.0])?;
/// let dx = ops::norm_backward_into(&dy, &x, &gamma, &stats, &options, None, None, Some(&mut dbeta))?;
/// assert_eq!(dx.to_vec::<f32>()?, [0.0, 0.0]);
/// assert_eq!(main_grad.to_vec::<f32>()?, [6.0, 6.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "those of norm_backward_add, and where its gradients go")]
pub fn norm_backward_into(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
    dgamma: Option<&mut GradientMut<'_>>,
    dbeta: Option<&mut GradientMut<'_>>,
) -> Result<Tensor> {
    let op = "norm_backward_into";
    check_backward(op, dy, x, gamma, stats, options, residual)?;
    let cols = x.shape().last_dim();
    if let Some(dgamma) = &dgamma {
        dgamma.expect(op, "dgamma and the columns of x", cols, x.device())?;
    }
    if let Some(dbeta) = &dbeta {
        dbeta.expect(op, "dbeta and the columns of x", cols, x.device())?;
        if options.normalization == Norm::RmsNorm {
            let (value, remedy) = (dbeta.name.to_owned(), "RMSNorm has none: pass no dbeta".to_owned());
            return Err(Error::Option { op, option: "dbeta", value, remedy });
        }
    }
    dispatch!(x.device(), norm::norm_backward_into(dy, x, gamma, stats, options, residual, dgamma, dbeta))
}

fn check_backward(
    op: &'static str,
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<()> {
    if let Some(residual) = residual {
        residual.expect_float(op, "residual")?;
        residual.expect_same_shape(op, "residual and x", x)?;
        x.device().expect_same(op, residual.device())?;
    }
    check(op, x, gamma, options)?;
    dy.expect_float(op, "dy")?;
    dy.expect_same_shape(op, "dy and x", x)?;
    x.device().expect_same(op, dy.device())?;
    check_stats(op, "rsigma and the rows of x", &stats.rsigma, x)?;
    match (&stats.mean, options.normalization) {
        (Some(mean), Norm::LayerNorm) => check_stats(op, "mean and the rows of x", mean, x)?,
        (None, Norm::RmsNorm) => {}
        (mean, norm) => {
            let value = if mean.is_some() { "present" } else { "absent" }.to_owned();
            let remedy = format!("these statistics are not {norm}'s: pass those that norm returned");
            return Err(Error::Option { op, option: "stats.mean", value, remedy });
        }
    }
    Ok(())
}

fn check(op: &'static str, x: &Tensor, gamma: &Tensor, options: &NormOptions) -> Result<()> {
    x.expect_float(op, "x")?;
    check_parameter(op, "gamma and the last dimension", gamma, x)?;
    let eps = options.eps;
    if eps.is_finite() && eps > 0.0 {
        return Ok(());
    }
    let remedy = "expected a finite value greater than 0, for example 1e-5".to_owned();
    Err(Error::Option { op, option: "eps", value: eps.to_string(), remedy })
}

fn check_parameter(op: &'static str, what: &'static str, parameter: &Tensor, x: &Tensor) -> Result<()> {
    parameter.expect_float(op, what)?;
    x.device().expect_same(op, parameter.device())?;
    let (lhs, rhs) = (*parameter.shape(), Shape::from([x.shape().last_dim()]));
    if lhs == rhs {
        return Ok(());
    }
    Err(Error::Shapes { op, what, lhs, rhs, remedy: "a norm has one parameter per column" })
}

fn check_stats(op: &'static str, what: &'static str, stats: &Tensor, x: &Tensor) -> Result<()> {
    stats.expect_dtype(op, what, DType::F32)?;
    x.device().expect_same(op, stats.device())?;
    let (lhs, rhs) = (*stats.shape(), Shape::from([x.shape().matrix()[0]]));
    if lhs == rhs {
        return Ok(());
    }
    Err(Error::Shapes { op, what, lhs, rhs, remedy: "statistics are those that norm returned for this x" })
}
