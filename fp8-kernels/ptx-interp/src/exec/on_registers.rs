//! Operations that read and write registers alone, and need not be fast.

use super::convert;
use crate::ir::{Cond, Cvt, Logic, Op};
use crate::lanes::{BITS, Reg, Registers, lanes};

/// Runs `op` in the lanes of `mask`. Other operations are none of these.
pub(super) fn run(regs: &mut Registers, op: &Op, mask: u32) {
    match op {
        Op::Select { d, a, b, p } => select(regs, mask, *d, *a, *b, *p),
        Op::Logic { kind, d, a, b } => logic(regs, mask, *kind, *d, *a, *b),
        Op::Lop3 { d, s, table } => lop3(regs, mask, *d, *s, *table),
        Op::Carry { .. } => carry(regs, op, mask),
        Op::Pack { d, parts, bits } => pack(regs, mask, *d, parts, *bits),
        Op::Unpack { parts, a, bits } => unpack(regs, mask, parts, *a, *bits),
        Op::Convert { cvt, d, a } => convert_each(regs, mask, *cvt, *d, *a),
        _ => {}
    }
}

/// The lanes in which a condition holds.
pub(super) fn condition(regs: &Registers, cond: Cond) -> u32 {
    let value = regs.p[cond.pred];
    if cond.negated { !value } else { value }
}

/// `selp`: one of two values, by a condition.
fn select(regs: &mut Registers, mask: u32, d: Reg, a: Reg, b: Reg, p: usize) {
    let choice = regs.p[p];
    match (d, a, b) {
        (Reg::W(d), Reg::W(a), Reg::W(b)) => {
            let (a, b) = (regs.w[a], regs.w[b]);
            crate::lanes::every(&mut regs.w[d], mask, |l| if choice & BITS[l] != 0 { a[l] } else { b[l] });
        }
        (Reg::D(d), Reg::D(a), Reg::D(b)) => {
            let (a, b) = (regs.d[a], regs.d[b]);
            crate::lanes::every(&mut regs.d[d], mask, |l| if choice & BITS[l] != 0 { a[l] } else { b[l] });
        }
        _ => {}
    }
    let chosen = choice & regs.set(a) | !choice & regs.set(b);
    regs.mark(d, mask, chosen & regs.p_set[p]);
}

/// Logic of conditions.
fn logic(regs: &mut Registers, mask: u32, kind: Logic, d: usize, a: Cond, b: Cond) {
    let (x, y) = (condition(regs, a), condition(regs, b));
    let (x_set, y_set) = (regs.p_set[a.pred], regs.p_set[b.pred]);
    let both = x_set & y_set;
    // A written operand that decides alone makes the result a written one.
    let (value, good) = match kind {
        Logic::And => (x & y, both | x_set & !x | y_set & !y),
        Logic::Or => (x | y, both | x_set & x | y_set & y),
        Logic::Xor => (x ^ y, both),
    };
    regs.p[d] = regs.p[d] & !mask | value & mask;
    regs.mark(Reg::P(d), mask, good);
}

/// `lop3`: any function of three bits, by its table.
fn lop3(regs: &mut Registers, mask: u32, d: Reg, s: [Reg; 3], table: u8) {
    let good = regs.set(s[0]) & regs.set(s[1]) & regs.set(s[2]);
    for lane in lanes(mask) {
        let [x, y, z] = s.map(|reg| regs.lane(reg, lane) as u32);
        let mut out = 0;
        for (bit, (x, y, z)) in [
            (!x, !y, !z),
            (!x, !y, z),
            (!x, y, !z),
            (!x, y, z),
            (x, !y, !z),
            (x, !y, z),
            (x, y, !z),
            (x, y, z),
        ]
        .into_iter()
        .enumerate()
        {
            out |= if table >> bit & 1 == 1 { x & y & z } else { 0 };
        }
        regs.put(d, lane, u64::from(out));
    }
    regs.mark(d, mask, good);
}

/// Addition and subtraction with a carry in, out or both.
fn carry(regs: &mut Registers, op: &Op, mask: u32) {
    let Op::Carry { d, a, b, subtract, carry_in, carry_out, flag } = op else { return };
    let wide = matches!(d, Reg::D(_));
    let mut good = regs.set(*a) & regs.set(*b);
    if *carry_in {
        good &= regs.p_set[*flag];
    }
    for lane in lanes(mask) {
        let (x, y) = (regs.lane(*a, lane), regs.lane(*b, lane));
        let carry = u128::from(*carry_in && regs.p[*flag] >> lane & 1 == 1);
        let bits = if wide { 64 } else { 32 };
        // A borrow shows as a set bit above the result as well.
        let full = if *subtract {
            u128::from(x).wrapping_sub(u128::from(y)).wrapping_sub(carry)
        } else {
            u128::from(x) + u128::from(y) + carry
        };
        regs.put(*d, lane, full as u64);
        if *carry_out {
            regs.put(Reg::P(*flag), lane, (full >> bits) as u64 & 1);
        }
    }
    regs.mark(*d, mask, good);
    if *carry_out {
        regs.mark(Reg::P(*flag), mask, good);
    }
}

/// Parts of a register put together.
fn pack(regs: &mut Registers, mask: u32, d: Reg, parts: &[Reg], bits: u32) {
    let good = parts.iter().fold(!0, |good, part| good & regs.set(*part));
    let ones = u64::MAX >> (64 - bits);
    for lane in lanes(mask) {
        let join = |(i, part): (usize, &Reg)| (regs.lane(*part, lane) & ones) << (i as u32 * bits);
        let value = parts.iter().enumerate().map(join).fold(0, |a, b| a | b);
        regs.put(d, lane, value);
    }
    regs.mark(d, mask, good);
}

/// A register taken apart.
fn unpack(regs: &mut Registers, mask: u32, parts: &[Option<Reg>], a: Reg, bits: u32) {
    let good = regs.set(a);
    let ones = u64::MAX >> (64 - bits);
    for lane in lanes(mask) {
        let value = regs.lane(a, lane);
        for (i, part) in parts.iter().enumerate() {
            if let Some(part) = part {
                regs.put(*part, lane, value >> (i as u32 * bits) & ones);
            }
        }
    }
    parts.iter().flatten().for_each(|part| regs.mark(*part, mask, good));
}

/// `cvt`.
fn convert_each(regs: &mut Registers, mask: u32, cvt: Cvt, d: Reg, a: Reg) {
    for lane in lanes(mask) {
        let value = convert::convert(cvt, regs.lane(a, lane));
        regs.put(d, lane, value);
    }
    regs.mark(d, mask, regs.set(a));
}
