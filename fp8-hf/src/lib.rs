#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod adapter;
mod atomic_folder;
mod calibrate;
mod carried;
mod checkpoint_source;
mod config;
#[cfg(feature = "tokenizer")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokenizer")))]
pub mod data;
mod encode;
mod error;
mod export;
mod family;
mod files;
mod folder;
mod from_options;
mod inspect;
mod jobs;
mod json;
mod keep;
mod model;
mod output;
mod packed;
mod parameter_source;
mod part;
mod plan;
mod positioned;
mod quantize;
mod quantize_options;
mod ranks;
mod recipe;
mod save;
mod save_model;
mod scheme;
mod source;
mod specs;
mod static_inputs;
mod targets;
pub mod text;
mod tied;
mod token_file;
mod token_losses;
#[cfg(feature = "tokenizer")]
mod tokenizer;
#[cfg(feature = "tokenizer")]
mod train_run;
#[cfg(feature = "tokenizer")]
mod trainer;
mod values;
mod weights;
mod wholes;

pub use adapter::{Adapter, LoraTargets, Survival, save_adapter};
pub use atomic_folder::AtomicFolder;
pub use calibrate::calibrate;
pub use config::{Config, InputScales, QuantMethod, Quantization, Rope, RopeScaling, WeightScales};
pub use error::{Error, Result};
pub use export::{ExportOptions, Exported, export};
pub use family::{Family, TensorKind, TensorSpec};
pub use folder::Folder;
pub use inspect::{Inspection, TensorInspection, inspect, inspect_weights};
pub use jobs::Monitor;
pub use keep::Fp8Weights;
pub use model::LoadOptions;
pub use output::expect_new;
pub use parameter_source::ParameterSource;
pub use quantize::{Quantized, quantize};
pub use quantize_options::QuantizeOptions;
pub use safetensors::Dtype;
pub use save::save;
pub use save_model::save_model;
pub use scheme::Scheme;
pub use token_file::{TokenFile, TokenFormat};
pub use token_losses::{TokenLosses, token_losses};
#[cfg(feature = "tokenizer")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokenizer")))]
pub use tokenizer::{TextStream, Tokenizer};
#[cfg(feature = "tokenizer")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokenizer")))]
pub use train_run::{ScheduleKind, SequenceSource, TrainRecord, TrainRun, TrainRunOptions, Warmup};
#[cfg(feature = "tokenizer")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokenizer")))]
pub use trainer::{TrainEvaluation, TrainPlan, TrainRanks, TrainStep, Trainer, TrainerOptions};
pub use values::Fp8Weight;
pub use weights::{WeightInfo, Weights};

pub use fp8_nn;
