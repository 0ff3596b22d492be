//! `adamw` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::{AdamWStep, AdamWTensor};
use crate::{Fp8Tensor, Result};

pub(crate) fn adamw(_: &Gpu, _: AdamWTensor<'_>, _: &AdamWStep) -> Result<()> {
    unsupported("adamw")
}

pub(crate) fn adamw_many(
    _: &Gpu,
    _: &mut [AdamWTensor<'_>],
    _: &AdamWStep,
) -> Result<Vec<Option<Fp8Tensor>>> {
    unsupported("adamw_many")
}
