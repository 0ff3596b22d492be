//! The random numbers of dropout: one key for each training scope, and one mask after the other in it.
//!
//! A model without dropout neither allocates nor launches anything for it. The first draw of a scope takes the scope's key
//! from a state on the device, by one launch; later draws of the scope are masks of that key, numbered by the host.

use crate::frame::Mode;
use crate::{Error, Forward, Result, Scaling};
use fp8_kernels::{Device, DropoutDraw, DropoutState};
use std::sync::atomic::Ordering::Relaxed;

/// How far the random numbers of dropout have come, as checkpoints store it.
///
/// The key of a scope is the number of SplitMix64 with this seed that belongs to the scope, and mask m of the scope begins at
/// counter m · 2⁴⁴ of Philox4x32-10 with that key: see [`DropoutState`] and
/// [`DropoutDraw::mask`].
///
/// ```
/// use fp8_recipe::fp8_kernels::Device;
/// use fp8_recipe::{DelayedScaling, DropoutProgress, GemmSlots, Scaling};
///
/// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
/// scaling.set_dropout_seed(42)?;
/// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
/// let draws = (cx.dropout_draw()?, cx.dropout_draw()?);
/// cx.commit()?;
/// assert_ne!(draws.0, draws.1);
/// assert_eq!(scaling.state()?.dropout, Some(DropoutProgress { seed: 42, scopes: 1 }));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DropoutProgress {
    /// The seed.
    pub seed: u64,
    /// How many training scopes have drawn masks.
    pub scopes: u64,
}

/// The random numbers of one model. What the host knows is replaced by the device's state at the first draw.
#[derive(Debug, Default)]
pub(crate) struct Randomness {
    start: DropoutProgress,
    /// Whether a seed was set or loaded.
    is_set: bool,
    state: Option<DropoutState>,
}

impl Randomness {
    /// Returns the progress, or `None` if there is nothing to save.
    pub(crate) fn progress(&self) -> Result<Option<DropoutProgress>> {
        match &self.state {
            Some(state) => {
                let (seed, scopes) = state.read()?;
                Ok(Some(DropoutProgress { seed, scopes }))
            }
            None => Ok(self.is_set.then_some(self.start)),
        }
    }

    pub(crate) fn set(&mut self, progress: DropoutProgress) -> Result<()> {
        if let Some(state) = &self.state {
            state.set(progress.seed, progress.scopes)?;
        }
        (self.start, self.is_set) = (progress, true);
        Ok(())
    }

    /// Takes the key of a scope.
    fn draw(&mut self, device: &Device) -> Result<DropoutDraw> {
        if let Some(state) = &self.state {
            return Ok(state.draw()?);
        }
        let state = DropoutState::new(self.start.seed, device)?;
        if self.start.scopes > 0 {
            state.set(self.start.seed, self.start.scopes)?;
        }
        Ok(self.state.insert(state).draw()?)
    }
}

impl Scaling {
    /// Sets the seed of dropout. The number of scopes that have drawn masks stays. Default: 0.
    ///
    /// In data-parallel training, give each rank a seed of its own, such as `seed + rank`, or all ranks drop the same elements of
    /// different batches. Do so again after [`load_state`](Self::load_state), which sets the seed of the rank that saved the
    /// state.
    ///
    /// # Errors
    /// A step that is being recorded; a device that failed. None on the CPU.
    pub fn set_dropout_seed(&mut self, seed: u64) -> Result<()> {
        let scopes = self.randomness.progress()?.unwrap_or_default().scopes;
        self.randomness.set(DropoutProgress { seed, scopes })
    }

    /// Returns the seed of dropout.
    pub const fn dropout_seed(&self) -> u64 {
        self.randomness.start.seed
    }
}

impl Forward<'_> {
    /// Returns the random numbers of the next dropout mask, or `None` in an evaluation, which drops nothing.
    ///
    /// Each call in a scope returns another mask, in the order of the calls. A replay ([`Backward::replay`]) returns those of the
    /// first run, from the point at which the snapshot was taken; take it before the layer runs. A layer keeps the draw in its
    /// `Saved`, for backward.
    ///
    /// A recorded step draws anew at each replay of its graph: replay n draws what step n would draw without a graph. The first
    /// step that draws must run before a step is recorded.
    ///
    /// [`Backward::replay`]: crate::Backward::replay
    ///
    /// # Errors
    /// The first draw of this `Scaling`, in a step that is being recorded; a replay of a layer that did not draw in its first
    /// run; a device that is out of memory or failed.
    pub fn dropout_draw(&mut self) -> Result<Option<DropoutDraw>> {
        match &self.mode {
            Mode::Evaluate => Ok(None),
            Mode::Replay { outcome, draws } => {
                let draw = outcome.draw().ok_or(Error::NoSnapshot)?;
                Ok(Some(draw.mask(draws.fetch_add(1, Relaxed))))
            }
            Mode::Record => {
                let Some(scope) = &mut self.scaling.scope else { return Ok(None) };
                if scope.outcome.draw().is_none() {
                    scope.outcome.set_draw(self.scaling.randomness.draw(&self.scaling.device)?);
                }
                let number = scope.draws;
                scope.draws += 1;
                Ok(scope.outcome.draw().map(|draw| draw.mask(number)))
            }
        }
    }
}
