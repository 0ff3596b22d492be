//! The trait of all optimizers.

use crate::{AdamW, Layer, LossScaler, Result};
use fp8_kernels::Tensor;
use std::fmt::Debug;

pub(crate) mod sealed {
    use crate::AdamW;

    /// Lends the state of an optimizer, which all of them share: AdamW's has everything that the others need.
    #[expect(unnameable_types, reason = "so that other crates cannot implement Optimizer")]
    pub trait HasState {
        fn state(&self) -> &AdamW;
        fn state_mut(&mut self) -> &mut AdamW;
    }

    impl HasState for AdamW {
        fn state(&self) -> &AdamW {
            self
        }

        fn state_mut(&mut self) -> &mut AdamW {
            self
        }
    }
}

/// An optimizer: [`AdamW`], [`Lion`](crate::Lion) or [`Sgd`](crate::Sgd). Checkpoints, loss scalers and
/// [`broadcast_state`](crate::broadcast_state) take any of them, and the methods are the same for all.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// fn train(model: &mut Linear, optimizer: &mut impl Optimizer) -> Result<()> {
///     let norm = clip_grad_norm(model, 1.0)?;
///     optimizer.step_with_norm(model, 1e-3, &norm)
/// }
///
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let (mut adamw, mut lion) = (AdamW::new(AdamWOptions::default())?, Lion::new(LionOptions::default())?);
/// train(&mut fc, &mut adamw)?;
/// train(&mut fc, &mut lion)?;
/// assert_eq!((adamw.steps(), lion.steps(), lion.skipped_steps()?), (1, 1, 0));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub trait Optimizer: Debug + sealed::HasState {
    /// Updates every parameter that is not frozen from its gradient: see [`AdamW::step`].
    ///
    /// # Errors
    /// Those of [`AdamW::step`].
    fn step(&mut self, model: &mut (impl Layer + ?Sized), lr: f32) -> Result<()> {
        self.state_mut().step(model, lr)
    }

    /// Takes a step with a norm that was already computed: see [`AdamW::step_with_norm`].
    ///
    /// # Errors
    /// Those of [`AdamW::step_with_norm`].
    fn step_with_norm(&mut self, model: &mut (impl Layer + ?Sized), lr: f32, norm: &Tensor) -> Result<()> {
        self.state_mut().step_with_norm(model, lr, norm)
    }

    /// Sets the learning rate of the next replay of a recorded step.
    ///
    /// # Errors
    /// A rate that is negative or not finite.
    fn set_lr(&self, lr: f32) -> Result<()> {
        self.state().set_lr(lr)
    }

    /// Returns the number of steps taken, including those that were skipped.
    fn steps(&self) -> u64 {
        self.state().steps()
    }

    /// Returns how many of the steps changed nothing, because their gradients had no finite norm: see [`AdamW::skipped_steps`].
    ///
    /// # Errors
    /// Those of [`AdamW::skipped_steps`].
    fn skipped_steps(&self) -> Result<u64> {
        self.state().skipped_steps()
    }

    /// Sets the scaler of the gradients: see [`AdamW::set_loss_scaler`].
    ///
    /// # Errors
    /// Those of [`AdamW::set_loss_scaler`].
    fn set_loss_scaler(&mut self, scaler: &LossScaler) -> Result<()> {
        self.state_mut().set_loss_scaler(scaler)
    }

    /// Returns the scaler of the gradients, if one was set.
    fn loss_scaler(&self) -> Option<&LossScaler> {
        self.state().loss_scaler()
    }

    /// Sets the f32 copies to the values of the parameters: see [`AdamW::reload_params`].
    ///
    /// # Errors
    /// Those of [`AdamW::reload_params`].
    fn reload_params(&mut self, model: &(impl Layer + ?Sized)) -> Result<()> {
        self.state_mut().reload_params(model)
    }
}

impl Optimizer for AdamW {}
