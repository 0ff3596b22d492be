//! The scales and amax histories of one recipe in one group, and of a single tensor.

pub(crate) mod domain;
pub(crate) mod domains;
pub(crate) mod group;
pub(crate) mod host_update;
pub(crate) mod plan;
pub(crate) mod quantizer;
pub(crate) mod slot_arena;
pub(crate) mod untouched_scales;
