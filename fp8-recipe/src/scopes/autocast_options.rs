//! The options of a forward scope.

use crate::AmaxGroup;
use fp8_kernels::DType;
use std::sync::Arc;

/// The options of a forward scope: Transformer Engine's arguments of `autocast`, the dtype to compute in, and whether ranks may have
/// scales of their own.
///
/// ```
/// use fp8_recipe::fp8_kernels::{DType, Device};
/// use fp8_recipe::{AutocastOptions, DelayedScaling, GemmSlots, Scaling};
///
/// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
/// let options = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
/// let cx = scaling.scope(&DelayedScaling::default().into(), &options)?;
/// assert_eq!(cx.compute_dtype(), Some(DType::BF16));
/// cx.commit()?;
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AutocastOptions {
    /// Whether GEMMs run in FP8. Default: true.
    pub enabled: bool,
    /// Whether amaxes are recorded although GEMMs run in high precision. It has no effect if `enabled`.
    /// Default: false.
    pub calibrating: bool,
    /// The group that amaxes are reduced over. Default: `None`, the group that was passed to
    /// [`Scaling::set_group`](crate::Scaling::set_group), if any.
    pub amax_reduction_group: Option<Arc<dyn AmaxGroup>>,
    /// The dtype that layers cast inputs and parameters to in high precision. Default: `None`, the dtype of the
    /// input, which parameters must have too.
    pub compute_dtype: Option<DType>,
    /// Whether gradients may be summed over ranks although the recipe reduces amaxes and the scope has no group of more than one
    /// rank, so that each rank computes with scales of its own. If false, fp8-nn's `all_reduce_gradients` refuses them. Nested
    /// scopes inherit true. Default: false.
    pub allow_scales_per_rank: bool,
}

impl Default for AutocastOptions {
    fn default() -> Self {
        Self {
            enabled: true,
            calibrating: false,
            amax_reduction_group: None,
            compute_dtype: None,
            allow_scales_per_rank: false,
        }
    }
}
