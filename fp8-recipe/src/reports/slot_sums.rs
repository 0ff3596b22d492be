//! The sums that a measuring scope keeps of each slot.

use crate::reports::error_squares::Squares;
use crate::reports::nvfp4_report::Nvfp4Sums;

/// The sums of what was measured of one slot in one scope.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) squares: Squares,
    /// Those of a slot in NVFP4.
    pub(crate) nvfp4: Option<Nvfp4Sums>,
}
