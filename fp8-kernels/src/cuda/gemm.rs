//! `gemm` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::Layout;
use crate::{DType, Result, Tensor};

pub(crate) fn gemm(
    _: &Gpu,
    _: &Tensor,
    _: &Tensor,
    _: Layout,
    _: [usize; 3],
    _: Option<&Tensor>,
    _: DType,
) -> Result<Tensor> {
    unsupported("gemm")
}

pub(crate) fn gemm_accumulate(
    _: &Gpu,
    _: &Tensor,
    _: &Tensor,
    _: Layout,
    _: [usize; 3],
    _: &mut Tensor,
    _: &str,
) -> Result<()> {
    unsupported("gemm_accumulate")
}
