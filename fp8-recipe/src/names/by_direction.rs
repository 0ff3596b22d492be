//! One value for the forward pass and one for the backward pass.

use crate::names::slots::Direction;
use std::ops::{Index, IndexMut};

/// A pair of values, indexed by [`Direction`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ByDirection<T> {
    pub(crate) forward: T,
    pub(crate) backward: T,
}

impl<T> ByDirection<T> {
    /// Calls `f` for the forward pass, then for the backward pass.
    pub(crate) fn from_fn(mut f: impl FnMut(Direction) -> T) -> Self {
        Self { forward: f(Direction::Forward), backward: f(Direction::Backward) }
    }

    /// Calls `f` for both passes; the first error ends it.
    pub(crate) fn try_from_fn<E>(mut f: impl FnMut(Direction) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { forward: f(Direction::Forward)?, backward: f(Direction::Backward)? })
    }

    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> ByDirection<U> {
        ByDirection { forward: f(self.forward), backward: f(self.backward) }
    }

    pub(crate) const fn each_ref(&self) -> ByDirection<&T> {
        ByDirection { forward: &self.forward, backward: &self.backward }
    }

    pub(crate) const fn each_mut(&mut self) -> ByDirection<&mut T> {
        ByDirection { forward: &mut self.forward, backward: &mut self.backward }
    }
}

impl<T> Index<Direction> for ByDirection<T> {
    type Output = T;

    fn index(&self, direction: Direction) -> &T {
        match direction {
            Direction::Forward => &self.forward,
            Direction::Backward => &self.backward,
        }
    }
}

impl<T> IndexMut<Direction> for ByDirection<T> {
    fn index_mut(&mut self, direction: Direction) -> &mut T {
        match direction {
            Direction::Forward => &mut self.forward,
            Direction::Backward => &mut self.backward,
        }
    }
}

impl<T> IntoIterator for ByDirection<T> {
    type Item = (Direction, T);
    type IntoIter = std::array::IntoIter<(Direction, T), 2>;

    fn into_iter(self) -> Self::IntoIter {
        [(Direction::Forward, self.forward), (Direction::Backward, self.backward)].into_iter()
    }
}
