//! Scopes: the guards that lend slots, and all that an open scope keeps.

pub(crate) mod autocast_options;
pub(crate) mod backward;
pub(crate) mod delayed_wgrad;
pub(crate) mod dropout;
pub(crate) mod dropout_draw;
pub(crate) mod forward;
pub(crate) mod forward_outcome;
pub(crate) mod gradient_sink;
pub(crate) mod lone_recipe;
pub(crate) mod open_scope;
pub(crate) mod origin;
pub(crate) mod overflow;
pub(crate) mod scope_settings;
pub(crate) mod scopes_so_far;
pub(crate) mod tensor_ranks;
