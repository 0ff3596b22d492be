//! Layers, optimizers, checkpoints and data parallelism, through the public API alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use fp8_nn::prelude::Device;

mod all_or_nothing;
mod checkpoint;
mod checkpoint_files;
mod data_parallel;
mod dtypes;
mod golden;
mod gradients;
mod modes;
mod optimizer;
mod overrides;
mod recompute;
mod scopes;
mod skipped_steps;
mod stack;
mod support;

fn open() -> Device {
    Device::cpu()
}
