//! Quantizes tensors to FP8 with one scale each.

use super::GradientMut;
use crate::backend::dispatch;
use crate::{Operand, Result, Slot, Tensor};

/// Quantizes `x` to FP8 as `slot` says, or returns it in high precision if the slot is off.
///
/// `x` is f32, bf16 or f16 of any shape. For each element, in f32:
///
/// - `amax = max |x|`, taken before scaling and max-combined into the slot's cell. NaN is skipped. A tensor without
///   elements records nothing.
/// - `code = x · scale`, rounded to the nearest FP8 value, ties to even. Values beyond the format's range become its largest
///   finite value, and NaN stays NaN.
///
/// With [`Scale::Blocks`](crate::Scale::Blocks) or [`Scale::Nvfp4`](crate::Scale::Nvfp4), each row or block has a scale of its own.
///
/// The result has the shape of `x` and the dequantization factor `scale_inv = 1 / scale`. If the slot asks for a columnwise
/// copy, it also has the codes of the transpose, provided the device makes them with the cast
/// ([`TransposePolicy`](crate::TransposePolicy)). A scale that comes from the tensor itself costs a second read of `x`.
/// Codes, amax and scale have the same bits on every backend.
///
/// # Errors
/// A dtype that is not a float; cells on another device; a custom scale policy that returns an unusable scale; on a GPU, a
/// slot without a scale in a step that is being recorded in a graph.
///
/// ```
/// use fp8_kernels::{Cell, DType, Device, Encoding, REST, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let (scale, amax) = (Cell::new(2.0, &cpu)?, Cell::new(REST, &cpu)?);
/// let slot = Slot { amax: Some(&amax), ..Slot::fixed(Encoding::E4M3, &scale, &rule) };
///
/// let x = Tensor::from_vec(vec![1.0f32, 1.6, 0.0, -300.0], [2, 2], &cpu)?;
/// let x8 = ops::quantize(&x, &slot)?;
/// assert_eq!(amax.read()?, 300.0);
/// // 1.6 · 2 = 3.2 rounds to 3.25; -300 · 2 is beyond the largest E4M3 value, 448.
/// assert_eq!(x8.dequantize(DType::F32)?.to_vec::<f32>()?, [1.0, 1.625, 0.0, -224.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn quantize(x: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
    x.expect_float("quantize", "x")?;
    slot.expect_device("quantize", x.device())?;
    dispatch!(x.device(), quantize::quantize(x, slot))
}

/// Quantizes `dy` as [`quantize`](quantize()) does, and returns it with its column sums.
///
/// The sums, f32 `[cols]`, are those of the unquantized values: the bias gradient of a Linear. Both results come from one
/// pass over memory.
///
/// # Errors
/// Those of [`quantize`](quantize()).
///
/// ```
/// use fp8_kernels::{Cell, DType, Device, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let rule = ScaleRule::Delayed { fp8_max: 57344.0, margin: 0, policy: ScalePolicy::Exact };
/// let scale = Cell::new(1.0, &cpu)?;
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.5], [2, 2], &cpu)?;
/// let (dy8, db) = ops::quantize_dbias(&dy, &Slot::fixed(Encoding::E5M2, &scale, &rule))?;
/// assert_eq!(db.to_vec::<f32>()?, [4.0, 6.5]);
/// assert_eq!(dy8.dequantize(DType::F32)?.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]); // 4.5 is a tie between 4 and 5
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn quantize_dbias(dy: &Tensor, slot: &Slot<'_>) -> Result<(Operand, Tensor)> {
    let op = "quantize_dbias";
    dy.expect_float(op, "dy")?;
    slot.expect_device(op, dy.device())?;
    dispatch!(dy.device(), quantize::quantize_dbias(dy, slot))
}

/// Quantizes `dy` as [`quantize_dbias`] does, and writes the column sums to `dbias` or adds them to it.
///
/// # Errors
/// Those of [`quantize_dbias`]; a `dbias` that is not f32 `[cols]`, is on another device or shares its storage.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Slot, Tensor, ops};
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.5], [2, 2], &Device::cpu())?;
/// let mut main_grad = Tensor::full(1.0, [2], DType::F32, &Device::cpu())?;
/// let mut dbias = ops::GradientMut::new(&mut main_grad, "bias", ops::Update::Add);
/// ops::quantize_dbias_into(&dy, &Slot::off(Encoding::E5M2), &mut dbias)?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [5.0, 7.5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn quantize_dbias_into(dy: &Tensor, slot: &Slot<'_>, dbias: &mut GradientMut<'_>) -> Result<Operand> {
    let op = "quantize_dbias_into";
    dy.expect_float(op, "dy")?;
    slot.expect_device(op, dy.device())?;
    dbias.expect(op, "dbias and the columns of dy", dy.shape().last_dim(), dy.device())?;
    dispatch!(dy.device(), quantize::quantize_dbias_into(dy, slot, dbias))
}

/// Quantizes several tensors of one device, each as its slot says.
///
/// The bits are those of [`quantize`](quantize()) for one tensor after the other, but a GPU needs one launch for all: use it
/// for many small tensors, such as the weights of a model. If two slots share a scale cell that is not set yet, the first of
/// them sets it.
///
/// # Errors
/// Those of [`quantize`](quantize()); tensors on different devices. Arguments are checked before anything is launched.
///
/// ```
/// use fp8_kernels::{Cell, DType, Device, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, ops};
/// let cpu = Device::cpu();
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let (one, two) = (Cell::new(1.0, &cpu)?, Cell::new(2.0, &cpu)?);
/// let x = Tensor::from_vec(vec![3.2f32], [1], &cpu)?;
/// let slots = [&one, &two].map(|scale| (&x, Slot::fixed(Encoding::E4M3, scale, &rule)));
/// let quantized = ops::quantize_many(&slots)?;
/// assert_eq!(quantized[0].dequantize(DType::F32)?.item()?, 3.25);
/// assert_eq!(quantized[1].dequantize(DType::F32)?.item()?, 3.25); // 6.4 rounds to 6.5
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn quantize_many(tensors: &[(&Tensor, Slot<'_>)]) -> Result<Vec<Operand>> {
    let op = "quantize_many";
    let Some((first, _)) = tensors.first() else { return Ok(Vec::new()) };
    for (x, slot) in tensors {
        x.expect_float(op, "x")?;
        first.device().expect_same(op, x.device())?;
        slot.expect_device(op, x.device())?;
    }
    if !tensors.iter().any(|(_, slot)| slot.nvfp4().is_some()) {
        return dispatch!(first.device(), quantize::quantize_many(tensors));
    }
    // Their factors need a launch of their own each.
    tensors.iter().map(|(x, slot)| dispatch!(x.device(), quantize::quantize(x, slot))).collect()
}
