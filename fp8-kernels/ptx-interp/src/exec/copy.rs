//! Asynchronous copies to shared memory: `cp.async`, its groups, and waiting for them.
//!
//! Source bytes are taken when the copy starts. They arrive when the thread waits for their group, the latest moment that
//! hardware allows: until then the destination is unwritten, and whoever touches it races with the copy, its own thread
//! too. From then on the copy is a write of its thread, which others may read behind a barrier.

use super::copies::Pending;
use super::fault::{Fault, Step};
use super::machine::Machine;
use super::warp::Warp;
use crate::ir::Mem;
use crate::lanes::{Reg, lanes};
use crate::report::Kind;

impl Warp {
    /// `cp.async`
    pub(super) fn copy(
        &mut self,
        machine: &mut Machine<'_>,
        to: &Mem,
        from: &Mem,
        size: Option<Reg>,
        mask: u32,
    ) -> Step {
        self.addressed(machine, to, mask)?;
        if let Some(size) = size {
            let missing = mask & !self.regs.set(size);
            if missing != 0 {
                return machine.unwritten(self, size, missing, "the size of this copy");
            }
        }
        let (bytes, span) = (to.bytes * to.count, machine.span);
        let bits = bytes.trailing_zeros();
        for lane in lanes(mask) {
            let size = size.map_or(bytes as u64, |size| self.regs.lane(size, lane));
            if size > bytes as u64 {
                return Self::oversized(size, bytes, lane);
            }
            let stamp = self.stamp(machine, lane);
            let mut data = [0; 16];
            if size > 0 {
                self.addressed(machine, from, 1 << lane)?;
                self.read_source(machine, from, lane, &mut data[..size as usize])?;
            }
            let spot = self.spot(to, lane);
            let (region, offset) = machine.resolve(self, to, spot, lane)?;
            if let Some(conflict) = region.touch(offset, bits, stamp, to.access, span) {
                let (text, label) = machine.describe(to, spot);
                return machine.race(self, lane, conflict, true, (spot.address, text, label));
            }
            region.init.set(offset, bytes, false);
            let group = self.copies.groups[lane];
            self.copies.pending.push(Pending { lane, group, offset, bytes, data });
        }
        Ok(())
    }

    /// The first bytes of a copy's source.
    fn read_source(&self, machine: &mut Machine<'_>, from: &Mem, lane: usize, out: &mut [u8]) -> Step {
        let (whole, stamp, span) = (from.bytes * from.count, self.stamp(machine, lane), machine.span);
        let spot = self.spot(from, lane);
        if spot.address & (whole as u64 - 1) != 0 {
            return machine.misplaced(from, spot, lane, Kind::Misaligned);
        }
        // In pieces of one byte where it is not the whole: nothing beyond the size is looked at.
        let piece = if out.len() == whole { whole } else { 1 };
        for start in (0..out.len()).step_by(piece) {
            let part = Mem { bytes: piece, count: 1, offset: from.offset + start as i64, ..*from };
            let spot = self.spot(&part, lane);
            let (region, offset) = machine.resolve(self, &part, spot, lane)?;
            let written = region.init.all(offset, piece);
            if let Some(source) = region.data.get(offset..offset + piece) {
                out[start..start + piece].copy_from_slice(source);
            }
            if let Some(conflict) = region.touch(offset, piece.trailing_zeros(), stamp, from.access, span) {
                let (text, label) = machine.describe(&part, spot);
                return machine.race(self, lane, conflict, false, (spot.address, text, label));
            }
            if !written {
                let (text, label) = machine.describe(&part, spot);
                let detail = format!("the source of this copy was never written: {text}");
                let fault = Fault::new(Kind::Uninitialised, lane, detail);
                return fault.address(spot.address, label).fail();
            }
        }
        Ok(())
    }

    /// `cp.async.wait_group`: all but the newest `most` groups arrive; without a number everything does.
    pub(super) fn wait(&mut self, machine: &mut Machine<'_>, most: Option<u32>, mask: u32) {
        let groups = self.copies.groups;
        let arrives = |copy: &Pending| {
            let older = most.is_none_or(|most| copy.group + most < groups[copy.lane]);
            mask >> copy.lane & 1 == 1 && older
        };
        let (arrived, pending) = std::mem::take(&mut self.copies.pending).into_iter().partition(arrives);
        self.copies.pending = pending;
        let arrived: Vec<Pending> = arrived;
        for copy in arrived {
            let stamp = self.stamp(machine, copy.lane);
            let data = copy.data.get(..copy.bytes).unwrap_or_default();
            machine.shared.land(copy.offset, data, stamp);
        }
    }
}
