//! Recipes whose scales differ between ranks because their scopes have no group.

use crate::{Backward, Forward};
use std::sync::Arc;

impl Forward<'_> {
    /// Returns the name of the recipe if its scales differ between ranks: see [`Backward::lone_recipe`].
    ///
    /// A layer whose backward takes no scope keeps it in its `Saved`, as fp8-nn's `Embedding` does.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::Device;
    /// use fp8_recipe::{CurrentScaling, DelayedScaling, GemmSlots, Scaling};
    ///
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
    /// assert_eq!(cx.lone_recipe().as_deref(), Some("delayed"));
    /// assert_eq!(cx.nested(&CurrentScaling::default().into())?.lone_recipe(), None); // it has no state
    /// cx.commit()?;
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn lone_recipe(&self) -> Option<Arc<str>> {
        self.scaling.lone_recipe(self.settings)
    }
}

impl Backward<'_> {
    /// Returns the name of a recipe of this scope whose scales differ between ranks: it reduces amaxes
    /// (`reduce_amax`), but neither [`Scaling::set_group`](crate::Scaling::set_group) nor the forward scope's options gave it a group of more than one
    /// rank.
    ///
    /// fp8-nn notes it in every gradient that is filled in the scope, and `all_reduce_gradients` refuses such gradients.
    /// [`AutocastOptions::allow_scales_per_rank`](crate::AutocastOptions::allow_scales_per_rank) allows them. Scopes in high
    /// precision have no such recipe.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::Device;
    /// use fp8_recipe::{AutocastOptions, DelayedScaling, GemmSlots, Scaling};
    ///
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// for (allow_scales_per_rank, lone) in [(false, Some("delayed")), (true, None)] {
    ///     let options = AutocastOptions { allow_scales_per_rank, ..Default::default() };
    ///     scaling.scope(&DelayedScaling::default().into(), &options)?.commit()?;
    ///     let cx = scaling.backward()?;
    ///     assert_eq!(cx.lone_recipe().as_deref(), lone);
    ///     cx.commit()?;
    /// }
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn lone_recipe(&self) -> Option<Arc<str>> {
        self.scaling.scopes().current()?.lone.clone()
    }
}
