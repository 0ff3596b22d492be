//! Dropout with masks that are a function of a key and the element's index.

use crate::backend::dispatch;
use crate::{Device, DropoutDraw, Error, Result, Tensor, ops};

mod key;

pub use key::DropoutKey;

/// Dropout of the elements of a tensor: how many, and which.
///
/// ```
/// use fp8_kernels::ops::{Dropout, DropoutKey};
/// let tenth = Dropout { p: 0.1, draw: DropoutKey { seed: 1, offset: 0 }.into() };
/// assert_eq!(tenth.draw.read()?.seed, 1);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Dropout {
    /// The probability of an element to be dropped, at least 0 and less than 1.
    pub p: f32,
    /// The random numbers of the mask.
    pub draw: DropoutDraw,
}

impl Dropout {
    /// The smallest random number that is kept: exact, since p has 24 significant bits and is less than 1.
    pub(crate) fn threshold(&self) -> u32 {
        (f64::from(self.p) * 2f64.powi(32)) as u32
    }

    /// Returns the factor that elements are multiplied by if they are kept.
    pub(crate) fn factor(&self) -> f32 {
        1.0 / (1.0 - self.p)
    }

    /// Checks the probability, which errors call `option`, and the draw; none where nothing is dropped.
    pub(crate) fn checked<'a>(
        dropout: Option<&'a Self>,
        op: &'static str,
        option: &'static str,
        device: &Device,
    ) -> Result<Option<&'a Self>> {
        let Some(given) = dropout else { return Ok(None) };
        if !(0.0..1.0).contains(&given.p) {
            let remedy = "a drop probability is at least 0 and less than 1".to_owned();
            return Err(Error::Option { op, option, value: given.p.to_string(), remedy });
        }
        if given.p == 0.0 {
            return Ok(None);
        }
        given.draw.check(op, device)?;
        Ok(Some(given))
    }
}

/// Sets each element of `x` to 0 with probability `p` and multiplies the others by `1 / (1 − p)`. `p = 0` returns `x`.
///
/// Element i is kept if `rᵢ ≥ ⌊p·2³²⌋`, where `rᵢ` is lane `i mod 4` of Philox4x32-10 at counter `offset + ⌊i/4⌋` under the
/// key `seed`. So the mask depends on the key and i alone: it is the same on every device, and [`dropout_backward`] computes
/// it again. Values are multiplied in f32 and rounded once. The key is a [`DropoutKey`], or a [`DropoutDraw`] on the device,
/// which a recorded step needs.
///
/// # Errors
/// A dtype that is not a float; a `p` outside `[0, 1)`; a draw on another device; a key on the host in a step that is being
/// recorded, since its mask would be the same at each replay.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let x = Tensor::full(1.0, [1000], DType::F32, &Device::cpu())?;
/// let y = ops::dropout(&x, 0.5, ops::DropoutKey { seed: 1, offset: 0 })?.to_vec::<f32>()?;
/// assert!(y.iter().all(|&v| v == 0.0 || v == 2.0));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout(x: &Tensor, p: f32, draw: impl Into<DropoutDraw>) -> Result<Tensor> {
    run("dropout", "x", x, Dropout { p, draw: draw.into() })
}

/// Returns the gradient of [`dropout`](dropout())'s input: `dy` with the same mask and factor.
///
/// # Errors
/// Those of [`dropout`](dropout()).
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let key = ops::DropoutKey { seed: 1, offset: 0 };
/// let x = Tensor::full(1.0, [100], DType::F32, &Device::cpu())?;
/// let y = ops::dropout(&x, 0.5, key)?.to_vec::<f32>()?;
/// let dy = Tensor::full(3.0, [100], DType::F32, &Device::cpu())?;
/// let dx = ops::dropout_backward(&dy, 0.5, key)?.to_vec::<f32>()?;
/// assert!(y.iter().zip(&dx).all(|(y, dx)| *dx == 3.0 * y));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout_backward(dy: &Tensor, p: f32, draw: impl Into<DropoutDraw>) -> Result<Tensor> {
    run("dropout_backward", "dy", dy, Dropout { p, draw: draw.into() })
}

fn run(op: &'static str, what: &'static str, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    x.expect_float(op, what)?;
    match Dropout::checked(Some(&dropout), op, "p", x.device())? {
        Some(dropout) => dispatch!(x.device(), dropout::dropout(op, x, dropout)),
        None => Ok(x.clone()),
    }
}

/// Adds the output of a residual branch, `x`, to `residual`, with dropout: `y = residual + path(hidden(x))`.
///
/// `hidden` drops elements as [`dropout`](dropout()) does. `path` drops whole entries of the first dimension, the batch
/// (stochastic depth, Transformer Engine's `drop_path_rate`): entry b is kept if element b of its mask is, and multiplied by
/// `1 / (1 − p)` then. `None`, and a probability of 0, drop nothing. Both tensors have the same shape; everything is computed
/// in f32 in one pass and rounded once to the dtype of `residual`.
///
/// # Errors
/// Different shapes or devices; dtypes that are not floats; those of [`dropout`](dropout()) for each probability and draw.
///
/// ```
/// use fp8_kernels::ops::{self, Dropout, DropoutKey};
/// use fp8_kernels::{DType, Device, Tensor};
/// let ones = Tensor::full(1.0, [64, 2], DType::F32, &Device::cpu())?;
/// let path = Dropout { p: 0.5, draw: DropoutKey { seed: 1, offset: 0 }.into() };
/// let y = ops::dropout_add(&ones, &ones, None, Some(&path))?.to_vec::<f32>()?;
/// assert!(y.chunks(2).all(|entry| entry == [1.0, 1.0] || entry == [3.0, 3.0]));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout_add(
    residual: &Tensor,
    x: &Tensor,
    hidden: Option<&Dropout>,
    path: Option<&Dropout>,
) -> Result<Tensor> {
    let op = "dropout_add";
    residual.expect_float(op, "residual")?;
    x.expect_float(op, "x")?;
    residual.expect_same_shape(op, "residual and x", x)?;
    residual.device().expect_same(op, x.device())?;
    let hidden = Dropout::checked(hidden, op, "hidden.p", x.device())?;
    let path = Dropout::checked(path, op, "path.p", x.device())?;
    if hidden.is_none() && path.is_none() {
        return ops::add(residual, x);
    }
    dispatch!(x.device(), dropout::dropout_add(op, Some(residual), x, hidden, path))
}

/// Returns the gradient of [`dropout_add`]'s `x`: `dy` with the same masks and factors. That of `residual` is `dy`.
///
/// # Errors
/// Those of [`dropout_add`].
///
/// ```
/// use fp8_kernels::ops::{self, Dropout, DropoutKey};
/// use fp8_kernels::{DType, Device, Tensor};
/// let (x, zero) = (Tensor::full(1.0, [8, 8], DType::F32, &Device::cpu())?, Tensor::zeros([8, 8], DType::F32, &Device::cpu())?);
/// let hidden = Dropout { p: 0.1, draw: DropoutKey { seed: 1, offset: 0 }.into() };
/// let y = ops::dropout_add(&zero, &x, Some(&hidden), None)?.to_vec::<f32>()?;
/// assert_eq!(ops::dropout_add_backward(&x, Some(&hidden), None)?.to_vec::<f32>()?, y);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout_add_backward(dy: &Tensor, hidden: Option<&Dropout>, path: Option<&Dropout>) -> Result<Tensor> {
    let op = "dropout_add_backward";
    dy.expect_float(op, "dy")?;
    let hidden = Dropout::checked(hidden, op, "hidden.p", dy.device())?;
    let path = Dropout::checked(path, op, "path.p", dy.device())?;
    if hidden.is_none() && path.is_none() {
        return Ok(dy.clone());
    }
    dispatch!(dy.device(), dropout::dropout_add(op, None, dy, hidden, path))
}
