//! Checks the tensors that callers pass to a layer before the layer computes anything.
//!
//! Every layer checks its inputs in forward and `dy` in backward. An error names the layer by its path, the argument, what
//! was passed and what would be right. Floats of any kind are accepted: layers cast them to the dtype they compute in.

use crate::{Error, Result};
use fp8_kernels::{DType, Device, Fp8Tensor, Operand, Shape, Tensor};
use std::sync::Arc;

/// A tensor or operand that a caller passed to a layer. Each check returns the argument, or an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument<'a> {
    layer: &'a str,
    name: &'static str,
    shape: &'a Shape,
    device: &'a Device,
    /// `None` for FP8.
    dtype: Option<DType>,
}

impl<'a> Argument<'a> {
    /// `name` is what errors call the tensor.
    pub(crate) fn new(layer: &'a str, name: &'static str, tensor: &'a Tensor) -> Self {
        let (shape, device, dtype) = (tensor.shape(), tensor.device(), Some(tensor.dtype()));
        Self { layer, name, shape, device, dtype }
    }

    /// `name` is what errors call the operand.
    pub(crate) fn operand(layer: &'a str, name: &'static str, operand: &'a Operand) -> Self {
        let dtype = operand.as_high().map(Tensor::dtype);
        Self { layer, name, shape: operand.shape(), device: operand.device(), dtype }
    }

    /// `name` is what errors call the codes.
    pub(crate) fn codes(layer: &'a str, name: &'static str, codes: &'a Fp8Tensor) -> Self {
        Self { layer, name, shape: codes.shape(), device: codes.device(), dtype: None }
    }

    /// Refuses a dtype that is not a float.
    pub(crate) fn float(self) -> Result<Self> {
        self.expect_dtype(DType::is_float, "f32, bf16 or f16")
    }

    /// Refuses other integers than ids and lengths are stored in.
    pub(crate) fn integer(self) -> Result<Self> {
        self.expect_dtype(|dtype| dtype == DType::I32, "i32")
    }

    fn expect_dtype(self, fits: impl Fn(DType) -> bool, expected: &'static str) -> Result<Self> {
        match self.dtype {
            Some(found) if !fits(found) => {
                let (layer, argument) = (self.layer.to_owned(), self.name);
                Err(Error::ArgumentDType { layer, argument, found, expected })
            }
            _ => Ok(self),
        }
    }

    /// Refuses a tensor that is on another device than the layer's parameters.
    pub(crate) fn on(self, device: &Device) -> Result<Self> {
        if self.device.is_same(device) {
            return Ok(self);
        }
        let (mut found, expected) = (self.device.to_string(), device.to_string());
        if found == expected {
            found = format!("another device opened on {found}");
        }
        Err(Error::ArgumentDevice { layer: self.layer.to_owned(), argument: self.name, found, expected })
    }

    /// Refuses a last dimension other than `size`, which is the layer's option `option`.
    pub(crate) fn features(self, size: usize, option: &str) -> Result<Self> {
        self.shape(self.shape.last() == Some(&size), || format!("[…, {size}], {option} last"))
    }

    /// Returns the sizes that were read from the tensor's shape, or refuses the shape where they are missing.
    pub(crate) fn sizes<T>(self, sizes: Option<T>, expected: impl FnOnce() -> String) -> Result<T> {
        sizes.ok_or_else(|| {
            let (layer, argument, shape) = (self.layer.to_owned(), self.name, *self.shape);
            Error::ArgumentShape { layer, argument, shape, expected: expected() }
        })
    }

    /// Refuses the tensor's shape unless `fits`; `expected` describes the shapes that fit.
    pub(crate) fn shape(self, fits: bool, expected: impl FnOnce() -> String) -> Result<Self> {
        self.sizes(fits.then_some(self), expected)
    }
}

/// The properties of a returned output that backward checks `dy` against: its shape and its device.
#[derive(Debug)]
pub(crate) struct Output {
    layer: Arc<str>,
    shape: Shape,
    device: Device,
}

impl Output {
    /// Describes the output `y` of the layer at path `layer`.
    pub(crate) fn of(layer: &Arc<str>, y: &Tensor) -> Self {
        Self { layer: layer.clone(), shape: *y.shape(), device: y.device().clone() }
    }

    /// Describes an output that may be in FP8.
    pub(crate) fn of_operand(layer: &Arc<str>, y: &Operand) -> Self {
        Self { layer: layer.clone(), shape: *y.shape(), device: y.device().clone() }
    }

    /// Returns the number of rows: all dimensions but the last.
    pub(crate) fn rows(&self) -> usize {
        self.shape.matrix()[0]
    }

    /// Refuses a `dy` that cannot be the gradient of this output.
    pub(crate) fn check(&self, dy: &Tensor) -> Result<()> {
        self.check_named("dy", dy)
    }

    /// Refuses a tensor of this name that cannot be the gradient of this output.
    pub(crate) fn check_named(&self, name: &'static str, dy: &Tensor) -> Result<()> {
        self.check_argument(Argument::new(&self.layer, name, dy))
    }

    /// Refuses what another layer than the one at `path` returned.
    pub(crate) fn expect_layer(&self, path: &Arc<str>) -> Result<()> {
        if self.layer == *path {
            return Ok(());
        }
        let (layer, found) = (path.to_string(), format!("layer `{}`", self.layer));
        Err(fp8_recipe::Error::Origin { layer, found }.into())
    }

    /// Refuses an operand that cannot be the gradient of this output.
    pub(crate) fn check_operand(&self, dy: &Operand) -> Result<()> {
        self.check_argument(Argument::operand(&self.layer, "dy", dy))
    }

    fn check_argument(&self, dy: Argument<'_>) -> Result<()> {
        let fits = *dy.shape == self.shape;
        let dy = dy.float()?.on(&self.device)?;
        dy.shape(fits, || format!("{}, the output's shape", self.shape)).map(drop)
    }
}
