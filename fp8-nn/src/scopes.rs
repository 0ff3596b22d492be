//! Closures over the guards: commit where the closure succeeds, drop the guard where it fails. The other ranks of a group are
//! told the closure's error.
//!
//! They live here, where the error type is fixed: a generic one cannot be inferred once `?` stands both inside and
//! outside the closure.

use crate::Result;
use fp8_recipe::{Backward, Forward, Recipe, Scaling};

/// Methods of [`Scaling`].
pub trait Scopes {
    /// A forward scope around `f`, committed where `f` succeeds.
    ///
    /// # Errors
    /// Those of `f` and of the commit.
    fn autocast_with<T>(
        &mut self,
        recipe: &Recipe,
        f: impl FnOnce(&mut Forward<'_>) -> Result<T>,
    ) -> Result<T>;

    /// A backward scope around `f`, committed where `f` succeeds.
    ///
    /// # Errors
    /// Those of `f` and of the commit.
    fn backward_with<T>(&mut self, f: impl FnOnce(&mut Backward<'_>) -> Result<T>) -> Result<T>;
}

impl Scopes for Scaling {
    fn autocast_with<T>(
        &mut self,
        recipe: &Recipe,
        f: impl FnOnce(&mut Forward<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut cx = self.autocast(recipe)?;
        let out = cx.attempt(f)?;
        cx.commit()?;
        Ok(out)
    }

    fn backward_with<T>(&mut self, f: impl FnOnce(&mut Backward<'_>) -> Result<T>) -> Result<T> {
        let mut cx = self.backward()?;
        let out = cx.attempt(f)?;
        cx.commit()?;
        Ok(out)
    }
}
