#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

// Names, values and errors.
mod by_direction;
mod digest;
mod error;
mod format;
mod slots;

// Recipes, and what is saved of a recipe's arenas.
mod arena_state;
mod current_scaling;
mod delayed_scaling;
mod dropped_slots;
mod recipe;
mod recipe_label;
mod saved;
mod state_report;

// One recipe under one group, and one tensor alone.
mod domain;
mod group;
mod quantizer;

// What open scopes keep, and what they leave to their backward.
mod autocast_options;
mod frame;
mod origin;
mod outcome;
mod scope;
mod weights;

// A model's arenas and cached weights.
mod scaling;

// What is done with them: scopes, starts, saved state, reports.
mod agreement;
mod guard;
mod report;
mod start;
mod state;

pub use arena_state::{ArenaState, ScalingState};
pub use autocast_options::AutocastOptions;
pub use current_scaling::CurrentScaling;
pub use delayed_scaling::{
    AmaxComputeAlgo, CustomAmax, CustomScale, DelayedScaling, ScalingFactorComputeAlgo,
};
pub use digest::StateDigest;
pub use error::{Error, Result};
pub use format::Format;
pub use fp8_kernels::{self, Encoding};
pub use group::AmaxGroup;
pub use guard::{Backward, Forward};
pub use origin::{Origin, Snapshot};
pub use quantizer::Quantizer;
pub use recipe::{Fp8Gemms, Recipe};
pub use recipe_label::RecipeLabel;
pub use report::SlotReport;
pub use scaling::Scaling;
pub use slots::{Direction, GemmSlots, SlotName, SlotRole, Slots};
pub use state_report::{LoadedSlot, NewSlot, StartsNew, StateReport, UnusedArena};
