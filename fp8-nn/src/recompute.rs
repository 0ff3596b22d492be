//! Keeps a layer's input and its scope's scales instead of its activations, and runs it again in backward: less memory,
//! one more forward, the same bits.

use crate::{Module, Result, composite};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward, Snapshot};

/// A layer that is computed again in backward. May be nested.
#[derive(Debug)]
pub struct Recompute<M> {
    /// The layer.
    pub inner: M,
}

composite!(Recompute<M> { inner });

/// The input, and a handle to the scales.
#[derive(Debug)]
pub struct RecomputeSaved {
    x: Tensor,
    snapshot: Snapshot,
}

impl<M: Module> Module for Recompute<M> {
    type Saved = RecomputeSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, RecomputeSaved)> {
        let (y, _) = self.inner.forward(cx, x)?;
        Ok((y, RecomputeSaved { x: x.clone(), snapshot: cx.snapshot() }))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: RecomputeSaved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| {
            let (_, inner) = self.inner.forward(&mut cx.replay(&saved.snapshot)?, &saved.x)?;
            self.inner.backward(cx, inner, dy)
        })
    }
}
