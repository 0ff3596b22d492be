#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

// Names, values and errors.
mod by_direction;
mod by_role;
mod digest;
mod error;
mod format;
mod fp8_attention;
mod scale_source;
mod slots;
mod used_slots;

// Recipes: what all have in common, each kind, and their names.
mod amax_compute_algo;
mod block_scaling;
mod by_name;
mod current_scaling;
mod custom_recipe;
mod delayed_scaling;
mod first_scale;
mod fp8_gemms;
mod gemm_accumulation;
mod pattern;
mod policy;
mod presets;
mod qparams;
mod recipe;
#[cfg(feature = "toml")]
mod recipe_file;
mod recipe_label;
mod recipe_options;

// What is saved of a recipe's arenas.
mod arena_state;
mod dropped_slots;
mod saved;
mod slot_columns;
mod state_report;
mod terms;
mod weight_state;

// One recipe under one group, a recipe for each slot, and a single tensor.
mod assignment;
mod domain;
mod gemm_pairs;
mod group;
mod host_update;
mod lone_recipe;
mod plan;
mod quantizer;
mod slot_arena;
mod weight_quantizer;

// The state of open scopes, and what their backward passes need.
mod autocast_options;
mod delayed_wgrad;
mod dropout;
mod frame;
mod origin;
mod outcome;
mod overflow;
mod records;
mod scope;
mod squares;
mod weight_version;
mod weights;

// A model's arenas and cached weights.
mod scaling;

// Operations on them: scopes, initial state, saved state, reports.
mod advice;
mod agreement;
mod dropout_draw;
mod explanation;
mod guard;
mod quantize_weight;
mod report;
mod slot_trace;
mod sqnr;
mod start;
mod state;

pub use advice::Advice;
pub use amax_compute_algo::{AmaxComputeAlgo, CustomAmax};
pub use arena_state::{ArenaState, ScalingState};
pub use autocast_options::AutocastOptions;
pub use block_scaling::{BlockScaling, Mxfp8};
pub use current_scaling::{CurrentScaling, Granularity};
pub use custom_recipe::CustomRecipe;
pub use delayed_scaling::{CustomScale, DelayedScaling, ScalingFactorComputeAlgo};
pub use delayed_wgrad::DelayedWgrad;
pub use digest::StateDigest;
pub use dropout::DropoutProgress;
pub use error::{Error, Result};
pub use explanation::{ExplainedLayer, ExplainedSlot, Explanation};
pub use format::Format;
pub use fp8_attention::SlotUse;
pub use fp8_gemms::Fp8Gemms;
pub use fp8_kernels::{self, Encoding};
pub use gemm_accumulation::GemmAccumulation;
pub use group::AmaxGroup;
pub use guard::{Backward, Forward};
pub use origin::{Origin, Snapshot};
pub use pattern::matches_glob;
pub use policy::SlotUpdate;
pub use qparams::{QParams, QParamsByRole};
pub use quantizer::Quantizer;
pub use recipe::Recipe;
pub use recipe_label::RecipeLabel;
pub use report::SlotReport;
pub use scale_source::ScaleSource;
pub use scaling::Scaling;
pub use slot_trace::{SlotSeries, SlotTrace, TracePoint};
pub use slots::{Direction, GemmSlots, SlotName, SlotRole, Slots};
pub use state_report::{LoadedSlot, NewSlot, StartsNew, StateReport, UnusedArena};
pub use weight_quantizer::WeightQuantizer;
pub use weight_state::WeightState;
pub use weight_version::WeightVersion;
