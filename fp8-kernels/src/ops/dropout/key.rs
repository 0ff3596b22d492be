//! Keys of masks.

/// Selects the random numbers of a [`dropout`](super::dropout()) mask.
///
/// Every mask needs a key that no other mask uses: a seed of its own, or the same seed and an offset advanced by `⌈n / 4⌉`
/// for each tensor of n elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DropoutKey {
    /// The 64-bit key of Philox.
    pub seed: u64,
    /// The counter at which the mask begins.
    pub offset: u64,
}
