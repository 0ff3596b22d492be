//! Loads and stores of lanes that all lie well within one allocation: the checks of a whole warp at once.
//!
//! Whatever is not so plain (local memory, lanes of several allocations, anything out of place or unwritten where that
//! matters) is left to the lane by lane form of [`super::access`], which names what is wrong.

use super::fault::Step;
use super::machine::Machine;
use super::warp::Warp;
use crate::ir::{Mem, SHARED_WINDOW, Space};
use crate::lanes::{Reg, lanes};
use crate::race::Conflict;
use crate::region::Region;

/// The allocation of a group.
#[derive(Clone, Copy)]
enum Home {
    Shared,
    Live(usize),
}

/// The places of a group's lanes in their allocation.
struct Group {
    home: Home,
    offsets: [usize; 32],
}

impl Machine<'_> {
    fn home(&mut self, home: Home) -> Option<&mut Region> {
        match home {
            Home::Shared => Some(&mut self.shared),
            Home::Live(index) => self.space.live.get_mut(index),
        }
    }

    /// Notes the accesses of a group; the first lane in conflict, if any.
    fn touch(&mut self, warp: &Warp, mem: &Mem, group: &Group, mask: u32) -> Option<(usize, Conflict)> {
        let (bits, span, access) = ((mem.bytes * mem.count).trailing_zeros(), self.span, mem.access);
        if span.ignored {
            return None;
        }
        let stamps: [_; 32] = std::array::from_fn(|lane| warp.stamp(self, lane));
        let region = self.home(group.home)?;
        lanes(mask).find_map(|lane| {
            let conflict = region.touch(group.offsets[lane], bits, stamps[lane], access, span)?;
            Some((lane, conflict))
        })
    }
}

impl Warp {
    fn group(&self, machine: &mut Machine<'_>, mem: &Mem, mask: u32) -> Option<Group> {
        let total = (mem.bytes * mem.count) as u64;
        let first = self.spot(mem, mask.trailing_zeros() as usize & 31);
        // The address of the allocation's first byte, and the first and last offsets that an access may have.
        let (home, base, low, high) = match first.space {
            Space::Shared => {
                let length = machine.shared.data.len() as u64;
                let (low, end) = match mem.array.and_then(|array| machine.kernel.arrays.get(array)) {
                    Some(array) => match array.bytes {
                        Some(bytes) => (array.offset as u64, (array.offset + bytes) as u64),
                        None => (machine.kernel.dynamic_offset() as u64, length),
                    },
                    None => (0, length),
                };
                let base = if mem.space == Space::Generic { SHARED_WINDOW } else { 0 };
                (Home::Shared, base, low, end.min(length).checked_sub(total)?)
            }
            Space::Global => {
                let index = machine.nearest(self, first.address, total as usize)?;
                let region = machine.space.live.get(index)?;
                (Home::Live(index), region.base, 0, (region.data.len() as u64).checked_sub(total)?)
            }
            _ => return None,
        };
        let addresses = match mem.base {
            Reg::D(r) => self.regs.d[r].map(|address| address.wrapping_add(mem.offset as u64)),
            Reg::W(r) => self.regs.w[r].map(|address| u64::from(address.wrapping_add(mem.offset as u32))),
            Reg::P(_) => return None,
        };
        let mut outside = 0u32;
        let mut offsets = [0; 32];
        for lane in 0..32 {
            let offset = addresses[lane].wrapping_sub(base);
            offsets[lane] = offset as usize;
            let wrong = (offset < low) | (offset > high) | (addresses[lane] & (total - 1) != 0);
            outside |= u32::from(wrong) << lane;
        }
        (outside & mask == 0).then_some(Group { home, offsets })
    }

    /// `ld` of a group. False if the lanes are none.
    pub(super) fn load_group(
        &mut self,
        machine: &mut Machine<'_>,
        mem: &Mem,
        d: &[Option<Reg>],
        extend: u32,
        mask: u32,
    ) -> Step<bool> {
        let Some(group) = self.group(machine, mem, mask) else { return Ok(false) };
        if let Some((lane, conflict)) = machine.touch(self, mem, &group, mask) {
            let spot = self.spot(mem, lane);
            let (text, label) = machine.describe(mem, spot);
            return machine.race(self, lane, conflict, false, (spot.address, text, label));
        }
        let Some(region) = machine.home(group.home) else { return Ok(false) };
        let (bytes, whole) = (mem.bytes, region.init.whole());
        for (element, d) in d.iter().enumerate() {
            let Some(d) = *d else { continue };
            let skip = element * bytes;
            let good = if whole {
                !0
            } else {
                let written = |&lane: &usize| region.init.all(group.offsets[lane] + skip, bytes);
                lanes(mask).filter(written).fold(0, |good, lane| good | 1 << lane)
            };
            match (d, bytes, extend) {
                (Reg::W(r), 4, 0) => {
                    let out = &mut self.regs.w[r];
                    lanes(mask).for_each(|lane| out[lane] = region.word(group.offsets[lane] + skip));
                }
                _ => {
                    for lane in lanes(mask) {
                        let value = region.load(group.offsets[lane] + skip, bytes);
                        self.regs.put(d, lane, extended(value, bytes, extend));
                    }
                }
            }
            self.regs.mark(d, mask, good);
        }
        Ok(true)
    }

    /// `st` of a group. False if the lanes are none.
    pub(super) fn store_group(
        &self,
        machine: &mut Machine<'_>,
        mem: &Mem,
        s: &[Reg],
        mask: u32,
    ) -> Step<bool> {
        let good = s.iter().fold(mask, |good, source| good & self.regs.set(*source));
        if good != mask {
            return Ok(false);
        }
        let Some(group) = self.group(machine, mem, mask) else { return Ok(false) };
        if let Some((lane, conflict)) = machine.touch(self, mem, &group, mask) {
            let spot = self.spot(mem, lane);
            let (text, label) = machine.describe(mem, spot);
            return machine.race(self, lane, conflict, true, (spot.address, text, label));
        }
        let Some(region) = machine.home(group.home) else { return Ok(false) };
        let (bytes, total) = (mem.bytes, mem.bytes * mem.count);
        for lane in lanes(mask) {
            let offset = group.offsets[lane];
            for (element, source) in s.iter().enumerate() {
                region.store(offset + element * bytes, bytes, self.regs.lane(*source, lane));
            }
            region.init.set(offset, total, true);
        }
        Ok(true)
    }
}

/// A loaded value as its register holds it: `extend` bits of a signed one, 0 for others.
#[inline]
pub(super) fn extended(value: u64, bytes: usize, extend: u32) -> u64 {
    if extend == 0 {
        return value;
    }
    let spare = 64 - 8 * bytes as u32;
    ((value << spare) as i64 >> spare) as u64 & u64::MAX >> (64 - extend)
}
