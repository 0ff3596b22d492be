//! Cases of recipes that run on the CPU and, in a program of their own, on a GPU: `crate::open` opens the device.

mod agreement;
mod amax_rules;
mod attention_slots;
mod by_name;
mod custom_recipes;
mod dropped_slots;
mod evaluation;
mod golden;
mod groups;
mod models;
mod new_recipes;
mod nvfp4_report;
mod options;
mod powers_of_two;
mod properties;
mod quantizer;
mod replay;
mod report;
mod scopes;
mod state;
mod state_report;
pub(crate) mod support;
mod te_rules;
mod trace;
mod update;
mod user_functions;
mod weights;
