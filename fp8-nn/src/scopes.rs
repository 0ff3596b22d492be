//! Scopes around closures. They are in this crate because its error type is fixed: a generic one cannot be inferred where `?`
//! is used both inside and outside the closure.

use crate::Result;
use fp8_recipe::{Backward, Forward, Recipe, Scaling};

/// Methods of [`Scaling`] that open a scope, run a closure in it and commit what it recorded.
///
/// If the closure returns an error, the scope is dropped without a commit. Scales and histories are then unchanged, and the
/// other ranks of a group get the closure's error.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 16, out_features: 16, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let x = Tensor::full(1.75, [2, 16], DType::F32, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
/// scaling.in_backward(|cx| fc.backward(cx, saved, &y))?;
/// let same = scaling.in_eval(&Recipe::off(), |cx| fc.forward(cx, &x))?.0;
/// assert_eq!(same.shape(), y.shape());
/// let reports = scaling.slot_reports()?;
/// let input = reports.iter().find(|slot| &*slot.name == "fc.input").map(|slot| slot.scale);
/// assert_eq!(input, Some(448.0 / 1.75)); // for the next step: E4M3's largest value by the amax
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub trait Scopes {
    /// Opens a forward scope, runs `f` in it, and commits it if `f` succeeds.
    ///
    /// # Errors
    /// The errors of `f` and of the commit.
    fn in_autocast<T>(&mut self, recipe: &Recipe, f: impl FnOnce(&mut Forward<'_>) -> Result<T>)
    -> Result<T>;

    /// Opens a backward scope, runs `f` in it, and commits it if `f` succeeds.
    ///
    /// # Errors
    /// The errors of `f` and of the commit.
    fn in_backward<T>(&mut self, f: impl FnOnce(&mut Backward<'_>) -> Result<T>) -> Result<T>;

    /// Opens a scope for evaluation, which records no amax, and runs `f` in it.
    ///
    /// # Errors
    /// The errors of `f`.
    fn in_eval<T>(&mut self, recipe: &Recipe, f: impl FnOnce(&mut Forward<'_>) -> Result<T>) -> Result<T>;
}

impl Scopes for Scaling {
    fn in_autocast<T>(
        &mut self,
        recipe: &Recipe,
        f: impl FnOnce(&mut Forward<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut cx = self.autocast(recipe)?;
        let out = cx.attempt(f)?;
        cx.commit()?;
        Ok(out)
    }

    fn in_backward<T>(&mut self, f: impl FnOnce(&mut Backward<'_>) -> Result<T>) -> Result<T> {
        let mut cx = self.backward()?;
        let out = cx.attempt(f)?;
        cx.commit()?;
        Ok(out)
    }

    fn in_eval<T>(&mut self, recipe: &Recipe, f: impl FnOnce(&mut Forward<'_>) -> Result<T>) -> Result<T> {
        f(&mut self.eval(recipe)?)
    }
}
