//! Errors: [`LoadError`] for PTX that cannot be read, [`Report`] for a fault while it runs.

use std::fmt;

/// PTX that is not understood: nothing of the module is loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
#[non_exhaustive]
pub struct LoadError {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// A description of what is not understood, with its text.
    pub what: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

/// A place in the CUDA source, from the `.loc` directives of `-lineinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceLine {
    /// File name as `.file` gives it.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// The inlined function the line belongs to, with its mangled name, if any.
    pub function: Option<String>,
    /// The place where that function was inlined: file and line.
    pub inlined_at: Option<(String, u32)>,
}

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)?;
        if let Some(function) = &self.function {
            write!(f, " in {function}")?;
        }
        if let Some((file, line)) = &self.inlined_at {
            write!(f, " inlined at {file}:{line}")?;
        }
        Ok(())
    }
}

/// The check that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// An access outside every allocation, or outside the shared or local array it belongs to.
    OutOfBounds,
    /// An access to memory that was freed.
    UseAfterFree,
    /// An address that is no multiple of the whole access's size.
    Misaligned,
    /// A value nobody wrote decides a branch or an address, or is stored to global memory.
    Uninitialised,
    /// Two threads touch the same byte, at least one writes, and nothing orders them.
    Race,
    /// Threads of a block wait at different barriers, or part of a warp has left.
    DivergentBarrier,
    /// A lane named in the mask of a warp-wide operation is not there.
    DivergentShuffle,
    /// Every thread waits and nothing can release them.
    Deadlock,
    /// A warp ran more instructions than allowed.
    StepLimit,
    /// `ld.global.nc` and a write of the same launch touch the same byte.
    NonCoherentRead,
    /// An access outside a thread's local memory.
    LocalMemory,
    /// More shared memory than a block can have.
    SharedSize,
    /// A grid, block or parameter list that no device accepts.
    LaunchShape,
    /// A write to a variable of the module, which is read-only here.
    ReadOnly,
    /// `trap`.
    Trap,
    /// An operation that loads but cannot run with these values, such as a barrier of part of a block.
    Unsupported,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfBounds => "out of bounds",
            Self::UseAfterFree => "use after free",
            Self::Misaligned => "misaligned",
            Self::Uninitialised => "uninitialised",
            Self::Race => "data race",
            Self::DivergentBarrier => "divergent barrier",
            Self::DivergentShuffle => "divergent shuffle",
            Self::Deadlock => "deadlock",
            Self::StepLimit => "step limit",
            Self::NonCoherentRead => "non-coherent read",
            Self::LocalMemory => "local memory",
            Self::SharedSize => "shared memory size",
            Self::LaunchShape => "launch shape",
            Self::ReadOnly => "read-only variable",
            Self::Trap => "trap",
            Self::Unsupported => "unsupported",
        })
    }
}

/// The first failed check of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The check.
    pub kind: Kind,
    /// The kernel's name.
    pub kernel: String,
    /// Line of the CUDA source, where the PTX names one.
    pub line: Option<SourceLine>,
    /// Line of the PTX text, 0 if the launch itself is at fault.
    pub ptx_line: u32,
    /// Block index.
    pub block: [u32; 3],
    /// Thread index in its block.
    pub thread: [u32; 3],
    /// The address, for faults of memory.
    pub address: Option<u64>,
    /// Label of the allocation or name of the array the address belongs to, or lies nearest to.
    pub allocation: Option<String>,
    /// A description of the fault, with the numbers.
    pub detail: String,
    /// The seed of the launch's order.
    pub seed: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([x, y, z], [i, j, k]) = (self.block, self.thread);
        write!(f, "{} in {}", self.kind, self.kernel)?;
        if let Some(line) = &self.line {
            write!(f, " ({line})")?;
        }
        write!(f, ", PTX line {}, block ({x}, {y}, {z}), thread ({i}, {j}, {k})", self.ptx_line)?;
        if let Some(address) = self.address {
            write!(f, ", address {address:#x}")?;
        }
        write!(f, ", seed {}\n  {}", self.seed, self.detail)
    }
}

impl std::error::Error for Report {}
