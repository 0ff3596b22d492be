//! The random numbers of dropout in scopes: one key for each training scope, and one mask after the other in it.
//!
//! A model without dropout neither allocates nor launches anything for it. The first draw of a scope takes the scope's key
//! from a state on the device, by one launch; later draws of the scope are masks of that key, numbered by the host.

use crate::scopes::scope_settings::Mode;
use crate::{Backward, DropoutProgress, Error, Forward, Result, Scaling};
use fp8_kernels::DropoutDraw;
use std::sync::atomic::Ordering::Relaxed;

impl Scaling {
    /// Sets the seed of dropout. The number of scopes that have drawn masks stays. Default: 0.
    ///
    /// In data-parallel training, give each rank a seed of its own, such as `seed + rank`, or all ranks drop the same elements of
    /// different batches. Ranks that share layers (tensor parallelism) have one seed. Do so again after [`load_state`](Self::load_state), which sets the seed of the rank that saved the
    /// state.
    ///
    /// # Errors
    /// A step that is being recorded; a device that failed. None on the CPU.
    pub fn set_dropout_seed(&mut self, seed: u64) -> Result<()> {
        let scopes = self.randomness().progress()?.unwrap_or_default().scopes;
        self.randomness_mut().set(DropoutProgress { seed, scopes })
    }

    /// Returns the seed of dropout.
    pub const fn dropout_seed(&self) -> u64 {
        self.randomness().seed()
    }

    /// Sets the number of this rank's replica in data-parallel training. Replicas with one seed then round their gradients stochastically
    /// with other random numbers: those of replica n begin at counter n · 2³² of a mask. Dropout does not depend on it. Ranks that share
    /// layers (tensor parallelism) are one replica. Default: 0.
    ///
    /// Like the seed, it is not part of the state: set it again after a restart. fp8-nn's `Gradients` sets it for the scopes that it watches
    /// ([`Backward::set_replica`]).
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
    /// use fp8_recipe::{GemmSlots, Nvfp4, Result, Scaling};
    /// let codes = |replica| -> Result<Vec<u8>> {
    ///     let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    ///     let mut scaling = Scaling::new(&fc, &device)?;
    ///     scaling.set_replica(replica);
    ///     let cx = scaling.autocast(&Nvfp4::default().into())?;
    ///     let origin = cx.origin(&fc.input);
    ///     cx.commit()?;
    ///     let dy = Tensor::from_vec((0..256).map(|i| (i as f32).sin()).collect(), [16, 16], &device)?;
    ///     let mut cx = scaling.backward()?;
    ///     let dy = ops::quantize(&dy, &cx.slot(&origin, &fc.grad_output)?)?;
    ///     cx.commit()?;
    ///     Ok(dy.as_fp8().map(|dy| dy.codes()).transpose()?.unwrap_or_default())
    /// };
    /// assert_eq!(codes(1)?, codes(1)?);
    /// assert_ne!(codes(0)?, codes(1)?);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub const fn set_replica(&mut self, replica: usize) {
        self.randomness_mut().replica = replica;
    }
}

impl Backward<'_> {
    /// Returns the seed of dropout and of stochastic rounding, which ranks that share layers have in common.
    ///
    /// ```
    /// use fp8_recipe::{GemmSlots, Scaling, fp8_kernels::Device};
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// scaling.set_dropout_seed(7)?;
    /// assert_eq!(scaling.backward()?.dropout_seed(), 7);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub const fn dropout_seed(&self) -> u64 {
        self.scaling.dropout_seed()
    }

    /// Sets the number of this rank's replica for this scope: see [`Scaling::set_replica`], which has an example.
    pub fn set_replica(&mut self, replica: usize) {
        if let Some(scope) = self.scaling.scopes_mut().current_mut() {
            scope.replica = Some(replica);
        }
    }
}

impl Forward<'_> {
    /// Returns the seed of dropout, which ranks that draw parts of one mask have in common.
    ///
    /// ```
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling, fp8_kernels::Device};
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// scaling.set_dropout_seed(7)?;
    /// assert_eq!(scaling.autocast(&DelayedScaling::default().into())?.dropout_seed(), 7);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub const fn dropout_seed(&self) -> u64 {
        self.scaling.dropout_seed()
    }

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
            Mode::Record => self.scaling.draw_dropout(),
        }
    }

    /// Returns whether the scope drops, as [`dropout_draw`](Self::dropout_draw) would say, without a draw.
    ///
    /// ```
    /// use fp8_kernels::Device;
    /// use fp8_recipe::{GemmSlots, Recipe, Scaling};
    ///
    /// let mut scaling = Scaling::new(&GemmSlots::new("fc"), &Device::cpu())?;
    /// let cx = scaling.autocast(&Recipe::off())?;
    /// assert!(cx.drops());
    /// cx.commit()?;
    /// assert!(!scaling.eval(&Recipe::off())?.drops());
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub const fn drops(&self) -> bool {
        !matches!(self.mode, Mode::Evaluate)
    }
}
