//! The options of a forward scope.

use crate::AmaxGroup;
use fp8_kernels::DType;
use std::sync::Arc;

/// The options of a forward scope: Transformer Engine's arguments of `autocast`, and the dtype to compute in.
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
}

impl Default for AutocastOptions {
    fn default() -> Self {
        Self { enabled: true, calibrating: false, amax_reduction_group: None, compute_dtype: None }
    }
}
