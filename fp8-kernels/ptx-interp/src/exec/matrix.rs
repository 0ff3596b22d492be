//! Matrices spread over a warp: `ldmatrix` and `mma`.
//!
//! Lane `l` has the row `g = l / 4` and the pair `t = l % 4` of an 8×8 matrix of 16-bit elements: columns 2t and 2t + 1 in
//! the low and high half of one register. The operands of `m16n8k16` are such matrices:
//!
//! | operand | register | row | columns |
//! |---|---|---|---|
//! | A, 16 × 16 | a0, a1 | g, g + 8 | 2t, 2t + 1 |
//! | | a2, a3 | g, g + 8 | 2t + 8, 2t + 9 |
//! | B, 16 × 8, by its columns | b0, b1 | column g | rows 2t, 2t + 1; 2t + 8, 2t + 9 |
//! | C and D, 16 × 8, f32 | c0, c1 | g | 2t; 2t + 1 |
//! | | c2, c3 | g + 8 | 2t; 2t + 1 |
//!
//! Those of `m16n8k32` have four elements of one byte in a register where these have two, columns 4t … 4t + 3 and 16 further
//! on: the same bytes at the same places.
//!
//! Here a sum starts at C and takes its products, which are exact, by rising k, each addition rounded to nearest.
//! Hardware's order and its roundings inside of a sum are its own: results agree within a tolerance, not in their bits.

use super::fault::{Fault, Step};
use super::machine::Machine;
use super::warp::Warp;
use crate::ir::{Element, Mem};
use crate::lanes::Reg;
use crate::numeric;
use crate::report::Kind;

impl Element {
    /// Returns the number of elements in a register.
    const fn count(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 | Self::E5M2 => 4,
        }
    }

    /// The value of element `i` of a register.
    fn value(self, register: u64, i: usize) -> f32 {
        let bits = register >> (i * 32 / self.count());
        match self {
            Self::F16 => half::f16::from_bits(bits as u16).to_f32(),
            Self::BF16 => f32::from_bits((bits as u32) << 16),
            Self::E4M3 => numeric::from_fp8(bits as u32 & 0xff, 3) as f32,
            Self::E5M2 => numeric::from_fp8(bits as u32 & 0xff, 2) as f32,
        }
    }
}

/// The largest k of a product.
const DEPTH: usize = 32;

impl Warp {
    /// `mma` of all lanes.
    pub(super) fn multiply(
        &mut self,
        machine: &Machine<'_>,
        [left_element, right_element]: [Element; 2],
        d: [Reg; 4],
        (a, b, c): ([Reg; 4], [Reg; 2], [Reg; 4]),
    ) -> Step {
        for reg in a.iter().chain(&b).chain(&c) {
            let missing = !self.regs.set(*reg);
            if missing != 0 {
                return machine.unwritten(self, *reg, missing, "a part of a matrix");
            }
        }
        let count = left_element.count();
        let depth = 8 * count;
        let (mut left, mut right) = ([[0.0f32; DEPTH]; 16], [[0.0f32; 8]; DEPTH]);
        let mut sums = [[0.0f32; 8]; 16];
        for lane in 0..32 {
            let (row, first, pair) = (lane / 4, lane % 4 * count, lane % 4 * 2);
            for (i, reg) in a.iter().enumerate() {
                let (bits, row, col) =
                    (self.regs.lane(*reg, lane), row + i % 2 * 8, first + i / 2 * 4 * count);
                for e in 0..count {
                    left[row][col + e] = left_element.value(bits, e);
                }
            }
            for (i, reg) in b.iter().enumerate() {
                let (bits, col) = (self.regs.lane(*reg, lane), first + i * 4 * count);
                for e in 0..count {
                    right[col + e][row] = right_element.value(bits, e);
                }
            }
            for (i, reg) in c.iter().enumerate() {
                sums[row + i / 2 * 8][pair + i % 2] = f32::from_bits(self.regs.lane(*reg, lane) as u32);
            }
        }
        for (left, sums) in left.iter().zip(&mut sums) {
            for (x, right) in left[..depth].iter().zip(&right) {
                sums.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
            }
        }
        for lane in 0..32 {
            let (row, pair) = (lane / 4, lane % 4 * 2);
            for (i, reg) in d.iter().enumerate() {
                let sum = sums[row + i / 2 * 8][pair + i % 2];
                self.regs.put(*reg, lane, u64::from(sum.to_bits()));
            }
        }
        d.iter().for_each(|reg| self.regs.mark(*reg, !0, !0));
        Ok(())
    }

    /// `ldmatrix` of all lanes: lanes 8i … 8i + 7 name the rows of matrix i.
    pub(super) fn load_matrix(
        &mut self,
        machine: &mut Machine<'_>,
        mem: &Mem,
        d: [Option<Reg>; 4],
        transposed: bool,
    ) -> Step {
        let count = d.iter().flatten().count();
        let named = u32::MAX >> (32 - 8 * count);
        self.addressed(machine, mem, named)?;
        let mut rows = [[0u16; 8]; 32];
        let mut written = [[true; 8]; 32];
        for lane in 0..8 * count {
            // The bytes go to other lanes than the one that names them: one of these stands for all.
            let taker = lane % 8 * 4 + if lane == 31 { 0 } else { 3 };
            let (spot, span) = (self.spot(mem, lane), machine.span);
            let [stamp, taken] = [lane, taker].map(|lane| self.stamp(machine, lane));
            let (region, offset) = machine.resolve(self, mem, spot, lane)?;
            let conflict = region.touch(offset, 4, stamp, mem.access, span);
            let conflict = conflict.or_else(|| region.touch(offset, 4, taken, mem.access, span));
            let whole = region.init.all(offset, 16);
            for (i, element) in rows[lane].iter_mut().enumerate() {
                *element = region.load(offset + 2 * i, 2) as u16;
                written[lane][i] = whole || region.init.all(offset + 2 * i, 2);
            }
            if let Some(conflict) = conflict {
                let (text, label) = machine.describe(mem, spot);
                return machine.race(self, lane, conflict, false, (spot.address, text, label));
            }
        }
        for (matrix, reg) in d.iter().flatten().enumerate() {
            let mut good = 0;
            for lane in 0..32 {
                let places = [0, 1].map(|i| {
                    let (row, col) = (lane / 4, lane % 4 * 2 + i);
                    let (row, col) = if transposed { (col, row) } else { (row, col) };
                    (matrix * 8 + row, col)
                });
                let [low, high] = places.map(|(row, col)| u64::from(rows[row][col]));
                good |= u32::from(places.iter().all(|&(row, col)| written[row][col])) << lane;
                self.regs.put(*reg, lane, low | high << 16);
            }
            self.regs.mark(*reg, !0, good);
        }
        Ok(())
    }

    /// The error of a size that is more than a copy's bytes.
    pub(super) fn oversized<T>(size: u64, bytes: usize, lane: usize) -> Step<T> {
        let detail = format!("a copy of {bytes} bytes takes {size} from its source");
        Fault::new(Kind::OutOfBounds, lane, detail).fail()
    }
}
