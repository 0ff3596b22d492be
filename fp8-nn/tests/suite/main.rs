//! Layers, optimizers, checkpoints and data parallelism, through the public API alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use fp8_nn::prelude::Device;

mod agreement;
mod all_or_nothing;
mod attention_by_recipe;
mod attention_fp8;
mod by_name;
mod cache_contents;
mod checkpoint;
mod checkpoint_files;
mod combinations;
mod counting;
mod cross_attention;
mod data_parallel;
mod decoder;
mod dropout;
mod dtypes;
mod fp8_mha;
mod fp8_weights;
mod frozen;
mod fused;
mod generation;
mod golden;
mod golden_options;
mod gradient_sums;
mod gradients;
mod initialization;
mod interruptions;
mod llama;
mod loss_scaler;
mod modes;
mod old_checkpoints;
mod one_process;
mod optimizer;
mod options;
mod oracle;
mod override_slots;
mod overrides;
mod own_block;
mod own_head;
mod parameter_groups;
mod partial_load;
mod recompute;
mod refusals;
mod sample;
mod saved;
mod scopes;
mod sequences;
mod sizes;
mod skipped_steps;
mod spikes;
mod sqnr;
mod stack;
mod support;
mod texts;
mod unused_gradients;

fn open() -> Device {
    Device::cpu()
}
