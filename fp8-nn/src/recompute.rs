//! Recomputation of activations.

use crate::{Block, CachedLayer, Module, Result, SequenceInfo, composite};
use fp8_kernels::Tensor;
use fp8_recipe::{Backward, Forward, Snapshot};

/// A layer whose activations are not stored but computed again in backward. This saves memory and costs one more forward
/// pass.
///
/// Between the passes it keeps the input of the layer and a handle to the scales of the scope: one f32 per slot, shared by
/// all such layers of the scope. In backward the layer runs with the scales and dropout masks of its first run and records
/// nothing, so outputs
/// and gradients are the same as without recomputation, bit for bit. It may be nested. Parameters and slots are those of
/// `inner`.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let device = Device::cpu();
/// let mlp = || {
///     let options = LayerNormMlpOptions { hidden_size: 32, ffn_hidden_size: 48, ..Default::default() };
///     LayerNormMlp::new("mlp", options, &device, &mut StdRng::seed_from_u64(1))
/// };
/// fn gradient(mut model: impl Module) -> Result<Vec<f32>> {
///     let mut scaling = Scaling::new(&model, &Device::cpu())?;
///     let x = Tensor::full(0.5, [4, 32], DType::F32, &Device::cpu())?;
///     let recipe = Recipe::from(DelayedScaling::default());
///     let (y, saved) = scaling.in_autocast(&recipe, |cx| model.forward(cx, &x))?;
///     Ok(scaling.in_backward(|cx| model.backward(cx, saved, &y))?.to_f32_vec()?)
/// }
/// assert_eq!(gradient(mlp()?)?, gradient(Recompute::new(mlp()?))?);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Recompute<M> {
    /// The layer that is computed again.
    pub inner: M,
}

composite!(Recompute<M> { inner });

impl<M: Module> Recompute<M> {
    /// Wraps `inner`.
    pub const fn new(inner: M) -> Self {
        Self { inner }
    }
}

/// The values that the backward pass of [`Recompute`] needs: the input, what is known of its sequences, and a handle to the
/// scales.
#[derive(Debug)]
pub struct RecomputeSaved {
    x: Tensor,
    info: SequenceInfo,
    snapshot: Snapshot,
}

/// A layer that is computed again in backward if it is so chosen.
#[derive(Debug)]
pub(crate) struct Recomputable<M> {
    pub(crate) inner: M,
    again: bool,
}

composite!(Recomputable<M> { inner; skip again });

/// The values that the backward pass of [`Recomputable`] needs.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(crate) enum RecomputableSaved<S> {
    Stored(S),
    Again(RecomputeSaved),
}

impl<M: Module> Recomputable<M> {
    pub(crate) const fn new(inner: M, again: bool) -> Self {
        Self { inner, again }
    }

    /// Runs `forward`, a forward pass of the layer for `x` and `info` that may return more than an output.
    pub(crate) fn forward_by<T>(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        forward: impl FnOnce(&M, &mut Forward<'_>) -> Result<(T, M::Saved)>,
    ) -> Result<(T, RecomputableSaved<M::Saved>)> {
        // Before the layer runs: what it draws from there on is drawn again.
        let snapshot = self.again.then(|| cx.snapshot());
        let (out, saved) = forward(&self.inner, cx)?;
        let saved = match snapshot {
            Some(snapshot) => {
                RecomputableSaved::Again(RecomputeSaved::new(x.clone(), info.clone(), snapshot))
            }
            None => RecomputableSaved::Stored(saved),
        };
        Ok((out, saved))
    }

    /// Returns what `forward`, the pass of [`forward_by`](Self::forward_by), left for backward.
    pub(crate) fn restore(
        &self,
        cx: &mut Backward<'_>,
        saved: RecomputableSaved<M::Saved>,
        forward: impl FnOnce(&M, &mut Forward<'_>, &Tensor, &SequenceInfo) -> Result<M::Saved>,
    ) -> Result<M::Saved> {
        match saved {
            RecomputableSaved::Stored(saved) => Ok(saved),
            RecomputableSaved::Again(saved) => saved.run(cx, |cx, x, info| forward(&self.inner, cx, x, info)),
        }
    }

    pub(crate) fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: RecomputableSaved<M::Saved>,
        dy: &Tensor,
    ) -> Result<Tensor> {
        self.backward_by(cx, saved, |inner, cx, saved| inner.backward(cx, saved, dy))
    }

    /// Runs `backward`, a backward pass of the layer after its usual forward pass.
    pub(crate) fn backward_by<T>(
        &mut self,
        cx: &mut Backward<'_>,
        saved: RecomputableSaved<M::Saved>,
        backward: impl FnOnce(&mut M, &mut Backward<'_>, M::Saved) -> Result<T>,
    ) -> Result<T> {
        let forward = |inner: &M, cx: &mut Forward<'_>, x: &Tensor, info: &SequenceInfo| {
            Ok(inner.forward_with_info(cx, x, info)?.1)
        };
        let saved = self.restore(cx, saved, forward)?;
        backward(&mut self.inner, cx, saved)
    }
}

impl RecomputeSaved {
    /// For a forward pass that began at `snapshot`.
    pub(crate) const fn new(x: Tensor, info: SequenceInfo, snapshot: Snapshot) -> Self {
        Self { x, info, snapshot }
    }

    /// Runs the forward pass again.
    pub(crate) fn run<T>(
        self,
        cx: &mut Backward<'_>,
        forward: impl FnOnce(&mut Forward<'_>, &Tensor, &SequenceInfo) -> Result<T>,
    ) -> Result<T> {
        forward(&mut cx.replay(&self.snapshot)?, &self.x, &self.info)
    }

    fn backward<M: Module>(self, layer: &mut M, cx: &mut Backward<'_>, dy: &Tensor) -> Result<Tensor> {
        let inner = self.run(cx, |cx, x, info| Ok(layer.forward_with_info(cx, x, info)?.1))?;
        layer.backward(cx, inner, dy)
    }
}

impl<M: Module> Module for Recompute<M> {
    type Saved = RecomputeSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, RecomputeSaved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, RecomputeSaved)> {
        // Before the layer runs: what it draws from there on is drawn again.
        let snapshot = cx.snapshot();
        let (y, _) = self.inner.forward_with_info(cx, x, info)?;
        Ok((y, RecomputeSaved::new(x.clone(), info.clone(), snapshot)))
    }

    fn is_positionwise(&self) -> bool {
        self.inner.is_positionwise()
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: RecomputeSaved, dy: &Tensor) -> Result<Tensor> {
        cx.attempt(|cx| saved.backward(&mut self.inner, cx, dy))
    }
}

impl<M: Block> Block for Recompute<M> {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        self.inner.evaluate(cx, x, info, cache)
    }

    fn kv_heads(&self) -> [usize; 2] {
        self.inner.kv_heads()
    }
}
