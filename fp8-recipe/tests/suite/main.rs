//! The recipes through their public API: updates, scopes, groups, state.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use fp8_recipe::fp8_kernels::Device;

mod every_device;
mod lone_ranks;
#[cfg(feature = "toml")]
mod recipe_files;
mod role_params;

fn open() -> Device {
    Device::cpu()
}
