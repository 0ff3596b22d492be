//! The input of a Linear as GEMMs read it, and as it is kept for wgrad.

use super::quantized::Quantized;
use fp8_kernels::{Fp8Tensor, Operand, Tensor};
use fp8_recipe::Snapshot;

/// An input that was quantized for the GEMMs.
#[derive(Debug)]
pub(crate) struct Input {
    /// All of it.
    pub(crate) whole: Quantized,
    /// The tokens of this rank, which backward gathers again, if ranks have tokens of their own. `None` if the weight is frozen.
    pub(crate) shard: Option<Kept>,
    /// The tokens of this rank in high precision, if adapters read them.
    pub(crate) values: Option<Tensor>,
}

impl From<Quantized> for Input {
    fn from(whole: Quantized) -> Self {
        Self { whole, shard: None, values: None }
    }
}

/// The input that a layer keeps for wgrad.
#[derive(Debug)]
pub(crate) enum WgradInput {
    /// As wgrad reads it.
    Operand(Operand),
    /// This rank's tokens of it.
    Shard(Kept),
}

/// This rank's tokens of an input, as wgrad gathers them.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(crate) enum Kept {
    /// Codes that become the whole's by a gather.
    Codes(Fp8Tensor),
    /// Values, for a wgrad in high precision.
    High(Tensor),
    /// Values of which the whole is quantized, with the scales of the forward pass.
    Values(Tensor, Snapshot),
}
