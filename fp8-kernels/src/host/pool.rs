//! Blocks of host memory that are kept when they are freed, so that a training step in its steady state asks the system for
//! none.
//!
//! The system maps a large block when it is requested and unmaps it when it is freed. Every page of every output would be
//! faulted in and cleared again in every step. Here a freed block serves the next request of its size class instead. Sizes
//! are rounded up to classes that waste at most an eighth, and the block of a class that was freed last, which is the most
//! likely to be in a cache, is used first.
//!
//! The pool is bounded in three ways:
//! - The blocks that are kept never take more bytes than the blocks in use took at their recent peak. The block that has
//!   been idle for longest makes room for a new one.
//! - A block that stays idle for [`WINDOW`] requests is returned to the system soon afterwards.
//! - If the system has no memory, all blocks are returned to it and the request is repeated once.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unit of a block's memory. The system allocator returns cleared blocks of this alignment without writing to them.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(16))]
pub(super) struct Line([u8; LINE]);

const LINE: usize = 16;

/// The alignment of the elements: a cache line, which is also the widest vector.
const ALIGNMENT: usize = 64;

/// Smaller blocks are returned to the system allocator, which keeps them itself.
const SMALLEST: usize = 4096;

/// Larger blocks are returned to the system at once. Beside the work on one, faulting in its pages costs little, and clearing a
/// kept block would touch pages that the system supplies cleared only when they are used.
const LARGEST: usize = 256 << 20;

/// Requests between two checks for idle blocks: those of many steps of a large model.
const WINDOW: u64 = 1 << 16;

/// Lines before the first aligned one, at most.
const SLACK: usize = (ALIGNMENT - LINE) / LINE;

/// Eight for each power of two from [`SMALLEST`] to [`LARGEST`].
const CLASSES: usize = 8 * (LARGEST.ilog2() - SMALLEST.ilog2() + 1) as usize;

static POOL: Mutex<Pool> = Mutex::new(Pool::new());

/// Memory for elements of any type. Dropping it returns it to the pool.
#[derive(Debug)]
pub(super) struct Block {
    lines: Vec<Line>,
    /// The first line that is aligned to [`ALIGNMENT`].
    start: usize,
    /// Its share of [`Pool::used`]; 0 if the pool does not take it back.
    class: usize,
}

impl Block {
    /// Allocates a block for at least `bytes` bytes. Returns it and whether all its bytes are 0; otherwise they are what an
    /// earlier owner wrote. Returns `None` if the system has no memory. Only a block that `keeps` comes from the pool and
    /// returns to it.
    pub(super) fn new(bytes: usize, keeps: bool) -> Option<(Self, bool)> {
        let class = if keeps { size_class(bytes)? } else { 0 };
        if class > 0 {
            let (kept, idle) = lock().take(class);
            drop(idle);
            if let Some(lines) = kept {
                return Some((Self::of(lines, class), false));
            }
        }
        let count = class.max(bytes).div_ceil(LINE) + SLACK;
        let lines = bytemuck::allocation::try_zeroed_vec(count).or_else(|()| {
            release_all();
            bytemuck::allocation::try_zeroed_vec(count)
        });
        match lines {
            Ok(lines) => Some((Self::of(lines, class), true)),
            Err(()) => {
                lock().used -= class;
                None
            }
        }
    }

    fn of(lines: Vec<Line>, class: usize) -> Self {
        // An interpreter may not know the address; then the elements have the alignment of a line.
        let start = lines.as_ptr().align_offset(ALIGNMENT).min(SLACK);
        Self { lines, start, class }
    }

    pub(super) fn lines(&self) -> &[Line] {
        &self.lines[self.start..]
    }

    pub(super) fn lines_mut(&mut self) -> &mut [Line] {
        &mut self.lines[self.start..]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.class == 0 {
            return;
        }
        let mut excess = lock().give(mem::take(&mut self.lines), self.class);
        // The lock is not held while the system frees a block.
        while let Some(lines) = excess {
            drop(lines);
            excess = lock().excess();
        }
    }
}

/// Returns all blocks that are kept to the system. From now on the pool keeps as much as is used at once from now on.
pub(crate) fn release_all() {
    let idle = lock().drain();
    drop(idle);
}

/// No code panics while it holds the lock, so the pool is whole even if a panic poisoned it.
fn lock() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block that is kept.
#[derive(Debug)]
struct Idle {
    lines: Vec<Line>,
    /// The number of requests before it was freed.
    since: u64,
}

#[derive(Debug)]
struct Pool {
    /// For each size class the blocks that are kept, the one that was freed last at the end.
    idle: [VecDeque<Idle>; CLASSES],
    /// Bytes of the blocks that are kept.
    kept: usize,
    /// Bytes of the blocks in use.
    used: usize,
    /// The most bytes that were in use, in this window of requests and in the one before it.
    peaks: [usize; 2],
    requests: u64,
}

impl Pool {
    const fn new() -> Self {
        Self { idle: [const { VecDeque::new() }; CLASSES], kept: 0, used: 0, peaks: [0; 2], requests: 0 }
    }

    /// Counts a block of `class` bytes as used. Returns one that is kept, if there is one, and the blocks that have been
    /// idle for too long.
    fn take(&mut self, class: usize) -> (Option<Vec<Line>>, Vec<Idle>) {
        self.requests += 1;
        self.used += class;
        self.peaks[0] = self.peaks[0].max(self.used);
        let block = self.idle[index(class)].pop_back().map(|idle| idle.lines);
        if block.is_some() {
            self.kept -= class;
        }
        let mut stale = Vec::new();
        if self.requests.is_multiple_of(WINDOW) {
            self.peaks = [self.used, self.peaks[0]];
            let is_stale = |idle: &Idle| idle.since < self.requests - WINDOW;
            for (index, blocks) in self.idle.iter_mut().enumerate() {
                let count = blocks.partition_point(is_stale);
                stale.extend(blocks.drain(..count));
                self.kept -= count * class_of(index);
            }
        }
        (block, stale)
    }

    /// Keeps a block that was in use. Returns one that must be freed, if there is one; there may be more.
    fn give(&mut self, lines: Vec<Line>, class: usize) -> Option<Vec<Line>> {
        self.used -= class;
        let blocks = &mut self.idle[index(class)];
        if blocks.try_reserve(1).is_err() {
            return Some(lines);
        }
        blocks.push_back(Idle { lines, since: self.requests });
        self.kept += class;
        self.excess()
    }

    /// Removes the block that has been idle for longest, if the pool keeps too much.
    fn excess(&mut self) -> Option<Vec<Line>> {
        if self.kept <= self.peaks[0].max(self.peaks[1]) {
            return None;
        }
        let oldest = |(index, blocks): (usize, &VecDeque<Idle>)| Some((blocks.front()?.since, index));
        let (_, index) = self.idle.iter().enumerate().filter_map(oldest).min()?;
        self.kept -= class_of(index);
        self.idle[index].pop_front().map(|idle| idle.lines)
    }

    /// Removes all blocks and forgets the peak.
    fn drain(&mut self) -> Vec<Idle> {
        (self.kept, self.peaks) = (0, [self.used; 2]);
        self.idle.iter_mut().flat_map(|blocks| blocks.drain(..)).collect()
    }
}

/// Returns the number of bytes that are allocated for `bytes`: eight steps for each power of two. Returns 0 for a block that
/// is too small or too large for the pool, and `None` for one that no system can allocate.
fn size_class(bytes: usize) -> Option<usize> {
    const MOST: usize = 1 << (usize::BITS - 2);
    match bytes {
        0..SMALLEST => Some(0),
        SMALLEST..=LARGEST => Some(bytes.next_multiple_of(bytes.next_power_of_two() / 16)),
        _ if bytes <= MOST => Some(0),
        _ => None,
    }
}

/// Returns the position of a size class among all classes.
fn index(class: usize) -> usize {
    let power = class.ilog2();
    8 * (power - SMALLEST.ilog2()) as usize + (class >> (power - 3)) % 8
}

/// Returns the size class at a position: the inverse of [`index`].
fn class_of(index: usize) -> usize {
    (8 + index % 8) << (index / 8 + SMALLEST.ilog2() as usize - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: usize = 1 << 20;

    #[test]
    fn size_classes_waste_an_eighth_at_most() {
        assert_eq!(
            [0, 1, 4095, 4096, 4097, 4609, 8193].map(size_class),
            [0, 0, 0, 4096, 4608, 5120, 9216].map(Some)
        );
        for bytes in (4096..2_000_000).step_by(4093).chain([LARGEST - 1, LARGEST]) {
            let class = size_class(bytes).unwrap();
            assert!(class >= bytes && class - bytes <= bytes / 8, "{bytes}: {class}");
            assert_eq!((size_class(class), class_of(index(class))), (Some(class), class));
            assert!(index(class) < CLASSES);
        }
        assert_eq!([LARGEST + 1, 1 << (usize::BITS - 2)].map(size_class), [Some(0), Some(0)]);
        assert_eq!([(1 << (usize::BITS - 2)) + 1, usize::MAX].map(size_class), [None, None]);
    }

    #[test]
    fn a_freed_block_serves_its_class_alone() {
        let mut pool = Pool::new();
        pool.take(CLASS);
        assert!(pool.give(vec![Line([7; LINE])], CLASS).is_none());
        assert!(pool.take(CLASS * 9 / 8).0.is_none() && pool.take(CLASS * 2).0.is_none());
        let lines = pool.take(CLASS).0.unwrap();
        assert_eq!((lines[0].0[0], pool.kept), (7, 0));
        assert!(pool.take(CLASS).0.is_none());
    }

    #[test]
    fn the_block_freed_last_is_used_first() {
        let mut pool = Pool::new();
        let _ = [pool.take(CLASS), pool.take(CLASS)];
        for value in [1, 2] {
            assert!(pool.give(vec![Line([value; LINE])], CLASS).is_none());
        }
        let blocks = [2, 1].map(|_| pool.take(CLASS).0.unwrap()[0].0[0]);
        assert_eq!(blocks, [2, 1]);
    }

    #[test]
    fn what_is_kept_is_at_most_what_was_used_at_once() {
        let mut pool = Pool::new();
        // Ever larger blocks, one at a time, so that no class is used twice.
        for index in 0..100 {
            let class = class_of(index);
            assert!(pool.take(class).0.is_none());
            let mut excess = pool.give(Vec::new(), class);
            while excess.is_some() {
                excess = pool.excess();
            }
            assert!((1..=class).contains(&pool.kept), "{class}: {}", pool.kept);
        }
        // The newest is among those that were kept.
        assert!(pool.take(class_of(99)).0.is_some());
    }

    #[test]
    fn idle_blocks_are_returned_and_the_peak_is_forgotten() {
        let mut pool = Pool::new();
        let _ = [CLASS, CLASS * 8].map(|class| pool.take(class));
        let _ = [CLASS, CLASS * 8].map(|class| assert!(pool.give(Vec::new(), class).is_none()));
        let mut returned = 0;
        for _ in 0..2 * WINDOW {
            returned += pool.take(CLASS).1.len();
            assert!(pool.give(Vec::new(), CLASS).is_none());
        }
        assert_eq!((returned, pool.kept, pool.used, pool.peaks), (1, CLASS, 0, [CLASS; 2]));
    }

    #[test]
    fn all_blocks_can_be_returned() {
        let mut pool = Pool::new();
        let _ = [CLASS, CLASS, CLASS * 2].map(|class| pool.take(class));
        let _ = [CLASS, CLASS, CLASS * 2].map(|class| assert!(pool.give(Vec::new(), class).is_none()));
        assert_eq!((pool.kept, pool.peaks[0], pool.drain().len()), (4 * CLASS, 4 * CLASS, 3));
        assert_eq!((pool.kept, pool.peaks), (0, [0; 2]));
        assert!(pool.take(CLASS).0.is_none());
    }

    #[test]
    fn blocks_are_aligned() {
        for bytes in [1, 100, 4096, 5000, 1 << 20] {
            let (mut block, _) = Block::new(bytes, true).unwrap();
            assert!(std::mem::size_of_val(block.lines()) >= bytes);
            assert!(block.lines().as_ptr().addr().is_multiple_of(ALIGNMENT) || cfg!(miri));
            block.lines_mut().fill(Line([1; LINE]));
        }
    }
}
