//! An interpreter for the PTX that NVRTC emits, with checks for races, bounds, uninitialised reads and deadlocks.
//!
//! ```no_run
//! use ptx_interp::{Launch, Memory, Module};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let ptx = String::new();
//! let module = Module::parse(&ptx)?;
//! let mut memory = Memory::new();
//! let x = memory.allocate(1024, "x");
//! memory.write(x, &[0; 1024])?;
//! let kernel = module.kernel("quantize").ok_or("no such kernel")?;
//! let params = x.to_le_bytes();
//! let launch = Launch { grid: [1, 1, 1], block: [256, 1, 1], dynamic_shared: 0, params: &params, seed: 0, ..Launch::default() };
//! ptx_interp::run(kernel, &launch, &memory)?;
//! # Ok(()) }
//! ```
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![forbid(unsafe_code)]

mod builder;
mod decode;
mod exec;
mod ir;
mod lanes;
mod lexer;
mod lines;
mod memory;
mod module;
mod numeric;
mod parser;
mod provenance;
mod race;
mod region;
mod report;

pub use exec::{Launch, Stats, run, splitmix64};
pub use lines::{lines_of, without_lines};
pub use memory::{Allocation, Memory, MemoryError};
pub use module::{Kernel, Module, Param};
pub use report::{Kind, LoadError, Report, SourceLine};
