//! Operations that the lanes of a warp do together (shuffles, votes, reductions, matches), and how lanes wait for each other.

use super::fault::{Fault, Step};
use super::machine::Machine;
use super::warp::Warp;
use crate::ir::{Inst, Op, Reduce, Shuffle, Together, Vote};
use crate::lanes::{BITS, Reg, every, lanes};
use crate::race::CLOCK_MAX;
use crate::report::Kind;

impl Warp {
    /// Lets the lanes of `mask`, which came to a warp-wide operation, do it if they are all of its members, else parks
    /// them. True if it was done.
    pub(super) fn meet(
        &mut self,
        machine: &mut Machine<'_>,
        what: &Together,
        members: Reg,
        mask: u32,
    ) -> Step<bool> {
        let missing = mask & !self.regs.set(members);
        if missing != 0 {
            return machine.unwritten(self, members, missing, "the mask of this operation");
        }
        let first = mask.trailing_zeros() as usize & 31;
        let wanted = self.regs.lane(members, first) as u32;
        let agree = match members {
            Reg::W(r) => {
                let here = self.regs.w[r].iter().zip(BITS);
                here.fold(0, |agree, (&w, bit)| agree | if w == wanted { bit } else { 0 })
            }
            _ => 0,
        };
        if wanted == mask && agree & mask == mask {
            self.together(machine, what, mask)?;
            return Ok(true);
        }
        for lane in lanes(mask) {
            let wanted = self.regs.lane(members, lane) as u32;
            if wanted >> lane & 1 == 0 {
                let detail =
                    format!("lane {lane} runs an operation whose mask {wanted:#010x} does not name it");
                return Fault::new(Kind::DivergentShuffle, lane, detail).fail();
            }
        }
        self.halt(mask);
        self.parked |= mask;
        self.at += 1;
        Ok(false)
    }

    /// With every lane waiting or gone: does the warp-wide operations whose members are all there. An error if lanes
    /// are parked and none can go on.
    pub(super) fn settle(&mut self, machine: &mut Machine<'_>) -> Step<bool> {
        let kernel = machine.kernel;
        let mut went = false;
        let mut absent = None;
        let mut rest = self.parked;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let pc = self.pc[lane];
            rest &= rest - 1;
            let Some(Inst { op: Op::Together { what, mask: members }, .. }) = kernel.code.get(pc) else {
                continue;
            };
            let wanted = self.regs.lane(*members, lane) as u32;
            let here = |l: usize| {
                self.parked >> l & 1 == 1 && self.pc[l] == pc && self.regs.lane(*members, l) as u32 == wanted
            };
            if let Some(other) = lanes(wanted).find(|&l| !here(l)) {
                absent.get_or_insert((lane, other, wanted));
                continue;
            }
            rest &= !wanted;
            self.at = pc;
            self.active = 0;
            self.together(machine, what, wanted)?;
            self.parked &= !wanted;
            lanes(wanted).for_each(|l| self.pc[l] = pc + 1);
            went = true;
        }
        if let (false, Some((lane, other, wanted))) = (went, absent) {
            let line = |l: usize| kernel.code.get(self.pc[l]).map_or(0, |inst| inst.line);
            let place = if self.exists >> other & 1 == 0 {
                "does not exist in this block".to_owned()
            } else if self.exited >> other & 1 == 1 {
                "has left the kernel".to_owned()
            } else if self.at_barrier >> other & 1 == 1 {
                format!("waits at the barrier of PTX line {}", line(other))
            } else if self.pc[other] == self.pc[lane] {
                "names another mask".to_owned()
            } else {
                format!("waits at PTX line {}", line(other))
            };
            let detail = format!("lane {other} is in the mask {wanted:#010x} and not here: it {place}");
            return Fault::new(Kind::DivergentShuffle, lane, detail).at(self.pc[lane]).fail();
        }
        Ok(went)
    }

    /// Does `what` for `members`, all of which are here.
    fn together(&mut self, machine: &mut Machine<'_>, what: &Together, members: u32) -> Step {
        match *what {
            Together::Shuffle { kind, d, p, a, b, c } => {
                self.shuffle(machine, kind, (d, p), (a, b, c), members)?
            }
            Together::Vote { kind, d, a } => {
                let yes = self.condition(a) & members;
                let value = match kind {
                    Vote::All => u32::from(yes == members),
                    Vote::Any => u32::from(yes != 0),
                    Vote::Uniform => u32::from(yes == members || yes == 0),
                    Vote::Ballot => yes,
                    Vote::Count => yes.count_ones(),
                };
                let good = self.regs.p_set[a.pred] & members == members;
                self.give(d, members, value, good);
            }
            Together::Reduce { kind, d, a } => {
                let mut values = lanes(members).map(|lane| self.regs.lane(a, lane) as u32);
                let first = values.next().unwrap_or(0);
                let value = values.fold(first, |x, y| match kind {
                    Reduce::Add => x.wrapping_add(y),
                    Reduce::MinU => x.min(y),
                    Reduce::MaxU => x.max(y),
                    Reduce::MinS => (x as i32).min(y as i32) as u32,
                    Reduce::MaxS => (x as i32).max(y as i32) as u32,
                    Reduce::And => x & y,
                    Reduce::Or => x | y,
                    Reduce::Xor => x ^ y,
                });
                let good = self.regs.set(a) & members == members;
                self.give(d, members, value, good);
            }
            Together::MatchAny { d, a } => {
                let good = self.regs.set(a) & members == members;
                let values: Vec<u64> = (0..32).map(|lane| self.regs.lane(a, lane)).collect();
                for lane in lanes(members) {
                    let same =
                        lanes(members).filter(|&l| values[l] == values[lane]).fold(0u32, |m, l| m | 1 << l);
                    self.regs.put(d, lane, u64::from(same));
                }
                self.regs.mark(d, members, if good { !0 } else { 0 });
            }
            Together::MatchAll { d, p, a } => {
                let good = self.regs.set(a) & members == members;
                let mut values = lanes(members).map(|lane| self.regs.lane(a, lane));
                let first = values.next();
                let same = values.all(|value| Some(value) == first);
                self.give(d, members, if same { members } else { 0 }, good);
                if let Some(p) = p {
                    self.give(Reg::P(p), members, u32::from(same), good);
                }
            }
            Together::Barrier => {}
            // These wait for all lanes, and promise nothing about memory.
            Together::Multiply { elements, d, a, b, c } => {
                return self.multiply(machine, elements, d, (a, b, c));
            }
            Together::LoadMatrix { mem, d, transposed } => {
                return self.load_matrix(machine, &mem, d, transposed);
            }
        }
        // CUDA C++ Programming Guide, "Warp Vote Functions": "These intrinsics do not imply a memory barrier. They do
        // not guarantee any memory ordering." Likewise reductions and matches.
        if !matches!(what, Together::Shuffle { .. } | Together::Barrier) {
            return Ok(());
        }
        let clock = self.clock;
        let mut latest = 0;
        for (lane, clock) in clock.iter().enumerate() {
            latest = latest.max(if members & BITS[lane] != 0 { *clock } else { 0 });
        }
        every(&mut self.clock, members, |_| (latest + 1).min(CLOCK_MAX));
        Ok(())
    }

    fn give(&mut self, d: Reg, members: u32, value: u32, good: bool) {
        lanes(members).for_each(|lane| self.regs.put(d, lane, u64::from(value)));
        self.regs.mark(d, members, if good { !0 } else { 0 });
    }

    fn shuffle(
        &mut self,
        machine: &Machine<'_>,
        kind: Shuffle,
        (d, p): (Option<Reg>, Option<usize>),
        (a, b, c): (Reg, Reg, Reg),
        members: u32,
    ) -> Step {
        for (reg, what) in [(b, "the distance of this shuffle"), (c, "the clamp of this shuffle")] {
            let missing = members & !self.regs.set(reg);
            if missing != 0 {
                return machine.unwritten(self, reg, missing, what);
            }
        }
        let (Reg::W(a), Reg::W(b), Reg::W(c)) = (a, b, c) else { return Ok(()) };
        let set = self.regs.w_set[a];
        let (values, distances, clamps) = (self.regs.w[a], self.regs.w[b], self.regs.w[c]);
        let mut out = match d {
            Some(Reg::W(d)) => self.regs.w[d],
            _ => values,
        };
        let (mut inside, mut good) = (0u32, 0u32);
        for lane in lanes(members) {
            let (b, c) = (distances[lane] & 31, clamps[lane]);
            let (segment, clamp) = (c >> 8 & 31, c & 31);
            let here = lane as u32;
            let last = here & segment | clamp & !segment;
            let (from, valid) = match kind {
                Shuffle::Up => (here.wrapping_sub(b), (here as i32 - b as i32) >= last as i32),
                Shuffle::Down => (here + b, here + b <= last),
                Shuffle::Butterfly => (here ^ b, here ^ b <= last),
                Shuffle::Index => {
                    let from = here & segment | b & !segment;
                    (from, from <= last)
                }
            };
            let from = if valid { from as usize & 31 } else { lane };
            if members >> from & 1 == 0 {
                let detail =
                    format!("lane {lane} reads lane {from}, which is not in the mask {members:#010x}");
                return Fault::new(Kind::DivergentShuffle, lane, detail).fail();
            }
            inside |= u32::from(valid) << lane;
            good |= (set >> from & 1) << lane;
            out[lane] = values[from];
        }
        if let Some(Reg::W(d)) = d {
            self.regs.w[d] = out;
            self.regs.mark(Reg::W(d), members, good);
        }
        if let Some(p) = p {
            self.regs.p[p] = self.regs.p[p] & !members | inside;
            self.regs.mark(Reg::P(p), members, !0);
        }
        Ok(())
    }
}
