#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod arenas;
mod error;
mod names;
mod recipes;
mod reports;
mod scaling;
mod scopes;
mod state;
mod weights;

pub use arenas::group::AmaxGroup;
pub use arenas::quantizer::Quantizer;
pub use error::{Error, Result};
pub use fp8_kernels::{self, Encoding};
pub use names::fp8_attention::SlotUse;
pub use names::pattern::matches_name;
pub use names::slots::{Direction, GemmSlots, SlotName, SlotRole, Slots};
pub use recipes::amax_compute_algo::{AmaxComputeAlgo, CustomAmax};
pub use recipes::block_scaling::{BlockScaling, Mxfp8};
pub use recipes::current_scaling::{CurrentScaling, Granularity};
pub use recipes::custom_recipe::CustomRecipe;
pub use recipes::delayed_scaling::{CustomScale, DelayedScaling, ScalingFactorComputeAlgo};
pub use recipes::format::Format;
pub use recipes::fp8_gemms::Fp8Gemms;
pub use recipes::gemm_accumulation::GemmAccumulation;
pub use recipes::nvfp4::Nvfp4;
pub use recipes::policy::SlotUpdate;
pub use recipes::qparams::{QParams, QParamsByRole};
pub use recipes::recipe::Recipe;
pub use recipes::recipe_label::RecipeLabel;
pub use reports::advice::Advice;
pub use reports::explanation::{ExplainedLayer, ExplainedSlot, Explanation};
pub use reports::nvfp4_report::Nvfp4Report;
pub use reports::scale_source::ScaleSource;
pub use reports::slot_report::SlotReport;
pub use reports::slot_trace::{SlotSeries, SlotTrace, TracePoint};
pub use scaling::Scaling;
pub use scopes::autocast_options::AutocastOptions;
pub use scopes::backward::Backward;
pub use scopes::delayed_wgrad::DelayedWgrad;
pub use scopes::dropout::DropoutProgress;
pub use scopes::forward::Forward;
pub use scopes::gradient_sink::GradientSink;
pub use scopes::origin::{Origin, Snapshot};
pub use state::arena_state::{ArenaState, ScalingState};
pub use state::digest::StateDigest;
pub use state::state_report::{LoadedSlot, NewSlot, StartsNew, StateReport, UnusedArena};
pub use weights::weight_quantizer::WeightQuantizer;
pub use weights::weight_state::WeightState;
pub use weights::weight_version::WeightVersion;
