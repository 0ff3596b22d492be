//! The progress of the random numbers of dropout and of stochastic rounding. It is stored on the device once a scope has drawn any.

use crate::Result;
use fp8_kernels::{Device, DropoutDraw, DropoutState};

/// The progress of the random numbers of dropout, and of gradients that are rounded stochastically, as checkpoints store it.
///
/// The n-th training scope that draws masks, counted from 0, uses the n-th number of SplitMix64 with this seed as its
/// key. Mask m of the scope begins at counter m · 2⁴⁴ of Philox4x32-10 with that key: see [`DropoutState`] and
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
    /// The number of training scopes, forward and backward, that have drawn masks.
    pub scopes: u64,
}

/// The random numbers of one model. What the host knows is replaced by the device's state at the first draw.
#[derive(Debug, Default)]
pub(crate) struct Randomness {
    start: DropoutProgress,
    /// The replica of scopes that set none.
    pub(crate) replica: usize,
    /// Whether a seed was set or loaded.
    is_set: bool,
    state: Option<DropoutState>,
}

impl Randomness {
    /// Returns the seed.
    pub(crate) const fn seed(&self) -> u64 {
        self.start.seed
    }

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
    pub(crate) fn draw(&mut self, device: &Device) -> Result<DropoutDraw> {
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
