//! Saved state, and the state with which the arenas of a recipe start.

pub(crate) mod agreement;
pub(crate) mod arena_state;
pub(crate) mod digest;
pub(crate) mod dropped_slots;
pub(crate) mod inherited;
pub(crate) mod initial_state;
pub(crate) mod pending_arena;
pub(crate) mod slot_columns;
pub(crate) mod state_report;
pub(crate) mod state_terms;
