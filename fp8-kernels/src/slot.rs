//! The description of one tensor's quantization: its format, the source of its scale, the place of its amax.

use crate::{BlockRule, Cell, Counters, Device, Encoding, Error, Nvfp4Rule, Result, ScaleRule, UNSET};
use fp8_format::Blocks;

/// Tells a quantizing operation how to quantize one tensor and where to record its amax.
///
/// The combinations of a slot's fields cover every mode, so neither layers nor kernels distinguish modes:
///
/// | mode | `scale` | `amax` |
/// |---|---|---|
/// | delayed scaling, training | [`Scale::Cell`], with `keep` | a cell of the arena |
/// | delayed scaling, evaluation | [`Scale::Cell`], without `keep` | `None` |
/// | current scaling | [`Scale::FromTensor`], or [`Scale::FromAmax`] for an amax that was reduced over ranks | `None` |
/// | a scale for each row or block | [`Scale::Blocks`] | `None` |
/// | NVFP4 | [`Scale::Nvfp4`], with [`Encoding::E2M1`] | `None` |
/// | high precision | [`Scale::Off`] | `None`, or a cell to calibrate |
///
/// [`ops::quantize`](crate::ops::quantize()) and every fused operation take one. A slot borrows its cells; recipes in
/// `fp8-recipe` lend slots for the tensors of a model.
///
/// ```
/// use fp8_kernels::{Cell, Device, Encoding, REST, Scale, ScalePolicy, ScaleRule, Slot, Tensor, UNSET, ops};
/// let cpu = Device::cpu();
/// let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
/// let (scale, amax) = (Cell::new(UNSET, &cpu)?, Cell::new(REST, &cpu)?);
/// let slot = Slot {
///     scale: Scale::Cell { cell: &scale, first: &rule, keep: true },
///     amax: Some(&amax),
///     ..Slot::off(Encoding::E4M3)
/// };
/// ops::quantize(&Tensor::from_vec(vec![1.0f32, -3.5], [2], &cpu)?, &slot)?;
/// assert_eq!(amax.read()?, 3.5);
/// assert_eq!(scale.read()?, -128.0); // 448 / 3.5, provisional
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    /// The format of the codes.
    pub encoding: Encoding,
    /// The source of the scale, or [`Scale::Off`].
    pub scale: Scale<'a>,
    /// The cell into which the amax is max-combined, if any.
    pub amax: Option<&'a Cell>,
    /// The counters of saturated and underflowed values, if they are to be counted.
    pub counters: Option<&'a Counters>,
    /// Whether a later product reads the tensor's transpose, as in a backward pass. If so, the codes of the transpose are made
    /// with the cast, or later from the codes: see [`TransposePolicy`](crate::TransposePolicy).
    pub columnwise: bool,
}

/// The source of the scale of a [`Slot`].
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// No scale: the tensor stays in high precision.
    Off,
    /// The magnitude of a cell. If the cell is [`UNSET`], the scale is computed by `first` from the tensor's own amax, which
    /// costs a second read of the tensor.
    Cell {
        /// The cell. Its magnitude is the scale; a negative sign means that the scale is provisional.
        cell: &'a Cell,
        /// The rule for the first scale.
        first: &'a ScaleRule,
        /// Whether a first scale is stored in the cell, as provisional.
        keep: bool,
    },
    /// A scale computed from the tensor's own amax, which costs a second read of the tensor.
    FromTensor(&'a ScaleRule),
    /// A scale computed from an amax that is known beforehand, for example reduced over ranks.
    FromAmax {
        /// The amax of the whole tensor.
        amax: f32,
        /// The rule for the scale.
        rule: &'a ScaleRule,
    },
    /// A scale for each row or block, computed from the elements that share it.
    Blocks(BlockRule),
    /// NVFP4: 4-bit codes, a scale for each block of 16 and a factor for the tensor. The encoding must be [`Encoding::E2M1`].
    Nvfp4(Nvfp4Rule<'a>),
}

impl<'a> Slot<'a> {
    /// Creates a slot that quantizes with the scale in `cell` and records nothing, for tests, tools and tensors outside a
    /// model. `first` is used only if the cell is [`UNSET`].
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

    /// Creates a slot that leaves the tensor in high precision and records nothing.
    pub const fn off(encoding: Encoding) -> Self {
        Self { encoding, scale: Scale::Off, amax: None, counters: None, columnwise: false }
    }

    /// Returns true if the tensor stays in high precision.
    pub const fn is_off(&self) -> bool {
        matches!(self.scale, Scale::Off)
    }

    /// Returns true if the tensor is quantized with one scale, as [`ops::attention_fp8`](crate::ops::attention_fp8()) needs it.
    pub const fn has_one_scale(&self) -> bool {
        !matches!(self.scale, Scale::Off | Scale::Blocks(_) | Scale::Nvfp4(_))
    }

    /// Returns the rule of a slot that has a scale for each row or block.
    pub(crate) const fn block_rule(&self) -> Option<BlockRule> {
        if let Scale::Blocks(rule) = self.scale { Some(rule) } else { None }
    }

    /// Returns which elements share a scale; `None` if all do, or the slot is off.
    pub const fn blocks(&self) -> Option<Blocks> {
        match &self.scale {
            Scale::Blocks(rule) => Some(rule.blocks()),
            Scale::Nvfp4(rule) => Some(rule.blocks),
            Scale::Off | Scale::Cell { .. } | Scale::FromTensor(_) | Scale::FromAmax { .. } => None,
        }
    }

    /// Returns the rule of a slot that quantizes to NVFP4.
    pub(crate) const fn nvfp4(&self) -> Option<&Nvfp4Rule<'a>> {
        if let Scale::Nvfp4(rule) = &self.scale { Some(rule) } else { None }
    }

    /// Returns the same slot without a columnwise copy.
    #[must_use]
    pub const fn rowwise_only(mut self) -> Self {
        self.columnwise = false;
        self
    }

    /// Returns the scale to quantize with, or `None` in high precision. `amax` reads the tensor and is called only if the
    /// scale depends on it.
    pub(crate) fn resolve(&self, amax: impl FnOnce() -> Result<f32>) -> Result<Option<f32>> {
        match self.scale {
            Scale::Off => Ok(None),
            Scale::Cell { cell, first, keep } => {
                let stored = cell.read()?;
                if stored != UNSET {
                    return Ok(Some(stored.abs()));
                }
                let amax = amax()?;
                // A zero or non-finite amax gives a scale of 1, and the slot stays unset.
                if !(amax.is_finite() && amax > 0.0) {
                    return Ok(Some(1.0));
                }
                let scale = first.scale(amax, 1.0)?;
                // A first scale of exactly 1 is stored as -1, which is UNSET and has the same magnitude.
                if keep {
                    cell.write(-scale)?;
                }
                Ok(Some(scale))
            }
            Scale::FromTensor(rule) => rule.scale(amax()?, 1.0).map(Some),
            Scale::FromAmax { amax, rule } => rule.scale(amax, 1.0).map(Some),
            Scale::Blocks(_) | Scale::Nvfp4(_) => {
                let blocks = self.blocks().map_or_else(String::new, |blocks| blocks.to_string());
                let remedy = "this operation quantizes with one scale".to_owned();
                Err(Error::Option { op: "quantize", option: "blocks", value: blocks, remedy })
            }
        }
    }

    /// Records the amax of a tensor that has elements.
    pub(crate) fn record(&self, amax: f32) -> Result<()> {
        self.amax.map_or(Ok(()), |cell| cell.merge_max(amax))
    }

    /// Checks that cells and counters are on the tensor's device.
    pub(crate) fn expect_device(&self, op: &'static str, device: &Device) -> Result<()> {
        match self.scale {
            Scale::Cell { cell, .. } => device.expect_same(op, cell.device())?,
            Scale::Blocks(rule) => rule.check(op)?,
            Scale::Nvfp4(rule) => rule.check(op, device)?,
            Scale::Off | Scale::FromTensor(_) | Scale::FromAmax { .. } => {}
        }
        let is_packed = self.encoding == Encoding::E2M1;
        if !self.is_off() && is_packed != self.nvfp4().is_some() {
            let remedy = if is_packed {
                "E2M1 needs the scales of NVFP4: use Scale::Nvfp4, or E4M3 or E5M2"
            } else {
                "NVFP4 has codes of E2M1"
            };
            let (option, value) = ("encoding", self.encoding.to_string());
            return Err(Error::Option { op, option, value, remedy: remedy.to_owned() });
        }
        if let Some(cell) = self.amax {
            device.expect_same(op, cell.device())?;
        }
        self.counters.map_or(Ok(()), |counters| device.expect_same(op, counters.device()))
    }
}
