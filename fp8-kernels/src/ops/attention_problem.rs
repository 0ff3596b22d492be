//! The sizes and options of a call of attention.

use super::{Dropout, Part};
use crate::Encoding;

/// The alignment of queries with keys in a sequence that has more keys than queries or fewer.
///
/// ```
/// assert_eq!(fp8_kernels::ops::Diagonal::default(), fp8_kernels::ops::Diagonal::TopLeft);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Diagonal {
    /// The first query is at the first key.
    #[default]
    TopLeft,
    /// The last query is at the last key: the queries continue a sequence whose first keys were computed before. The last
    /// query and key are the last ones that are not padding.
    BottomRight,
}

/// The arguments of a call after they have been checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) head_dim: usize,
    /// The number of keys that a query sees to the left and to the right of its own.
    pub(crate) window: [Option<usize>; 2],
    pub(crate) diagonal: Diagonal,
    pub(crate) scale: f32,
    /// The format that the scores' gradients are rounded to on the CPU, if products read FP8 codes. Probabilities are then
    /// rounded to E4M3.
    pub(crate) rounding: Option<Encoding>,
    /// With a probability above 0.
    pub(crate) dropout: Option<&'a Dropout>,
    /// The heads among those of the mask.
    pub(crate) mask_heads: Part,
    /// Whether backward gives the same bits each time.
    pub(crate) deterministic: bool,
}
