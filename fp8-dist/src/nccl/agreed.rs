//! Agreements of the ranks that last.

use fp8_kernels::{Shape, Tensor, interop};

/// The properties of a call that the ranks have agreed on for its name and need not compare again.
#[derive(Debug)]
pub(super) struct Agreed {
    /// Types and rule.
    pub(super) label: String,
    /// The committed scale in the slot's cell; `None` if the slot has no cell.
    pub(super) committed: Option<interop::Committed>,
    /// The extents of all ranks' shards.
    pub(super) shards: Vec<Shape>,
    /// The call's number, one i32 on the device.
    pub(super) number: Tensor,
    /// Its number among the calls whose order is compared.
    pub(super) call: u64,
}
