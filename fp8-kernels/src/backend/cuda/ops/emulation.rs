//! Chooses how a GPU multiplies operands with factors for rows or blocks: by a scale mode of the library or by emulation.

use super::Gpu;
use super::product::FactorLayout;
use crate::fp8_tensor::Sharing;
use crate::ops::Emulation;
use fp8_format::Blocks;

/// The first versions of cuBLAS with scale modes for MX, and for rows and blocks of 128.
const MX_VERSION: usize = 12_08_00;
const HOPPER_VERSION: usize = 12_09_00;
/// The first version with the scale mode of NVFP4.
const FP4_VERSION: usize = 12_08_00;

/// The layouts in which the library reads both operands' factors, or the emulation used instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Native([FactorLayout; 2]),
    Emulated(Emulation),
}

impl Way {
    /// For operands that `gemm_fp8` multiplies and of which at least one has factors for rows or blocks.
    pub(crate) fn of(gpu: &Gpu, sharing: [Sharing; 2]) -> Self {
        let version = gpu.cublas_version();
        Self::on(gpu.capability(), version, sharing)
    }

    fn on(capability: (i32, i32), version: usize, [a, b]: [Sharing; 2]) -> Self {
        let is_hopper = capability == (9, 0) && version >= HOPPER_VERSION;
        let has_mx = capability.0 >= 10 && version >= MX_VERSION;
        let powers_of_two = [a, b].iter().all(|sharing| sharing.has_powers_of_two());
        let of_128 = |sharing: Sharing| match sharing.blocks() {
            Some(Blocks::B128x128) => FactorLayout::Tile128,
            _ => FactorLayout::Vec128,
        };
        match (a.blocks(), b.blocks()) {
            (Some(Blocks::B1x16 | Blocks::B16x16), _) | (_, Some(Blocks::B1x16 | Blocks::B16x16)) => {
                match capability.0 >= 10 && version >= FP4_VERSION {
                    true => Self::Native([FactorLayout::Vec16; 2]),
                    false => Self::Emulated(Emulation::ScaledCodes),
                }
            }
            (None | Some(Blocks::Row), None | Some(Blocks::Row)) if is_hopper => {
                Self::Native([FactorLayout::Outer; 2])
            }
            (None | Some(Blocks::Row), None | Some(Blocks::Row)) => Self::Emulated(Emulation::FactorsAfter),
            (Some(Blocks::Mx32), _) | (_, Some(Blocks::Mx32)) if has_mx => {
                Self::Native([FactorLayout::Vec32; 2])
            }
            (Some(Blocks::Mx32), _) | (_, Some(Blocks::Mx32)) => Self::Emulated(Emulation::Dequantized),
            _ if is_hopper => Self::Native([of_128(a), of_128(b)]),
            _ if has_mx && powers_of_two => Self::Native([FactorLayout::Vec32; 2]),
            _ if powers_of_two => Self::Emulated(Emulation::Dequantized),
            _ => Self::Emulated(Emulation::Rounded),
        }
    }

    /// Returns the replacement for a mode that the library refuses for a product.
    pub(super) fn instead(sharing: [Sharing; 2]) -> Self {
        Self::on((0, 0), 0, sharing)
    }
}

pub(crate) fn emulation(gpu: &Gpu, sharing: [Sharing; 2]) -> Option<Emulation> {
    if sharing.iter().all(|sharing| sharing.blocks().is_none()) {
        return None;
    }
    match Way::of(gpu, sharing) {
        Way::Native(_) => None,
        Way::Emulated(emulation) => Some(emulation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_a_way_for_every_pair() {
        let sharing = |blocks: Option<Blocks>, powers_of_two| match blocks {
            None => Sharing::Tensor,
            Some(blocks) => Sharing::Blocks { blocks, powers_of_two },
        };
        let way = |capability, version, a, b, powers_of_two| {
            Way::on(capability, version, [sharing(a, powers_of_two), sharing(b, powers_of_two)])
        };
        let (row, line, tile, mx) =
            (Some(Blocks::Row), Some(Blocks::B1x128), Some(Blocks::B128x128), Some(Blocks::Mx32));
        let native = |a, b| Way::Native([a, b]);
        let emulated = Way::Emulated;
        use Emulation::{Dequantized, FactorsAfter, Rounded};
        use FactorLayout::{Outer, Tile128, Vec32, Vec128};
        // Compute capability 8.9, 9.0, 10.0, 12.0; then 9.0 and 10.0 with libraries from before the modes.
        let machines = [
            ((8, 9), 13_01_00),
            ((9, 0), 12_09_00),
            ((10, 0), 12_08_00),
            ((12, 0), 13_01_00),
            ((9, 0), 12_08_05),
            ((10, 0), 12_06_00),
        ];
        let table = [
            (
                row,
                row,
                true,
                [
                    emulated(FactorsAfter),
                    native(Outer, Outer),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                ],
            ),
            (
                row,
                None,
                false,
                [
                    emulated(FactorsAfter),
                    native(Outer, Outer),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                    emulated(FactorsAfter),
                ],
            ),
            (
                line,
                tile,
                true,
                [
                    emulated(Dequantized),
                    native(Vec128, Tile128),
                    native(Vec32, Vec32),
                    native(Vec32, Vec32),
                    emulated(Dequantized),
                    emulated(Dequantized),
                ],
            ),
            (
                tile,
                line,
                false,
                [
                    emulated(Rounded),
                    native(Tile128, Vec128),
                    emulated(Rounded),
                    emulated(Rounded),
                    emulated(Rounded),
                    emulated(Rounded),
                ],
            ),
            (
                line,
                line,
                false,
                [
                    emulated(Rounded),
                    native(Vec128, Vec128),
                    emulated(Rounded),
                    emulated(Rounded),
                    emulated(Rounded),
                    emulated(Rounded),
                ],
            ),
            (
                mx,
                mx,
                true,
                [
                    emulated(Dequantized),
                    emulated(Dequantized),
                    native(Vec32, Vec32),
                    native(Vec32, Vec32),
                    emulated(Dequantized),
                    emulated(Dequantized),
                ],
            ),
        ];
        for (a, b, powers_of_two, ways) in table {
            for ((capability, version), expected) in machines.into_iter().zip(ways) {
                assert_eq!(
                    way(capability, version, a, b, powers_of_two),
                    expected,
                    "{a:?} {b:?} {capability:?} {version}"
                );
            }
        }
    }
}
