//! The three GEMMs of a Linear, for operands in FP8 or in high precision.
//!
//! | pass | product | shapes |
//! |---|---|---|
//! | fprop | `y = x · wᵀ + bias` | `[m, k] · [n, k]ᵀ` |
//! | dgrad | `dx = dy · w` | `[m, n] · [n, k]` |
//! | wgrad | `dw += dyᵀ · x` | `[m, n]ᵀ · [m, k]` |

use super::{Accumulation, Layout, gemm, gemm_accumulate, gemm_fp8, gemm_fp8_accumulate};
use crate::{DType, Error, Operand, Result, Tensor};

/// `x · wᵀ + bias` in `dtype`, fast accumulation.
///
/// # Errors
/// One operand in FP8 and the other not; all errors of the GEMMs.
pub fn fprop(x: &Operand, w: &Operand, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    match (x, w) {
        (Operand::Fp8(x), Operand::Fp8(w)) => gemm_fp8(x, w, bias, dtype, Accumulation::Fast),
        (Operand::High(x), Operand::High(w)) => gemm(x, w, Layout::Nt, bias, dtype),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("fprop", high),
    }
}

/// `dy · w` in `dtype`, split accumulation.
///
/// # Errors
/// As [`fprop`].
pub fn dgrad(dy: &Operand, w: &Operand, dtype: DType) -> Result<Tensor> {
    match (dy, w) {
        (Operand::Fp8(dy), Operand::Fp8(w)) => {
            gemm_fp8(dy, &w.transposed()?, None, dtype, Accumulation::Split)
        }
        (Operand::High(dy), Operand::High(w)) => gemm(dy, w, Layout::Nn, None, dtype),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("dgrad", high),
    }
}

/// `dw += dyᵀ · x` into f32, split accumulation. `name` is what an error calls `dw`.
///
/// # Errors
/// As [`fprop`]; `dw` of another shape or type, or shared.
pub fn wgrad(dy: &Operand, x: &Operand, dw: &mut Tensor, name: &str) -> Result<()> {
    match (dy, x) {
        (Operand::Fp8(dy), Operand::Fp8(x)) => {
            gemm_fp8_accumulate(&dy.transposed()?, &x.transposed()?, dw, name)
        }
        (Operand::High(dy), Operand::High(x)) => gemm_accumulate(dy, x, Layout::Tn, dw, name),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("wgrad", high),
    }
}

fn mixed<T>(op: &'static str, high: &Tensor) -> Result<T> {
    let high: DType = high.dtype();
    Err(Error::MixedOperands { op, high })
}
