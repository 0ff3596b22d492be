//! Recipes whose scales differ between ranks because their scopes have no group.

use crate::arenas::domain::Domain;
use crate::scopes::scope_settings::ScopeSettings;
use crate::{Backward, Forward, Scaling};
use std::sync::Arc;

impl Scaling {
    /// Returns the name of the settings' recipe if FP8 runs under it, it reduces amaxes, it has no group of more than one rank, and
    /// the options do not allow that.
    fn lone_recipe(&self, settings: ScopeSettings) -> Option<Arc<str>> {
        if !settings.enabled || settings.allows_scales_per_rank {
            return None;
        }
        let mut domains = self.plans[settings.plan].domains.iter().map(|&domain| &self.domains[domain]);
        domains
            .find(|domain| domain.is_lone())
            .map(|domain| domain.label().without_group().to_string().into())
    }

    /// Notes in the open scope that it runs under the settings.
    pub(crate) fn note_lone(&mut self, settings: ScopeSettings) {
        if self.scope.as_ref().is_some_and(|scope| scope.lone.is_none()) {
            let lone = self.lone_recipe(settings);
            self.scope.iter_mut().for_each(|scope| scope.lone.clone_from(&lone));
        }
    }
}

impl Domain {
    /// Returns whether the recipe reduces amaxes but has no other ranks to reduce them with.
    fn is_lone(&self) -> bool {
        let reduces = self.policy.state().is_some_and(|state| state.reduce_amax());
        reduces && self.group().is_none_or(|group| group.world_size() <= 1)
    }
}

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
    /// (`reduce_amax`), but neither [`Scaling::set_group`] nor the forward scope's options gave it a group of more than one
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
        self.scaling.scope.as_ref()?.lone.clone()
    }
}
