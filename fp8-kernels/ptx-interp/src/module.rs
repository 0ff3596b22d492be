//! A parsed module and its kernels.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ir::{Inst, Special};
use crate::lanes::Reg;
use crate::report::SourceLine;

/// A PTX module: immutable once parsed.
#[derive(Debug)]
pub struct Module {
    pub(crate) target: String,
    pub(crate) kernels: Vec<Kernel>,
}

impl Module {
    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// All kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
    }

    /// The architecture the text is for, such as `sm_90`.
    pub fn target(&self) -> &str {
        &self.target
    }
}

/// The place of a parameter in the bytes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// A `.loc` before names are known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Location {
    pub(crate) file: u64,
    pub(crate) line: u32,
    pub(crate) function: Option<String>,
    pub(crate) inlined_at: Option<(u64, u32)>,
}

/// A constant of the module in global memory.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) data: Vec<u8>,
}

/// A shared array with its place in the block's shared memory; dynamic arrays have no length of their own.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) name: String,
    pub(crate) offset: usize,
    pub(crate) bytes: Option<usize>,
}

/// The number of registers of each file that a warp needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) w: usize,
    pub(crate) d: usize,
    pub(crate) p: usize,
}

/// One kernel of a [`Module`].
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) params_size: usize,
    pub(crate) static_shared: usize,
    pub(crate) shared_align: usize,
    pub(crate) local_bytes: usize,
    pub(crate) max_threads: Option<u32>,
    pub(crate) declared: u32,
    pub(crate) code: Vec<Inst>,
    pub(crate) counts: Counts,
    pub(crate) constants: Vec<(Reg, u64)>,
    pub(crate) specials: Vec<(Special, Reg, u64)>,
    pub(crate) arrays: Vec<Array>,
    pub(crate) locations: Vec<Location>,
    pub(crate) lines: Arc<[SourceLine]>,
    pub(crate) variables: Arc<[Variable]>,
}

impl Kernel {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters, in order, where a launch's bytes hold them.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Bytes of all parameters.
    pub fn params_size(&self) -> usize {
        self.params_size
    }

    /// Bytes of shared memory declared with a size.
    pub fn static_shared(&self) -> usize {
        self.static_shared
    }

    /// Bytes of local memory of a thread.
    pub fn local_bytes(&self) -> usize {
        self.local_bytes
    }

    /// The most threads of a block, where `.maxntid` or `.reqntid` says so.
    pub fn max_threads(&self) -> Option<u32> {
        self.max_threads
    }

    /// Registers declared, counted in 32-bit ones: virtual ones, many more than a device would use.
    pub fn registers(&self) -> u32 {
        self.declared
    }

    /// Instructions of the body.
    pub fn instructions(&self) -> usize {
        self.code.len()
    }

    /// Returns the offset at which dynamic shared memory starts.
    pub(crate) fn dynamic_offset(&self) -> usize {
        self.static_shared.next_multiple_of(self.shared_align.max(1))
    }

    pub(crate) fn name_lines(&mut self, files: &HashMap<u64, String>, strings: &HashMap<String, String>) {
        let file = |index: &u64| files.get(index).cloned().unwrap_or_else(|| format!("file {index}"));
        let line = |location: &Location| SourceLine {
            file: file(&location.file),
            line: location.line,
            function: location.function.as_ref().map(|name| strings.get(name).unwrap_or(name).clone()),
            inlined_at: location.inlined_at.as_ref().map(|(at, line)| (file(at), *line)),
        };
        self.lines = self.locations.iter().map(line).collect();
    }
}
