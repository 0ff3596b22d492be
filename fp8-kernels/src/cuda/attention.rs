//! `attention` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::{AttentionSaved, Problem};
use crate::{Result, Tensor};

pub(crate) fn attention(
    _: &Gpu,
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
    _: &Problem,
) -> Result<(Tensor, AttentionSaved)> {
    unsupported("attention")
}

pub(crate) fn attention_backward(
    _: &Gpu,
    _: [&Tensor; 5],
    _: &AttentionSaved,
    _: Option<&Tensor>,
    _: &Problem,
) -> Result<(Tensor, Tensor, Tensor)> {
    unsupported("attention_backward")
}
