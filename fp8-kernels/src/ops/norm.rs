//! LayerNorm and RMSNorm over the last dimension, fused with quantization.
//!
//! In f32, for every row: `μ = mean(x)` (LayerNorm), `rsigma = 1 / √(var + eps)` with the biased variance around μ, or the
//! mean square for RMSNorm; then
//! - LayerNorm: `fma((x − μ)·rsigma, γ, β)`, without β `((x − μ)·rsigma)·γ`;
//! - RMSNorm: `(x·rsigma)·γ`;
//!
//! with γ taken as 1 + γ, one f32 addition, if it is zero-centered. The variance is a second pass over the row, so a large
//! mean costs no precision. Sums may be ordered differently per backend; given equal statistics the codes are equal.

use crate::backend::dispatch;
use crate::{DType, Error, Operand, Result, Shape, Slot, Tensor};
use std::fmt;
use std::str::FromStr;

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// Subtracts the mean, divides by the deviation; γ and β.
    LayerNorm,
    /// Divides by the root of the mean square; γ alone.
    RmsNorm,
}

impl Norm {
    const ALL: [Self; 2] = [Self::LayerNorm, Self::RmsNorm];

    /// `LayerNorm` or `RMSNorm`.
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

/// How a norm is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOptions {
    /// Which one.
    pub norm: Norm,
    /// Added to the variance; finite and greater than 0.
    pub eps: f32,
    /// Whether γ is stored as its distance from 1.
    pub zero_centered_gamma: bool,
}

impl Default for NormOptions {
    fn default() -> Self {
        Self { norm: Norm::LayerNorm, eps: 1e-5, zero_centered_gamma: false }
    }
}

/// What backward needs besides `x`: `[rows]` in f32. Zeros where there are no columns.
#[derive(Debug, Clone)]
pub struct NormStats {
    /// Means; RMSNorm has none.
    pub mean: Option<Tensor>,
    /// `1 / √(var + eps)`.
    pub rsigma: Tensor,
}

/// The norm of each row of `x`, quantized as `slot` says without being rounded in between; in `x`'s dtype where the slot is
/// off. `x` is `[.., cols]`, `gamma` and `beta` are `[cols]`, each f32, bf16 or f16.
///
/// # Errors
/// A γ or β of another length, β for RMSNorm, an eps that is not finite and greater than 0, dtypes that are not floats; a
/// user's scale policy that returns no usable scale.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Slot, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32, 3.0], [1, 2], &Device::cpu())?;
/// let gamma = Tensor::from_vec(vec![1.0f32, 1.0], [2], &Device::cpu())?;
/// let options = ops::NormOptions::default();
/// let (y, stats) = ops::norm(&x, &gamma, None, &options, &Slot::off(Encoding::E4M3))?;
/// assert_eq!(y.dequantize(x.dtype())?.to_vec::<f32>()?, [-0.999995, 0.999995]); // 1 / sqrt(1 + 1e-5)
/// assert_eq!(stats.rsigma.to_vec::<f32>()?, [0.999995]);
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
        if options.norm == Norm::RmsNorm {
            let remedy = "RMSNorm has none: pass no beta, or use LayerNorm".to_owned();
            return Err(Error::Option {
                op: "norm",
                option: "beta",
                value: beta.shape().to_string(),
                remedy,
            });
        }
    }
    dispatch!(x.device(), norm::norm(x, gamma, beta, options, slot))
}

/// The gradients for `dy`: of `x` in `x`'s dtype, of γ and (LayerNorm) of β, both `[cols]` in f32.
///
/// # Errors
/// As [`norm`]; a `dy` of another shape than `x`; statistics of another norm or number of rows.
pub fn norm_backward(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    backward("norm_backward", dy, x, gamma, stats, options, None)
}

/// [`norm_backward`], with the gradient that reaches `x` past the norm, `residual`, added to dx before that is rounded:
/// what a block with a residual connection needs, in one pass.
///
/// # Errors
/// As [`norm_backward`]; a `residual` of another shape than `x`, or not a float.
pub fn norm_backward_add(
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: &Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "norm_backward_add";
    residual.expect_float(op, "residual")?;
    residual.expect_same_shape(op, "residual and x", x)?;
    x.device().expect_same(op, residual.device())?;
    backward(op, dy, x, gamma, stats, options, Some(residual))
}

fn backward(
    op: &'static str,
    dy: &Tensor,
    x: &Tensor,
    gamma: &Tensor,
    stats: &NormStats,
    options: &NormOptions,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    check(op, x, gamma, options)?;
    dy.expect_float(op, "dy")?;
    dy.expect_same_shape(op, "dy and x", x)?;
    x.device().expect_same(op, dy.device())?;
    check_stats(op, "rsigma and the rows of x", &stats.rsigma, x)?;
    match (&stats.mean, options.norm) {
        (Some(mean), Norm::LayerNorm) => check_stats(op, "mean and the rows of x", mean, x)?,
        (None, Norm::RmsNorm) => {}
        (mean, norm) => {
            let value = if mean.is_some() { "present" } else { "absent" }.to_owned();
            let remedy = format!("these statistics are not {norm}'s: pass those that norm returned");
            return Err(Error::Option { op, option: "stats.mean", value, remedy });
        }
    }
    dispatch!(x.device(), norm::norm_backward(dy, x, gamma, stats, options, residual))
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
