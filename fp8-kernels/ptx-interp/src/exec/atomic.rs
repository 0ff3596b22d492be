//! Atomics: read, modify, write, lane after lane in the launch's order.

use super::fault::{Fault, Step};
use super::machine::Machine;
use super::warp::Warp;
use crate::ir::{AtomOp, Mem, Space, Ty};
use crate::lanes::Reg;
use crate::numeric::{canonical, flush};
use crate::report::Kind;

/// The new value of a location. f32 sums in global memory flush subnormals, as devices do.
fn combine(kind: AtomOp, ty: Ty, global: bool, old: u64, b: u64, c: u64) -> u64 {
    let (o, x) = (old as u32, b as u32);
    match (kind, ty) {
        (AtomOp::Add, Ty::F32) => {
            let f = |bits: u32| f32::from_bits(if global { flush(bits) } else { bits });
            let sum = canonical(f(o) + f(x));
            u64::from(if global { flush(sum) } else { sum })
        }
        (AtomOp::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (AtomOp::Add, _) => old.wrapping_add(b),
        (AtomOp::Min, Ty::U64) => old.min(b),
        (AtomOp::Max, Ty::U64) => old.max(b),
        (AtomOp::Min, Ty::S64) => (old as i64).min(b as i64) as u64,
        (AtomOp::Max, Ty::S64) => (old as i64).max(b as i64) as u64,
        (AtomOp::Min, Ty::S32) => u64::from((o as i32).min(x as i32) as u32),
        (AtomOp::Max, Ty::S32) => u64::from((o as i32).max(x as i32) as u32),
        (AtomOp::Min, _) => u64::from(o.min(x)),
        (AtomOp::Max, _) => u64::from(o.max(x)),
        (AtomOp::And, _) => old & b,
        (AtomOp::Or, _) => old | b,
        (AtomOp::Xor, _) => old ^ b,
        (AtomOp::Exch, _) => b,
        (AtomOp::Cas, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (AtomOp::Inc, _) => u64::from(if o >= x { 0 } else { o + 1 }),
        (AtomOp::Dec, _) => u64::from(if o == 0 || o > x { x } else { o - 1 }),
    }
}

impl Warp {
    /// `atom` and `red`
    pub(crate) fn atomic(
        &mut self,
        machine: &mut Machine<'_>,
        mem: &Mem,
        (kind, ty): (AtomOp, Ty),
        (d, b, c): (Option<Reg>, Reg, Option<Reg>),
        mask: u32,
    ) -> Step {
        self.addressed(machine, mem, mask)?;
        for reg in [Some(b), c].into_iter().flatten() {
            let missing = mask & !self.regs.set(reg);
            if missing != 0 {
                return machine.unwritten(self, reg, missing, "the operand of this atomic");
            }
        }
        let (bits, span) = (mem.bytes.trailing_zeros(), machine.span);
        let mut good = 0;
        for lane in machine.atomic_order(mask) {
            let spot = self.spot(mem, lane);
            if matches!(spot.space, Space::Local | Space::Param) {
                return Fault::new(Kind::Unsupported, lane, "an atomic on local memory").fail();
            }
            let stamp = self.stamp(machine, lane);
            let (region, offset) = machine.resolve(self, mem, spot, lane)?;
            if region.read_only {
                let label = region.label.clone();
                let detail = format!("variable '{label}' of the module is written");
                return Fault::new(Kind::ReadOnly, lane, detail).address(spot.address, Some(label)).fail();
            }
            if let Some(conflict) = region.touch(offset, bits, stamp, mem.access, span) {
                let (text, label) = machine.describe(mem, spot);
                return machine.race(self, lane, conflict, true, (spot.address, text, label));
            }
            let known = region.init.all(offset, mem.bytes);
            if !known && kind != AtomOp::Exch {
                let (text, label) = machine.describe(mem, spot);
                let detail = format!("an atomic combines with {text}, which nobody wrote");
                return Fault::new(Kind::Uninitialised, lane, detail).address(spot.address, label).fail();
            }
            good |= u32::from(known) << lane;
            let old = region.load(offset, mem.bytes);
            let c = c.map_or(0, |c| self.regs.lane(c, lane));
            let new = combine(kind, ty, spot.space == Space::Global, old, self.regs.lane(b, lane), c);
            region.store(offset, mem.bytes, new);
            region.init.set(offset, mem.bytes, true);
            if let Some(d) = d {
                self.regs.put(d, lane, old);
            }
        }
        if let Some(d) = d {
            self.regs.mark(d, mask, good);
        }
        Ok(())
    }
}
