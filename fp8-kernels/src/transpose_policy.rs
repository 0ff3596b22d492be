//! The time at which transposed copies are made.

/// The time at which a [`Device`](crate::Device) makes the transposed copy of an FP8 tensor, which dgrad and wgrad read on hardware whose
/// FP8 GEMM supports only the TN layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransposePolicy {
    /// During the cast, in the same pass over the tensor.
    WithCast,
    /// At the first use in backward, from the codes. This needs less memory between the passes.
    OnDemand,
    /// Never, because the GEMM reads either layout.
    Never,
}
