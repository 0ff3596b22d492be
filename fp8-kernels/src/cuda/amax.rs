//! `amax` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::{Result, Tensor};

pub(crate) fn amax(_: &Gpu, _: &Tensor) -> Result<Tensor> {
    unsupported("amax")
}
