//! Delayed scaling for one tensor that belongs to no model.

use crate::policy::{Policy, State};
use crate::{DelayedScaling, Direction, Error, Result};
use fp8_kernels::{Arena, Cell, Counters, Device, Encoding, Operand, Scale, ScaleRule, Slot, Tensor, ops};

/// Delayed scaling for one tensor outside a model: quantizes with the scale that the history gives, then updates both.
///
/// It needs no [`Scaling`](crate::Scaling), no scope and no name, and takes part in no group. Each call of
/// [`quantize`](Self::quantize) is one iteration of the history. The first tensor is quantized with its own scale, or with 1
/// under [`with_te_rules`](DelayedScaling::with_te_rules).
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{DelayedScaling, Direction, Quantizer};
///
/// let device = Device::cpu();
/// let mut quantizer = Quantizer::new(DelayedScaling::default(), Direction::Forward, &device)?;
/// let x8 = quantizer.quantize(&Tensor::from_vec(vec![3.5f32, -1.0], [2], &device)?)?;
/// assert!(x8.is_fp8());
/// assert_eq!(quantizer.scale()?, 128.0); // 448 / 3.5
/// assert_eq!(quantizer.amax_history()?.last(), Some(&3.5));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Quantizer {
    recipe: DelayedScaling,
    rule: ScaleRule,
    encoding: Encoding,
    /// An arena of one slot. The next three are handles to its cells.
    arena: Arena,
    scale: Cell,
    amax: Cell,
    counters: Counters,
    /// The device failed while a call was undone; the next call tries again.
    is_unrestored: bool,
}

/// The only slot of the arena.
const SLOT: usize = 0;

impl Quantizer {
    /// Creates a quantizer with an empty history. `direction` chooses the encoding under `Format::Hybrid`: E4M3 for forward,
    /// E5M2 for backward.
    ///
    /// # Errors
    /// An option of the recipe that is out of range; a device that is out of memory or failed.
    pub fn new(recipe: DelayedScaling, direction: Direction, device: &Device) -> Result<Self> {
        recipe.validate()?;
        let arena = Arena::new(1, recipe.arena_options(), device)?;
        let (Some(scale), Some(amax), Some(counters)) =
            (arena.scale(SLOT), arena.staging(SLOT), arena.counters(SLOT))
        else {
            return Err(Error::UnknownSlot("quantizer".into()));
        };
        Ok(Self {
            scale: scale.clone(),
            amax: amax.clone(),
            counters: counters.clone(),
            rule: recipe.rule(direction.any_role()),
            encoding: recipe.fp8_format.encoding(direction),
            arena,
            recipe,
            is_unrestored: false,
        })
    }

    /// Quantizes `x` with the present scale, with a transposed copy, then updates history and scale. The operand is always
    /// [`Operand::Fp8`].
    ///
    /// # Errors
    /// A dtype that is not a float; another device than the quantizer's; a user's function that returned no usable scale.
    /// History and scale are as before then.
    pub fn quantize(&mut self, x: &Tensor) -> Result<Operand> {
        if self.is_unrestored {
            self.roll_back()?;
        }
        let quantized = self.quantize_and_update(x);
        if quantized.is_err() {
            // The caller gets the first error; if undoing fails as well, the next call tries again.
            let _ = self.roll_back();
        }
        quantized
    }

    fn quantize_and_update(&mut self, x: &Tensor) -> Result<Operand> {
        let slot = Slot {
            encoding: self.encoding,
            scale: Scale::Cell { cell: &self.scale, first: &self.rule, keep: true },
            amax: Some(&self.amax),
            counters: Some(&self.counters),
            columnwise: true,
        };
        let operand = ops::quantize(x, &slot)?;
        ops::update_scales(&mut self.arena, &self.recipe.scale_update(&self.rule))?;
        Ok(operand)
    }

    fn roll_back(&mut self) -> Result<()> {
        self.is_unrestored = true;
        self.arena.roll_back()?;
        self.is_unrestored = false;
        Ok(())
    }

    /// Returns the scale that the next tensor will be quantized with; 1 before the first tensor.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn scale(&self) -> Result<f32> {
        Ok(self.scale.read()?.abs())
    }

    /// Returns the amaxes of the last `amax_history_len` − 1 tensors, oldest first, with zeros before those of the first
    /// tensors.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn amax_history(&self) -> Result<Vec<f32>> {
        Ok(self.arena.window(SLOT)?)
    }
}
