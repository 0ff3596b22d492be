//! One tensor with a history of its own, updated by each use: no scope, no name, no group.

use crate::domain::Domain;
use crate::{DelayedScaling, Direction, Recipe, Result};
use fp8_kernels::{Device, Operand, Scale, Slot, Tensor, UpdateClock, ops};

/// Delayed scaling for a tensor outside a model: quantizes with the scale that its history gives, then updates both.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{DelayedScaling, Direction, Quantizer};
/// let device = Device::cpu();
/// let mut quantizer = Quantizer::new(DelayedScaling::default(), Direction::Forward, &device)?;
/// quantizer.quantize(&Tensor::from_vec(vec![3.5f32, -1.0], [2], &device)?)?;
/// assert_eq!(quantizer.scale()?, 128.0); // 448 / 3.5
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Quantizer {
    direction: Direction,
    domain: Domain,
}

impl Quantizer {
    /// At rest.
    ///
    /// # Errors
    /// An option of the recipe that is out of range.
    pub fn new(recipe: DelayedScaling, direction: Direction, device: &Device) -> Result<Self> {
        let recipe = Recipe::from(recipe);
        recipe.validate()?;
        let mut domain = Domain::new(recipe.key(), &recipe);
        domain.arenas =
            Some(domain.new_arenas(&[UpdateClock::new(1, device)?, UpdateClock::new(1, device)?])?);
        Ok(Self { direction, domain })
    }

    /// Quantizes `x` and updates history and scale.
    ///
    /// # Errors
    /// A dtype that is not a float; a user's function that returned no usable scale: history and scale are as before.
    pub fn quantize(&mut self, x: &Tensor) -> Result<Operand> {
        self.domain.restore()?;
        let direction = self.direction as usize;
        let quantized = self.domain.arenas.as_ref().map_or_else(
            || Ok(Operand::High(x.clone())),
            |arenas| {
                let arena = &arenas[direction];
                let first = &self.domain.rules[direction];
                let scale = arena.scale(0).map_or(Scale::Off, |cell| Scale::Cell { cell, first, keep: true });
                let encoding = self.domain.encodings[direction];
                let (amax, counters) = (arena.staging(0), arena.counters(0));
                ops::quantize(x, &Slot { encoding, scale, amax, counters, columnwise: true })
            },
        );
        match quantized
            .map_err(Into::into)
            .and_then(|operand| Ok((operand, self.domain.update(self.direction)?)))
        {
            Ok((operand, ())) => Ok(operand),
            Err(error) => {
                // The first error is the one to tell; a second one is left to the next call.
                let _ = self.domain.roll_back(self.direction);
                Err(error)
            }
        }
    }

    /// The scale that the next tensor will be quantized with; 1 before the first.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn scale(&self) -> Result<f32> {
        let arenas = self.domain.arenas.as_ref();
        let cell = arenas.and_then(|arenas| arenas[self.direction as usize].scale(0));
        Ok(cell.map_or(Ok(1.0), |cell| cell.read().map(f32::abs))?)
    }

    /// Past amaxes, oldest to newest.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn amax_history(&self) -> Result<Vec<f32>> {
        let arenas = self.domain.arenas.as_ref();
        Ok(arenas.map_or_else(|| Ok(Vec::new()), |arenas| arenas[self.direction as usize].window(0))?)
    }
}
