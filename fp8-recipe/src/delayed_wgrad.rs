//! Weight gradients that a backward scope leaves for later.

use crate::Backward;
use fp8_kernels::Operand;
use fp8_kernels::ops::Accumulation;
use std::sync::Arc;

/// A weight gradient that was not computed yet: `dw[n, k] += dy[m, n]ᵀ · x[m, k]`.
///
/// [`Backward::delay_wgrad`] says how it comes about.
#[derive(Debug)]
pub struct DelayedWgrad {
    /// The name of the weight.
    pub weight: Arc<str>,
    /// The gradient of the output, `[m, n]`.
    pub dy: Operand,
    /// The input, `[m, k]`.
    pub x: Operand,
    /// How the product accumulates.
    pub accumulation: Accumulation,
}

impl Backward<'_> {
    /// Delays the weight gradients of this scope: layers compute the gradients of their inputs, biases and norms, and leave the
    /// products `dyᵀ · x` for later. A pipeline sends the gradient of the input to the previous stage first, and computes the
    /// weight gradients while it waits.
    ///
    /// [`take_wgrads`](Self::take_wgrads) returns them, in the order in which backward reached the layers. fp8-nn's `backward_dw`
    /// computes them, with the bits that the scope would have given them.
    pub fn delay_wgrad(&mut self) {
        self.wgrads.get_or_insert_default();
    }

    /// Returns the weight gradients that were delayed so far. A [`commit`](Self::commit) without it is refused if there are any.
    pub fn take_wgrads(&mut self) -> Vec<DelayedWgrad> {
        self.wgrads.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns where a layer leaves its weight gradient; `None` if it is to compute it at once.
    pub fn delayed_wgrads(&mut self) -> Option<&mut Vec<DelayedWgrad>> {
        self.wgrads.as_mut()
    }
}
