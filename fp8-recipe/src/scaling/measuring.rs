//! Measures the signal-to-quantization-noise ratios of slots.

use crate::scopes::scope_settings::ScopeSettings;
use crate::{Direction, Result, Scaling, SlotName};
use fp8_kernels::{DType, Encoding, Operand, Tensor};

impl Scaling {
    /// Sets whether layers measure the quantization error of each tensor, for
    /// [`SlotReport::sqnr`](crate::SlotReport::sqnr) and [`SlotTrace`](crate::SlotTrace). Measuring dequantizes each tensor and
    /// compares it on the host, which takes longer than the step itself, so turn it on for single steps. Tensors in NVFP4 are
    /// quantized to FP8, too, to compare both, and their blocks are counted: [`SlotReport::nvfp4`](crate::SlotReport::nvfp4). It changes
    /// no result. A step that measures cannot be recorded in a graph. Default: off, which costs nothing.
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
        self.sqnr.set(measuring);
    }

    /// Adds what the open scope quantized.
    pub(crate) fn measure(
        &mut self,
        settings: ScopeSettings,
        (direction, index): (Direction, usize),
        values: &Tensor,
        quantized: &Operand,
    ) -> Result<()> {
        let Some(domain) = self.domains.plan(settings.plan).domain(direction, index) else { return Ok(()) };
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
        let role = self.model_slots().all()[direction].get(index).map(SlotName::role);
        let Some((scope, role)) = self.scopes.current_mut().zip(role) else { return Ok(()) };
        let sums = scope.measured.entry((domain, direction, index)).or_default();
        let host = values.to_f32_vec()?;
        sums.squares.add(&host, &quantized.dequantize(DType::F32)?.to_f32_vec()?);
        if let Some(codes) = quantized.as_fp8().filter(|codes| codes.encoding() == Encoding::E2M1) {
            sums.nvfp4.get_or_insert_default().add(role, values, &host, codes)?;
        }
        Ok(())
    }
}
