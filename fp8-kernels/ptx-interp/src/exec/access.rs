//! Loads and stores with every check: bounds, alignment, unwritten bytes, races.

use super::fault::{Fault, Step};
use super::group::extended;
use super::machine::Machine;
use super::spot::Spot;
use super::warp::Warp;
use crate::ir::{Mem, Space};
use crate::lanes::{Reg, lanes};
use crate::race::{Access, Stamp};
use crate::region::Region;
use crate::report::Kind;

impl Machine<'_> {
    /// Name, first byte and length of what bounds a shared access.
    fn shared_bounds(&self, mem: &Mem) -> (String, u64, u64) {
        let total = self.shared.data.len() as u64;
        match mem.array.and_then(|index| self.kernel.arrays.get(index)) {
            Some(array) => match array.bytes {
                Some(bytes) => (format!("shared array '{}'", array.name), array.offset as u64, bytes as u64),
                None => {
                    let first = self.kernel.dynamic_offset() as u64;
                    (format!("dynamic shared array '{}'", array.name), first, total.saturating_sub(first))
                }
            },
            None => ("shared memory".to_owned(), 0, total),
        }
    }

    /// The region and offset of an access, checked for bounds and alignment.
    #[inline]
    pub(crate) fn resolve(
        &mut self,
        warp: &Warp,
        mem: &Mem,
        spot: Spot,
        lane: usize,
    ) -> Step<(&mut Region, usize)> {
        let total = mem.bytes * mem.count;
        let Spot { space, address } = spot;
        if address & (total as u64 - 1) != 0 {
            return self.misplaced(mem, spot, lane, Kind::Misaligned);
        }
        if space == Space::Shared {
            if let Some(array) = mem.array {
                let inside = self.kernel.arrays.get(array).is_some_and(|array| match array.bytes {
                    Some(bytes) => {
                        address >= array.offset as u64
                            && address + total as u64 <= (array.offset + bytes) as u64
                    }
                    None => address >= self.kernel.dynamic_offset() as u64,
                });
                if !inside {
                    return self.misplaced(mem, spot, lane, Kind::OutOfBounds);
                }
            }
            return match self.shared.offset(address, total) {
                Some(offset) => Ok((&mut self.shared, offset)),
                None => self.misplaced(mem, spot, lane, Kind::OutOfBounds),
            };
        }
        if let Some(index) = self.nearest(warp, address, total) {
            let region = &mut self.space.live[index];
            let offset = region.offset(address, total).unwrap_or(0);
            return Ok((region, offset));
        }
        let variable = self.variables.iter().position(|region| region.offset(address, total).is_some());
        match variable {
            Some(index) => {
                let region = &mut self.variables[index];
                let offset = region.offset(address, total).unwrap_or(0);
                Ok((region, offset))
            }
            None => self.misplaced(mem, spot, lane, Kind::OutOfBounds),
        }
    }

    /// The live allocation that holds the bytes, tried first where this instruction found one before.
    #[inline]
    pub(super) fn nearest(&mut self, warp: &Warp, address: u64, bytes: usize) -> Option<usize> {
        let holds =
            |index: usize| self.space.live.get(index).is_some_and(|r| r.offset(address, bytes).is_some());
        let met = self.met.get(warp.at).copied().unwrap_or(0);
        if holds(met) {
            return Some(met);
        }
        let index = self.space.find(address).filter(|&index| holds(index))?;
        if let Some(met) = self.met.get_mut(warp.at) {
            *met = index;
        }
        Some(index)
    }

    /// Describes the place of a spot in words. Also returns the label of the allocation or array.
    #[cold]
    pub(crate) fn describe(&self, mem: &Mem, spot: Spot) -> (String, Option<String>) {
        if spot.space == Space::Shared {
            let (name, first, bytes) = self.shared_bounds(mem);
            let label =
                mem.array.and_then(|index| self.kernel.arrays.get(index)).map(|array| array.name.clone());
            let text = if spot.address < first {
                format!("{} bytes before {name} ({bytes} bytes)", first - spot.address)
            } else if spot.address >= first + bytes {
                format!("{} bytes past the end of {name} ({bytes} bytes)", spot.address - first - bytes)
            } else {
                format!("byte {} of {name} ({bytes} bytes)", spot.address - first)
            };
            return (text, label);
        }
        let place = self.space.place(spot.address);
        (place.text, place.label)
    }

    #[cold]
    pub(super) fn misplaced<T>(&self, mem: &Mem, spot: Spot, lane: usize, kind: Kind) -> Step<T> {
        let total = mem.bytes * mem.count;
        let (text, label) = self.describe(mem, spot);
        let freed = spot.space != Space::Shared && self.space.place(spot.address).freed;
        let kind = if kind == Kind::OutOfBounds && freed { Kind::UseAfterFree } else { kind };
        let needs = if kind == Kind::Misaligned {
            format!(", which is no multiple of {total}")
        } else {
            String::new()
        };
        let detail = format!("{total} bytes at {:#x}{needs}: {text}", spot.address);
        Fault::new(kind, lane, detail).address(spot.address, label).fail()
    }
}

impl Warp {
    pub(crate) fn stamp(&self, machine: &Machine<'_>, lane: usize) -> Stamp {
        Stamp::new(machine.phase, self.clock[lane], (self.index * 32 + lane) as u32)
    }

    /// An error if the address of a lane of `mask` is unwritten.
    #[inline]
    pub(crate) fn addressed(&self, machine: &Machine<'_>, mem: &Mem, mask: u32) -> Step {
        let missing = mask & !self.regs.set(mem.base);
        if missing == 0 { Ok(()) } else { machine.unwritten(self, mem.base, missing, "the address") }
    }

    /// The offset of a local access in the warp's local memory.
    fn local_offset(&self, machine: &Machine<'_>, mem: &Mem, spot: Spot, lane: usize) -> Step<usize> {
        let (total, size) = (mem.bytes * mem.count, machine.kernel.local_bytes);
        let inside = spot.address.checked_add(total as u64).is_some_and(|end| end <= size as u64);
        if !inside || !spot.address.is_multiple_of(total as u64) {
            let kind = if inside { Kind::Misaligned } else { Kind::LocalMemory };
            let detail = format!("{total} bytes at {} of {size} bytes of local memory", spot.address);
            return Fault::new(kind, lane, detail).address(spot.address, None).fail();
        }
        Ok(lane * size + spot.address as usize)
    }

    /// `ld.param` of one unsigned value at the same place for all lanes, as nearly all are. False if it is another.
    fn load_param(&mut self, machine: &Machine<'_>, mem: &Mem, d: &[Option<Reg>], mask: u32) -> bool {
        let first = self.spot(mem, mask.trailing_zeros() as usize & 31);
        let (at, bytes) = (first.address as usize, mem.bytes);
        let (Space::Param, [Some(d)]) = (mem.space, d) else { return false };
        let Some(source) = at.checked_add(bytes).and_then(|end| machine.launch.params.get(at..end)) else {
            return false;
        };
        let value = source.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        if lanes(mask).any(|lane| self.spot(mem, lane).address != first.address) {
            return false;
        }
        lanes(mask).for_each(|lane| self.regs.put(*d, lane, value));
        self.regs.mark(*d, mask, !0);
        true
    }

    /// `ld`
    pub(crate) fn load(
        &mut self,
        machine: &mut Machine<'_>,
        mem: &Mem,
        d: &[Option<Reg>],
        extend: u32,
        mask: u32,
    ) -> Step {
        self.addressed(machine, mem, mask)?;
        if self.load_group(machine, mem, d, extend, mask)?
            || (extend == 0 && self.load_param(machine, mem, d, mask))
        {
            return Ok(());
        }
        let (bytes, total) = (mem.bytes, mem.bytes * mem.count);
        let (bits, span) = (total.trailing_zeros(), machine.span);
        // Lanes whose every element is a written one, and, by element, those that are not.
        let mut good = [0u32; 8];
        for lane in lanes(mask) {
            let spot = self.spot(mem, lane);
            let values: [u64; 8];
            match spot.space {
                Space::Param => {
                    let params = machine.launch.params;
                    let at = spot.address as usize;
                    if params.len() < total || spot.address > (params.len() - total) as u64 {
                        let detail = format!("{total} bytes at {at} of {} bytes of parameters", params.len());
                        return Fault::new(Kind::OutOfBounds, lane, detail).fail();
                    }
                    values = std::array::from_fn(|e| {
                        let bytes =
                            params.get(at + e * bytes..at + (e + 1) * bytes).filter(|_| e < mem.count);
                        bytes.map_or(0, |b| b.iter().rev().fold(0, |v, &byte| v << 8 | u64::from(byte)))
                    });
                    good.iter_mut().for_each(|g| *g |= 1 << lane);
                }
                Space::Local => {
                    let offset = self.local_offset(machine, mem, spot, lane)?;
                    values = std::array::from_fn(|e| {
                        if e < mem.count { self.local.load(offset + e * bytes, bytes) } else { 0 }
                    });
                    for (e, g) in good.iter_mut().enumerate().take(mem.count) {
                        *g |= u32::from(self.local.init.all(offset + e * bytes, bytes)) << lane;
                    }
                }
                _ => {
                    let stamp = self.stamp(machine, lane);
                    let (region, offset) = machine.resolve(self, mem, spot, lane)?;
                    if region.init.all(offset, total) {
                        good.iter_mut().take(mem.count).for_each(|g| *g |= 1 << lane);
                    } else {
                        for (e, g) in good.iter_mut().enumerate().take(mem.count) {
                            *g |= u32::from(region.init.all(offset + e * bytes, bytes)) << lane;
                        }
                    }
                    values = if mem.count == 1 {
                        let mut values = [0; 8];
                        values[0] = region.load(offset, bytes);
                        values
                    } else {
                        std::array::from_fn(|e| {
                            if e < mem.count { region.load(offset + e * bytes, bytes) } else { 0 }
                        })
                    };
                    if let Some(conflict) = region.touch(offset, bits, stamp, mem.access, span) {
                        let (text, label) = machine.describe(mem, spot);
                        return machine.race(self, lane, conflict, false, (spot.address, text, label));
                    }
                }
            }
            for (d, value) in d.iter().zip(values) {
                let Some(d) = *d else { continue };
                self.regs.put(d, lane, extended(value, bytes, extend));
            }
        }
        for (d, good) in d.iter().zip(good) {
            if let Some(d) = *d {
                self.regs.mark(d, mask, good);
            }
        }
        Ok(())
    }

    /// `st`
    pub(crate) fn store(&mut self, machine: &mut Machine<'_>, mem: &Mem, s: &[Reg], mask: u32) -> Step {
        self.addressed(machine, mem, mask)?;
        if self.store_group(machine, mem, s, mask)? {
            return Ok(());
        }
        let (bytes, total) = (mem.bytes, mem.bytes * mem.count);
        let (bits, span) = (total.trailing_zeros(), machine.span);
        for lane in lanes(mask) {
            let spot = self.spot(mem, lane);
            let is_global = spot.space == Space::Global;
            if is_global && let Some(source) = s.iter().find(|s| self.regs.set(**s) >> lane & 1 == 0) {
                return machine.unwritten(self, *source, 1 << lane, "what is stored to global memory");
            }
            match spot.space {
                Space::Param => return Fault::new(Kind::ReadOnly, lane, "a parameter is written").fail(),
                Space::Local => {
                    let offset = self.local_offset(machine, mem, spot, lane)?;
                    for (e, source) in s.iter().enumerate() {
                        let at = offset + e * bytes;
                        self.local.store(at, bytes, self.regs.lane(*source, lane));
                        self.local.init.set(at, bytes, self.regs.set(*source) >> lane & 1 == 1);
                    }
                }
                _ => {
                    let stamp = self.stamp(machine, lane);
                    let (region, offset) = machine.resolve(self, mem, spot, lane)?;
                    if region.read_only {
                        let label = region.label.clone();
                        let detail = format!("variable '{label}' of the module is written");
                        return Fault::new(Kind::ReadOnly, lane, detail)
                            .address(spot.address, Some(label))
                            .fail();
                    }
                    if let Some(conflict) = region.touch(offset, bits, stamp, mem.access, span) {
                        let (text, label) = machine.describe(mem, spot);
                        return machine.race(self, lane, conflict, true, (spot.address, text, label));
                    }
                    for (e, source) in s.iter().enumerate() {
                        let at = offset + e * bytes;
                        region.store(at, bytes, self.regs.lane(*source, lane));
                        region.init.set(at, bytes, self.regs.set(*source) >> lane & 1 == 1);
                    }
                }
            }
        }
        debug_assert!(matches!(mem.access, Access::Write | Access::Atomic));
        Ok(())
    }
}
