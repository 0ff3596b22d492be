//! Layers, optimizers, checkpoints and data parallelism, through the public API alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use fp8_nn::prelude::Device;

mod attention_by_recipe;
mod combinations;
mod cross_attention;
mod every_device;
mod gradient_sums;
mod initialization;
mod interruptions;
mod one_process;
mod options;
mod oracle;
mod parallel;
mod sizes;
mod spikes;
mod texts;
mod unused_gradients;

fn open() -> Device {
    Device::cpu()
}
