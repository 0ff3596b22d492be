//! Running a launch: block after block, in each the warps in turn until all wait.

mod access;
mod active;
mod atomic;
mod blame;
mod convert;
mod copies;
mod copy;
mod fault;
mod group;
mod machine;
mod matrix;
mod on_registers;
mod spot;
mod together;
mod warp;

use crate::ir::{Op, VARIABLES};
use crate::lanes::lanes;
use crate::memory::Memory;
use crate::module::Kernel;
use crate::race::Span;
use crate::region::Region;
use crate::report::{Kind, Report};
use blame::report;
use fault::Fault;
use machine::{Machine, Order};
use warp::Warp;

pub use machine::{Launch, Stats, splitmix64};

/// The most shared memory a block can have.
const SHARED_LIMIT: usize = 227 << 10;

/// Runs `kernel` to its end.
///
/// # Errors
/// The first check that fails: see [`Kind`]. Memory keeps what was written until then.
pub fn run(kernel: &Kernel, launch: &Launch<'_>, memory: &Memory) -> Result<Stats, Box<Report>> {
    if let Err((kind, detail)) = shape(kernel, launch) {
        return Err(report(kernel, launch, [0; 3], None, Fault::new(kind, 0, detail)));
    }
    let mut space = memory.space();
    let first = space.start_launch();
    let mut base = VARIABLES;
    let variable = |variable: &crate::module::Variable| {
        let mut region = Region::new(base, variable.data.len(), &variable.name);
        base = (base + variable.data.len() as u64).next_multiple_of(256) + 256;
        region.data.copy_from_slice(&variable.data);
        region.init.set(0, variable.data.len(), true);
        region.read_only = true;
        region
    };
    let mut machine = Machine {
        kernel,
        launch,
        variables: kernel.variables.iter().map(variable).collect(),
        shared: Region::new(0, kernel.dynamic_offset() + launch.dynamic_shared, "shared memory"),
        met: vec![0; kernel.code.len()],
        span: Span { launch: first, block: first, ignored: !launch.races },
        phase: first,
        block: [0; 3],
        order: (launch.seed != 0).then_some(Order(launch.seed)),
        stats: Stats::default(),
        space: &mut space,
    };
    let result = machine.blocks();
    let (stats, phase) = (machine.stats, machine.phase);
    space.end_launch(phase);
    result.map(|()| stats)
}

/// Refuses a launch that no device would start.
fn shape(kernel: &Kernel, launch: &Launch<'_>) -> Result<(), (Kind, String)> {
    let wrong = |detail: String| Err((Kind::LaunchShape, detail));
    let ([x, y, z], [i, j, k]) = (launch.grid, launch.block);
    if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > 65535 || z > 65535 {
        return wrong(format!("grid ({x}, {y}, {z}): 1 to (2147483647, 65535, 65535) are possible"));
    }
    let threads = u64::from(i) * u64::from(j) * u64::from(k);
    if threads == 0 || threads > 1024 || k > 64 {
        return wrong(format!("block ({i}, {j}, {k}): 1 to 1024 threads, at most 64 deep, are possible"));
    }
    if let Some(most) = kernel.max_threads.filter(|&most| threads > u64::from(most)) {
        return wrong(format!(
            "block ({i}, {j}, {k}): {} was compiled for at most {most} threads",
            kernel.name
        ));
    }
    if launch.params.len() != kernel.params_size {
        let (given, wanted) = (launch.params.len(), kernel.params_size);
        return wrong(format!("{given} bytes of parameters: {} takes {wanted}", kernel.name));
    }
    let shared = kernel.dynamic_offset().saturating_add(launch.dynamic_shared);
    if shared > SHARED_LIMIT {
        let detail = format!("{shared} bytes of shared memory: a block can have {SHARED_LIMIT}");
        return Err((Kind::SharedSize, detail));
    }
    Ok(())
}

impl Machine<'_> {
    fn blocks(&mut self) -> Result<(), Box<Report>> {
        let [gx, gy, gz] = self.launch.grid;
        let total = u64::from(gx) * u64::from(gy) * u64::from(gz);
        let threads = self.launch.block.iter().product::<u32>() as usize;
        let mut warps: Vec<Warp> =
            (0..threads.div_ceil(32)).map(|w| Warp::new(self, w, (threads - w * 32).min(32))).collect();
        // A permutation without a table: multiply by something coprime to the count, and shift.
        let (factor, shift) = match &mut self.order {
            None => (1, 0),
            Some(order) => {
                let mut factor = (order.next() % total) | 1;
                while gcd(factor, total) != 1 {
                    factor += 2;
                }
                (factor, order.next() % total)
            }
        };
        for n in 0..total {
            let index = ((u128::from(n) * u128::from(factor) + u128::from(shift)) % u128::from(total)) as u64;
            let (x, rest) = (index % u64::from(gx), index / u64::from(gx));
            self.block = [x as u32, (rest % u64::from(gy)) as u32, (rest / u64::from(gy)) as u32];
            if n > 0 {
                self.phase = self.phase.saturating_add(1);
            }
            self.span.block = self.phase;
            self.shared.reset(self.phase);
            warps.iter_mut().for_each(|warp| warp.start(self));
            while self.turn(&mut warps)? {}
        }
        Ok(())
    }

    fn fail<T>(&self, warp: &Warp, fault: Fault) -> Result<T, Box<Report>> {
        Err(report(self.kernel, self.launch, self.block, Some(warp), fault))
    }

    /// Runs every warp until it waits, then lets a barrier through. False once all threads have left.
    fn turn(&mut self, warps: &mut [Warp]) -> Result<bool, Box<Report>> {
        let mut able: Vec<usize> = (0..warps.len()).filter(|&w| warps[w].runnable() != 0).collect();
        while !able.is_empty() {
            let (at, budget) = match &mut self.order {
                None => (0, u64::MAX),
                Some(order) => (order.below(able.len()), 1 + order.next() % 300),
            };
            let warp = &mut warps[able[at]];
            if let Err(fault) = warp.run(self, budget) {
                return self.fail(warp, *fault);
            }
            if warp.runnable() == 0 {
                able.remove(at);
            }
        }
        self.release(warps)
    }

    fn release(&mut self, warps: &mut [Warp]) -> Result<bool, Box<Report>> {
        let Some(first) = warps.iter().find(|warp| warp.at_barrier != 0) else { return Ok(false) };
        let lane = first.at_barrier.trailing_zeros() as usize;
        let place = first.pc[lane];
        let line = self.kernel.code.get(place).map_or(0, |inst| inst.line);
        for warp in warps.iter() {
            let gone = warp.exited & warp.exists;
            if warp.at_barrier != 0 && gone != 0 {
                let (waits, left) = (warp.at_barrier.trailing_zeros(), gone.trailing_zeros());
                let detail =
                    format!("lane {waits} of the warp waits at the barrier, lane {left} has left the kernel");
                return self.fail(
                    warp,
                    Fault::new(Kind::DivergentBarrier, waits as usize, detail).at(warp.pc[waits as usize]),
                );
            }
            if let Some(other) = lanes(warp.at_barrier).find(|&l| warp.pc[l] != place) {
                let there = self.kernel.code.get(warp.pc[other]).map_or(0, |inst| inst.line);
                let detail = format!(
                    "this thread waits at the barrier of PTX line {there}, others at that of line {line}"
                );
                return self.fail(warp, Fault::new(Kind::DivergentBarrier, other, detail).at(warp.pc[other]));
            }
        }
        let reduction = match self.kernel.code.get(place).map(|inst| &inst.op) {
            Some(Op::Barrier { id, count, reduce }) => {
                let threads = self.launch.block.iter().product::<u32>();
                let name = first.regs.lane(*id, lane);
                for warp in warps.iter() {
                    for l in lanes(warp.at_barrier) {
                        if warp.regs.lane(*id, l) != name {
                            let detail =
                                format!("threads wait at barriers {name} and {}", warp.regs.lane(*id, l));
                            return self.fail(warp, Fault::new(Kind::Deadlock, l, detail).at(warp.pc[l]));
                        }
                        let counted = count.map_or(u64::from(threads), |count| warp.regs.lane(count, l));
                        if counted != u64::from(threads) {
                            let detail = format!("a barrier of {counted} of {threads} threads");
                            return self.fail(warp, Fault::new(Kind::Unsupported, l, detail).at(warp.pc[l]));
                        }
                    }
                }
                *reduce
            }
            _ => None,
        };
        if let Some((kind, d, cond)) = reduction {
            let votes = |warp: &Warp| warp.condition(cond) & warp.at_barrier;
            let yes: u32 = warps.iter().map(|warp| votes(warp).count_ones()).sum();
            let all: u32 = warps.iter().map(|warp| warp.at_barrier.count_ones()).sum();
            let good = warps.iter().all(|warp| warp.at_barrier & !warp.regs.p_set[cond.pred] == 0);
            let value = match kind {
                crate::ir::Vote::Count => yes,
                crate::ir::Vote::All => u32::from(yes == all),
                _ => u32::from(yes > 0),
            };
            for warp in warps.iter_mut() {
                lanes(warp.at_barrier).for_each(|l| warp.regs.put(d, l, u64::from(value)));
                warp.regs.mark(d, warp.at_barrier, if good { !0 } else { 0 });
            }
        }
        for warp in warps.iter_mut() {
            lanes(warp.at_barrier).for_each(|l| warp.pc[l] += 1);
            warp.at_barrier = 0;
            warp.clock = [0; 32];
        }
        self.phase = self.phase.saturating_add(1);
        self.stats.barriers += 1;
        Ok(true)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
