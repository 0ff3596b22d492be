//! Allocations in host memory whose size depends on a caller's arguments: failures are errors, not aborts.

mod array;
mod pool;

pub(crate) use array::Array;
pub(crate) use pool::release_all;

use crate::{Error, Result};
use bytemuck::Zeroable;

/// Returns `len` zeros. Large blocks are not written: the system supplies zeroed pages when they are first used.
pub(crate) fn zeroed<T: Zeroable>(op: &'static str, len: usize) -> Result<Vec<T>> {
    let zeroed = || bytemuck::allocation::try_zeroed_vec(len);
    zeroed()
        .or_else(|()| {
            pool::release_all();
            zeroed()
        })
        .map_err(|()| failed::<T>(op, len))
}

/// Returns an empty vector with capacity for `len` elements.
pub(crate) fn room<T>(op: &'static str, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let reserved = values.try_reserve_exact(len).or_else(|_| {
        pool::release_all();
        values.try_reserve_exact(len)
    });
    reserved.map_err(|_| failed::<T>(op, len))?;
    Ok(values)
}

/// Returns a vector of `len` copies of `value`.
pub(crate) fn filled<T: Copy>(op: &'static str, value: T, len: usize) -> Result<Vec<T>> {
    let mut values = room(op, len)?;
    values.resize(len, value);
    Ok(values)
}

/// Collects an iterator of known length.
pub(crate) fn collect<T>(op: &'static str, elements: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut values = room(op, elements.len())?;
    values.extend(elements);
    Ok(values)
}

/// Collects an iterator of known length, up to the first error.
pub(crate) fn try_collect<T>(
    op: &'static str,
    elements: impl ExactSizeIterator<Item = Result<T>>,
) -> Result<Vec<T>> {
    let mut values = room(op, elements.len())?;
    for element in elements {
        values.push(element?);
    }
    Ok(values)
}

/// Copies a slice to a vector.
pub(crate) fn copied<T: Copy>(op: &'static str, slice: &[T]) -> Result<Vec<T>> {
    let mut values = room(op, slice.len())?;
    values.extend_from_slice(slice);
    Ok(values)
}

fn failed<T>(op: &'static str, len: usize) -> Error {
    Error::HostAllocation { op, bytes: len.saturating_mul(size_of::<T>()) }
}
