//! Opens scopes.

use crate::scopes::forward_outcome::Ending;
use crate::scopes::scope_settings::{Mode, ScopeSettings, check_compute_dtype};
use crate::{AutocastOptions, Backward, Direction, Forward, Recipe, Result, Scaling};
use std::sync::Arc;

impl Scaling {
    /// Opens a forward scope under `recipe`, with the default options.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn autocast(&mut self, recipe: &Recipe) -> Result<Forward<'_>> {
        self.scope(recipe, &AutocastOptions::default())
    }

    /// Opens a forward scope under `recipe`.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn scope(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<Forward<'_>> {
        self.open(Direction::Forward)?;
        match self.settings(recipe, options, true) {
            Ok(settings) => Ok(Forward::outermost(self, settings)),
            Err(error) => {
                self.roll_back(Ending::Left);
                Err(error)
            }
        }
    }

    /// Opens a forward scope for evaluation. It records no amax, so there is nothing to commit, and backward refuses its
    /// `Saved`s.
    ///
    /// It quantizes with the recipe's scales. Under a delayed-scaling recipe that has not been trained with here, and in
    /// slots that are not calibrated, each tensor takes its own scale (1 under a recipe with `calibrate_first_step: false`, such
    /// as Transformer Engine's: see [`Recipe::starts_at_one`]).
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn eval(&mut self, recipe: &Recipe) -> Result<Forward<'_>> {
        self.eval_with_options(recipe, &AutocastOptions::default())
    }

    /// Opens a scope for evaluation with options: see [`eval`](Self::eval).
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a pattern of a recipe by name that matches no slot.
    pub fn eval_with_options(&mut self, recipe: &Recipe, options: &AutocastOptions) -> Result<Forward<'_>> {
        self.settle()?;
        let settings = self.settings(recipe, options, false)?;
        Ok(Forward::within(self, settings, Mode::Evaluate))
    }

    /// Opens a backward scope. It takes no recipe, because each `Saved` knows the recipe of its forward.
    ///
    /// Its commit updates the backward arenas of all recipes under which forward scopes were committed since the last
    /// backward scope was, whether or not a layer runs backward in it. A rank whose layers had nothing to do (an expert
    /// without tokens) therefore takes part in the reductions of the other ranks.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn backward(&mut self) -> Result<Backward<'_>> {
        self.open(Direction::Backward)?;
        Ok(Backward::new(self))
    }

    fn open(&mut self, direction: Direction) -> Result<()> {
        self.settle()?;
        self.scopes.open(direction, self.weights.uses());
        Ok(())
    }

    pub(crate) fn settings(
        &mut self,
        recipe: &Recipe,
        options: &AutocastOptions,
        records: bool,
    ) -> Result<ScopeSettings> {
        let AutocastOptions { enabled, calibrating, compute_dtype, allow_scales_per_rank, .. } = *options;
        compute_dtype.map_or(Ok(()), check_compute_dtype)?;
        let plan = self.plan_for(recipe, options, records && (enabled || calibrating))?;
        let settings = ScopeSettings {
            plan,
            enabled,
            calibrating,
            compute_dtype,
            allows_scales_per_rank: allow_scales_per_rank,
        };
        if records && settings.records() {
            if let Some(scope) = self.scopes.current_mut() {
                scope.touch_plan(plan, &self.domains.plan(plan).domains);
            }
            self.note_lone(settings);
        }
        Ok(settings)
    }

    /// Notes in the open scope that a backward runs in it: under these settings, after a forward scope that touched `touched`.
    pub(crate) fn touch_for_backward(&mut self, settings: ScopeSettings, touched: &[usize]) {
        self.note_lone(settings);
        let Some(scope) = self.scopes.current_mut() else { return };
        scope.touch(touched);
        if settings.records() {
            scope.touch(&self.domains.plan(settings.plan).domains);
        }
    }

    /// Returns the name of the settings' recipe if FP8 runs under it, it reduces amaxes, it has no group of more than one rank,
    /// and the options do not allow that.
    pub(crate) fn lone_recipe(&self, settings: ScopeSettings) -> Option<Arc<str>> {
        if !settings.enabled || settings.allows_scales_per_rank {
            return None;
        }
        let mut domains =
            self.domains.plan(settings.plan).domains.iter().map(|&domain| &self.domains[domain]);
        let lone = domains.find(|domain| domain.is_lone())?;
        Some(lone.label().without_group().to_string().into())
    }

    /// Notes in the open scope that it runs under the settings.
    fn note_lone(&mut self, settings: ScopeSettings) {
        if self.scopes.current().is_some_and(|scope| scope.lone.is_none()) {
            let lone = self.lone_recipe(settings);
            if let Some(scope) = self.scopes.current_mut() {
                scope.lone = lone;
            }
        }
    }
}
