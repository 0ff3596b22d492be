//! Steps of an optimizer with a scaler.

use super::LossScaler;
use crate::{AdamW, Error, Layer, Optimizer, Result};
use fp8_kernels::Tensor;
use std::sync::Arc;

impl LossScaler {
    /// Takes a step of `optimizer` with the gradients divided by the scale, or skips it if one of them overflowed. Call
    /// [`update`](Self::update) afterwards.
    ///
    /// A skipped step changes no parameter, moment or f32 copy, and does not count in Adam's bias correction
    /// ([`AdamW::updates`]). If [`check`](Self::check) was not called, this computes the norm of all gradients and skips the
    /// step if it is not finite. If it was called, this relies on it, and does not see what became infinite after the scope, such as
    /// a sum over ranks: [`step_with_norm`](Self::step_with_norm) does. From the first call on the optimizer keeps the scaler, so that checkpoints contain it
    /// ([`AdamW::set_loss_scaler`]).
    ///
    /// # Errors
    /// Those of [`AdamW::step`]; an optimizer that has another scaler.
    pub fn step(
        &self,
        optimizer: &mut (impl Optimizer + ?Sized),
        model: &mut (impl Layer + ?Sized),
        lr: f32,
    ) -> Result<()> {
        let optimizer = optimizer.state_mut();
        self.attach(optimizer)?;
        optimizer.step(model, lr)
    }

    /// Takes a [`step`](Self::step) that is also skipped if `norm`, one f32 on the device, is not finite: pass the norm that
    /// [`clip_grad_norm`](Self::clip_grad_norm) returns.
    ///
    /// # Errors
    /// Those of [`AdamW::step_with_norm`]; an optimizer that has another scaler.
    pub fn step_with_norm(
        &self,
        optimizer: &mut (impl Optimizer + ?Sized),
        model: &mut (impl Layer + ?Sized),
        lr: f32,
        norm: &Tensor,
    ) -> Result<()> {
        let optimizer = optimizer.state_mut();
        self.attach(optimizer)?;
        optimizer.step_with_norm(model, lr, norm)
    }

    fn attach(&self, optimizer: &mut AdamW) -> Result<()> {
        match optimizer.loss_scaler() {
            Some(other) if Arc::ptr_eq(&other.shared, &self.shared) => Ok(()),
            Some(_) => Err(Error::LossScaler {
                problem: "the optimizer has another scaler",
                remedy: "use that one, or replace it with `AdamW::set_loss_scaler`",
            }),
            None => optimizer.set_loss_scaler(self),
        }
    }
}
