//! The additions around the branches of a block.

use crate::Result;
use crate::dropout::Rate;
use fp8_kernels::ops::{self, Dropout};
use fp8_kernels::{DType, Tensor};
use fp8_recipe::Forward;

/// The addition of a residual branch, with dropout of its elements (`hidden`) and of whole batch entries (`path`).
#[derive(Debug, Clone)]
pub(crate) struct Residual {
    pub(crate) hidden: Rate,
    pub(crate) path: Rate,
    /// Whether sums are f32; otherwise they have the dtype of the branches.
    pub(crate) is_f32: bool,
    pub(crate) params_dtype: DType,
}

/// The masks of one addition.
#[derive(Debug)]
pub(crate) struct ResidualSaved {
    hidden: Option<Dropout>,
    path: Option<Dropout>,
}

impl Residual {
    /// Returns `x` as a branch reads it.
    pub(crate) fn input_of_branch(&self, cx: &Forward<'_>, x: &Tensor) -> Result<Tensor> {
        if self.is_f32 {
            Ok(ops::cast(x, cx.compute_dtype().unwrap_or(self.params_dtype))?)
        } else {
            Ok(x.clone())
        }
    }

    /// Returns `x + dropped(branch)`.
    pub(crate) fn add(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        branch: &Tensor,
    ) -> Result<(Tensor, ResidualSaved)> {
        let (hidden, path) = (self.hidden.draw_for(cx, branch)?, self.path.draw(cx)?);
        let [x, branch] = self.both(x, branch)?;
        let y = ops::dropout_add(&x, &branch, hidden.as_ref(), path.as_ref())?;
        Ok((y, ResidualSaved { hidden, path }))
    }

    /// Returns the sum of two gradients, the second of which is a branch's.
    pub(crate) fn sum(&self, x: &Tensor, branch: &Tensor) -> Result<Tensor> {
        let [x, branch] = self.both(x, branch)?;
        Ok(ops::add(&x, &branch)?)
    }

    /// Returns what follows an addition in the dtype of the additions.
    pub(crate) fn output(&self, x: &Tensor) -> Result<Tensor> {
        if self.is_f32 { Ok(ops::cast(x, DType::F32)?) } else { Ok(x.clone()) }
    }

    /// In the dtype of their sum.
    fn both(&self, x: &Tensor, branch: &Tensor) -> Result<[Tensor; 2]> {
        let dtype = if self.is_f32 { DType::F32 } else { branch.dtype() };
        Ok([ops::cast(x, dtype)?, ops::cast(branch, dtype)?])
    }
}

impl ResidualSaved {
    /// Returns the gradient of the branch. That of the residual is `dy`.
    pub(crate) fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        Ok(ops::dropout_add_backward(dy, self.hidden.as_ref(), self.path.as_ref())?)
    }
}
