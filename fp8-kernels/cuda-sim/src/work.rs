//! One unit of a stream's work, and what it does to device memory when its turn comes.

use std::sync::Arc;

use ptx_interp::{Memory, Module};

use crate::code::Code;
use crate::cublaslt::Product;
use crate::cudnn::Evaluation;
use crate::fault::Fault;
use crate::ffi::Host;
use crate::nccl::{Collective, Ran};

/// Work as it was at the call that queued it.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Launch(Launch),
    Product(Box<Product>),
    /// A graph of cuDNN's.
    Evaluation(Box<Evaluation>),
    /// Host to device, from a copy made at the call: pageable memory is read before the call returns.
    Upload {
        to: u64,
        bytes: Vec<u8>,
    },
    /// Host to device, from pinned memory, read when the copy runs.
    UploadPinned {
        to: u64,
        from: Host,
        bytes: usize,
    },
    Download {
        from: u64,
        to: Host,
        bytes: usize,
        /// To pinned memory, written when the copy runs; to any other before the call returns.
        pinned: bool,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        pattern: Vec<u8>,
        count: usize,
    },
    /// Memory allocated in stream order comes into being.
    Allocate {
        address: u64,
    },
    Free {
        address: u64,
    },
    /// One rank's part of a collective.
    Collective(Box<Collective>),
}

/// A kernel with its arguments, as bytes laid out by the PTX's own parameter list.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) module: Arc<Module>,
    pub(crate) kernel: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: usize,
    pub(crate) params: Vec<u8>,
    pub(crate) seed: u64,
    pub(crate) races: bool,
}

impl Work {
    /// Runs the work and answers with the simulated nanoseconds it took.
    pub(crate) fn perform(self, memory: &Memory) -> Result<Ran, Fault> {
        let moved = match self {
            Self::Launch(launch) => return launch.perform(memory).map(Ran::For),
            Self::Collective(collective) => return collective.perform(memory),
            Self::Product(product) => return product.perform(memory).map(Ran::For),
            Self::Evaluation(graph) => return graph.perform(memory).map(Ran::For),
            Self::Upload { to, bytes } => {
                memory.write(to, &bytes)?;
                bytes.len()
            }
            Self::UploadPinned { to, from, bytes } => {
                memory.write(to, &from.read(bytes).map_err(unreadable)?)?;
                bytes
            }
            Self::Download { from, to, bytes, .. } => {
                let mut staged = vec![0; bytes];
                memory.read(from, &mut staged)?;
                to.write(&staged).map_err(unreadable)?;
                bytes
            }
            Self::Copy { to, from, bytes } => {
                memory.copy(to, from, bytes)?;
                bytes
            }
            Self::Fill { to, pattern, count } => {
                memory.fill(to, &pattern, count)?;
                pattern.len() * count
            }
            Self::Allocate { address } => {
                memory.open(address);
                0
            }
            Self::Free { address } => {
                memory.free(address)?;
                0
            }
        };
        Ok(Ran::For(1000 + moved as u64 / 100))
    }
}

fn unreadable(code: Code) -> Fault {
    Fault { code, text: "a copy: the host address is null or the length impossible".into() }
}

impl Launch {
    fn perform(&self, memory: &Memory) -> Result<u64, Fault> {
        let kernel = self.module.kernel(&self.kernel).ok_or_else(Fault::stuck)?;
        let launch = ptx_interp::Launch {
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.dynamic_shared,
            params: &self.params,
            seed: self.seed,
            races: self.races,
            ..ptx_interp::Launch::default()
        };
        let stats = ptx_interp::run(kernel, &launch, memory)?;
        Ok(2000 + stats.thread_instructions / 100)
    }
}
