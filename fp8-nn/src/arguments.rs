//! Checks the tensors that callers pass to a layer before the layer computes anything.
//!
//! Every layer checks its inputs in forward and `dy` in backward. An error names the layer by its path, the argument, what
//! was passed and what would be right. Floats of any kind are accepted: layers cast them to the dtype they compute in.

use crate::{Error, Result};
use fp8_kernels::{DType, Device, Shape, Tensor};
use std::sync::Arc;

/// A tensor that a caller passed to a layer. Each check returns the argument, or an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument<'a> {
    layer: &'a str,
    name: &'static str,
    tensor: &'a Tensor,
}

impl<'a> Argument<'a> {
    /// `name` is what errors call the tensor.
    pub(crate) const fn new(layer: &'a str, name: &'static str, tensor: &'a Tensor) -> Self {
        Self { layer, name, tensor }
    }

    /// Refuses a dtype that is not a float.
    pub(crate) fn float(self) -> Result<Self> {
        self.dtype(self.tensor.dtype().is_float(), "f32, bf16 or f16")
    }

    /// Refuses other integers than ids and lengths are stored in.
    pub(crate) fn integer(self) -> Result<Self> {
        self.dtype(self.tensor.dtype() == DType::I32, "i32")
    }

    fn dtype(self, fits: bool, expected: &'static str) -> Result<Self> {
        if fits {
            return Ok(self);
        }
        let (layer, argument, found) = (self.layer.to_owned(), self.name, self.tensor.dtype());
        Err(Error::ArgumentDType { layer, argument, found, expected })
    }

    /// Refuses a tensor that is on another device than the layer's parameters.
    pub(crate) fn on(self, device: &Device) -> Result<Self> {
        if self.tensor.device().is_same(device) {
            return Ok(self);
        }
        let (mut found, expected) = (self.tensor.device().to_string(), device.to_string());
        if found == expected {
            found = format!("another device opened on {found}");
        }
        Err(Error::ArgumentDevice { layer: self.layer.to_owned(), argument: self.name, found, expected })
    }

    /// Refuses a last dimension other than `size`, which is the layer's option `option`.
    pub(crate) fn features(self, size: usize, option: &str) -> Result<Self> {
        let shape = self.tensor.shape();
        self.shape(shape.last() == Some(&size), || format!("[…, {size}], {option} last"))
    }

    /// Returns the sizes that were read from the tensor's shape, or refuses the shape where they are missing.
    pub(crate) fn sizes<T>(self, sizes: Option<T>, expected: impl FnOnce() -> String) -> Result<T> {
        sizes.ok_or_else(|| {
            let (layer, argument, shape) = (self.layer.to_owned(), self.name, *self.tensor.shape());
            Error::ArgumentShape { layer, argument, shape, expected: expected() }
        })
    }

    /// Refuses the tensor's shape unless `fits`; `expected` describes the shapes that fit.
    pub(crate) fn shape(self, fits: bool, expected: impl FnOnce() -> String) -> Result<Self> {
        self.sizes(fits.then_some(self), expected)
    }
}

/// What backward must know of the output that forward returned: `dy` has its shape and is on its device.
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

    /// Refuses a `dy` that cannot be the gradient of this output.
    pub(crate) fn check(&self, dy: &Tensor) -> Result<()> {
        let dy_fits = *dy.shape() == self.shape;
        let argument = Argument::new(&self.layer, "dy", dy).float()?.on(&self.device)?;
        argument.shape(dy_fits, || format!("{}, the output's shape", self.shape)).map(drop)
    }
}
