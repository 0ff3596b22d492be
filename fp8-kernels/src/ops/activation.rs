//! Activation functions, plain and gated, fused with quantization and with a bias gradient.
//!
//! The formulas are in the documentation of [`Activation`]; every backend spells them operation by operation.

use super::GradientMut;
use crate::backend::dispatch;
use crate::{Encoding, Error, Operand, Result, Shape, Slot, Tensor};
use std::fmt;
use std::str::FromStr;

/// An activation function, with Transformer Engine's names.
///
/// Everything is computed in f32. σ is [`math::sigmoid`](crate::math::sigmoid), and `fma(a, b, c)` is `a·b + c` rounded once;
/// all other operations are rounded one by one, from left to right. So the results have the same bits on every backend.
///
/// | name | f(x) | f′(x) |
/// |---|---|---|
/// | gelu, geglu | `x·σ(x·fma(x·x, 0.071354814, 1.595769))` | `s·fma(c·(1 − s), fma(c·c, 0.21406444, 1.595769), 1)` |
/// | silu, swiglu | `x·σ(x)` | `s·fma(c, 1 − s, 1)` |
/// | qgelu, qgeglu | `x·σ(1.702·x)` | `s·fma(1.702·c, 1 − s, 1)` |
/// | relu, reglu | `0 if x ≤ 0 else x` | `0 if x ≤ 0 else 1` |
/// | srelu, sreglu | `r·r`, where r = relu(x) | `2·r` |
/// | glu | `σ(x)` | `s·(1 − s)` |
///
/// In f′, `c` is x clamped to ±128, where every σ is 0 or 1, and `s` is the σ of f(c); this keeps derivatives at infinity
/// finite. gelu is the tanh approximation, written with `½ + ½·tanh(u) = σ(2u)` because σ keeps its relative precision in
/// the left tail.
///
/// A *gated* activation (the names that end in "glu") splits each row `[.., 2n]` of its input into two halves and returns
/// `f(first)·second`, `[.., n]`. The gradient has the layout of the input: `[f′(first)·dy·second | f(first)·dy]`.
///
/// ```
/// use fp8_kernels::ops::Activation;
/// assert_eq!("swiglu".parse::<Activation>()?, Activation::Swiglu);
/// assert!(Activation::Swiglu.is_gated() && !Activation::Silu.is_gated());
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x·Φ(x), in the tanh approximation.
    Gelu,
    /// max(x, 0).
    Relu,
    /// x·σ(x).
    Silu,
    /// x·σ(1.702·x).
    Qgelu,
    /// max(x, 0)².
    Srelu,
    /// Gated σ.
    Glu,
    /// Gated gelu.
    Geglu,
    /// Gated relu.
    Reglu,
    /// Gated silu.
    Swiglu,
    /// Gated qgelu.
    Qgeglu,
    /// Gated srelu.
    Sreglu,
}

impl Activation {
    /// All activations.
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

    /// Returns the name in lower case, as [`FromStr`] takes it.
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

    /// Returns true for the gated activations, whose output has half the columns of their input.
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

/// Applies an activation to `h` and quantizes the result as `slot` says, without rounding it in between.
///
/// `h` is f32, bf16 or f16 of any shape. The output has the same shape; a gated activation halves the last dimension. If
/// the slot is off, the output stays in high precision and has `h`'s dtype. FP8 codes and amaxes have the same bits on
/// every backend.
///
/// # Errors
/// A dtype that is not a float; an odd last dimension under a gated activation; a custom scale policy that returns an
/// unusable scale.
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
    if slot.nvfp4().is_some() {
        return super::quantize(&activate(h, activation)?, slot);
    }
    dispatch!(h.device(), activation::activation(h, activation, shape, slot))
}

/// Applies an activation in high precision: `y = act(h)`, of `h`'s dtype.
///
/// It computes in f32 and rounds once. [`activation`](activation()) quantizes the result to FP8 in the same pass instead. Gated activations
/// halve the last dimension. On a GPU the operation is queued and returns at once.
///
/// ```
/// use fp8_kernels::ops::{self, Activation};
/// use fp8_kernels::{Device, Tensor};
/// let h = Tensor::from_vec(vec![-1.0f32, 0.0, 2.0, 3.0], [2, 2], &Device::cpu())?;
/// let y = ops::activate(&h, Activation::Relu)?;
/// assert_eq!(y.to_vec::<f32>()?, [0.0, 0.0, 2.0, 3.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a gated activation of an odd last dimension; the device failed.
pub fn activate(h: &Tensor, function: Activation) -> Result<Tensor> {
    // The format of a slot that is off is not used.
    activation(h, function, &Slot::off(Encoding::E4M3))?.dequantize(h.dtype())
}

/// Returns the gradient of `h`, given `dy`, the gradient of [`activation`](activation())'s output.
///
/// `dy` has the output's shape, and `h` is the input of the forward call; both are f32, bf16 or f16. The result has `h`'s
/// shape and dtype.
///
/// # Errors
/// A `dy` whose shape is not the output's; dtypes that are not floats; an odd last dimension under a gated activation.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let h = Tensor::from_vec(vec![2.0f32, 3.0], [1, 2], &cpu)?; // f(2)·3
/// let dy = Tensor::from_vec(vec![10.0f32], [1, 1], &cpu)?;
/// let dh = ops::activation_backward(&dy, &h, ops::Activation::Reglu)?;
/// assert_eq!(dh.to_vec::<f32>()?, [30.0, 20.0]); // f′(2)·10·3 and f(2)·10
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn activation_backward(dy: &Tensor, h: &Tensor, activation: Activation) -> Result<Tensor> {
    check_backward("activation_backward", dy, h, activation)?;
    dispatch!(h.device(), activation::activation_backward(dy, h, activation))
}

/// Computes [`activation_backward`], quantizes it as `slot` says, and returns it with its column sums.
///
/// This is the backward pass between the two GEMMs of an MLP, in one pass over memory. The gradient is quantized without
/// being rounded in between; if the slot is off, it has `h`'s dtype. The sums, f32 `[cols]`, are those of the unquantized
/// gradient: the bias gradient of the layer in front of the activation.
///
/// # Errors
/// Those of [`activation_backward`]; a custom scale policy that returns an unusable scale.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let h = Tensor::from_vec(vec![-1.0f32, 2.0, 3.0, 4.0], [2, 2], &cpu)?;
/// let dy = Tensor::from_vec(vec![5.0f32, 6.0, 7.0, 8.0], [2, 2], &cpu)?;
/// let slot = Slot::off(Encoding::E5M2);
/// let (dh, dbias) = ops::activation_backward_quantize_dbias(&dy, &h, ops::Activation::Relu, &slot)?;
/// assert_eq!(dh.dequantize(DType::F32)?.to_vec::<f32>()?, [0.0, 6.0, 7.0, 8.0]);
/// assert_eq!(dbias.to_vec::<f32>()?, [7.0, 14.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn activation_backward_quantize_dbias(
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
) -> Result<(Operand, Tensor)> {
    let op = "activation_backward_quantize_dbias";
    check_backward(op, dy, h, activation)?;
    slot.expect_device(op, h.device())?;
    if slot.nvfp4().is_some() {
        return super::quantize_dbias(&activation_backward(dy, h, activation)?, slot);
    }
    dispatch!(h.device(), activation::activation_backward_quantize_dbias(dy, h, activation, slot))
}

/// Computes [`activation_backward_quantize_dbias`], and writes the column sums to `dbias` or adds them to it.
///
/// # Errors
/// Those of [`activation_backward_quantize_dbias`]; a `dbias` that is not f32 `[cols]`, with the columns of `h`, is on another
/// device or shares its storage.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let h = Tensor::from_vec(vec![-1.0f32, 2.0, 3.0, 4.0], [2, 2], &cpu)?;
/// let dy = Tensor::from_vec(vec![5.0f32, 6.0, 7.0, 8.0], [2, 2], &cpu)?;
/// let mut main_grad = Tensor::full(1.0, [2], DType::F32, &cpu)?;
/// let (slot, relu) = (Slot::off(Encoding::E5M2), ops::Activation::Relu);
/// let mut dbias = ops::GradientMut::new(&mut main_grad, "fc1.bias", ops::Update::Add);
/// let dh = ops::activation_backward_quantize_dbias_into(&dy, &h, relu, &slot, &mut dbias)?;
/// assert_eq!(dh.dequantize(DType::F32)?.to_vec::<f32>()?, [0.0, 6.0, 7.0, 8.0]);
/// assert_eq!(main_grad.to_vec::<f32>()?, [8.0, 15.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn activation_backward_quantize_dbias_into(
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
    dbias: &mut GradientMut<'_>,
) -> Result<Operand> {
    let op = "activation_backward_quantize_dbias_into";
    check_backward(op, dy, h, activation)?;
    slot.expect_device(op, h.device())?;
    dbias.expect(op, "dbias and the columns of h", h.shape().last_dim(), h.device())?;
    if slot.nvfp4().is_some() {
        return super::quantize_dbias_into(&activation_backward(dy, h, activation)?, slot, dbias);
    }
    dispatch!(h.device(), activation::activation_backward_quantize_dbias_into(dy, h, activation, slot, dbias))
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
