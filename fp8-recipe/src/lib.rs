#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod agreement;
mod by_direction;
mod domain;
mod dropped_slots;
mod error;
mod format;
mod group;
mod guard;
mod origin;
mod quantizer;
mod recipe;
mod report;
mod scaling;
mod scope;
mod slots;
mod start;
mod state;
mod state_report;
mod weights;

pub use agreement::StateDigest;
pub use error::{Error, Result};
pub use format::Format;
pub use fp8_kernels::{self, Encoding};
pub use group::AmaxGroup;
pub use guard::{AutocastOptions, Backward, Forward};
pub use origin::{Origin, Snapshot};
pub use quantizer::Quantizer;
pub use recipe::{
    AmaxComputeAlgo, CurrentScaling, CustomAmax, CustomScale, DelayedScaling, Fp8Gemms, Recipe,
    ScalingFactorComputeAlgo,
};
pub use report::SlotReport;
pub use scaling::Scaling;
pub use slots::{Direction, GemmSlots, SlotName, SlotRole, Slots};
pub use state::{ArenaState, ScalingState};
pub use state_report::{LoadedSlot, NewSlot, StartsNew, StateReport, UnusedArena};
