//! The ranks that have parts of a tensor, and whether they quantize it with one scale.

use crate::scopes::scope_settings::Mode;
use crate::{AmaxGroup, Direction, Error, Forward, Result, SlotName};
use std::sync::Arc;

impl Forward<'_> {
    /// Notes that layers call collectives of `group` in this scope: if it is left without commit, by an error or a panic, the other ranks
    /// of the group are told, and do not wait for this one; so they are if the backward scope is. An evaluation tells no rank. Layers with
    /// tensor parallelism call it.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Arena, Device};
    /// use fp8_recipe::{AmaxGroup, DelayedScaling, GemmSlots, Result, Scaling};
    /// use std::sync::{Arc, Mutex};
    ///
    /// #[derive(Debug, Default)]
    /// struct Ranks(Mutex<Vec<String>>);
    ///
    /// impl AmaxGroup for Ranks {
    ///     fn id(&self) -> &str {
    ///         "tp"
    ///     }
    ///     fn world_size(&self) -> usize {
    ///         2
    ///     }
    ///     fn agree_on_names(&self, _: &str, _: &[Arc<str>]) -> Result<()> {
    ///         Ok(())
    ///     }
    ///     fn all_reduce_max(&self, _: &str, _: &Arena) -> Result<()> {
    ///         Ok(())
    ///     }
    ///     fn poison(&self, reason: &str) {
    ///         self.0.lock().unwrap().push(reason.to_owned());
    ///     }
    /// }
    ///
    /// let (ranks, mut scaling) = (Arc::new(Ranks::default()), Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?);
    /// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
    /// cx.add_group(&(ranks.clone() as Arc<dyn AmaxGroup>));
    /// drop(cx);
    /// assert_eq!(*ranks.0.lock().unwrap(), ["left a forward scope without commit"]);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn add_group(&mut self, group: &Arc<dyn AmaxGroup>) {
        if let Some(scope) = self.scaling.scopes_mut().current_mut() {
            scope.add_group(group);
        }
    }

    /// Returns whether a backward pass computes an activation again ([`Backward::replay`](crate::Backward::replay)).
    ///
    /// ```
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, fp8_kernels::Device};
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
    /// let snapshot = cx.snapshot();
    /// assert!(!cx.is_replay());
    /// cx.commit()?;
    /// assert!(scaling.backward()?.replay(&snapshot)?.is_replay());
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub const fn is_replay(&self) -> bool {
        matches!(self.mode, Mode::Replay { .. })
    }

    /// Checks that the processes `ranks` of the job ([`AmaxGroup::members`](crate::AmaxGroup::members)), which have parts of the
    /// tensors of a layer, quantize each with one scale. `slot` is the forward slot of one of them. `is_gathered` says that its parts are
    /// joined in FP8, which needs equal scales under every recipe. Layers with tensor parallelism call it.
    ///
    /// Recipes without state pass: ranks find the scale of a gathered tensor together. So do evaluations and replays, whose scales
    /// training has found.
    ///
    /// ```
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, fp8_kernels::Device};
    /// let slots = GemmSlots::new("fc");
    /// let mut scaling = Scaling::new(&slots, &Device::cpu())?;
    /// let cx = scaling.autocast(&DelayedScaling::default().into())?;
    /// let error = cx.expect_shared_scales(&slots.input, &[0, 1], true).unwrap_err();
    /// assert!(error.to_string().contains("the scope has no group"), "{error}");
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// A recipe that reduces amaxes over a group without some of the ranks; a recipe that does not reduce them (`reduce_amax = false`)
    /// for a tensor that is gathered.
    pub fn expect_shared_scales(&self, slot: &SlotName, ranks: &[usize], is_gathered: bool) -> Result<()> {
        if ranks.len() < 2 || !self.settings.records() || !matches!(self.mode, Mode::Record) {
            return Ok(());
        }
        let index = self.scaling.model_slots().index(slot, Direction::Forward)?;
        let plan = self.scaling.domains().plan(self.settings.plan);
        let Some(domain) = plan.domain(slot.direction(), index) else { return Ok(()) };
        let Some(state) = self.scaling.domains()[domain].policy.state() else { return Ok(()) };
        if !state.reduce_amax() {
            let slot = slot.name().clone();
            return if is_gathered { Err(Error::OwnScales { slot }) } else { Ok(()) };
        }
        let members = plan.group().map(|group| group.members()).unwrap_or_default();
        let missing: Vec<usize> = ranks.iter().copied().filter(|rank| !members.contains(rank)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let group = plan.group().map(|group| group.id().to_owned());
        Err(Error::AmaxRanks { slot: slot.name().clone(), group, missing })
    }
}
