//! What a quantizing operation is told about one tensor: its format, where its scale comes from, where its amax goes.
//!
//! This covers every mode (recording, evaluation, replay, first step, current scaling, calibrating, off), so neither
//! layers nor kernels have a branch for modes.

use crate::{Cell, Counters, Device, Encoding, Result, ScaleRule};

/// A staging cell at rest: its tensor did not run. As an integer it lies below the bits of every amax, so that an
/// integer maximum serves all devices.
pub const REST: f32 = -1.0;

/// A scale cell before its slot's first finite amax > 0; its magnitude, 1, is the scale. A first-step scale is stored as
/// `-scale` until its scope is committed: the sign bit says "provisional", kernels use the magnitude.
pub const UNSET: f32 = -1.0;

/// Lent for one call; every quantizing operation, fused or not, takes one.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    /// The format of the codes.
    pub encoding: Encoding,
    /// Where the scale comes from.
    pub scale: Scale<'a>,
    /// Where the amax is max-combined into, if anywhere.
    pub amax: Option<&'a Cell>,
    /// Where saturation and underflow are counted, if anywhere.
    pub counters: Option<&'a Counters>,
    /// Whether backward will read the tensor's transpose.
    pub columnwise: bool,
}

/// Where a scale comes from.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// Nowhere: the tensor stays in high precision.
    Off,
    /// The cell's magnitude; while that is [`UNSET`] the tensor's own by `first`, stored provisionally if `keep`.
    Cell {
        /// Magnitude: the scale. Sign: provisional.
        cell: &'a Cell,
        /// The rule for a slot still unset.
        first: &'a ScaleRule,
        /// Whether a first scale is put into the cell.
        keep: bool,
    },
    /// The tensor's own, by a first read.
    FromTensor(&'a ScaleRule),
    /// From this amax, reduced over ranks beforehand.
    FromAmax {
        /// The amax of the whole tensor.
        amax: f32,
        /// The rule.
        rule: &'a ScaleRule,
    },
}

impl<'a> Slot<'a> {
    /// Quantizes with one given scale and records nothing: for tests, tools and tensors outside a model.
    ///
    /// ```
    /// use fp8_kernels::{Cell, Device, Encoding, ScalePolicy, ScaleRule, Slot, Tensor, ops};
    /// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    /// let scale = Cell::new(2.0, &Device::cpu())?;
    /// let x = Tensor::from_vec(vec![1.0f32, -300.0], [1, 2], &Device::cpu())?;
    /// let q = ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &scale, &rule))?;
    /// assert_eq!(q.dequantize(fp8_kernels::DType::F32)?.to_vec::<f32>()?, [1.0, -224.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub const fn fixed(encoding: Encoding, cell: &'a Cell, first: &'a ScaleRule) -> Self {
        let scale = Scale::Cell { cell, first, keep: false };
        Self { encoding, scale, amax: None, counters: None, columnwise: false }
    }

    /// Stays in high precision and records nothing.
    pub const fn off(encoding: Encoding) -> Self {
        Self { encoding, scale: Scale::Off, amax: None, counters: None, columnwise: false }
    }

    /// Whether the tensor stays in high precision.
    pub const fn is_off(&self) -> bool {
        matches!(self.scale, Scale::Off)
    }

    /// The same slot, wanting no transposed copy.
    #[must_use]
    pub const fn rowwise_only(mut self) -> Self {
        self.columnwise = false;
        self
    }

    /// The scale to quantize with, or `None` in high precision. `amax` reads the tensor, and is called only where the
    /// scale needs it.
    pub(crate) fn resolve(&self, amax: impl FnOnce() -> Result<f32>) -> Result<Option<f32>> {
        match self.scale {
            Scale::Off => Ok(None),
            Scale::Cell { cell, first, keep } => {
                let stored = cell.read()?;
                if stored != UNSET {
                    return Ok(Some(stored.abs()));
                }
                let amax = amax()?;
                // Zero and non-finite amaxes say nothing: scale 1, and the slot stays unset.
                if !(amax.is_finite() && amax > 0.0) {
                    return Ok(Some(1.0));
                }
                let scale = first.scale(amax, 1.0)?;
                // A first scale of exactly 1 is stored like any other: -1 is UNSET, which means the same magnitude.
                if keep {
                    cell.write(-scale)?;
                }
                Ok(Some(scale))
            }
            Scale::FromTensor(rule) => rule.scale(amax()?, 1.0).map(Some),
            Scale::FromAmax { amax, rule } => rule.scale(amax, 1.0).map(Some),
        }
    }

    /// Records the amax of a tensor that has elements.
    pub(crate) fn record(&self, amax: f32) -> Result<()> {
        self.amax.map_or(Ok(()), |cell| cell.merge_max(amax))
    }

    /// Cells and counters where the tensor lies, or an error.
    pub(crate) fn expect_device(&self, op: &'static str, device: &Device) -> Result<()> {
        if let Scale::Cell { cell, .. } = self.scale {
            device.expect_same(op, cell.device())?;
        }
        if let Some(cell) = self.amax {
            device.expect_same(op, cell.device())?;
        }
        self.counters.map_or(Ok(()), |counters| device.expect_same(op, counters.device()))
    }
}
