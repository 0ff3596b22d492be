//! `norm` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::{NormOptions, NormStats};
use crate::{Operand, Result, Slot, Tensor};

pub(crate) fn norm(_: &Gpu, _: &Tensor, _: &Tensor, _: Option<&Tensor>, _: &NormOptions, _: &Slot<'_>) -> Result<(Operand, NormStats)> {
    unsupported("norm")
}

pub(crate) fn norm_backward(_: &Gpu, _: &Tensor, _: &Tensor, _: &Tensor, _: &NormStats, _: &NormOptions, _: Option<&Tensor>) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    unsupported("norm_backward")
}
