//! Recipes: what all have in common, each kind, and their names.

pub(crate) mod amax_compute_algo;
pub(crate) mod assignment;
pub(crate) mod block_scaling;
pub(crate) mod by_name;
pub(crate) mod current_scaling;
pub(crate) mod custom_recipe;
pub(crate) mod delayed_scaling;
pub(crate) mod first_scale;
pub(crate) mod format;
pub(crate) mod fp8_gemms;
pub(crate) mod gemm_accumulation;
pub(crate) mod gemm_pairs;
pub(crate) mod nvfp4;
pub(crate) mod policy;
pub(crate) mod presets;
pub(crate) mod qparams;
pub(crate) mod recipe;
#[cfg(feature = "toml")]
pub(crate) mod recipe_file;
pub(crate) mod recipe_key;
pub(crate) mod recipe_label;
pub(crate) mod recipe_options;
