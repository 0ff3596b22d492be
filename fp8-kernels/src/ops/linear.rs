//! The three GEMMs of a Linear, for operands in FP8 or in high precision.

use super::{
    Accumulation, Layout, Update, gemm, gemm_add, gemm_fp8, gemm_fp8_add, gemm_fp8_into, gemm_fp8_quantize,
    gemm_into, quantize,
};
use crate::{DType, Error, Operand, Result, Slot, Tensor};

/// Computes the forward product of a Linear, `y = x · wᵀ + bias`, in `dtype`.
///
/// `x` is `[.., k]`, `w` is `[n, k]`, `bias` is `[n]`, and the result is `[.., n]`. Two FP8 operands are multiplied by
/// [`gemm_fp8`](gemm_fp8()) with this `accumulation`, usually [`Accumulation::Fast`]. Two in high precision are multiplied by
/// [`gemm`](gemm()), which ignores it. So a layer calls `fprop` with whatever [`quantize`](super::quantize()) returns.
///
/// # Errors
/// One operand in FP8 and the other in high precision; those of the GEMMs.
///
/// ```
/// use fp8_kernels::{DType, Device, Operand, Tensor, ops};
/// let cpu = Device::cpu();
/// let x = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let w = Operand::High(Tensor::from_vec(vec![3.0f32, 4.0, 5.0, 6.0], [2, 2], &cpu)?);
/// let bias = Tensor::from_vec(vec![0.5f32, -0.5], [2], &cpu)?;
/// let y = ops::fprop(&x, &w, Some(&bias), DType::F32, ops::Accumulation::Fast)?;
/// assert_eq!(y.to_vec::<f32>()?, [11.5, 16.5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn fprop(
    x: &Operand,
    w: &Operand,
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    match (x, w) {
        (Operand::Fp8(x), Operand::Fp8(w)) => gemm_fp8(x, w, bias, dtype, accumulation),
        (Operand::High(x), Operand::High(w)) => gemm(x, w, Layout::Nt, bias, dtype),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("fprop", high),
    }
}

/// Computes [`fprop`] with a residual connection, `y = (x · wᵀ + addend) + bias`, in `dtype`.
///
/// `addend` is a matrix of the output's size, f32, bf16 or f16: see [`gemm_add`](super::gemm_add).
///
/// # Errors
/// Those of [`fprop`]; an addend of another size, of a dtype that is not a float, or on another device.
///
/// ```
/// use fp8_kernels::{DType, Device, Operand, Tensor, ops};
/// let cpu = Device::cpu();
/// let x = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let w = Operand::High(Tensor::from_vec(vec![3.0f32, 4.0, 5.0, 6.0], [2, 2], &cpu)?);
/// let residual = Tensor::from_vec(vec![100.0f32, 200.0], [1, 2], &cpu)?;
/// let y = ops::fprop_add(&x, &w, &residual, None, DType::F32, ops::Accumulation::Fast)?;
/// assert_eq!(y.to_vec::<f32>()?, [111.0, 217.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn fprop_add(
    x: &Operand,
    w: &Operand,
    addend: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    match (x, w) {
        (Operand::Fp8(x), Operand::Fp8(w)) => gemm_fp8_add(x, w, addend, bias, dtype, accumulation),
        (Operand::High(x), Operand::High(w)) => gemm_add(x, w, Layout::Nt, addend, bias, dtype),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("fprop_add", high),
    }
}

/// Computes the gradient of a Linear's input, `dx = dy · w`, in `dtype`.
///
/// `dy` is `[.., n]`, `w` is `[n, k]`, and the result is `[.., k]`. FP8 operands are multiplied with this `accumulation`, usually
/// [`Accumulation::Split`]. The product reads the transpose of `w`: quantize it with a slot whose `columnwise` is true.
///
/// # Errors
/// Those of [`fprop`].
///
/// ```
/// use fp8_kernels::{DType, Device, Operand, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let w = Operand::High(Tensor::from_vec(vec![3.0f32, 4.0, 5.0, 6.0], [2, 2], &cpu)?);
/// let dx = ops::dgrad(&dy, &w, DType::F32, ops::Accumulation::Split)?;
/// assert_eq!(dx.to_vec::<f32>()?, [13.0, 16.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dgrad(dy: &Operand, w: &Operand, dtype: DType, accumulation: Accumulation) -> Result<Tensor> {
    match (dy, w) {
        (Operand::Fp8(dy), Operand::Fp8(w)) => gemm_fp8(dy, &w.transposed()?, None, dtype, accumulation),
        (Operand::High(dy), Operand::High(w)) => gemm(dy, w, Layout::Nn, None, dtype),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("dgrad", high),
    }
}

/// Computes [`fprop`] and quantizes the output as `slot` says, for a next operation that reads FP8.
///
/// FP8 operands are multiplied by [`gemm_fp8_quantize`](super::gemm_fp8_quantize). Of operands in high precision, the product is
/// f32. So the output is rounded once, to FP8. If the slot is off, the output is that of `fprop`, in `dtype`.
///
/// # Errors
/// Those of [`fprop`] and of [`quantize`](super::quantize()).
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let x = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let w = Operand::High(Tensor::from_vec(vec![3.0f32, 2.0], [1, 2], &cpu)?);
/// let rule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };
/// let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E4M3) };
/// let y = ops::fprop_quantize(&x, &w, None, &slot, DType::F32, ops::Accumulation::Fast)?;
/// assert!(y.is_fp8());
/// assert_eq!(y.dequantize(DType::F32)?.to_vec::<f32>()?, [7.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn fprop_quantize(
    x: &Operand,
    w: &Operand,
    bias: Option<&Tensor>,
    slot: &Slot<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    match (x, w) {
        (Operand::Fp8(x), Operand::Fp8(w)) => gemm_fp8_quantize(x, w, bias, slot, dtype, accumulation),
        _ => quantize(&fprop(x, w, bias, between(slot, dtype), accumulation)?, slot),
    }
}

/// Computes [`dgrad`] and quantizes the gradient as `slot` says, as [`fprop_quantize`] does with the output.
///
/// # Errors
/// Those of [`dgrad`] and of [`quantize`](super::quantize()).
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let w = Operand::High(Tensor::from_vec(vec![3.0f32, 2.0], [2, 1], &cpu)?);
/// let rule = ScaleRule::Current { fp8_max: 57344.0, epsilon: 0.0, power_2_scales: false };
/// let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(Encoding::E5M2) };
/// let dx = ops::dgrad_quantize(&dy, &w, &slot, DType::F32, ops::Accumulation::Split)?;
/// assert!(dx.is_fp8());
/// assert_eq!(dx.dequantize(DType::F32)?.to_vec::<f32>()?, [7.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dgrad_quantize(
    dy: &Operand,
    w: &Operand,
    slot: &Slot<'_>,
    dtype: DType,
    accumulation: Accumulation,
) -> Result<Operand> {
    match (dy, w) {
        (Operand::Fp8(dy), Operand::Fp8(w)) => {
            gemm_fp8_quantize(dy, &w.transposed()?, None, slot, dtype, accumulation)
        }
        _ => quantize(&dgrad(dy, w, between(slot, dtype), accumulation)?, slot),
    }
}

/// The dtype of a product that is quantized, so that it is rounded once.
fn between(slot: &Slot<'_>, dtype: DType) -> DType {
    if slot.is_off() || slot.nvfp4().is_some() { dtype } else { DType::F32 }
}

/// Adds the gradient of a Linear's weight to `dw` in place: `dw += dyᵀ · x`.
///
/// `dy` is `[.., n]`, `x` is `[.., k]`, and `dw` is f32 `[n, k]`. FP8 operands are multiplied with this `accumulation`, usually
/// [`Accumulation::Split`]. The product reads the transposes of both: quantize them with slots whose `columnwise` is true. `name`
/// identifies `dw` in errors.
///
/// # Errors
/// Those of [`fprop`]; a `dw` that has another shape, is not f32 or shares its storage.
///
/// ```
/// use fp8_kernels::{DType, Device, Operand, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let x = Operand::High(Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &cpu)?);
/// let mut dw = Tensor::zeros([2, 2], DType::F32, &cpu)?;
/// ops::wgrad(&dy, &x, &mut dw, "fc1.weight.main_grad", ops::Accumulation::Split)?;
/// assert_eq!(dw.to_vec::<f32>()?, [3.0, 4.0, 6.0, 8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn wgrad(
    dy: &Operand,
    x: &Operand,
    dw: &mut Tensor,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    wgrad_into(dy, x, dw, Update::Add, name, accumulation)
}

/// Stores the gradient of a Linear's weight in `dw`: adds it, as [`wgrad`] does, or replaces what `dw` holds.
///
/// # Errors
/// Those of [`wgrad`].
///
/// ```
/// use fp8_kernels::{Device, Operand, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Operand::High(Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?);
/// let x = Operand::High(Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &cpu)?);
/// let mut dw = Tensor::from_vec(vec![f32::NAN; 4], [2, 2], &cpu)?; // from another step
/// ops::wgrad_into(&dy, &x, &mut dw, ops::Update::Write, "fc1.weight.main_grad", ops::Accumulation::Split)?;
/// assert_eq!(dw.to_vec::<f32>()?, [3.0, 4.0, 6.0, 8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn wgrad_into(
    dy: &Operand,
    x: &Operand,
    dw: &mut Tensor,
    update: Update,
    name: &str,
    accumulation: Accumulation,
) -> Result<()> {
    match (dy, x) {
        (Operand::Fp8(dy), Operand::Fp8(x)) => {
            gemm_fp8_into(&dy.transposed()?, &x.transposed()?, dw, update, name, accumulation)
        }
        (Operand::High(dy), Operand::High(x)) => gemm_into(dy, x, Layout::Tn, dw, update, name),
        (Operand::High(high), _) | (_, Operand::High(high)) => mixed("wgrad", high),
    }
}

fn mixed<T>(op: &'static str, high: &Tensor) -> Result<T> {
    let high: DType = high.dtype();
    Err(Error::MixedOperands { op, high })
}
