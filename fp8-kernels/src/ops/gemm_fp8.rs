//! The FP8 matrix product, TN in BLAS terms: `y[m, n] = ((Σₖ a[m, k] · b[n, k]) · scale_inv_a) · scale_inv_b`.
//!
//! m, n and k may have any values: where hardware requires multiples of 16, the backend pads with zeros, which reach no amax.

use super::gemm::{Terms, Update, check_bias, check_out, check_output, check_terms, rounded_bias};
use crate::backend::dispatch;
use crate::fp8_tensor::Sharing;
use crate::{DType, Encoding, Error, Fp8Tensor, Operand, Result, Slot, Tensor};
use fp8_format::Blocks;

/// Selects how tensor cores add up the products of [`gemm_fp8`](gemm_fp8()). The CPU adds in f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Fast accumulation: inside the tensor core, with fewer bits than f32. The usual choice for fprop.
    Fast,
    /// Split accumulation: partial sums are moved to f32 at intervals. The usual choice for dgrad and wgrad.
    Split,
}

/// Returns the product of two FP8 tensors, `((Σₖ a[m, k] · b[n, k]) · scale_inv_a) · scale_inv_b`, plus `bias`.
///
/// `a` is `[.., k]` and `b` is `[n, k]`; the result is `[.., n]` in `dtype`, which is f32, bf16 or f16. The encodings are
/// E4M3×E4M3, E4M3×E5M2 or E5M2×E4M3. m, n and k may have any values: where hardware requires multiples of 16, the operands
/// are padded with zeros inside. Products are summed in f32, the `[n]` bias is added in f32, and the result is rounded once.
/// For a 16-bit `dtype`, an f32 bias is first rounded to `dtype`, as in Transformer Engine.
///
/// With factors for blocks of 128 or 32 values of k ([`Fp8Tensor::blocks`]), the sum of each block is multiplied by its two factors,
/// and these products are summed: `Σ_blocks ((Σₖ a·b) · scale_inv_a) · scale_inv_b`. Allowed are rows with rows or with one factor,
/// 1 × 128 with 1 × 128 or 128 × 128, and MX with MX.
///
/// In NVFP4 it is `((Σ_blocks S_a · S_b · Σₖ a·b) · decode_a) · decode_b` with blocks of 16 values of k: the term of a block is exact in
/// f32. Allowed are 1 × 16 with 1 × 16 or 16 × 16, and a Hadamard-transformed copy with another one.
///
/// The sum of the codes' products is multiplied by the factor of `a` first, so that two small factors do not underflow. If that
/// product exceeds f32::MAX, the result is infinite even if the factor of `b` would have made it small again: values of `a` above
/// about 10³⁶ overflow here that would not in high precision. The second example shows it.
///
/// On a GPU this is a product of cuBLASLt, which may multiply the two factors with each other first. The tensor cores of Ada
/// and Hopper sum with fewer bits than f32; `accumulation` selects how.
///
/// # Errors
/// Different last dimensions; E5M2×E5M2; factors that cannot be multiplied, or that belong to the transpose; a bias whose length is not n; a `dtype` that is not a float; a result with more
/// elements than a tensor can have or memory holds.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor, ops};
/// let cpu = Device::cpu();
/// let fp8 = |codes: [u8; 2], scale_inv: f32| {
///     let codes = Tensor::from_vec(codes.to_vec(), [1, 2], &cpu)?;
///     Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(scale_inv, &cpu)?)
/// };
/// let a = fp8([0x38, 0x40], 0.5)?; // the codes of 1 and 2, times 0.5
/// let b = fp8([0x44, 0x48], 10.0)?; // the codes of 3 and 4, times 10
/// let y = ops::gemm_fp8(&a, &b, None, DType::F32, ops::Accumulation::Fast)?;
/// assert_eq!(y.to_vec::<f32>()?, [55.0]); // (1·3 + 2·4) · 0.5 · 10
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor, ops};
/// let cpu = Device::cpu();
/// let largest = |value: f32| { // with the code of 448
///     let code = Tensor::from_vec(vec![0x7Eu8], [1, 1], &cpu)?;
///     Fp8Tensor::from_codes(code, [1, 1], Encoding::E4M3, Tensor::scalar(value / 448.0, &cpu)?)
/// };
/// let product = |a: f32, b: f32| {
///     ops::gemm_fp8(&largest(a)?, &largest(b)?, None, DType::F32, ops::Accumulation::Fast)?.item()
/// };
/// assert!((product(1e35, 0.01)? / 1e33 - 1.0).abs() < 1e-6);
/// assert_eq!(product(1e36, 0.01)?, f32::INFINITY); // 448 · 448 · (10³⁶ / 448) is more than f32::MAX
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_fp8(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    product("gemm_fp8", a, b, Terms { addend: None, bias }, dtype, accumulation)
}

/// Returns the product of two FP8 tensors, as [`gemm_fp8`](gemm_fp8()) computes it, plus `addend`, and plus `bias` on each row:
/// `(product + addend) + bias`.
///
/// `addend` is a matrix of the result's size, f32, bf16 or f16. Each addition is in f32, and the result is rounded once: see
/// [`gemm_add`](super::gemm_add).
///
/// # Errors
/// Those of [`gemm_fp8`](gemm_fp8()); an addend of another size, of a dtype that is not a float, or on another device.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor, ops};
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [1, 2], &cpu)?; // 1 and 2
/// let a = Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
/// let residual = Tensor::full(10.0, [1, 1], DType::F32, &cpu)?;
/// let y = ops::gemm_fp8_add(&a, &a, &residual, None, DType::F32, ops::Accumulation::Fast)?;
/// assert_eq!(y.to_vec::<f32>()?, [15.0]); // 1·1 + 2·2 + 10
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_fp8_add(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    addend: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    product("gemm_fp8_add", a, b, Terms { addend: Some(addend), bias }, dtype, accumulation)
}

fn product(
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    terms: Terms<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    let dims = check(op, a, b)?;
    check_terms(op, &terms, dims, a.scale_inv())?;
    check_output(op, dtype)?;
    let bias = rounded_bias(terms.bias, dtype)?;
    let terms = Terms { bias: bias.as_ref(), ..terms };
    dispatch!(a.device(), gemm_fp8::gemm_fp8(op, a, b, dims, terms, dtype, accumulation))
}

/// Adds the product of two FP8 tensors, as [`gemm_fp8`](gemm_fp8()) computes it, to `out` in place.
///
/// `out` is f32 `[m, n]`. Weight gradients are accumulated in this way. `name` identifies `out` in errors.
///
/// # Errors
/// Those of [`gemm_fp8`](gemm_fp8()); an `out` that has another shape, is not f32 or shares its storage.
///
/// ```
/// use fp8_kernels::{Device, Encoding, Fp8Tensor, Tensor, ops};
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [2, 1], &cpu)?; // 1 and 2
/// let a = Fp8Tensor::from_codes(codes, [2, 1], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
/// let mut dw = Tensor::from_vec(vec![10.0f32; 4], [2, 2], &cpu)?;
/// ops::gemm_fp8_accumulate(&a, &a, &mut dw, "fc1.weight.main_grad", ops::Accumulation::Split)?;
/// assert_eq!(dw.to_vec::<f32>()?, [11.0, 12.0, 12.0, 14.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_fp8_accumulate(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    out: &mut Tensor,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    store("gemm_fp8_accumulate", a, b, out, Update::Add, name, accumulation)
}

/// Stores the product of two FP8 tensors, as [`gemm_fp8`](gemm_fp8()) computes it, in `out`: adds it, as [`gemm_fp8_accumulate`]
/// does, or replaces what `out` holds.
///
/// # Errors
/// Those of [`gemm_fp8_accumulate`].
///
/// ```
/// use fp8_kernels::{Device, Encoding, Fp8Tensor, Tensor, ops};
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [2, 1], &cpu)?; // 1 and 2
/// let a = Fp8Tensor::from_codes(codes, [2, 1], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
/// let mut dw = Tensor::from_vec(vec![f32::NAN; 4], [2, 2], &cpu)?; // from another step
/// ops::gemm_fp8_into(&a, &a, &mut dw, ops::Update::Write, "fc1.weight.main_grad", ops::Accumulation::Split)?;
/// assert_eq!(dw.to_vec::<f32>()?, [1.0, 2.0, 2.0, 4.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_fp8_into(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    out: &mut Tensor,
    update: Update,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    store("gemm_fp8_into", a, b, out, update, name, accumulation)
}

fn store(
    op: &'static str,
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    out: &mut Tensor,
    update: Update,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    let [m, n, k] = check(op, a, b)?;
    check_out(op, out, [m, n], a.scale_inv())?;
    dispatch!(a.device(), gemm_fp8::gemm_fp8_into(op, a, b, [m, n, k], out, update, name, accumulation))
}

/// Computes [`gemm_fp8`](gemm_fp8()) and quantizes the result as `slot` says.
///
/// Use it if the next operation takes FP8, as in a chain of products: the high-precision result is never written to memory.
/// The bias is added in f32, the amax is taken before scaling, and the result is rounded once,
/// to FP8. If the slot is off, the output stays in high precision and has `dtype`.
///
/// On a GPU this is one kernel of cuBLASLt if the slot's scale is already set and nothing is counted; otherwise the product
/// is quantized in a second pass.
///
/// # Errors
/// Those of [`gemm_fp8`](gemm_fp8()); a custom scale policy that returns an unusable scale.
///
/// ```
/// use fp8_kernels::{Cell, DType, Device, Encoding, Fp8Tensor, REST, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [1, 2], &cpu)?; // 1 and 2
/// let a = Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let (scale, amax) = (Cell::new(8.0, &cpu)?, Cell::new(REST, &cpu)?);
/// let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &scale, &rule) };
/// let y = ops::gemm_fp8_quantize(&a, &a, None, &slot, DType::BF16, ops::Accumulation::Fast)?;
/// assert_eq!(amax.read()?, 5.0); // 1·1 + 2·2, before scaling
/// assert_eq!(y.dequantize(DType::F32)?.to_vec::<f32>()?, [5.0]); // the code of 40, divided by 8
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_fp8_quantize(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let op = "gemm_fp8_quantize";
    let dims = check(op, a, b)?;
    check_bias(op, bias, dims[1], a.scale_inv())?;
    check_output(op, dtype)?;
    slot.expect_device(op, a.device())?;
    dispatch!(a.device(), gemm_fp8::gemm_fp8_quantize(a, b, dims, bias, slot, dtype, accumulation))
}

/// Quantizes the product in f32, so that the output is rounded once.
pub(crate) fn product_then_quantize(
    a: &Fp8Tensor,
    b: &Fp8Tensor,
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    let between = if slot.is_off() || slot.nvfp4().is_some() { dtype } else { DType::F32 };
    super::quantize(&gemm_fp8(a, b, bias, between, accumulation)?, slot)
}

fn check(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<[usize; 3]> {
    a.device().expect_same(op, b.device())?;
    let (lhs, rhs) = (a.encoding(), b.encoding());
    if (lhs, rhs) == (Encoding::E5M2, Encoding::E5M2) {
        return Err(Error::Encodings { op, lhs, rhs });
    }
    let sharing = [a, b].map(Fp8Tensor::first_sharing);
    let [has_hadamard, other_has] = sharing.map(Sharing::has_hadamard);
    if !can_multiply(a.blocks(), b.blocks()) || has_hadamard != other_has {
        let [lhs, rhs] = sharing.map(Sharing::name);
        return Err(Error::Blocks { op, lhs, rhs });
    }
    for x in [a, b] {
        if let (None, Some(blocks @ (Blocks::Row | Blocks::B1x128 | Blocks::Mx32 | Blocks::B1x16))) =
            (x.rowwise(), x.blocks())
        {
            let remedy = "the product reads the transpose of this operand, which is quantized from the source: give its slot \
                          columnwise = true";
            return Err(Error::Option {
                op,
                option: "blocks",
                value: blocks.to_string(),
                remedy: remedy.to_owned(),
            });
        }
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

/// Returns whether [`gemm_fp8`](gemm_fp8()) multiplies operands whose scales are shared in this way. `None` is one scale for the
/// tensor.
///
/// ```
/// use fp8_kernels::fp8_format::Blocks;
/// use fp8_kernels::ops;
/// assert!(ops::can_multiply(Some(Blocks::B1x128), Some(Blocks::B128x128)));
/// assert!(!ops::can_multiply(Some(Blocks::B128x128), Some(Blocks::B128x128)));
/// assert!(ops::can_multiply(Some(Blocks::Row), None));
/// ```
pub const fn can_multiply(a: Option<Blocks>, b: Option<Blocks>) -> bool {
    matches!(
        (a, b),
        (None | Some(Blocks::Row), None | Some(Blocks::Row))
            | (Some(Blocks::B1x128), Some(Blocks::B1x128 | Blocks::B128x128))
            | (Some(Blocks::B128x128), Some(Blocks::B1x128))
            | (Some(Blocks::Mx32), Some(Blocks::Mx32))
            | (Some(Blocks::B1x16), Some(Blocks::B1x16 | Blocks::B16x16))
            | (Some(Blocks::B16x16), Some(Blocks::B1x16))
    )
}
