//! Hugging Face folders: configurations, hostile files, and exports against those of peers.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod calibration;
#[cfg(feature = "tokenizer")]
mod chat_templates;
mod config;
mod decoder;
mod exported_values;
mod exporting;
mod exports;
mod files;
mod folders;
mod hostile;
mod inspecting;
mod kept;
#[cfg(feature = "tokenizer")]
mod kept_tokens;
mod matrices;
mod models;
mod nvfp4;
mod parallel;
mod ranks;
mod saving;
mod token_files;
#[cfg(feature = "tokenizer")]
mod tokenizer_folders;
#[cfg(feature = "tokenizer")]
mod tokens;
mod trained;
#[cfg(feature = "tokenizer")]
mod training;
#[cfg(feature = "tokenizer")]
mod training_data;
#[cfg(feature = "tokenizer")]
mod training_packs;
