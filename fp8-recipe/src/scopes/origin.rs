//! Handles by which a backward pass finds its forward scope.

use crate::scopes::forward_outcome::ForwardOutcome;
use crate::scopes::scope_settings::ScopeSettings;
use std::sync::Arc;

/// Identifies the forward scope and the layer of a `Saved`, so that backward uses the same recipe, group and arena.
///
/// [`Backward::slot`](crate::Backward::slot) takes the origins of committed forward scopes of the same
/// [`Scaling`](crate::Scaling). It refuses those of an evaluation, and those of a scope that was discarded or whose guard was
/// dropped, because the amaxes of such a scope have been discarded.
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let fc = GemmSlots::new("fc");
/// let mut scaling = Scaling::new(&fc, &Device::cpu())?;
/// let cx = scaling.autocast(&DelayedScaling::default().into())?;
/// let origin = cx.origin(&fc.input); // a layer keeps it in its `Saved`
/// cx.commit()?;
///
/// let mut cx = scaling.backward()?;
/// assert!(cx.slot(&origin, &fc.grad_output).is_ok());
/// cx.commit()?;
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Origin {
    pub(crate) owner: Arc<()>,
    pub(crate) settings: ScopeSettings,
    /// None for an evaluation.
    pub(crate) outcome: Option<Arc<ForwardOutcome>>,
    pub(crate) layer: Arc<str>,
}

impl Origin {
    /// Returns the domains that its forward scope touched, or why its backward cannot run under the `Scaling` with this
    /// identity.
    pub(crate) fn touched(&self, identity: &Arc<()>) -> Result<&[usize], &'static str> {
        if !Arc::ptr_eq(&self.owner, identity) {
            return Err("another Scaling");
        }
        self.outcome.as_ref().ok_or("an evaluation scope")?.touched()
    }
}

/// The scales of a forward scope, for a layer that runs its forward again in backward.
///
/// All snapshots of a scope share one copy: one f32 per slot, stored when the scope is committed.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let x = Tensor::from_vec(vec![3.5f32], [1, 1], &device)?;
/// let mut cx = scaling.autocast(&DelayedScaling { margin: 1, ..Default::default() }.into())?;
/// let snapshot = cx.snapshot();
/// let first = ops::quantize(&x, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
///
/// let mut cx = scaling.backward()?;
/// let again = ops::quantize(&x, &cx.replay(&snapshot)?.slot(&fc.input)?)?;
/// cx.commit()?;
/// let codes = |operand: &fp8_recipe::fp8_kernels::Operand| operand.as_fp8().map(|x8| x8.codes()).transpose();
/// assert_eq!(codes(&first)?, codes(&again)?);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) owner: Arc<()>,
    pub(crate) settings: ScopeSettings,
    pub(crate) outcome: Arc<ForwardOutcome>,
    /// The dropout masks that the scope had drawn before.
    pub(crate) draws: u64,
}
