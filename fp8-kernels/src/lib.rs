#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![cfg_attr(
    not(feature = "cuda"),
    expect(
        dead_code,
        reason = "accessors that only the CUDA backend calls; the default build looks for dead code"
    )
)]

mod arena;
mod atomic_file;
mod backend;
mod block_rule;
mod cell_values;
mod cells;
mod deferred;
mod device;
mod dropout_state;
mod dtype;
mod element;
mod environment;
mod error;
mod fp8_parts;
mod fp8_tensor;
mod graph;
mod host;
pub mod math;
mod memory;
mod nvfp4;
mod operand;
pub mod ops;
mod replayed;
mod scale_rule;
mod shape;
mod slot;
mod tensor;
mod transpose_policy;
mod tuned_products;
mod update_clock;

pub use arena::{Arena, ArenaOptions, KeptScales};
pub use atomic_file::AtomicFile;
pub use backend::cpu::CpuPath;
#[cfg(feature = "cuda")]
pub use backend::cuda::{CudaAllocator, CudaOptions, GemmTuning, interop};
pub use block_rule::BlockRule;
pub use cell_values::{REST, UNSET};
pub use cells::{Cell, CounterValues, Counters};
/// The crate whose streams [`Device::from_stream`] takes.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use deferred::Deferred;
pub use device::Device;
pub use dropout_state::{DropoutDraw, DropoutState};
pub use dtype::DType;
pub use element::Element;
pub use error::{Error, Result};
pub use fp8_format::{self, Encoding};
pub use fp8_tensor::Fp8Tensor;
pub use graph::Graph;
pub use half::{bf16, f16};
pub use memory::{MemoryKind, MemoryKindGuard, MemoryReport, MemoryUse};
pub use nvfp4::{Nvfp4Rule, StochasticRounding};
pub use operand::Operand;
pub use replayed::Replayed;
pub use scale_rule::{CustomPolicy, ScalePolicy, ScaleRule};
pub use shape::Shape;
pub use slot::{Scale, Slot};
pub use tensor::Tensor;
pub use transpose_policy::TransposePolicy;
pub use tuned_products::{TunedProducts, TunedProductsError};
pub use update_clock::UpdateClock;
