//! Layers, optimizers, checkpoints and data parallelism, through the public API alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use fp8_nn::prelude::Device;

mod agreement;
mod all_or_nothing;
mod by_name;
mod checkpoint;
mod checkpoint_files;
mod counting;
mod data_parallel;
mod dropout;
mod dtypes;
mod fused;
mod golden;
mod gradients;
mod initialization;
mod llama;
mod modes;
mod old_checkpoints;
mod one_process;
mod optimizer;
mod options;
mod oracle;
mod override_slots;
mod overrides;
mod recompute;
mod refusals;
mod scopes;
mod sequences;
mod sizes;
mod skipped_steps;
mod spikes;
mod sqnr;
mod stack;
mod support;
mod texts;

fn open() -> Device {
    Device::cpu()
}
