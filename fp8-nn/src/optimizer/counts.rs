//! The counts of an optimizer.

/// The counts of an optimizer, as checkpoints store them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) steps: u64,
    /// The number of these steps that were skipped.
    pub(crate) skipped: u64,
    /// The updates that the bias corrections count; `None` if they count steps.
    pub(crate) updates: Option<u64>,
}
