#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod domain;
mod error;
mod format;
mod group;
mod guard;
mod quantizer;
mod recipe;
mod report;
mod scaling;
mod slots;
mod state;

pub use error::{Error, Result};
pub use format::Format;
pub use fp8_kernels::{self, Encoding};
pub use group::AmaxGroup;
pub use guard::{AutocastOptions, Backward, Forward, Origin, Snapshot};
pub use quantizer::Quantizer;
pub use recipe::{
    AmaxComputeAlgo, CurrentScaling, CustomAmax, CustomScale, DelayedScaling, Fp8Gemms, Recipe,
    ScalingFactorComputeAlgo,
};
pub use report::SlotReport;
pub use scaling::Scaling;
pub use slots::{Direction, GemmSlots, SlotName, SlotRole, Slots};
pub use state::{ArenaState, ScalingState};
