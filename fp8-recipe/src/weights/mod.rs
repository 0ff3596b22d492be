//! Weights: their versions, the cache of their FP8 copies, and the scales that copies are made with.

pub(crate) mod quantize_weight;
pub(crate) mod weight_cache;
pub(crate) mod weight_quantizer;
pub(crate) mod weight_records;
pub(crate) mod weight_state;
pub(crate) mod weight_version;
