//! The recipes through their public API: updates, scopes, groups, state.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use fp8_recipe::fp8_kernels::Device;

mod agreement;
mod support;

mod amax_rules;
mod attention_slots;
mod by_name;
mod custom_recipes;
mod dropped_slots;
mod evaluation;
mod golden;
mod groups;
mod lone_ranks;
mod models;
mod new_recipes;
mod options;
mod powers_of_two;
mod properties;
mod quantizer;
#[cfg(feature = "toml")]
mod recipe_files;
mod replay;
mod report;
mod role_params;
mod scopes;
mod state;
mod state_report;
mod te_rules;
mod trace;
mod update;
mod user_functions;
mod weights;

fn open() -> Device {
    Device::cpu()
}
