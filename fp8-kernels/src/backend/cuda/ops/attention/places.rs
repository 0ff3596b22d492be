//! The places of heads in memory.

use crate::Result;
use crate::ops::Heads;

/// Returns the address of the first of these heads' elements.
pub(super) fn address(op: &'static str, heads: Heads<'_>) -> Result<u64> {
    let buffer = heads.tensor().cuda(op)?;
    Ok(buffer.ptr() + (heads.first() * buffer.dtype().size()) as u64)
}

/// Whether each token's heads begin at a multiple of 16 bytes, as the kernels of the tensor cores read them.
pub(super) fn is_aligned(heads: Heads<'_>) -> bool {
    let size = heads.tensor().dtype().size();
    [heads.first(), heads.pitch()].iter().all(|elements| (elements * size).is_multiple_of(16))
}
