//! What the scales are doing, slot by slot.

use crate::by_direction::ByDirection;
use crate::{Direction, RecipeLabel, Result, Scaling, SlotRole};
use std::fmt;
use std::sync::Arc;

/// One slot under one recipe.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotReport {
    /// The slot's name.
    pub name: Arc<str>,
    /// What the tensor is to its GEMM.
    pub role: SlotRole,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The recipe and group that it ran under.
    pub recipe: RecipeLabel,
    /// The newest amax of its window (0: none yet; for a history of length 1 see the scale).
    pub amax: f32,
    /// The scale for the next tensor.
    pub scale: f32,
    /// Whether it has been calibrated: a finite amax > 0 in a committed scope.
    pub calibrated: bool,
    /// Finite values that rounded beyond the format's largest, since the last reset.
    pub saturated: u64,
    /// Values other than 0 that became 0, since the last reset.
    pub underflowed: u64,
    /// Values counted, since the last reset.
    pub elements: u64,
    /// NaN values, since the last reset. NaN leaves the amax alone: a tensor of nothing else has amax 0.
    pub nan: u64,
    /// How often its amax was infinite or NaN and was left out.
    pub non_finite: u64,
}

/// One line: name, amax, scale, and each count that is not 0.
impl fmt::Display for SlotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, direction, amax, scale, elements, .. } = self;
        write!(f, "{name} ({direction}): amax {amax}, scale {scale}")?;
        if !self.calibrated {
            f.write_str(", not calibrated")?;
        }
        if *elements > 0 {
            write!(f, ", {elements} values")?;
        }
        let counts = [
            (self.saturated, "saturated"),
            (self.underflowed, "underflowed"),
            (self.nan, "NaN"),
            (self.non_finite, "amaxes not finite"),
        ];
        counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .try_for_each(|(count, what)| write!(f, ", {count} {what}"))
    }
}

impl Scaling {
    /// Every slot of every arena; counts are there where [`set_counting`](Self::set_counting) is on.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn slot_reports(&self) -> Result<Vec<SlotReport>> {
        let mut reports = Vec::new();
        for domain in &self.domains {
            let Some(arenas) = &domain.arenas else { continue };
            for (direction, arena) in arenas.each_ref() {
                let names = self.names[direction].iter().zip(&self.roles[direction]);
                let amaxes = arena.newest_all()?.into_iter().zip(arena.scales()?);
                let counts = arena.counters_all()?.into_iter().zip(arena.skipped_non_finite_all()?);
                for ((name, role), ((amax, scale), (counters, non_finite))) in names.zip(amaxes.zip(counts)) {
                    reports.push(SlotReport {
                        name: name.clone(),
                        role: *role,
                        direction,
                        recipe: domain.label(),
                        amax,
                        scale: scale.abs(),
                        calibrated: scale > 0.0,
                        saturated: counters.saturated,
                        underflowed: counters.underflowed,
                        elements: counters.elements,
                        nan: counters.nan,
                        non_finite,
                    });
                }
            }
        }
        Ok(reports)
    }

    /// Counters back to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset_counters(&mut self) -> Result<()> {
        let arenas = self.domains.iter().filter_map(|domain| domain.arenas.as_ref());
        let mut arenas = arenas.flat_map(ByDirection::each_ref);
        Ok(arenas.try_for_each(|(_, arena)| arena.reset_counters())?)
    }
}
