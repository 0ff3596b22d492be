//! Measures the signal-to-quantization-noise ratio of each slot on request. It is computed on the host, so a GPU waits
//! for every tensor that is measured.

use crate::reports::error_squares::{Measured, Squares};
use crate::scopes::scope_settings::{Mode, ScopeSettings};
use crate::{Backward, Direction, Forward, Origin, Result, Scaling, SlotName};
use fp8_kernels::{DType, Operand, Tensor};

impl Scaling {
    /// Sets whether layers measure the quantization error of each tensor, for
    /// [`SlotReport::sqnr`](crate::SlotReport::sqnr) and [`SlotTrace`](crate::SlotTrace). Measuring dequantizes each tensor and
    /// compares it on the host, which takes longer than the step itself, so turn it on for single steps. It changes no
    /// result. A step that measures cannot be recorded in a graph. Default: off, which costs nothing.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
    /// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
    ///
    /// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    /// let mut scaling = Scaling::new(&fc, &device)?;
    /// scaling.set_measuring_sqnr(true);
    /// let x = Tensor::from_vec(vec![448.0f32, 33.0], [1, 2], &device)?; // the scale is 1, and 33 becomes 32
    /// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
    /// let x8 = ops::quantize(&x, &cx.slot(&fc.input)?)?;
    /// cx.measure_sqnr(&fc.input, &x, &x8)?; // the layers of fp8-nn do this
    /// cx.commit()?;
    /// let sqnr = scaling.slot_reports()?[0].sqnr.unwrap_or_default();
    /// assert!((sqnr - 10.0 * ((448.0f64 * 448.0 + 33.0 * 33.0) / 1.0).log10()).abs() < 1e-9);
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn set_measuring_sqnr(&mut self, measuring: bool) {
        self.measuring_sqnr = measuring;
        self.sqnr.clear();
    }

    /// Adds what the open scope quantized.
    fn measure(
        &mut self,
        settings: ScopeSettings,
        (direction, index): (Direction, usize),
        values: &Tensor,
        quantized: &Operand,
    ) -> Result<()> {
        let Some(domain) = self.plans[settings.plan].domain(direction, index) else { return Ok(()) };
        if values.shape() != quantized.shape() {
            return Err(fp8_kernels::Error::Shapes {
                op: "measure_sqnr",
                what: "the values and the quantized tensor",
                lhs: *values.shape(),
                rhs: *quantized.shape(),
                remedy: "pass the tensor that was quantized",
            }
            .into());
        }
        let remedy = "it is computed on the host: measure in a step without a graph";
        self.device.expect_eager("measure_sqnr", remedy)?;
        let (values, quantized) = (values.to_f32_vec()?, quantized.dequantize(DType::F32)?.to_f32_vec()?);
        if let Some(scope) = &mut self.scope {
            scope.squares.entry((domain, direction, index)).or_default().add(&values, &quantized);
        }
        Ok(())
    }

    /// Replaces the ratios of the slots that a committed scope measured.
    pub(crate) fn keep_sqnr(&mut self, squares: impl IntoIterator<Item = (Measured, Squares)>) {
        for (slot, squares) in squares {
            match squares.decibels() {
                Some(decibels) => self.sqnr.insert(slot, decibels),
                None => self.sqnr.remove(&slot),
            };
        }
    }
}

impl Forward<'_> {
    /// Returns whether layers pass their tensors to [`measure_sqnr`](Self::measure_sqnr) in this scope: it records, runs in
    /// FP8, and [`Scaling::set_measuring_sqnr`] is on.
    pub fn measures_sqnr(&self) -> bool {
        self.scaling.measuring_sqnr && self.settings.enabled && matches!(self.mode, Mode::Record)
    }

    /// Measures how exactly `quantized` represents `values`, which a slot of this scope quantized, if
    /// [`measures_sqnr`](Self::measures_sqnr). A tensor in high precision is not measured.
    /// [`Scaling::set_measuring_sqnr`] has an example.
    ///
    /// # Errors
    /// A slot that was not registered, one of another layer at the same path, or one of the backward pass; tensors of
    /// different shapes; a step that is recorded in a graph; the device failed.
    pub fn measure_sqnr(&mut self, slot: &SlotName, values: &Tensor, quantized: &Operand) -> Result<()> {
        if !self.measures_sqnr() || !quantized.is_fp8() {
            return Ok(());
        }
        let index = self.scaling.index(slot, Direction::Forward)?;
        self.scaling.measure(self.settings, (Direction::Forward, index), values, quantized)
    }
}

impl Backward<'_> {
    /// Returns whether layers pass their tensors to [`measure_sqnr`](Self::measure_sqnr): `origin` is of a scope in FP8 that
    /// recorded, and [`Scaling::set_measuring_sqnr`] is on.
    pub fn measures_sqnr(&self, origin: &Origin) -> bool {
        let is_ours = || origin.touched(&self.scaling.identity).is_ok();
        self.scaling.measuring_sqnr && origin.settings.enabled && is_ours()
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
        let index = self.scaling.index(slot, Direction::Backward)?;
        self.scaling.measure(origin.settings, (Direction::Backward, index), values, quantized)
    }
}
