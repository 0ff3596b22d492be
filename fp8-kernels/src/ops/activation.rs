//! Activation functions, plain and gated, fused with quantization and with a bias gradient.
//!
//! In f32, with σ = [`math::sigmoid`](crate::math::sigmoid) and every multiply-add that is one written `fma(a, b, c)` =
//! a·b + c rounded once; all else is rounded operation by operation, from left to right:
//!
//! | name | f(x) | f′(x) |
//! |---|---|---|
//! | gelu, geglu | `x·σ(x·fma(x·x, 0.071354814, 1.595769))` | `s·fma(c·(1 − s), fma(c·c, 0.21406444, 1.595769), 1)` |
//! | silu, swiglu | `x·σ(x)` | `s·fma(c, 1 − s, 1)` |
//! | qgelu, qgeglu | `x·σ(1.702·x)` | `s·fma(1.702·c, 1 − s, 1)` |
//! | relu, reglu | `0 if x ≤ 0 else x` | `0 if x ≤ 0 else 1` |
//! | srelu, sreglu | `r·r`, r = relu(x) | `2·r` |
//! | glu | `σ(x)` | `s·(1 − s)` |
//!
//! `s` is f's σ at `c`, and `c` is x clamped to ±128, where every σ is 0 or 1: so derivatives at infinity are right. gelu
//! is the tanh form, since ½ + ½·tanh(u) = σ(2u); σ keeps relative precision in the left tail, where the sum cancels.
//!
//! Gated: rows of `h` are [activated half | gate half], the output `f(first)·second` has half the columns, and the
//! gradient is laid out as `h` is: `[(f′(first)·dy)·second | f(first)·dy]`.

use crate::backend::dispatch;
use crate::{Error, Operand, Result, Shape, Slot, Tensor};
use std::fmt;
use std::str::FromStr;

/// See the module's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x·Φ(x), tanh form.
    Gelu,
    /// max(x, 0).
    Relu,
    /// x·σ(x).
    Silu,
    /// x·σ(1.702·x).
    Qgelu,
    /// max(x, 0)².
    Srelu,
    /// σ, gated.
    Glu,
    /// gelu, gated.
    Geglu,
    /// relu, gated.
    Reglu,
    /// silu, gated.
    Swiglu,
    /// qgelu, gated.
    Qgeglu,
    /// srelu, gated.
    Sreglu,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Gelu,
        Self::Relu,
        Self::Silu,
        Self::Qgelu,
        Self::Srelu,
        Self::Glu,
        Self::Geglu,
        Self::Reglu,
        Self::Swiglu,
        Self::Qgeglu,
        Self::Sreglu,
    ];

    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::Qgelu => "qgelu",
            Self::Srelu => "srelu",
            Self::Glu => "glu",
            Self::Geglu => "geglu",
            Self::Reglu => "reglu",
            Self::Swiglu => "swiglu",
            Self::Qgeglu => "qgeglu",
            Self::Sreglu => "sreglu",
        }
    }

    /// Whether it takes two halves and halves the last dimension.
    pub const fn is_gated(self) -> bool {
        matches!(self, Self::Glu | Self::Geglu | Self::Reglu | Self::Swiglu | Self::Qgeglu | Self::Sreglu)
    }

    fn output_shape(self, op: &'static str, h: &Tensor) -> Result<Shape> {
        let (shape, last) = (*h.shape(), h.shape().last_dim());
        if !self.is_gated() {
            return Ok(shape);
        }
        if last % 2 == 0 {
            return Ok(shape.with_last(last / 2));
        }
        let remedy = format!("{self} takes two halves: expected an even last dimension, got {last}");
        Err(Error::Shape { op, shape, remedy })
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| Error::Option {
            op: "activation",
            option: "name",
            value: name.to_owned(),
            remedy: format!("expected one of {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// The activation of `h`, quantized as `slot` says without being rounded in between; in `h`'s dtype where the slot is off.
///
/// `h` is f32, bf16 or f16, of any shape; a gated activation halves the last dimension.
///
/// # Errors
/// A dtype that is not a float; an odd last dimension under a gated activation; a user's scale policy that returns no
/// usable scale.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Slot, Tensor, ops};
/// let h = Tensor::from_vec(vec![-1.0f32, 0.5, 3.0, 2.0], [1, 4], &Device::cpu())?;
/// let y = ops::activation(&h, ops::Activation::Reglu, &Slot::off(Encoding::E4M3))?;
/// assert_eq!(y.dequantize(h.dtype())?.to_vec::<f32>()?, [0.0, 1.0]); // max(-1, 0)·3, max(0.5, 0)·2
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn activation(h: &Tensor, activation: Activation, slot: &Slot<'_>) -> Result<Operand> {
    h.expect_float("activation", "h")?;
    slot.expect_device("activation", h.device())?;
    let shape = activation.output_shape("activation", h)?;
    dispatch!(h.device(), activation::activation(h, activation, shape, slot))
}

/// The gradient of `h` for `dy`, the output's: `h`'s shape and dtype.
///
/// # Errors
/// A `dy` of another shape than the output's; dtypes that are not floats; an odd last dimension under a gated activation.
pub fn activation_backward(dy: &Tensor, h: &Tensor, activation: Activation) -> Result<Tensor> {
    check_backward("activation_backward", dy, h, activation)?;
    dispatch!(h.device(), activation::activation_backward(dy, h, activation))
}

/// [`activation_backward`] quantized as `slot` says without being rounded in between, and its column sums in f32: the bias
/// gradient of the layer before.
///
/// # Errors
/// As [`activation_backward`]; a user's scale policy that returns no usable scale.
pub fn activation_backward_quantize_dbias(
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
) -> Result<(Operand, Tensor)> {
    let op = "activation_backward_quantize_dbias";
    check_backward(op, dy, h, activation)?;
    slot.expect_device(op, h.device())?;
    dispatch!(h.device(), activation::activation_backward_quantize_dbias(dy, h, activation, slot))
}

fn check_backward(op: &'static str, dy: &Tensor, h: &Tensor, activation: Activation) -> Result<()> {
    dy.expect_float(op, "dy")?;
    h.expect_float(op, "h")?;
    h.device().expect_same(op, dy.device())?;
    let expected = activation.output_shape(op, h)?;
    if *dy.shape() == expected {
        return Ok(());
    }
    let (lhs, rhs) = (*dy.shape(), expected);
    let remedy = "dy must have the activation's output shape";
    Err(Error::Shapes { op, what: "dy and the output", lhs, rhs, remedy })
}
