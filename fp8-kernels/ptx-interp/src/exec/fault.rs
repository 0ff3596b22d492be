//! A failed check, before it is a report.

use crate::report::Kind;

/// A failed check, before it has a kernel and a line.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(super) kind: Kind,
    pub(super) lane: usize,
    pub(super) address: Option<u64>,
    pub(super) label: Option<String>,
    pub(super) detail: String,
    /// The instruction, where it is not the warp's current one.
    pub(super) pc: Option<usize>,
}

/// The result of a step of a warp.
pub(crate) type Step<T = ()> = Result<T, Box<Fault>>;

impl Fault {
    pub(crate) fn new(kind: Kind, lane: usize, detail: impl Into<String>) -> Self {
        Self { kind, lane, address: None, label: None, detail: detail.into(), pc: None }
    }

    pub(crate) fn address(mut self, address: u64, label: Option<String>) -> Self {
        self.address = Some(address);
        self.label = label;
        self
    }

    /// At an instruction that is not the warp's current one: where a lane waits.
    pub(crate) fn at(mut self, pc: usize) -> Self {
        self.pc = Some(pc);
        self
    }

    pub(crate) fn fail<T>(self) -> Step<T> {
        Err(Box::new(self))
    }
}
