//! A recipe under a group, with its forward and backward arena.

use crate::{AmaxGroup, Direction, Recipe, Result};
use fp8_kernels::ops::{self, AmaxRule, ScaleUpdate};
use fp8_kernels::{Arena, ArenaOptions, Device, Encoding, REST, ScaleRule, UNSET};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Domain {
    /// The identity: recipe and group.
    pub(crate) key: String,
    pub(crate) recipe: Recipe,
    pub(crate) rules: [ScaleRule; 2],
    pub(crate) encodings: [Encoding; 2],
    /// None until the first scope that records. Under current scaling they only serve the report.
    pub(crate) arenas: Option<[Arena; 2]>,
    group: Option<Arc<dyn AmaxGroup>>,
    agreed: [bool; 2],
    /// Arenas that a scope left and that could not be put back yet.
    unrestored: [bool; 2],
}

impl Domain {
    pub(crate) fn new(key: String, recipe: &Recipe) -> Self {
        Self {
            key,
            rules: Direction::ALL.map(|direction| recipe.rule(direction)),
            encodings: Direction::ALL.map(|direction| recipe.format().encoding(direction)),
            recipe: recipe.clone(),
            arenas: None,
            group: None,
            agreed: [false; 2],
            unrestored: [false; 2],
        }
    }

    pub(crate) fn make_arenas(&mut self, slots: [usize; 2], device: &Device) -> Result<()> {
        let options = match &self.recipe {
            Recipe::Delayed(recipe) => ArenaOptions {
                history_len: recipe.amax_history_len,
                rest: if recipe.zero_is_skipped { 0.0 } else { REST },
                first_scale: if recipe.calibrate_first_step { UNSET } else { 1.0 },
            },
            Recipe::Current(_) => ArenaOptions { history_len: 2, rest: REST, first_scale: UNSET },
        };
        let [forward, backward] = slots;
        self.arenas = Some([Arena::new(forward, options, device)?, Arena::new(backward, options, device)?]);
        Ok(())
    }

    pub(crate) fn group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        self.group.as_ref()
    }

    /// The same part in the job. Ranks that joined it anew have names to compare.
    pub(crate) fn set_group(&mut self, group: Option<Arc<dyn AmaxGroup>>) {
        let same = match (&self.group, &group) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !same {
            self.agreed = [false; 2];
            self.group = group;
        }
    }

    /// The group that a commit reduces over: the recipe wants it, and there are other ranks.
    pub(crate) fn reducing_group(&self) -> Option<&Arc<dyn AmaxGroup>> {
        let Recipe::Delayed(recipe) = &self.recipe else { return None };
        self.group
            .as_ref()
            .filter(|group| recipe.reduce_amax && self.arenas.is_some() && group.world_size() > 1)
    }

    /// Row 0 becomes its maximum over the ranks.
    pub(crate) fn reduce(&mut self, direction: Direction, names: &[Arc<str>]) -> Result<()> {
        let (Some(group), Some(arenas)) = (self.reducing_group(), &self.arenas) else { return Ok(()) };
        let key = format!("{direction} {}", self.key);
        if !self.agreed[direction as usize] {
            group.agree_on_names(&key, names)?;
        }
        group.all_reduce_max(&key, &arenas[direction as usize])?;
        self.agreed[direction as usize] = true;
        Ok(())
    }

    /// Fails where a user's function would, and changes nothing.
    pub(crate) fn check(&self, direction: Direction) -> Result<()> {
        let rule = &self.rules[direction as usize];
        if let Some(arenas) = &self.arenas {
            ops::check_scales(&arenas[direction as usize], &scale_update(&self.recipe, rule))?;
        }
        Ok(())
    }

    /// Undoes what an open scope wrote. Where the device fails, [`restore`](Self::restore) tries again.
    pub(crate) fn roll_back(&mut self, direction: Direction) -> Result<()> {
        let Some(arenas) = &self.arenas else { return Ok(()) };
        self.unrestored[direction as usize] = true;
        arenas[direction as usize].roll_back()?;
        self.unrestored[direction as usize] = false;
        Ok(())
    }

    /// What an earlier [`roll_back`](Self::roll_back) left.
    pub(crate) fn restore(&mut self) -> Result<()> {
        let left = Direction::ALL.into_iter().filter(|&direction| self.unrestored[direction as usize]);
        left.collect::<Vec<_>>().into_iter().try_for_each(|direction| self.roll_back(direction))
    }

    pub(crate) fn update(&mut self, direction: Direction) -> Result<()> {
        let rule = &self.rules[direction as usize];
        if let Some(arenas) = &mut self.arenas {
            ops::update_scales(&mut arenas[direction as usize], &scale_update(&self.recipe, rule))?;
        }
        Ok(())
    }
}

fn scale_update<'a>(recipe: &'a Recipe, rule: &'a ScaleRule) -> ScaleUpdate<'a> {
    match recipe {
        Recipe::Delayed(recipe) => ScaleUpdate {
            amax: recipe.amax_rule(),
            rule,
            interval: recipe.interval,
            record_non_finite: recipe.record_non_finite,
        },
        Recipe::Current(_) => {
            ScaleUpdate { amax: AmaxRule::MostRecent, rule, interval: 1, record_non_finite: false }
        }
    }
}
