//! The rules that compute the scales of rows and blocks.

use crate::fp8_tensor::Sharing;
use crate::{Error, Result};
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
    /// An f32 scale for each row of the rowwise codes, and one scale for all columnwise codes, from the amax of the tensor. torchao
    /// quantizes weights so for products that read them transposed. `blocks` of the scaling must be [`Blocks::Row`].
    RowsThenTensor(BlockScaling),
}

impl BlockRule {
    /// Returns which elements share a scale in the rowwise codes.
    pub const fn blocks(&self) -> Blocks {
        match self {
            Self::F32(scaling) => scaling.blocks,
            Self::Mx(_) => Blocks::Mx32,
            Self::RowsThenTensor(_) => Blocks::Row,
        }
    }

    /// Returns which elements share a scale in the columnwise codes. `None` means that all do.
    pub const fn columnwise_blocks(&self) -> Option<Blocks> {
        match self {
            Self::RowsThenTensor(_) => None,
            Self::F32(_) | Self::Mx(_) => Some(self.blocks()),
        }
    }

    /// Returns whether all scales are powers of two, in the rowwise and in the columnwise codes.
    pub const fn has_powers_of_two(&self) -> bool {
        match self {
            Self::F32(scaling) | Self::RowsThenTensor(scaling) => scaling.power_2_scales,
            Self::Mx(_) => true,
        }
    }

    /// Checks that the blocks are those of the variant.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let (blocks, remedy) = match self {
            Self::F32(scaling) if scaling.blocks == Blocks::Mx32 => {
                (scaling.blocks, "MX blocks have E8M0 scales: use BlockRule::Mx")
            }
            Self::F32(scaling) if scaling.blocks.is_fp4() => {
                (scaling.blocks, "NVFP4 blocks have E4M3 scales and 4-bit elements: use Scale::Nvfp4")
            }
            Self::RowsThenTensor(scaling) if scaling.blocks != Blocks::Row => {
                (scaling.blocks, "BlockRule::RowsThenTensor has a scale for each row: use Blocks::Row")
            }
            Self::F32(_) | Self::Mx(_) | Self::RowsThenTensor(_) => return Ok(()),
        };
        Err(Error::Option { op, option: "blocks", value: blocks.to_string(), remedy: remedy.to_owned() })
    }

    /// Returns how the rowwise and the columnwise codes share factors.
    pub(crate) const fn sharing(&self) -> [Sharing; 2] {
        let powers_of_two = self.has_powers_of_two();
        let columnwise = match self.columnwise_blocks() {
            None => Sharing::Tensor,
            Some(blocks) => Sharing::Blocks { blocks, powers_of_two },
        };
        [Sharing::Blocks { blocks: self.blocks(), powers_of_two }, columnwise]
    }
}
