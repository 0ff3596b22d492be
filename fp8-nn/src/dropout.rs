//! Dropout in layers: checked probabilities, and the masks that a forward pass draws and its backward pass needs.

use crate::{Error, Result};
use fp8_kernels::Tensor;
use fp8_kernels::ops::{self, Dropout};
use fp8_recipe::Forward;

/// The probability that something is dropped, at least 0 and less than 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate(f32);

impl Rate {
    pub(crate) fn new(layer: &str, option: &'static str, p: f32) -> Result<Self> {
        if (0.0..1.0).contains(&p) {
            return Ok(Self(p));
        }
        let remedy = "expected a probability of at least 0 and less than 1".to_owned();
        Err(Error::Option { layer: layer.to_owned(), option, value: p.to_string(), remedy })
    }

    /// Draws a mask. `None` if nothing is dropped: with probability 0, and in an evaluation.
    pub(crate) fn draw(self, cx: &mut Forward<'_>) -> Result<Option<Dropout>> {
        if self.0 == 0.0 {
            return Ok(None);
        }
        Ok(cx.dropout_draw()?.map(|draw| Dropout { p: self.0, draw }))
    }
}

/// The addition of a residual branch, with dropout of its elements (`hidden`) and of whole batch entries (`path`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Residual {
    pub(crate) hidden: Rate,
    pub(crate) path: Rate,
}

/// The masks of one addition.
#[derive(Debug)]
pub(crate) struct ResidualSaved {
    hidden: Option<Dropout>,
    path: Option<Dropout>,
}

impl Residual {
    /// Returns `residual + dropped(branch)`, rounded to the dtype of `residual`.
    pub(crate) fn add(
        self,
        cx: &mut Forward<'_>,
        residual: &Tensor,
        branch: &Tensor,
    ) -> Result<(Tensor, ResidualSaved)> {
        let (hidden, path) = (self.hidden.draw(cx)?, self.path.draw(cx)?);
        let y = ops::dropout_add(residual, branch, hidden.as_ref(), path.as_ref())?;
        Ok((y, ResidualSaved { hidden, path }))
    }
}

impl ResidualSaved {
    /// Returns the gradient of the branch. That of the residual is `dy`.
    pub(crate) fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        Ok(ops::dropout_add_backward(dy, self.hidden.as_ref(), self.path.as_ref())?)
    }
}
