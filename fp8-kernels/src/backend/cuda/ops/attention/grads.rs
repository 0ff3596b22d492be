//! Memory for the gradients of a call, in the layout that was asked for.

use super::super::{Buffer, Gpu};
use crate::ops::{AttentionGrads, GradLayout, GradPlace, Problem};
use crate::{DType, Device, Result, Shape, Tensor};

/// One of the gradients.
#[derive(Clone, Copy)]
pub(super) enum Gradient {
    Q,
    K,
    V,
}

/// The gradients of a call, not yet written.
pub(super) struct Grads {
    tensors: Vec<(Buffer, Shape)>,
    places: [GradPlace; 3],
    element: usize,
}

impl Grads {
    pub(super) fn new(gpu: &Gpu, dtype: DType, layout: GradLayout, p: &Problem<'_>) -> Result<Self> {
        let tensor = |shape: Shape| Ok((gpu.alloc(dtype, shape.numel())?, shape));
        let tensors = layout.shapes(p).into_iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { tensors, places: layout.places(p), element: dtype.size() })
    }

    /// Returns the address of a gradient's first element.
    pub(super) fn address(&self, which: Gradient) -> u64 {
        let place = self.places[which as usize];
        let tensor = self.tensors.get(place.tensor).map_or(0, |(buffer, _)| buffer.ptr());
        tensor + (place.first * self.element) as u64
    }

    /// Returns the number of elements from one token of a gradient to the next. That of dk is that of dv.
    pub(super) const fn pitch(&self, which: Gradient) -> usize {
        self.places[which as usize].pitch
    }

    /// Makes all of them zeros.
    pub(super) fn clear(&self, gpu: &Gpu) -> Result<()> {
        self.tensors.iter().try_for_each(|(buffer, _)| gpu.clear(buffer))
    }

    pub(super) fn finish(self, op: &'static str, device: &Device) -> Result<AttentionGrads> {
        let tensor = |(buffer, shape)| Tensor::from_cuda(buffer, shape, device);
        AttentionGrads::from_tensors(op, self.tensors.into_iter().map(tensor).collect())
    }
}
