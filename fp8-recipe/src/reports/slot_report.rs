//! The scale, amax and counts of each slot.

use crate::names::by_direction::ByDirection;
use crate::{Direction, Nvfp4Report, RecipeLabel, Result, Scaling, SlotRole};
use fp8_kernels::Encoding;
use std::fmt;
use std::sync::Arc;

/// The text in reports and explanations for a slot whose tensor attention reads, under a recipe that gives the tensor
/// more than one scale.
pub(crate) const STAYS_HIGH: &str =
    "attention stays in high precision, because it needs one scale for a tensor";

/// The scale, amax and counts of one slot under one recipe: see [`Scaling::slot_reports`]. `Display` writes one line.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{DelayedScaling, GemmSlots, Scaling};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// scaling.set_counting(true);
/// let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
/// ops::quantize(&Tensor::from_vec(vec![3.5f32, 1e-9], [1, 2], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// let report = &scaling.slot_reports()?[0];
/// let line = "fc.input (forward): amax 3.5, scale 128, scales not powers of two, 2 values, 1 underflowed";
/// assert_eq!(report.to_string(), line);
/// assert!(!report.has_powers_of_two); // under `ScalingFactorComputeAlgo::Exact`, the next scale may be 112
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SlotReport {
    /// The slot's name.
    pub name: Arc<str>,
    /// The part that the tensor plays in its GEMM.
    pub role: SlotRole,
    /// The pass it belongs to.
    pub direction: Direction,
    /// The recipe and group that it ran under.
    pub recipe: RecipeLabel,
    /// The format of its codes. [`Encoding::E2M1`] means NVFP4.
    pub encoding: Encoding,
    /// The newest amax of the window: 0 if there is none yet, and for a history of length 1, which keeps none.
    pub amax: f32,
    /// The scale for the next tensor.
    pub scale: f32,
    /// Whether the recipe rounds every scale of the slot to a power of two. Dequantizing codes to f32 is then exact; other
    /// scales round.
    pub has_powers_of_two: bool,
    /// Whether a committed scope has set the scale, from a finite amax above 0.
    pub calibrated: bool,
    /// The number of finite values that rounded beyond the format's largest value, since the last reset.
    pub saturated: u64,
    /// The number of values other than 0 that became 0, since the last reset.
    pub underflowed: u64,
    /// The number of values that were counted, since the last reset.
    pub elements: u64,
    /// The number of NaN values, since the last reset. NaN does not enter the amax: a tensor with only NaN values has amax 0.
    pub nan: u64,
    /// The number of times that the amax was infinite or NaN and was left out of the window.
    pub non_finite: u64,
    /// Whether attention, which reads the tensor, leaves it in high precision because the recipe gives a tensor more than one
    /// scale. The slot then never runs.
    pub stays_in_high_precision: bool,
    /// The signal-to-quantization-noise ratio in decibels, `10 · log₁₀(Σ x² / Σ (x − code · scale_inv)²)`, of what the slot
    /// quantized in the last scope that measured it. `None` unless [`Scaling::set_measuring_sqnr`] is on. About 31.5 in E4M3 and
    /// 25.5 in E5M2 if no value saturates or underflows; about 20 in NVFP4, and 17 if it is rounded stochastically.
    pub sqnr: Option<f64>,
    /// The blocks of a tensor in NVFP4 in the last scope that measured it, with the SQNR that it would have in FP8. `None` for FP8, and
    /// unless [`Scaling::set_measuring_sqnr`] is on.
    pub nvfp4: Option<Nvfp4Report>,
}

/// Writes one line: name, amax, scale, a mark if the recipe's scales are not powers of two, each count that is not 0, and the
/// SQNR if it was measured, in NVFP4 with the blocks that lost something; or that the tensor stays in high precision.
impl fmt::Display for SlotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, direction, amax, scale, elements, .. } = self;
        if self.stays_in_high_precision {
            return write!(f, "{name} ({direction}): {STAYS_HIGH}");
        }
        write!(f, "{name} ({direction}): amax {amax}, scale {scale}")?;
        if !self.calibrated {
            f.write_str(", not calibrated")?;
        }
        if !self.has_powers_of_two {
            f.write_str(", scales not powers of two")?;
        }
        if *elements > 0 {
            write!(f, ", {elements} values")?;
        }
        write_counts(
            f,
            &[
                (self.saturated, "saturated"),
                (self.underflowed, "underflowed"),
                (self.nan, "NaN"),
                (self.non_finite, "amaxes not finite"),
            ],
        )?;
        if let Some(nvfp4) = &self.nvfp4 {
            write!(f, ", {} blocks", nvfp4.blocks)?;
            write_counts(
                f,
                &[
                    (nvfp4.lost, "lost"),
                    (nvfp4.saturated, "saturated"),
                    (nvfp4.nan, "with NaN"),
                    (nvfp4.infinite, "with infinities"),
                ],
            )?;
        }
        let Some(sqnr) = self.sqnr else { return Ok(()) };
        write!(f, ", SQNR {sqnr:.1} dB")?;
        match self.nvfp4.and_then(|nvfp4| nvfp4.mxfp8_sqnr.zip(nvfp4.fp8_sqnr)) {
            Some((mxfp8, fp8)) => write!(f, " (MXFP8 {mxfp8:.1} dB, FP8 {fp8:.1} dB)"),
            None => Ok(()),
        }
    }
}

/// Writes each count that is not 0.
fn write_counts(f: &mut fmt::Formatter<'_>, counts: &[(u64, &str)]) -> fmt::Result {
    let mut counts = counts.iter().filter(|(count, _)| *count > 0);
    counts.try_for_each(|(count, what)| write!(f, ", {count} {what}"))
}

impl Scaling {
    /// Returns a report of every slot under every recipe that has been used. Values are counted only while
    /// [`set_counting`](Self::set_counting) is on. If amaxes that are not finite were left out of a history, this also emits
    /// one `tracing` event of level `WARN`, which names the first of these slots.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn slot_reports(&self) -> Result<Vec<SlotReport>> {
        let mut reports = Vec::new();
        for (position, domain) in self.domains().iter().enumerate() {
            let Some(arenas) = &domain.arenas else { continue };
            for (direction, arena) in arenas.each_ref() {
                let (arena, used) = (arena.own(), domain.used[direction].clone());
                let amaxes = arena.newest_all()?.into_iter().zip(arena.scales()?);
                let counts = arena.counters_all()?.into_iter().zip(arena.skipped_non_finite_all()?);
                let slots = used.clone().zip(&self.model_slots().all()[direction][used]);
                for ((index, slot), ((amax, scale), (counters, non_finite))) in slots.zip(amaxes.zip(counts))
                {
                    let role = slot.role();
                    reports.push(SlotReport {
                        name: slot.name().clone(),
                        role,
                        direction,
                        recipe: domain.label(),
                        encoding: domain.encodings[direction],
                        amax,
                        scale: domain.reported_scale(role, amax, scale)?,
                        has_powers_of_two: domain.has_powers_of_two(role),
                        calibrated: scale > 0.0,
                        saturated: counters.saturated,
                        underflowed: counters.underflowed,
                        elements: counters.elements,
                        nan: counters.nan,
                        non_finite,
                        stays_in_high_precision: domain.leaves_high(slot),
                        sqnr: self.sqnr().of((position, direction, index)),
                        nvfp4: self.sqnr().nvfp4_of((position, direction, index)),
                    });
                }
            }
        }
        let mut skipped = reports.iter().filter(|report| report.non_finite > 0).peekable();
        if let Some(first) = skipped.peek().map(|report| report.name.clone()) {
            let (slots, amaxes) =
                skipped.fold((0u64, 0), |(slots, amaxes), report| (slots + 1, amaxes + report.non_finite));
            // Subscribers filter by the target: it stays when this file moves.
            tracing::warn!(
                target: "fp8_recipe::report",
                slots, amaxes, %first, "amaxes that are not finite were left out of the history"
            );
        }
        Ok(reports)
    }

    /// Sets all counts of values to zero.
    ///
    /// # Errors
    /// The device failed; none on the CPU.
    pub fn reset_counters(&mut self) -> Result<()> {
        self.counting_mut().count_reset();
        let arenas = self.domains().iter().filter_map(|domain| domain.arenas.as_ref());
        let mut arenas = arenas.flat_map(ByDirection::each_ref);
        Ok(arenas.try_for_each(|(_, arena)| arena.own().reset_counters())?)
    }
}
