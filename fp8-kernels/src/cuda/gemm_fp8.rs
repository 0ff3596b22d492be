//! `gemm_fp8` on a GPU: not there yet, and an error that says so.

use super::{Gpu, unsupported};
use crate::ops::Accumulation;
use crate::{DType, Fp8Tensor, Result, Tensor};

pub(crate) fn gemm_fp8(
    _: &Gpu,
    _: &Fp8Tensor,
    _: &Fp8Tensor,
    _: [usize; 3],
    _: Option<&Tensor>,
    _: DType,
    _: Accumulation,
) -> Result<Tensor> {
    unsupported("gemm_fp8")
}

pub(crate) fn gemm_fp8_accumulate(
    _: &Gpu,
    _: &Fp8Tensor,
    _: &Fp8Tensor,
    _: [usize; 3],
    _: &mut Tensor,
    _: &str,
) -> Result<()> {
    unsupported("gemm_fp8_accumulate")
}
