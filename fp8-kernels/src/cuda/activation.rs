//! `activation` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::Activation;
use crate::{Operand, Result, Shape, Slot, Tensor};

pub(crate) fn activation(_: &Gpu, _: &Tensor, _: Activation, _: Shape, _: &Slot<'_>) -> Result<Operand> {
    unsupported("activation")
}

pub(crate) fn activation_backward(_: &Gpu, _: &Tensor, _: &Tensor, _: Activation) -> Result<Tensor> {
    unsupported("activation_backward")
}

pub(crate) fn activation_backward_quantize_dbias(_: &Gpu, _: &Tensor, _: &Tensor, _: Activation, _: &Slot<'_>) -> Result<(Operand, Tensor)> {
    unsupported("activation_backward_quantize_dbias")
}
