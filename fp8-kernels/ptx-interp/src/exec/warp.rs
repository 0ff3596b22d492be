//! One warp: 32 lanes, each with its own place in the code, run in groups that share the lowest one.
//!
//! Lanes that jump back run later than those behind them in the text, so structured code comes together again without
//! any knowledge of its structure.

use super::copies::Copies;
use super::fault::{Fault, Step};
use super::machine::{Machine, coordinates};
use super::on_registers;
use crate::ir::{Inst, Logic, Op, Special};
use crate::lanes::{Reg, Registers, lanes};
use crate::region::Region;
use crate::report::Kind;

/// A warp of the running block.
#[derive(Debug)]
pub(crate) struct Warp {
    pub(crate) regs: Registers,
    /// The place of each lane in the code, unless the lane is active.
    pub(crate) pc: [usize; 32],
    /// Lanes that have a thread.
    pub(crate) exists: u32,
    pub(crate) exited: u32,
    pub(crate) at_barrier: u32,
    /// Lanes that wait for others of the warp.
    pub(crate) parked: u32,
    /// The lanes running now, at `at`, and how many they are.
    pub(crate) active: u32,
    pub(super) count: u32,
    pub(crate) at: usize,
    /// Lowest place of the lanes that could run but do not.
    next: usize,
    /// Lamport clocks of the lanes, counted from the last barrier.
    pub(crate) clock: [u32; 32],
    pub(crate) local: Region,
    /// Asynchronous copies under way.
    pub(super) copies: Copies,
    pub(crate) index: usize,
    steps: u64,
    /// The marks of a warp that has not run: constants and special registers are written.
    fresh: [Vec<u32>; 3],
}

impl Drop for Warp {
    fn drop(&mut self) {
        std::mem::take(&mut self.regs).recycle();
    }
}

impl Warp {
    pub(crate) fn new(machine: &Machine<'_>, index: usize, threads: usize) -> Self {
        let counts = machine.kernel.counts;
        let regs = Registers::new([counts.w, counts.d, counts.p]);
        let mut warp = Self {
            regs,
            pc: [0; 32],
            exists: u32::MAX >> (32 - threads.clamp(1, 32)),
            exited: 0,
            at_barrier: 0,
            parked: 0,
            active: 0,
            count: 0,
            at: 0,
            next: usize::MAX,
            clock: [0; 32],
            copies: Copies::default(),
            local: Region::new(0, machine.kernel.local_bytes * 32, "local memory"),
            index,
            steps: 0,
            fresh: Default::default(),
        };
        // No instruction writes these.
        for (reg, value) in &machine.kernel.constants {
            warp.regs.fill(*reg, *value);
            warp.regs.mark(*reg, !0, !0);
        }
        for (special, reg, extra) in &machine.kernel.specials {
            warp.place(machine, *special, *reg, *extra);
            warp.regs.mark(*reg, !0, !0);
        }
        warp.fresh = [warp.regs.w_set.clone(), warp.regs.d_set.clone(), warp.regs.p_set.clone()];
        warp
    }

    /// Puts all lanes at the start of a new block.
    pub(crate) fn start(&mut self, machine: &Machine<'_>) {
        self.pc = [0; 32];
        (self.exited, self.at_barrier, self.parked, self.active) = (0, 0, 0, 0);
        (self.clock, self.steps) = ([0; 32], 0);
        self.copies = Copies::default();
        let [w, d, p] = &self.fresh;
        self.regs.w_set.copy_from_slice(w);
        self.regs.d_set.copy_from_slice(d);
        self.regs.p_set.copy_from_slice(p);
        if machine.kernel.local_bytes > 0 {
            self.local.reset(0);
        }
        for (special, reg, extra) in &machine.kernel.specials {
            if let Special::Ctaid(_) = special {
                self.place(machine, *special, *reg, *extra);
            }
        }
    }

    /// Fills a special register.
    fn place(&mut self, machine: &Machine<'_>, special: Special, reg: Reg, extra: u64) {
        let launch = machine.launch;
        let threads = launch.block.iter().product::<u32>();
        for lane in 0..32u32 {
            let thread = coordinates(self.index as u32 * 32 + lane, launch.block);
            let value = match special {
                Special::Tid(axis) => thread[axis],
                Special::Ntid(axis) => launch.block[axis],
                Special::Ctaid(axis) => machine.block[axis],
                Special::Nctaid(axis) => launch.grid[axis],
                Special::LaneId => lane,
                Special::WarpId => self.index as u32,
                Special::WarpCount => threads.div_ceil(32),
                Special::MaskEq => 1 << lane,
                Special::MaskLt => (1 << lane) - 1,
                Special::MaskLe => u32::MAX >> (31 - lane),
                Special::MaskGt => !(u32::MAX >> (31 - lane)),
                Special::MaskGe => !((1 << lane) - 1),
                Special::DynamicShared => machine.kernel.dynamic_offset() as u32,
                Special::DynamicSize => launch.dynamic_shared as u32,
                Special::TotalSize => machine.shared.data.len() as u32,
            };
            self.regs.put(reg, lane as usize, u64::from(value).wrapping_add(extra));
        }
    }

    /// Lanes that could go on.
    pub(crate) fn runnable(&self) -> u32 {
        self.exists & !self.exited & !self.at_barrier & !self.parked
    }

    /// Activates the lanes that share the lowest place. False if none can run.
    fn pick(&mut self) -> bool {
        lanes(self.active).for_each(|lane| self.pc[lane] = self.at);
        let runnable = self.runnable();
        self.active = 0;
        (self.at, self.next) = (usize::MAX, usize::MAX);
        for lane in lanes(runnable) {
            let pc = self.pc[lane];
            if pc < self.at {
                (self.next, self.at, self.active) = (self.at, pc, 1 << lane);
            } else if pc == self.at {
                self.active |= 1 << lane;
            } else {
                self.next = self.next.min(pc);
            }
        }
        self.count = self.active.count_ones();
        self.active != 0
    }

    /// Sends the lanes of `mask`, which are active, to `pc`, out of the active group.
    fn send(&mut self, mask: u32, pc: usize) {
        lanes(mask).for_each(|lane| self.pc[lane] = pc);
        self.active &= !mask;
        self.count = self.active.count_ones();
        self.next = self.next.min(pc);
    }

    /// Runs until no lane can go on or `budget` instructions are over.
    pub(crate) fn run(&mut self, machine: &mut Machine<'_>, budget: u64) -> Step {
        let kernel = machine.kernel;
        let limit = machine.launch.step_limit;
        let mut left = budget;
        loop {
            while self.active == 0 || self.at >= self.next {
                if !self.pick() && (self.parked == 0 || !self.settle(machine)?) {
                    return Ok(());
                }
            }
            if left == 0 {
                return Ok(());
            }
            left -= 1;
            self.steps += 1;
            if self.steps > limit {
                let lane = self.active.trailing_zeros() as usize;
                let detail = format!("a warp ran {limit} instructions in this block and did not end");
                return Fault::new(Kind::StepLimit, lane, detail).fail();
            }
            let Some(inst) = kernel.code.get(self.at) else { return Ok(()) };
            machine.stats.warp_instructions += 1;
            machine.stats.thread_instructions += u64::from(self.count);
            // Most instructions by far.
            if let (None, Op::Map { run, d, s, .. }) = (inst.guard, &inst.op) {
                run(&mut self.regs, d.number(), s.map(Reg::number), self.active);
                self.at += 1;
                continue;
            }
            self.step(machine, inst)?;
        }
    }

    /// Runs one instruction of the active lanes.
    #[inline]
    fn step(&mut self, machine: &mut Machine<'_>, inst: &Inst) -> Step {
        let mut mask = self.active;
        if let Some(guard) = inst.guard {
            let missing = mask & !self.regs.p_set[guard.pred];
            if missing != 0 {
                return machine.unwritten(
                    self,
                    Reg::P(guard.pred),
                    missing,
                    "the condition of this instruction",
                );
            }
            mask &= self.condition(guard);
            if mask == 0 {
                self.at += 1;
                return Ok(());
            }
        }
        match &inst.op {
            Op::Map { run, d, s, .. } => run(&mut self.regs, d.number(), s.map(Reg::number), mask),
            Op::Set { test, a, b, p, q, with } => {
                let truth = test(&self.regs, a.number(), b.number());
                let mut good = self.regs.set(*a) & self.regs.set(*b);
                let (mut yes, mut no) = (truth, !truth);
                if let Some((kind, cond)) = with {
                    let other = self.condition(*cond);
                    good &= self.regs.p_set[cond.pred];
                    (yes, no) = match kind {
                        Logic::And => (yes & other, no & other),
                        Logic::Or => (yes | other, no | other),
                        Logic::Xor => (yes ^ other, no ^ other),
                    };
                }
                for (target, value) in [(p, yes), (q, no)] {
                    if let Some(target) = *target {
                        self.regs.p[target] = self.regs.p[target] & !mask | value & mask;
                        self.regs.mark(Reg::P(target), mask, good);
                    }
                }
            }
            Op::Branch { target } => {
                if mask == self.active {
                    self.at = *target;
                } else {
                    self.send(mask, *target);
                    self.at += 1;
                }
                return Ok(());
            }
            Op::Load { mem, d, extend } => self.load(machine, mem, d, *extend, mask)?,
            Op::Store { mem, s } => self.store(machine, mem, s, mask)?,
            Op::Together { what, mask: members } => {
                if !self.meet(machine, what, *members, mask)? {
                    return Ok(());
                }
            }
            Op::Barrier { .. } => {
                self.halt(mask);
                self.at_barrier |= mask;
            }
            Op::Exit => {
                self.halt(mask);
                self.exited |= mask;
            }
            other => self.rare(machine, other, mask)?,
        }
        self.at += 1;
        Ok(())
    }

    /// Operations that need not be fast.
    fn rare(&mut self, machine: &mut Machine<'_>, op: &Op, mask: u32) -> Step {
        match op {
            Op::Atomic { mem, kind, ty, d, b, c } => {
                self.atomic(machine, mem, (*kind, *ty), (*d, *b, *c), mask)?
            }
            Op::Jump { index, targets } => {
                let missing = mask & !self.regs.set(*index);
                if missing != 0 {
                    return machine.unwritten(self, *index, missing, "the index of this jump");
                }
                for lane in lanes(mask) {
                    let index = self.regs.lane(*index, lane) as usize;
                    let Some(target) = targets.get(index) else {
                        let detail = format!("jump to entry {index} of {}", targets.len());
                        return Fault::new(Kind::OutOfBounds, lane, detail).fail();
                    };
                    self.send(1 << lane, *target);
                }
            }
            Op::ActiveMask { d } => {
                // PTX ISA, activemask: an "exited or inactive or predicated-off thread will contribute 0".
                let value = u64::from(mask);
                lanes(mask).for_each(|lane| self.regs.put(*d, lane, value));
                self.regs.mark(*d, mask, !0);
            }
            Op::Copy { to, from, size } => self.copy(machine, to, from, *size, mask)?,
            Op::Commit => self.copies.commit(mask),
            Op::Wait { most } => self.wait(machine, *most, mask),
            Op::Trap => {
                let lane = mask.trailing_zeros() as usize & 31;
                return Fault::new(Kind::Trap, lane, "the kernel stopped itself").fail();
            }
            other => on_registers::run(&mut self.regs, other, mask),
        }
        Ok(())
    }
}
