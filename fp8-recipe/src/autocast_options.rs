//! The options of a forward scope.

use crate::AmaxGroup;
use fp8_kernels::DType;
use std::sync::Arc;

/// Transformer Engine's arguments of `autocast`, and the computation's dtype.
#[derive(Debug, Clone)]
pub struct AutocastOptions {
    /// Whether GEMMs run in FP8.
    pub enabled: bool,
    /// Whether amaxes are recorded although they do not.
    pub calibrating: bool,
    /// Over whom amaxes are reduced; `None`: the group given by [`Scaling::set_group`].
    pub amax_reduction_group: Option<Arc<dyn AmaxGroup>>,
    /// What layers cast inputs and parameters to in high precision; `None`: the input's dtype, which parameters must have.
    pub compute_dtype: Option<DType>,
}

impl Default for AutocastOptions {
    fn default() -> Self {
        Self { enabled: true, calibrating: false, amax_reduction_group: None, compute_dtype: None }
    }
}
