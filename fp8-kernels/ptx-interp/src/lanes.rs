//! The registers of one warp and the loops over its 32 lanes.
//!
//! Three files: 32-bit (also 8- and 16-bit values, zero-extended), 64-bit, and predicates as lane masks. Beside each
//! register lies a lane mask of what has been written; results of unwritten values count as unwritten. Constants and
//! special registers live in the same files, so every operand is a register number.

use std::cell::RefCell;

/// A 32-bit register of all lanes.
pub(crate) type L32 = [u32; 32];
/// A 64-bit register of all lanes.
pub(crate) type L64 = [u64; 32];

/// The register files of a warp.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    pub(crate) w: Vec<L32>,
    pub(crate) d: Vec<L64>,
    pub(crate) p: Vec<u32>,
    pub(crate) w_set: Vec<u32>,
    pub(crate) d_set: Vec<u32>,
    pub(crate) p_set: Vec<u32>,
}

impl Reg {
    /// Its number in its file.
    #[inline(always)]
    pub(crate) fn number(self) -> usize {
        let (Self::W(number) | Self::D(number) | Self::P(number)) = self;
        number
    }
}

/// A register of a known file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reg {
    /// 32-bit file.
    W(usize),
    /// 64-bit file.
    D(usize),
    /// Predicate file.
    P(usize),
}

thread_local! {
    /// Files of warps that are done, for the next ones: memory that the system hands out anew costs a page fault each 4 KiB.
    static SPARE: RefCell<Vec<Registers>> = const { RefCell::new(Vec::new()) };
}

/// The most files that a thread keeps: those of a block.
const KEPT: usize = 32;

impl Registers {
    /// At least so many 32-bit registers, 64-bit registers and predicates, and as many marks, of which none is set. The values are
    /// any: an unwritten value goes nowhere without its mark.
    pub(crate) fn new([w, d, p]: [usize; 3]) -> Self {
        fn unmarked(file: &mut Vec<u32>, len: usize) {
            file.clear();
            file.resize(len, 0);
        }
        fn grow<T: Copy + Default>(file: &mut Vec<T>, len: usize) {
            if file.len() < len {
                file.resize(len, T::default());
            }
        }
        // A thread that ends may still launch, when it drops its device.
        let spare = SPARE.try_with(|spare| spare.borrow_mut().pop());
        let mut registers = spare.ok().flatten().unwrap_or_default();
        grow(&mut registers.w, w);
        grow(&mut registers.d, d);
        grow(&mut registers.p, p);
        unmarked(&mut registers.w_set, w);
        unmarked(&mut registers.d_set, d);
        unmarked(&mut registers.p_set, p);
        registers
    }

    /// Keeps the memory for [`Self::new`].
    pub(crate) fn recycle(self) {
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < KEPT {
                spare.push(self);
            }
        });
    }

    /// The lanes in which `reg` holds a written value.
    #[inline]
    pub(crate) fn set(&self, reg: Reg) -> u32 {
        match reg {
            Reg::W(r) => self.w_set[r],
            Reg::D(r) => self.d_set[r],
            Reg::P(r) => self.p_set[r],
        }
    }

    /// Notes that the lanes of `mask` were written, with a written value where `good` says so.
    #[inline]
    pub(crate) fn mark(&mut self, reg: Reg, mask: u32, good: u32) {
        let set = match reg {
            Reg::W(r) => &mut self.w_set[r],
            Reg::D(r) => &mut self.d_set[r],
            Reg::P(r) => &mut self.p_set[r],
        };
        note(set, mask, good);
    }

    /// One lane's value; a predicate is 0 or 1.
    #[inline]
    pub(crate) fn lane(&self, reg: Reg, lane: usize) -> u64 {
        match reg {
            Reg::W(r) => u64::from(self.w[r][lane]),
            Reg::D(r) => self.d[r][lane],
            Reg::P(r) => u64::from(self.p[r] >> lane & 1),
        }
    }

    /// Sets one lane's value, not its mark.
    #[inline]
    pub(crate) fn put(&mut self, reg: Reg, lane: usize, value: u64) {
        match reg {
            Reg::W(r) => self.w[r][lane] = value as u32,
            Reg::D(r) => self.d[r][lane] = value,
            Reg::P(r) => self.p[r] = self.p[r] & !(1 << lane) | ((value & 1) as u32) << lane,
        }
    }

    /// Sets the value of all lanes, not their marks.
    pub(crate) fn fill(&mut self, reg: Reg, value: u64) {
        match reg {
            Reg::W(r) => self.w[r] = [value as u32; 32],
            Reg::D(r) => self.d[r] = [value; 32],
            Reg::P(r) => self.p[r] = if value & 1 == 1 { !0 } else { 0 },
        }
    }
}

/// Notes in a register's marks that the lanes of `mask` were written, with a written value where `good` says so.
#[inline(always)]
pub(crate) fn note(set: &mut u32, mask: u32, good: u32) {
    *set = *set & !mask | good & mask;
}

/// The mask of each lane alone: a vector of constants where a shift by the lane would be none.
pub(crate) const BITS: [u32; 32] = {
    let mut bits = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// The lanes of a mask, rising.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros() as usize;
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane)
    })
}

/// Computes all 32 lanes and keeps those of `mask`; for functions so cheap that skipping lanes costs more.
#[inline(always)]
pub(crate) fn every<T: Copy>(out: &mut [T; 32], mask: u32, f: impl Fn(usize) -> T) {
    if mask == !0 {
        for (lane, o) in out.iter_mut().enumerate() {
            *o = f(lane);
        }
    } else {
        for (lane, o) in out.iter_mut().enumerate() {
            let value = f(lane);
            *o = if mask & BITS[lane] != 0 { value } else { *o };
        }
    }
}

/// Computes the lanes of `mask` only; for slow functions.
#[inline(always)]
pub(crate) fn chosen<T: Copy>(out: &mut [T; 32], mask: u32, f: impl Fn(usize) -> T) {
    for lane in lanes(mask) {
        out[lane] = f(lane);
    }
}

/// An operation on whole registers: `(registers, destination, sources, mask)`. The numbers' files are part of the operation,
/// and so is marking what was written: the lanes where every source is.
pub(crate) type Map = fn(&mut Registers, usize, [usize; 3], u32);

/// The marks of a file.
macro_rules! marks {
    ($r:ident, w) => {
        $r.w_set
    };
    ($r:ident, d) => {
        $r.d_set
    };
}
pub(crate) use marks;

/// `map!(w = w, w; every |a, b| …)`: a [`Map`] with the files of destination and sources, and how lanes are chosen.
macro_rules! map {
    ($d:ident = $a:ident; $how:ident |$x:pat_param| $body:expr) => {{
        fn run(r: &mut $crate::lanes::Registers, d: usize, s: [usize; 3], mask: u32) {
            let a = r.$a[s[0]];
            let good = $crate::lanes::marks!(r, $a)[s[0]];
            $crate::lanes::$how(&mut r.$d[d], mask, |l| {
                let $x = a[l];
                $body
            });
            $crate::lanes::note(&mut $crate::lanes::marks!(r, $d)[d], mask, good);
        }
        run as $crate::lanes::Map
    }};
    ($d:ident = $a:ident, $b:ident; $how:ident |$x:pat_param, $y:pat_param| $body:expr) => {{
        fn run(r: &mut $crate::lanes::Registers, d: usize, s: [usize; 3], mask: u32) {
            let (a, b) = (r.$a[s[0]], r.$b[s[1]]);
            let good = $crate::lanes::marks!(r, $a)[s[0]] & $crate::lanes::marks!(r, $b)[s[1]];
            $crate::lanes::$how(&mut r.$d[d], mask, |l| {
                let ($x, $y) = (a[l], b[l]);
                $body
            });
            $crate::lanes::note(&mut $crate::lanes::marks!(r, $d)[d], mask, good);
        }
        run as $crate::lanes::Map
    }};
    ($d:ident = $a:ident, $b:ident, $c:ident; $how:ident |$x:pat_param, $y:pat_param, $z:pat_param| $body:expr) => {{
        fn run(r: &mut $crate::lanes::Registers, d: usize, s: [usize; 3], mask: u32) {
            let (a, b, c) = (r.$a[s[0]], r.$b[s[1]], r.$c[s[2]]);
            let good = $crate::lanes::marks!(r, $a)[s[0]]
                & $crate::lanes::marks!(r, $b)[s[1]]
                & $crate::lanes::marks!(r, $c)[s[2]];
            $crate::lanes::$how(&mut r.$d[d], mask, |l| {
                let ($x, $y, $z) = (a[l], b[l], c[l]);
                $body
            });
            $crate::lanes::note(&mut $crate::lanes::marks!(r, $d)[d], mask, good);
        }
        run as $crate::lanes::Map
    }};
}
pub(crate) use map;

/// A comparison: the lanes, of all 32, in which it holds.
pub(crate) type Compare = fn(&Registers, usize, usize) -> u32;

/// `compare!(w; |a, b| …)`: a [`Compare`] of two registers of a file.
macro_rules! compare {
    ($file:ident; |$x:pat_param, $y:pat_param| $body:expr) => {{
        fn run(r: &$crate::lanes::Registers, a: usize, b: usize) -> u32 {
            let (a, b) = (&r.$file[a], &r.$file[b]);
            let mut out = 0;
            for lane in 0..32 {
                let ($x, $y) = (a[lane], b[lane]);
                out |= if $body { $crate::lanes::BITS[lane] } else { 0 };
            }
            out
        }
        run as $crate::lanes::Compare
    }};
}
pub(crate) use compare;

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs as the last destructor of its thread, as that of a device may.
    struct Last;

    impl Drop for Last {
        fn drop(&mut self) {
            Registers::new([1, 2, 3]).recycle();
        }
    }

    thread_local! {
        static LAST: Last = const { Last };
    }

    #[test]
    fn a_thread_that_ends_has_registers() {
        let thread = std::thread::spawn(|| {
            LAST.with(|_| ());
            Registers::new([1, 1, 1]).recycle();
        });
        thread.join().unwrap();
    }

    #[test]
    fn registers_that_are_used_again_have_no_marks() {
        let mut registers = Registers::new([1, 1, 1]);
        registers.mark(Reg::W(0), !0, !0);
        registers.mark(Reg::P(0), !0, !0);
        registers.recycle();
        let registers = Registers::new([2, 1, 1]);
        assert_eq!((registers.w.len(), registers.w_set, registers.p_set), (2, vec![0, 0], vec![0]));
        let fewer = Registers::new([0, 1, 1]);
        assert!(fewer.w_set.is_empty(), "the values are kept, the marks are not");
    }
}
