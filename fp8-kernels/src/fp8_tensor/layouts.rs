//! The codes of a tensor and of its transpose, with their factors.

use crate::{Result, Shape, Tensor};
use fp8_format::Blocks;

/// The layouts that exist: at least one.
#[expect(
    clippy::large_enum_variant,
    reason = "tensors are few, and a box would cost each quantization an allocation"
)]
#[derive(Clone)]
pub(super) enum Layouts {
    Rowwise(Layout),
    Columnwise(Layout),
    Both { rowwise: Layout, columnwise: Layout },
}

impl Layouts {
    pub(super) fn new(rowwise: Layout, columnwise: Option<Layout>) -> Self {
        match columnwise {
            None => Self::Rowwise(rowwise),
            Some(mut columnwise) => {
                if let (Sharing::Tensor, Sharing::Tensor) = (rowwise.sharing, columnwise.sharing) {
                    columnwise.scale_inv = rowwise.scale_inv.clone();
                }
                Self::Both { rowwise, columnwise }
            }
        }
    }

    pub(super) fn rowwise(&self) -> Option<&Layout> {
        match self {
            Self::Rowwise(rowwise) | Self::Both { rowwise, .. } => Some(rowwise),
            Self::Columnwise(_) => None,
        }
    }

    pub(super) fn columnwise(&self) -> Option<&Layout> {
        match self {
            Self::Columnwise(columnwise) | Self::Both { columnwise, .. } => Some(columnwise),
            Self::Rowwise(_) => None,
        }
    }

    /// Whether both layouts exist and share one factor.
    pub(super) fn share_a_factor(&self) -> bool {
        let is_one = |layout: &Layout| layout.sharing == Sharing::Tensor;
        matches!(self, Self::Both { rowwise, columnwise } if is_one(rowwise) && is_one(columnwise))
    }

    /// The rowwise layout, or the columnwise one if it alone exists.
    pub(super) fn first(&self) -> &Layout {
        match self {
            Self::Rowwise(layout) | Self::Columnwise(layout) | Self::Both { rowwise: layout, .. } => layout,
        }
    }
}

/// The codes of a matrix or of its transpose, with their factors.
#[derive(Clone)]
pub(crate) struct Layout {
    pub(crate) codes: Tensor,
    pub(crate) scale_inv: Tensor,
    /// The factors of the whole tensor, encode and decode, f32 `[2]`: those of NVFP4, whose blocks have another one each.
    pub(crate) tensor_scale: Option<Tensor>,
    pub(crate) sharing: Sharing,
}

impl Layout {
    /// The same codes as those of a tensor of this shape.
    pub(super) fn in_shape(&self, shape: Shape) -> Result<Self> {
        let codes = self.codes.reshape(self.sharing.codes_shape(shape))?;
        Ok(Self { codes, ..self.clone() })
    }
}

/// The elements of a layout that share a factor, and what is known of the factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// All: one f32.
    Tensor,
    /// Those of a row or block of the matrix that the codes are of: f32, or u8 (E8M0) for MX.
    Blocks { blocks: Blocks, powers_of_two: bool },
    /// Those of a block of NVFP4: u8 (E4M3), and a factor for the whole. Two codes are in a byte. `hadamard`: the codes are of what
    /// a Hadamard transform made of the matrix, rows padded to whole blocks.
    Nvfp4 { blocks: Blocks, hadamard: bool },
}

impl Sharing {
    pub(crate) const fn blocks(self) -> Option<Blocks> {
        match self {
            Self::Tensor => None,
            Self::Blocks { blocks, .. } | Self::Nvfp4 { blocks, .. } => Some(blocks),
        }
    }

    /// Whether the codes are of a Hadamard transform.
    pub(crate) const fn has_hadamard(self) -> bool {
        matches!(self, Self::Nvfp4 { hadamard: true, .. })
    }

    /// The shape of the codes of a tensor of this shape.
    pub(crate) fn codes_shape(self, shape: Shape) -> Shape {
        match self {
            Self::Tensor | Self::Blocks { .. } => shape,
            Self::Nvfp4 { hadamard, .. } => shape.with_last(packed_width(shape.last_dim(), hadamard)),
        }
    }

    /// The name in errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 { hadamard: true, .. } => "Hadamard-transformed 1x16",
            _ => self.blocks().map_or("tensor", Blocks::name),
        }
    }

    /// Whether the factors are known to be powers of two.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only GPUs multiply powers of two in another way")
    )]
    pub(crate) const fn has_powers_of_two(self) -> bool {
        matches!(self, Self::Blocks { powers_of_two: true, .. })
    }
}

/// The bytes of a row of so many codes of 4 bits.
pub(crate) const fn packed_width(cols: usize, hadamard: bool) -> usize {
    if hadamard { cols.div_ceil(16) * 8 } else { cols.div_ceil(2) }
}
