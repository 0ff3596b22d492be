//! Agreements of the ranks that last.

use crate::message::Message;
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

/// The number of a call, that another call has by chance only: FNV-1a of what the ranks agree on.
pub(super) fn number(label: &str, shards: &[Shape]) -> i32 {
    let extents = shards.iter().flat_map(|shape| shape.iter().flat_map(|extent| extent.to_le_bytes()));
    let hash = label.bytes().chain(extents);
    let hash = hash.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.cast_signed()
}

/// The shapes in the messages of all ranks.
pub(super) fn shapes(all: &[Message]) -> Vec<Shape> {
    all.iter().filter_map(|message| Some(message.part.as_ref()?.shape)).collect()
}
