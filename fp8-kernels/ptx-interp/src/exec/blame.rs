//! From a failed check to a [`Report`]: places, labels, and where an unwritten value came from.

use super::fault::{Fault, Step};
use super::machine::{Launch, Machine, coordinates};
use super::warp::Warp;
use crate::ir::{Op, Space, Together};
use crate::lanes::Reg;
use crate::module::Kernel;
use crate::race::Conflict;
use crate::report::{Kind, Report};

/// Completes a report.
#[cold]
pub(super) fn report(
    kernel: &Kernel,
    launch: &Launch<'_>,
    block: [u32; 3],
    warp: Option<&Warp>,
    fault: Fault,
) -> Box<Report> {
    let Fault { kind, lane, address, label, detail, pc } = fault;
    let inst = warp.and_then(|warp| kernel.code.get(pc.unwrap_or(warp.at)));
    let index = warp.map_or(0, |warp| warp.index as u32 * 32) + lane as u32;
    Box::new(Report {
        kind,
        kernel: kernel.name.clone(),
        line: inst.and_then(|inst| kernel.lines.get(inst.loc? as usize)).cloned(),
        ptx_line: inst.map_or(0, |inst| inst.line),
        block,
        thread: if warp.is_some() { coordinates(index, launch.block) } else { [0; 3] },
        address,
        allocation: label,
        detail,
        seed: launch.seed,
    })
}

/// The registers an operation writes and those it reads.
fn registers(op: &Op) -> (Vec<Reg>, Vec<Reg>) {
    match op {
        Op::Map { d, s, n, .. } => (vec![*d], s[..*n].to_vec()),
        Op::Carry { d, a, b, flag, .. } => (vec![*d, Reg::P(*flag)], vec![*a, *b, Reg::P(*flag)]),
        Op::Lop3 { d, s, .. } => (vec![*d], s.to_vec()),
        Op::Set { a, b, p, q, with, .. } => {
            let targets = p.iter().chain(q).map(|&p| Reg::P(p)).collect();
            (targets, [*a, *b].into_iter().chain(with.map(|(_, cond)| Reg::P(cond.pred))).collect())
        }
        Op::Logic { d, a, b, .. } => (vec![Reg::P(*d)], vec![Reg::P(a.pred), Reg::P(b.pred)]),
        Op::Select { d, a, b, p } => (vec![*d], vec![*a, *b, Reg::P(*p)]),
        Op::Pack { d, parts, .. } => (vec![*d], parts.clone()),
        Op::Unpack { parts, a, .. } => (parts.iter().flatten().copied().collect(), vec![*a]),
        Op::Convert { d, a, .. } => (vec![*d], vec![*a]),
        Op::Load { d, .. } => (d.iter().flatten().copied().collect(), Vec::new()),
        Op::Atomic { d, .. } => (d.iter().copied().collect(), Vec::new()),
        Op::Together { what, .. } => match what {
            Together::Shuffle { d, a, .. } => (d.iter().copied().collect(), vec![*a]),
            Together::Vote { d, a, .. } => (vec![*d], vec![Reg::P(a.pred)]),
            Together::Reduce { d, a, .. } | Together::MatchAny { d, a } | Together::MatchAll { d, a, .. } => {
                (vec![*d], vec![*a])
            }
            Together::Multiply { d, a, b, c, .. } => (d.to_vec(), [&a[..], b, c].concat()),
            Together::LoadMatrix { d, .. } => (d.iter().flatten().copied().collect(), Vec::new()),
            Together::Barrier => (Vec::new(), Vec::new()),
        },
        _ => (Vec::new(), Vec::new()),
    }
}

impl Machine<'_> {
    /// Describes where the unwritten value of `reg` came from, as far as the code tells.
    #[cold]
    pub(crate) fn origin(&self, warp: &Warp, reg: Reg, lane: usize) -> String {
        let (mut reg, mut before) = (reg, warp.at);
        let mut shuffled = false;
        for _ in 0..64 {
            let code = &self.kernel.code;
            let writes = |index: &usize| registers(&code[*index].op).0.contains(&reg);
            let found =
                (0..before.min(code.len())).rev().find(writes).or_else(|| (0..code.len()).rev().find(writes));
            let Some(index) = found else { return "a register that was never written".to_owned() };
            let inst = &code[index];
            let line = inst.loc.and_then(|loc| self.kernel.lines.get(loc as usize));
            let place =
                line.map_or(format!("PTX line {}", inst.line), |l| format!("{l}, PTX line {}", inst.line));
            if let Op::Load { mem, .. }
            | Op::Atomic { mem, .. }
            | Op::Together { what: Together::LoadMatrix { mem, .. }, .. } = &inst.op
            {
                let name =
                    mem.array.and_then(|a| self.kernel.arrays.get(a)).map(|a| format!(" '{}'", a.name));
                let space = match mem.space {
                    Space::Shared => "shared memory",
                    Space::Local => "local memory",
                    _ => "memory",
                };
                return format!("loaded from unwritten {space}{} at {place}", name.unwrap_or_default());
            }
            shuffled |= matches!(inst.op, Op::Together { .. });
            let sources = registers(&inst.op).1;
            let unwritten = |source: &&Reg| shuffled || warp.regs.set(**source) >> lane & 1 == 0;
            match sources
                .iter()
                .find(|s| **s != reg && unwritten(s))
                .or_else(|| sources.iter().find(unwritten))
            {
                Some(source) if *source != reg => (reg, before) = (*source, index),
                _ => return format!("computed at {place}"),
            }
        }
        "computed from unwritten values".to_owned()
    }

    /// A fault for an unwritten value that matters.
    #[cold]
    pub(crate) fn unwritten<T>(&self, warp: &Warp, reg: Reg, missing: u32, what: &str) -> Step<T> {
        let lane = missing.trailing_zeros() as usize & 31;
        let detail = format!("{what} is an unwritten value: {}", self.origin(warp, reg, lane));
        Fault::new(Kind::Uninitialised, lane, detail).fail()
    }

    /// A fault for two unordered accesses.
    #[cold]
    pub(crate) fn race<T>(
        &self,
        warp: &Warp,
        lane: usize,
        conflict: Conflict,
        writes: bool,
        place: (u64, String, Option<String>),
    ) -> Step<T> {
        let (address, text, label) = place;
        let did = if conflict.wrote { "wrote" } else { "read" };
        let does = if writes { "writes" } else { "reads" };
        let [x, y, z] = coordinates(conflict.other.thread(), self.launch.block);
        let who = if conflict.other_block {
            "a thread of another block".to_owned()
        } else {
            format!("thread ({x}, {y}, {z}) of this block")
        };
        let (kind, why) = if conflict.in_flight {
            let detail = format!(
                "this thread {does} {text}, into which {who} copies asynchronously: the copy has not been waited for"
            );
            return Fault::new(Kind::Race, lane, detail).address(address, label).fail();
        } else if conflict.non_coherent {
            (Kind::NonCoherentRead, "one of them through the read-only path")
        } else if conflict.other_block {
            (Kind::Race, "nothing orders blocks")
        } else if conflict.other.thread() / 32 == warp.index as u32 {
            (Kind::Race, "no warp synchronisation between them")
        } else {
            (Kind::Race, "no barrier between them")
        };
        let detail = format!("this thread {does} {text}, which {who} {did}: {why}");
        Fault::new(kind, lane, detail).address(address, label).fail()
    }
}
