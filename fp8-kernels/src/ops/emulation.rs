//! Emulation of products with scales for rows or blocks, on devices that cannot multiply these themselves.

use crate::Device;
use crate::backend::dispatch;
use crate::fp8_tensor::Sharing;
use fp8_format::Blocks;
use std::fmt;

/// The replacement for a matrix product that a GPU or its cuBLAS does not have: see [`emulation`](emulation()).
///
/// ```
/// use fp8_kernels::ops::Emulation;
/// let text = "emulated: dequantized to bf16, which is exact for these scales";
/// assert_eq!(Emulation::Dequantized.to_string(), text);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Emulation {
    /// An FP8 product with factors of 1, whose sums a kernel multiplies by the factors of the rows: the same formula.
    FactorsAfter,
    /// A bf16 product of the dequantized operands. Codes times powers of two are exact in bf16, so only the order of the sums
    /// differs.
    Dequantized,
    /// A bf16 product of the dequantized operands, whose values bf16 rounds to 8 significant bits.
    Rounded,
    /// A bf16 product of codes times the scales of their blocks, which is exact in bf16, with the factors of the tensors applied to
    /// the sums: NVFP4. Only the order of the sums differs.
    ScaledCodes,
}

impl fmt::Display for Emulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FactorsAfter => "emulated: scales are applied after the FP8 product",
            Self::Dequantized => "emulated: dequantized to bf16, which is exact for these scales",
            Self::Rounded => "emulated: dequantized to bf16, which rounds the values to 8 significant bits",
            Self::ScaledCodes => "emulated: codes times block scales in bf16, which is exact",
        })
    }
}

/// Returns what a device does instead if it cannot multiply operands with such scales itself, for example Hopper with MX blocks.
///
/// `a` and `b` say which elements of the operands share a scale, `None` that all do; `powers_of_two` whether all scales are powers
/// of two. The CPU multiplies every pair itself, and GPUs multiply operands with one scale. The result holds for the device and its
/// version of cuBLAS; a product that cuBLAS then refuses for its extents is emulated, too.
///
/// ```
/// use fp8_kernels::fp8_format::Blocks;
/// use fp8_kernels::{Device, ops};
/// let mx = Some(Blocks::Mx32);
/// assert_eq!(ops::emulation(&Device::cpu(), mx, mx, true), None);
/// ```
pub fn emulation(
    device: &Device,
    a: Option<Blocks>,
    b: Option<Blocks>,
    powers_of_two: bool,
) -> Option<Emulation> {
    let sharing = |blocks: Option<Blocks>| match blocks {
        None => Sharing::Tensor,
        Some(blocks) if blocks.is_fp4() => Sharing::Nvfp4 { blocks, hadamard: false },
        Some(blocks) => Sharing::Blocks { blocks, powers_of_two },
    };
    dispatch!(device, emulation::emulation([sharing(a), sharing(b)]))
}
