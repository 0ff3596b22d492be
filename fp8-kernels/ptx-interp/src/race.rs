//! Shadow memory that records the accesses to each byte, to find data races.
//!
//! A cell holds the last writer and two readers of one granule (1, 2, 4, 8 or 16 bytes, per page as coarse as the accesses
//! allow). Each is a stamp: the phase (a number that rises with every block started and every barrier passed, and never
//! restarts), the thread, its warp clock and flags. A stamp from before the launch means nothing, so nothing is ever cleared.
//!
//! Two accesses, one a write, race unless both are atomic or something orders them: the same thread, a barrier of the
//! block (different phases of one block), or within a warp a shuffle or its barrier (a larger warp clock). Nothing orders
//! different blocks of a launch. The clock is a Lamport clock: what it calls a race is one; it may miss some between
//! lanes that synchronised with others only.

const PAGE_BITS: u32 = 12;
/// Bytes under one shadow page.
pub(crate) const PAGE: usize = 1 << PAGE_BITS;
/// The coarsest granule, as a power of two: a 16-byte vector access.
const COARSEST: u32 = 4;

const THREAD_SHIFT: u32 = 4;
const CLOCK_SHIFT: u32 = 15;
/// The last warp clock a stamp can hold.
pub(crate) const CLOCK_MAX: u32 = (1 << 17) - 1;
const ATOMIC: u64 = 1;
const NON_COHERENT: u64 = 2;
const MANY_BLOCKS: u64 = 4;
/// A copy that its thread has not waited for.
const IN_FLIGHT: u64 = 8;

/// Packs an access: phase 32 bits, warp clock 17, thread 11, flags 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Stamp(u64);

impl Stamp {
    pub(crate) fn new(phase: u32, clock: u32, thread: u32) -> Self {
        let clock = u64::from(clock.min(CLOCK_MAX));
        Self(u64::from(phase) << 32 | clock << CLOCK_SHIFT | u64::from(thread) << THREAD_SHIFT)
    }

    pub(crate) fn phase(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(crate) fn thread(self) -> u32 {
        (self.0 >> THREAD_SHIFT) as u32 & 0x7ff
    }

    fn clock(self) -> u32 {
        (self.0 >> CLOCK_SHIFT) as u32 & CLOCK_MAX
    }

    fn is(self, flag: u64) -> bool {
        self.0 & flag != 0
    }
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A plain load.
    Read,
    /// A load through the read-only path.
    NonCoherent,
    /// A volatile, relaxed or acquire load.
    StrongRead,
    /// A plain store.
    Write,
    /// An atomic, or a volatile, relaxed or release store.
    Atomic,
    /// The start of an asynchronous copy: nobody may touch the bytes until its thread has waited for it.
    Copy,
}

/// The phases that bound an access: what is older than the launch is forgotten, what is older than the block is another block's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Span {
    pub(crate) launch: u32,
    pub(crate) block: u32,
    /// No access is noted, and none conflicts.
    pub(crate) ignored: bool,
}

/// Why two accesses conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    /// The earlier access.
    pub(crate) other: Stamp,
    /// Whether the earlier access wrote.
    pub(crate) wrote: bool,
    /// Whether it belongs to another block.
    pub(crate) other_block: bool,
    /// Whether a non-coherent load is one side of it, whatever the order.
    pub(crate) non_coherent: bool,
    /// Whether the earlier access is an asynchronous copy under way.
    pub(crate) in_flight: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    write: Stamp,
    read: [Stamp; 2],
}

fn unordered(old: Stamp, new: Stamp, span: Span) -> bool {
    let (was, now) = (old.phase(), new.phase());
    if was < span.launch {
        return false;
    }
    if was < span.block {
        return true;
    }
    let (a, b) = (old.thread(), new.thread());
    was == now && a != b && (a >> 5 != b >> 5 || (new.clock() <= old.clock() && old.clock() < CLOCK_MAX))
}

impl Cell {
    #[inline]
    fn touch(&mut self, new: Stamp, access: Access, span: Span) -> Option<Conflict> {
        let conflict = |other: Stamp, wrote, non_coherent| {
            let other_block = other.phase() < span.block;
            Some(Conflict {
                other,
                wrote,
                other_block,
                non_coherent,
                in_flight: wrote && other.is(IN_FLIGHT),
            })
        };
        let w = self.write;
        if w.is(IN_FLIGHT) && w.phase() >= span.launch {
            return conflict(w, true, false);
        }
        match access {
            Access::Read | Access::NonCoherent | Access::StrongRead => {
                if w.phase() >= span.launch {
                    if access == Access::NonCoherent {
                        return conflict(w, true, true);
                    }
                    let both_atomic = access == Access::StrongRead && w.is(ATOMIC);
                    if !both_atomic && (unordered(w, new, span) || w.is(MANY_BLOCKS)) {
                        return conflict(w, true, false);
                    }
                }
                let flags = match access {
                    Access::NonCoherent => NON_COHERENT,
                    Access::StrongRead => ATOMIC,
                    _ => 0,
                };
                self.note_reader(Stamp(new.0 | flags), span);
                None
            }
            Access::Write | Access::Atomic | Access::Copy => {
                let atomic = access == Access::Atomic;
                let mut flags = match access {
                    Access::Atomic => ATOMIC,
                    Access::Copy => IN_FLIGHT,
                    _ => 0,
                };
                if w.phase() >= span.launch {
                    let both = atomic && w.is(ATOMIC);
                    if !both && (unordered(w, new, span) || w.is(MANY_BLOCKS)) {
                        return conflict(w, true, false);
                    }
                    if both && (w.phase() < span.block || w.is(MANY_BLOCKS)) {
                        flags |= MANY_BLOCKS;
                    }
                }
                for r in self.read {
                    if r.phase() < span.launch {
                        continue;
                    }
                    if r.is(NON_COHERENT) {
                        return conflict(r, false, true);
                    }
                    if !(atomic && r.is(ATOMIC)) && unordered(r, new, span) {
                        return conflict(r, false, false);
                    }
                }
                self.write = Stamp(new.0 | flags);
                None
            }
        }
    }

    /// The copy under way is done: from now on a write of its thread.
    fn land(&mut self, new: Stamp) {
        if self.write.is(IN_FLIGHT) {
            self.write = new;
        }
    }

    /// Keeps the newest reader and, of the others, the one whose loss would hide most: another block's, then another
    /// warp's of this phase, then another lane's.
    #[inline]
    fn note_reader(&mut self, new: Stamp, span: Span) {
        let [first, second] = self.read;
        if first.phase() == new.phase() && first.thread() == new.thread() {
            self.read[0] = Stamp(new.0 | first.0 & NON_COHERENT);
            return;
        }
        if first.phase() < span.launch {
            self.read = [new, Stamp::default()];
            return;
        }
        let weight = |old: Stamp| {
            if old.phase() < span.launch {
                0
            } else if old.phase() < span.block {
                5
            } else if old.is(NON_COHERENT) {
                4
            } else if old.phase() != new.phase() {
                1
            } else if old.thread() >> 5 != new.thread() >> 5 {
                3
            } else {
                2
            }
        };
        let kept = if weight(second) > weight(first) { second } else { first };
        self.read = [new, kept];
    }
}

#[derive(Clone, Debug)]
struct Page {
    /// Granule size as a power of two.
    shift: u32,
    cells: Vec<Cell>,
}

impl Page {
    /// Makes granules of at most `1 << shift` bytes, each inheriting the history of the one it was part of.
    #[cold]
    fn split(&mut self, shift: u32) {
        let copies = 1 << (self.shift - shift);
        self.cells = self.cells.iter().flat_map(|cell| std::iter::repeat_n(*cell, copies)).collect();
        self.shift = shift;
    }
}

/// The shadow of one allocation, made page by page as it is touched.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadow {
    pages: Vec<Option<Box<Page>>>,
}

impl Shadow {
    /// Notes an access of `1 << bits` bytes at the multiple `offset` of that size, and says with what it conflicts.
    #[inline]
    pub(crate) fn touch(
        &mut self,
        offset: usize,
        bits: u32,
        new: Stamp,
        access: Access,
        span: Span,
    ) -> Option<Conflict> {
        let index = offset >> PAGE_BITS;
        let page = match self.pages.get_mut(index) {
            Some(Some(page)) => page,
            _ => self.make(index, bits),
        };
        if page.shift > bits {
            page.split(bits);
        }
        let first = (offset & (PAGE - 1)) >> page.shift;
        let count = 1usize << (bits - page.shift);
        for cell in page.cells.get_mut(first..first + count)? {
            if let Some(conflict) = cell.touch(new, access, span) {
                return Some(conflict);
            }
        }
        None
    }

    /// Turns a noted [`Access::Copy`] of `1 << bits` bytes at `offset` into a write at `new`.
    pub(crate) fn land(&mut self, offset: usize, bits: u32, new: Stamp) {
        let Some(Some(page)) = self.pages.get_mut(offset >> PAGE_BITS) else { return };
        let first = (offset & (PAGE - 1)) >> page.shift;
        let count = (1usize << bits >> page.shift).max(1);
        page.cells.iter_mut().skip(first).take(count).for_each(|cell| cell.land(new));
    }

    #[cold]
    fn make(&mut self, index: usize, bits: u32) -> &mut Page {
        if self.pages.len() <= index {
            self.pages.resize_with(index + 1, || None);
        }
        let shift = bits.min(COARSEST);
        let cells = vec![Cell::default(); PAGE >> shift];
        self.pages[index].insert(Box::new(Page { shift, cells }))
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let held =
            self.pages.iter().flatten().map(|page| page.cells.len() * size_of::<Cell>()).sum::<usize>();
        held + self.pages.len() * size_of::<Option<Box<Page>>>()
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.pages = Vec::new();
    }
}
