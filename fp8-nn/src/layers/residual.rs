//! The additions around the branches of a block.
//!
//! Without dropout, the last product of a branch adds the residual while it writes its output ([`Destination::Residual`]), and the
//! backward pass of the branch's norm adds the gradient of the residual connection ([`Around`]).
//!
//! [`Destination::Residual`]: crate::fp8_output::Destination::Residual

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

    /// Returns the dtype of a sum that the last product of a branch makes, for a branch whose input has this dtype; `None` if
    /// something is dropped between the product and the addition.
    pub(crate) fn dtype_in_product(&self, cx: &Forward<'_>, input: DType) -> Option<DType> {
        let dtype = if self.is_f32 { DType::F32 } else { cx.compute_dtype().unwrap_or(input) };
        let drops = cx.drops() && !(self.hidden.is_zero() && self.path.is_zero());
        (!drops).then_some(dtype)
    }

    /// Returns `x` as the last product of a branch adds it: see [`dtype_in_product`](Self::dtype_in_product).
    pub(crate) fn addend(&self, cx: &Forward<'_>, x: &Tensor, input: DType) -> Result<Option<Tensor>> {
        let dtype = self.dtype_in_product(cx, input);
        Ok(dtype.map(|dtype| ops::cast(x, dtype)).transpose()?)
    }

    /// Returns `x + dropped(branch)`, or `branch` if it is the sum already.
    pub(crate) fn add(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        branch: Tensor,
        is_sum: bool,
    ) -> Result<(Tensor, ResidualSaved)> {
        if is_sum {
            return Ok((branch, ResidualSaved { hidden: None, path: None }));
        }
        let branch = &branch;
        let (hidden, path) = (self.hidden.draw_for(cx, branch)?, self.path.draw(cx)?);
        let [x, branch] = both(x, branch, self.is_f32)?;
        let y = ops::dropout_add(&x, &branch, hidden.as_ref(), path.as_ref())?;
        Ok((y, ResidualSaved { hidden, path }))
    }

    /// Returns `dy`, the gradient of an addition, as the gradient of the residual connection around its branch.
    pub(crate) const fn around<'a>(&self, dy: &'a Tensor) -> Around<'a> {
        Around { dy, is_f32: self.is_f32 }
    }

    /// Returns what follows an addition in the dtype of the additions.
    pub(crate) fn output(&self, x: &Tensor) -> Result<Tensor> {
        if self.is_f32 { Ok(ops::cast(x, DType::F32)?) } else { Ok(x.clone()) }
    }
}

/// Returns both in f32 or in the dtype of the branch.
fn both(x: &Tensor, branch: &Tensor, is_f32: bool) -> Result<[Tensor; 2]> {
    let dtype = if is_f32 { DType::F32 } else { branch.dtype() };
    Ok([ops::cast(x, dtype)?, ops::cast(branch, dtype)?])
}

/// The gradient of a residual connection around a layer: a backward pass that takes it returns its sum with the gradient of the
/// layer's input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Around<'a> {
    dy: &'a Tensor,
    /// Whether the sum is f32; otherwise it has the dtype of the layer's gradient.
    is_f32: bool,
}

impl<'a> Around<'a> {
    /// The gradient of another layer with the same input.
    pub(crate) const fn of_layer(dx: &'a Tensor) -> Self {
        Self { dy: dx, is_f32: false }
    }

    /// Returns the sum with `dx`, the gradient of the layer's input.
    pub(crate) fn sum(self, dx: &Tensor) -> Result<Tensor> {
        let [dy, dx] = both(self.dy, dx, self.is_f32)?;
        Ok(ops::add(&dy, &dx)?)
    }

    /// Returns the gradient for a norm that adds it before it rounds, if the sum has the dtype `x` that the norm computes in, and
    /// so has the gradient of the layer's input.
    pub(crate) fn in_norm(self, x: DType, input: DType) -> Option<&'a Tensor> {
        (x == input && (x == DType::F32 || !self.is_f32)).then_some(self.dy)
    }
}

impl ResidualSaved {
    /// Returns the gradient of the branch. That of the residual is `dy`.
    pub(crate) fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        Ok(ops::dropout_add_backward(dy, self.hidden.as_ref(), self.path.as_ref())?)
    }
}
