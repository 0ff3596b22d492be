//! Ranges of entries, checked against the size of a block.

use crate::{Error, Result};
use std::ops::Range;

/// A range within a block. Only [`within`](Self::within) makes one, so code with a span never accesses memory beyond the
/// block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    start: usize,
    end: usize,
}

impl Span {
    /// Checks `range` against a block of `len` entries.
    ///
    /// # Errors
    /// A range that ends beyond the block, or before it starts.
    pub(super) fn within(op: &'static str, range: Range<usize>, len: usize) -> Result<Self> {
        let Range { start, end } = range;
        if start <= end && end <= len {
            return Ok(Self { start, end });
        }
        let remedy = format!("this block has {len}, numbered from 0");
        Err(Error::Option { op, option: "cells", value: format!("{start}..{end}"), remedy })
    }

    pub(super) const fn range(self) -> Range<usize> {
        self.start..self.end
    }

    /// Returns the entries of a block in host memory.
    pub(super) fn of<T>(self, block: &[T]) -> &[T] {
        &block[self.start..self.end]
    }

    /// Returns the bytes from the start of a block of `T` to the first entry.
    pub(super) const fn offset<T>(self) -> u64 {
        (size_of::<T>() * self.start) as u64
    }
}
