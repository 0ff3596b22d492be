//! Hugging Face folders: read, checked, quantized to FP8, inspected, and written.
//!
//! | file of a folder | |
//! |---|---|
//! | `config.json` | the sizes and options of the model: [`Config`], in the spelling of transformers 4 or 5 |
//! | `model.safetensors`, or several files with `model.safetensors.index.json` | the tensors: [`Weights`] |
//! | `generation_config.json` | the tokens that end a text |
//! | tokenizer, chat template and others | carried along when a folder is written |
//!
//! [`Folder::open`] reads the first three and checks them against each other; the [families](Family) of models differ in data
//! alone. Values are read by range, from f32, bf16, f16 and every FP8 layout that [`Quantization`] describes. [`save`] and
//! [`Folder::save`] write a folder, [`quantize`] writes it with FP8 weights, [`inspect`] measures what that costs.
//!
//! Files are read and never mapped. A hostile one is an error: offsets, sizes, names that occur twice, paths that leave the
//! folder, and headers of more than 100 MB are refused before any tensor is read. A folder that is written appears whole or not
//! at all.

mod calibrate;
mod carried;
mod config;
mod encode;
mod export;
mod family;
mod folder;
mod from_options;
mod inspect;
mod jobs;
mod keep;
mod model;
mod output;
mod plan;
mod positioned;
mod quantize;
mod ranks;
mod recipe;
mod save;
mod save_model;
mod scheme;
mod source;
mod static_inputs;
mod targets;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod values;
mod weights;

pub use calibrate::calibrate;
pub use config::{Config, InputScales, QuantMethod, Quantization, Rope, RopeScaling, WeightScales};
pub use export::{ExportOptions, Exported, export};
pub use family::{Family, TensorKind, TensorSpec};
pub use folder::Folder;
pub use inspect::{Inspection, TensorInspection, inspect, inspect_weights};
pub use jobs::Monitor;
pub use keep::Fp8Weights;
pub use model::{LoadOptions, ParameterSource};
pub use output::expect_new;
pub use quantize::{QuantizeOptions, Quantized, quantize};
pub use safetensors::Dtype;
pub use save::save;
pub use save_model::save_model;
pub use scheme::Scheme;
#[cfg(feature = "tokenizer")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokenizer")))]
pub use tokenizer::{TextStream, Tokenizer};
pub use values::Fp8Weight;
pub use weights::{WeightInfo, Weights};
