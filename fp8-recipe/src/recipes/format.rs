//! The FP8 formats of a recipe: one for each direction.

use crate::{Direction, Error, Result};
use fp8_kernels::Encoding;
use std::fmt;
use std::str::FromStr;

/// The FP8 formats of a recipe. The default is `Hybrid`.
///
/// ```
/// use fp8_recipe::{Direction, Encoding, Format};
/// assert_eq!(Format::Hybrid.encoding(Direction::Forward), Encoding::E4M3);
/// assert_eq!(Format::Hybrid.encoding(Direction::Backward), Encoding::E5M2);
/// assert_eq!("hybrid".parse::<Format>()?, Format::default());
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Format {
    /// E4M3 for all tensors.
    E4M3,
    /// E5M2 for all tensors. Every recipe refuses it: activations and weights need E4M3's precision, and no FP8 GEMM
    /// multiplies two E5M2 tensors.
    E5M2,
    /// E4M3 for activations and weights, E5M2 for gradients.
    #[default]
    Hybrid,
    /// E2M1 for all tensors: codes of 4 bits. [`Nvfp4`](crate::Nvfp4) alone has it; other recipes refuse it.
    E2M1,
}

impl Format {
    /// Returns the encoding of the tensors of a pass.
    pub const fn encoding(self, direction: Direction) -> Encoding {
        match (self, direction) {
            (Self::E2M1, _) => Encoding::E2M1,
            (Self::E5M2, _) | (Self::Hybrid, Direction::Backward) => Encoding::E5M2,
            (Self::E4M3, _) | (Self::Hybrid, Direction::Forward) => Encoding::E4M3,
        }
    }

    /// Returns `E4M3`, `E5M2`, `HYBRID` or `E2M1`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "E4M3",
            Self::E5M2 => "E5M2",
            Self::Hybrid => "HYBRID",
            Self::E2M1 => "E2M1",
        }
    }

    pub(crate) fn validate(self, recipe: &'static str) -> Result<()> {
        let remedy = match self {
            Self::E4M3 | Self::Hybrid => return Ok(()),
            Self::E5M2 => {
                "no FP8 GEMM multiplies E5M2 by E5M2, and weights and activations need E4M3's precision; \
                 use HYBRID (E5M2 for gradients only) or E4M3"
            }
            Self::E2M1 => "codes of 4 bits need a scale for each 16 values: use the recipe nvfp4",
        };
        Err(Error::Recipe { recipe, option: "fp8_format", value: self.to_string(), remedy })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::E4M3, Self::E5M2, Self::Hybrid, Self::E2M1];
        all.into_iter().find(|format| format.name().eq_ignore_ascii_case(name)).ok_or_else(|| Error::Recipe {
            recipe: "recipe",
            option: "fp8_format",
            value: name.to_owned(),
            remedy: "expected hybrid or e4m3",
        })
    }
}
