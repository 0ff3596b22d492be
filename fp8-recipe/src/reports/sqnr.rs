//! Measures the signal-to-quantization-noise ratio of each slot on request. It is computed on the host, so a GPU waits
//! for every tensor that is measured.

use crate::scopes::scope_settings::Mode;
use crate::{Backward, Direction, Forward, Origin, Result, SlotName};
use fp8_kernels::{Operand, Tensor};

impl Forward<'_> {
    /// Returns whether layers pass their tensors to [`measure_sqnr`](Self::measure_sqnr) in this scope: it records, runs in
    /// FP8, and [`Scaling::set_measuring_sqnr`](crate::Scaling::set_measuring_sqnr) is on.
    pub fn measures_sqnr(&self) -> bool {
        self.scaling.sqnr().is_on() && self.settings.enabled && matches!(self.mode, Mode::Record)
    }

    /// Measures how exactly `quantized` represents `values`, which a slot of this scope quantized, if
    /// [`measures_sqnr`](Self::measures_sqnr). A tensor in high precision is not measured.
    /// [`Scaling::set_measuring_sqnr`](crate::Scaling::set_measuring_sqnr) has an example.
    ///
    /// # Errors
    /// A slot that was not registered, one of another layer at the same path, or one of the backward pass; tensors of
    /// different shapes; a step that is recorded in a graph; the device failed.
    pub fn measure_sqnr(&mut self, slot: &SlotName, values: &Tensor, quantized: &Operand) -> Result<()> {
        if !self.measures_sqnr() || !quantized.is_fp8() {
            return Ok(());
        }
        let index = self.scaling.model_slots().index(slot, Direction::Forward)?;
        self.scaling.measure(self.settings, (Direction::Forward, index), values, quantized)
    }
}

impl Backward<'_> {
    /// Returns whether layers pass their tensors to [`measure_sqnr`](Self::measure_sqnr): `origin` is of a scope in FP8 that
    /// recorded, and [`Scaling::set_measuring_sqnr`](crate::Scaling::set_measuring_sqnr) is on.
    pub fn measures_sqnr(&self, origin: &Origin) -> bool {
        let is_ours = || origin.touched(self.scaling.model_slots().identity()).is_ok();
        self.scaling.sqnr().is_on() && origin.settings.enabled && is_ours()
    }

    /// Measures how exactly `quantized` represents `values`, which a slot of this scope quantized, if
    /// [`measures_sqnr`](Self::measures_sqnr): see [`Forward::measure_sqnr`].
    ///
    /// # Errors
    /// As [`Forward::measure_sqnr`].
    pub fn measure_sqnr(
        &mut self,
        origin: &Origin,
        slot: &SlotName,
        values: &Tensor,
        quantized: &Operand,
    ) -> Result<()> {
        if !self.measures_sqnr(origin) || !quantized.is_fp8() {
            return Ok(());
        }
        let index = self.scaling.model_slots().index(slot, Direction::Backward)?;
        self.scaling.measure(origin.settings, (Direction::Backward, index), values, quantized)
    }
}
