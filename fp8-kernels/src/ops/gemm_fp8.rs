//! FP8 matrix product, TN in BLAS words: `y[m, n] = ((Σₖ a[m, k] · b[n, k]) · scale_inv_a) · scale_inv_b`.
//!
//! f32 accumulation, then bias in f32, then one rounding to the output type. E4M3×E4M3, E4M3×E5M2, E5M2×E4M3. Any m, n, k:
//! where hardware wants multiples of 16 the library pads with zeros inside, which reach no amax.
//!
//! That is the CPU's rule, to the bit. On a GPU the product is cuBLASLt's: it may multiply the factors with each other first,
//! and the tensor cores of Ada and Hopper align what they add at a time to the largest of it, with fewer bits than f32 has.

use super::gemm::{check_bias, check_out, check_output};
use crate::backend::dispatch;
use crate::{DType, Encoding, Error, Fp8Tensor, Operand, Result, Slot, Tensor};

/// How tensor cores add up products. The CPU adds in f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Inside the tensor core, with fewer bits: for fprop.
    Fast,
    /// Promoted to f32 at intervals: for dgrad and wgrad.
    Split,
}

/// `a[m, k] · b[n, k]ᵀ` with the operands' factors, plus `bias[n]`.
///
/// # Errors
/// Last dimensions that differ, E5M2×E5M2, a bias of another length than n, an output type that is not a float; a product
/// of more elements than a tensor can have, or than fit into memory.
pub fn gemm_fp8(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    let dims = check("gemm_fp8", a, b)?;
    check_bias("gemm_fp8", bias, dims[1], a.scale_inv())?;
    check_output("gemm_fp8", dtype)?;
    dispatch!(a.device(), gemm_fp8::gemm_fp8(a, b, dims, bias, dtype, accumulation))
}

/// `out += a · bᵀ`, into f32: a weight gradient's accumulation. `name` is what an error calls `out`.
///
/// # Errors
/// As [`gemm_fp8`]; `out` of another shape or type, or shared.
pub fn gemm_fp8_accumulate(a: &Fp8Tensor, b: &Fp8Tensor, out: &mut Tensor, name: &str) -> Result<()> {
    let op = "gemm_fp8_accumulate";
    let [m, n, k] = check(op, a, b)?;
    check_out(op, out, [m, n], a.scale_inv())?;
    dispatch!(a.device(), gemm_fp8::gemm_fp8_accumulate(a, b, [m, n, k], out, name))
}

/// [`gemm_fp8`] with an FP8 output: quantized as `slot` says, its amax taken before scaling and merged. Where the slot is
/// off the output is `dtype`.
///
/// # Errors
/// As [`gemm_fp8`].
pub fn gemm_fp8_quantize(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
) -> Result<Operand> {
    let op = "gemm_fp8_quantize";
    let dims = check(op, a, b)?;
    check_bias(op, bias, dims[1], a.scale_inv())?;
    check_output(op, dtype)?;
    slot.expect_device(op, a.device())?;
    dispatch!(a.device(), gemm_fp8::gemm_fp8_quantize(a, b, dims, bias, slot, dtype))
}

/// The product in f32, then quantized: the output is rounded once.
pub(crate) fn product_then_quantize(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
) -> Result<Operand> {
    let between = if slot.is_off() { dtype } else { DType::F32 };
    super::quantize(&gemm_fp8(a, b, bias, between, Accumulation::Fast)?, slot)
}

fn check(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<[usize; 3]> {
    a.device().expect_same(op, b.device())?;
    let (lhs, rhs) = (a.encoding(), b.encoding());
    if (lhs, rhs) == (Encoding::E5M2, Encoding::E5M2) {
        return Err(Error::Encodings { op, lhs, rhs });
    }
    let ([m, k], [n, kb]) = (a.matrix(), b.matrix());
    if k != kb {
        let (lhs, rhs) = (*a.shape(), *b.shape());
        return Err(Error::Shapes {
            op,
            what: "a and b",
            lhs,
            rhs,
            remedy: "a · bᵀ needs equal last dimensions",
        });
    }
    a.shape().with_last(n).check_size(op)?;
    Ok([m, n, k])
}
