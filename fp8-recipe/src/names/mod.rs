//! Names of quantized tensors, and values for each pass or role.

pub(crate) mod by_direction;
pub(crate) mod by_role;
pub(crate) mod fp8_attention;
pub(crate) mod model_slots;
pub(crate) mod pattern;
pub(crate) mod slots;
pub(crate) mod used_slots;
