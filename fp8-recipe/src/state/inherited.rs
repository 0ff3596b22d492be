//! Loaded state that waits for its recipe, and the report of which state the present arenas started from.

use crate::StateReport;
use crate::state::pending_arena::PendingArena;
use crate::{Direction, RecipeLabel};

/// Loaded arenas that no recipe has continued yet, and the report.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    pending: Vec<PendingArena>,
    report: StateReport,
}

impl Inherited {
    pub(crate) fn pending(&self) -> &[PendingArena] {
        &self.pending
    }

    pub(crate) fn pending_mut(&mut self) -> &mut [PendingArena] {
        &mut self.pending
    }

    /// Replaces everything by newly loaded arenas.
    pub(crate) fn replace(&mut self, pending: Vec<PendingArena>) {
        *self = Self { pending, report: StateReport::default() };
    }

    /// Removes the arenas at these positions, which recipes have continued.
    pub(crate) fn remove(&mut self, positions: [Option<usize>; 2]) {
        let mut position = 0;
        self.pending.retain(|_| {
            position += 1;
            !positions.contains(&Some(position - 1))
        });
    }

    /// Adds the report of an arena that started from the pending arenas at `sources`.
    pub(crate) fn note(&mut self, sources: &[usize], report: StateReport) {
        for &position in sources {
            if let Some(arena) = self.pending.get_mut(position) {
                arena.is_source = true;
            }
        }
        self.report.append(report);
    }

    /// Removes the entries of an arena that starts again from the report.
    pub(crate) fn forget(&mut self, recipe: &RecipeLabel, direction: Direction) {
        self.report.forget(recipe, direction);
    }

    /// Returns the report, with the pending arenas that no slot has used so far.
    pub(crate) fn report(&self) -> StateReport {
        let has_past = |pending: &&PendingArena| pending.arena.last_updates.iter().any(|&last| last > 0);
        let unused = self.pending.iter().filter(|pending| !pending.is_source).filter(has_past);
        StateReport { unused: unused.map(PendingArena::unused).collect(), ..self.report.clone() }
    }

    /// A forward scope was committed after the backward scopes of those before it.
    pub(crate) fn forward_committed(&mut self) {
        self.pending.iter_mut().for_each(|pending| pending.arena.awaits_backward = false);
    }

    /// A backward scope was committed. Recipes that have not been used since their state was loaded have arenas, too, in which no
    /// slot has run.
    pub(crate) fn backward_committed(&mut self) {
        let awaiting = self.pending.iter_mut().filter(|pending| pending.arena.awaits_backward);
        awaiting.for_each(|pending| pending.arena.updates += 1);
    }
}
