//! The open scope of a `Scaling`, and what earlier scopes have left for it.

use crate::Direction;
use crate::scopes::open_scope::{Awaiting, Scope};
use std::fmt::Display;

/// The number of scopes so far, the open one, and the domains that await a backward scope.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    /// The number of forward and backward scopes so far.
    number: u64,
    open: Option<Scope>,
    awaiting: Awaiting,
}

impl Scopes {
    /// Opens a scope. `weight_uses` is the number of uses of cached weights so far.
    pub(crate) fn open(&mut self, direction: Direction, weight_uses: u64) {
        let (touched, lone, groups) = match direction {
            Direction::Forward => (Vec::new(), None, Vec::new()),
            Direction::Backward => {
                let awaiting = &self.awaiting;
                (awaiting.domains().to_vec(), awaiting.lone().cloned(), awaiting.groups().to_vec())
            }
        };
        self.number += 1;
        let scope = Scope::new(direction, touched, weight_uses, self.number);
        self.open = Some(Scope { lone, groups, ..scope });
    }

    pub(crate) const fn current(&self) -> Option<&Scope> {
        self.open.as_ref()
    }

    pub(crate) const fn current_mut(&mut self) -> Option<&mut Scope> {
        self.open.as_mut()
    }

    /// Closes the open scope.
    pub(crate) fn take(&mut self) -> Option<Scope> {
        self.open.take()
    }

    /// Remembers an error in the open scope. If the scope is then dropped without commit, the other ranks get this error.
    pub(crate) fn remember<T, E: Display>(&mut self, result: Result<T, E>) -> Result<T, E> {
        if let (Err(error), Some(scope)) = (&result, &mut self.open) {
            scope.cause = Some(error.to_string());
        }
        result
    }

    pub(crate) const fn awaiting(&self) -> &Awaiting {
        &self.awaiting
    }

    pub(crate) const fn awaiting_mut(&mut self) -> &mut Awaiting {
        &mut self.awaiting
    }

    /// Forgets which domains await a backward scope, when their state is replaced.
    pub(crate) fn forget_awaiting(&mut self) {
        self.awaiting = Awaiting::default();
    }
}
