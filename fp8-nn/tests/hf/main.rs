//! Hugging Face folders: configurations, hostile files, exports against those of peers, and the program `fp8`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod calibration;
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
mod matrices;
mod models;
#[cfg(feature = "cli")]
mod program;
mod ranks;
mod saving;
#[cfg(feature = "tokenizer")]
mod tokenizer_folders;
#[cfg(feature = "tokenizer")]
mod tokens;
