//! The rules that compute the scales of rows and blocks.

use fp8_format::Blocks;
use fp8_format::slice::{BlockScaling, MxRounding};

/// The rule that computes the scales of a tensor's rows or blocks, each from the elements that share it.
///
/// ```
/// use fp8_kernels::fp8_format::Blocks;
/// use fp8_kernels::fp8_format::slice::BlockScaling;
/// use fp8_kernels::{BlockRule, DType, Device, Encoding, Scale, Slot, Tensor, ops};
/// let rule = BlockRule::F32(BlockScaling::new(Blocks::Row));
/// let slot = Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E4M3) };
/// let x = Tensor::from_vec(vec![448.0f32, 1.0, 7e-6, 1e-6], [2, 2], &Device::cpu())?;
/// let x8 = ops::quantize(&x, &slot)?;
/// assert_eq!(x8.as_fp8().map(|x8| x8.scale_inv().to_vec::<f32>()).transpose()?, Some(vec![1.0, 1.5625e-8]));
/// assert_eq!(x8.dequantize(DType::F32)?.to_vec::<f32>()?, [448.0, 1.0, 7e-6, 1e-6]); // both rows keep their values
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BlockRule {
    /// f32 scales, for rows, 1 × 128 blocks or 128 × 128 blocks.
    F32(BlockScaling),
    /// E8M0 scales for 32 elements of a row: MXFP8.
    Mx(MxRounding),
}

impl BlockRule {
    /// Returns which elements share a scale.
    pub const fn blocks(&self) -> Blocks {
        match self {
            Self::F32(scaling) => scaling.blocks,
            Self::Mx(_) => Blocks::Mx32,
        }
    }
}
