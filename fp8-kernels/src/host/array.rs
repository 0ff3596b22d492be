//! Elements in host memory: in a block of the pool, or in a vector that a user made.

use super::failed;
use super::pool::Block;
use crate::Result;
use crate::environment::keeps_host_memory;
use crate::memory::{Counted, MemoryKind};
use bytemuck::Pod;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A fixed number of elements in host memory, aligned to 64 bytes unless a user made them. When it is dropped, later arrays
/// reuse its memory.
#[expect(unnameable_types, reason = "seen by the sealed half of Element alone")]
pub struct Array<T> {
    memory: Memory<T>,
    counted: Counted,
}

/// Bytes of the largest array that debug builds mark as not written.
const MARKED: usize = 64 << 20;

enum Memory<T> {
    Pooled { block: Block, len: usize, elements: PhantomData<T> },
    Given(Vec<T>),
}

impl<T: Pod> Array<T> {
    /// Returns `len` elements that have any values, such as those of an array that was dropped. The caller must overwrite
    /// all of them before a tensor is made of them.
    ///
    /// In builds with debug assertions all bytes of an array of up to 64 MiB are 0xFF: every float is NaN, as are FP8 codes, and
    /// every integer is -1.
    pub(crate) fn for_overwrite(op: &'static str, len: usize) -> Result<Self> {
        let (mut array, _) = Self::of_any_values(op, len)?;
        // Pages of a huge array that is never written stay unmapped, as in other builds.
        if cfg!(debug_assertions) && size_of_val(&array[..]) <= MARKED {
            bytemuck::cast_slice_mut::<T, u8>(&mut array).fill(0xFF);
        }
        Ok(array)
    }

    /// Returns `len` zeros. New blocks are not written: the system supplies zeroed pages when they are first used.
    pub(crate) fn zeroed(op: &'static str, len: usize) -> Result<Self> {
        let (mut array, is_zero) = Self::of_any_values(op, len)?;
        if !is_zero {
            array.fill(T::zeroed());
        }
        Ok(array)
    }

    /// Returns `len` copies of `value`.
    pub(crate) fn filled(op: &'static str, value: T, len: usize) -> Result<Self> {
        let (mut array, _) = Self::of_any_values(op, len)?;
        array.fill(value);
        Ok(array)
    }

    /// Returns a copy of a slice.
    pub(crate) fn copied(op: &'static str, slice: &[T]) -> Result<Self> {
        let (mut array, _) = Self::of_any_values(op, slice.len())?;
        array.copy_from_slice(slice);
        Ok(array)
    }

    /// Collects an iterator of known length. An iterator that ends early leaves zeros.
    pub(crate) fn collect(op: &'static str, elements: impl ExactSizeIterator<Item = T>) -> Result<Self> {
        let mut array = Self::zeroed(op, elements.len())?;
        array.iter_mut().zip(elements).for_each(|(place, element)| *place = element);
        Ok(array)
    }

    /// Returns `len` elements, and whether all are 0.
    fn of_any_values(op: &'static str, len: usize) -> Result<(Self, bool)> {
        if len == 0 {
            return Ok((Self::from(Vec::new()), true));
        }
        let keeps = keeps_host_memory()?;
        let block = len.checked_mul(size_of::<T>()).and_then(|bytes| Block::new(bytes, keeps));
        let (block, is_zero) = block.ok_or_else(|| failed::<T>(op, len))?;
        let memory = Memory::Pooled { block, len, elements: PhantomData };
        Ok((Self { memory, counted: Counted::new(None, len * size_of::<T>()) }, is_zero))
    }
}

impl<T> Array<T> {
    /// Counts its memory as of another kind.
    pub(crate) fn set_memory_kind(&self, kind: MemoryKind) {
        self.counted.set_kind(kind);
    }
}

impl<T> From<Vec<T>> for Array<T> {
    fn from(elements: Vec<T>) -> Self {
        let counted = Counted::new(None, size_of_val(&*elements));
        Self { memory: Memory::Given(elements), counted }
    }
}

impl<T: Pod> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Pooled { block, len, .. } => &bytemuck::cast_slice(block.lines())[..*len],
            Memory::Given(elements) => elements,
        }
    }
}

impl<T: Pod> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Pooled { block, len, .. } => &mut bytemuck::cast_slice_mut(block.lines_mut())[..*len],
            Memory::Given(elements) => elements,
        }
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    /// Elements of a block that the pool keeps.
    const LEN: usize = 12_345;

    #[test]
    fn reused_memory_is_cleared_filled_and_copied() {
        for round in 0..3 {
            drop(Array::<f32>::filled("test", 7.0, LEN).unwrap());
            assert!(Array::<f32>::zeroed("test", LEN).unwrap().iter().all(|v| v.to_bits() == 0), "{round}");
            assert!(Array::<u8>::zeroed("test", 4 * LEN).unwrap().iter().all(|&v| v == 0), "{round}");
            let numbers: Vec<i32> = (0..LEN as i32).collect();
            assert_eq!(Array::copied("test", &numbers).unwrap()[..], numbers);
            assert_eq!(Array::collect("test", 0..LEN as i32).unwrap()[..], numbers);
        }
    }

    #[test]
    fn an_iterator_that_ends_early_leaves_zeros() {
        struct Short;
        impl Iterator for Short {
            type Item = i32;

            fn next(&mut self) -> Option<i32> {
                None
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                (LEN, Some(LEN))
            }
        }
        impl ExactSizeIterator for Short {}
        drop(Array::filled("test", 7, LEN).unwrap());
        assert_eq!(Array::collect("test", Short).unwrap()[..], [0; LEN]);
    }

    #[test]
    fn missed_writes_are_seen_in_debug_builds() {
        drop(Array::<f32>::filled("test", 7.0, LEN).unwrap());
        let array = Array::<f32>::for_overwrite("test", LEN).unwrap();
        assert!(array.len() == LEN && (!cfg!(debug_assertions) || array.iter().all(|v| v.is_nan())));
    }

    #[test]
    fn an_array_may_be_empty_and_cannot_be_huge() {
        assert!(Array::<f32>::for_overwrite("test", 0).unwrap().is_empty());
        assert!(Array::<u8>::zeroed("test", 0).unwrap().is_empty());
        for len in [usize::MAX, usize::MAX / 4 + 1, isize::MAX as usize, isize::MAX as usize / 8] {
            let error = Array::<f32>::zeroed("test", len).unwrap_err();
            assert!(matches!(error, Error::HostAllocation { op: "test", .. }), "{error}");
        }
    }

    #[test]
    fn a_users_vector_is_not_copied() {
        let vector = vec![1.0f32, 2.0];
        let address = vector.as_ptr();
        let array = Array::from(vector);
        assert_eq!((array.as_ptr(), &array[..]), (address, &[1.0, 2.0][..]));
    }

    #[test]
    fn live_arrays_share_no_memory() {
        std::thread::scope(|scope| {
            // Freed by another thread than the one that wrote it. One thread does so for all: glibc may read a thread's memory
            // after it was unmapped where a thread ends while it is detached (bug 19951), and thousands of them met that.
            let (frees, freed) = std::sync::mpsc::channel::<Array<u32>>();
            scope.spawn(move || freed.into_iter().for_each(drop));
            for thread in 0..8u32 {
                let frees = frees.clone();
                scope.spawn(move || {
                    let mut live: Vec<(u32, Array<u32>)> = Vec::new();
                    for step in 0..400 {
                        let (value, len) = (thread << 16 | step, 1500 + 700 * (step as usize % 5));
                        let mut array = Array::for_overwrite("test", len).unwrap();
                        array.fill(value);
                        live.push((value, array));
                        if live.len() > 6 {
                            let (value, array) = live.swap_remove(step as usize % 6);
                            assert!(array.iter().all(|&v| v == value), "{thread} {step}");
                            frees.send(array).unwrap();
                        }
                    }
                });
            }
        });
    }
}
