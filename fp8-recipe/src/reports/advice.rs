//! Advice on slots that lose values: the option to change.

use crate::reports::nvfp4_advice;
use crate::reports::share::percent;
use crate::{RecipeLabel, ScaleSource, SlotSeries, SlotTrace, TracePoint};
use std::fmt;
use std::sync::Arc;

/// Shares of values below which a slot is left alone: of a step's values, and of all.
const SATURATED: f64 = 1e-4;
const LEAST_SATURATED: f64 = 1e-5;
const UNDERFLOWED: f64 = 0.05;

/// A scale that leaves more than this many bits of the format unused costs precision.
const UNUSED_BITS: f64 = 4.0;

/// The least SQNR in decibels that is left alone: about 6 below that of values that neither saturate nor underflow.
const LEAST_SQNR_E4M3: f64 = 25.0;
const LEAST_SQNR_E5M2: f64 = 19.0;

/// A problem that one slot had in the last steps, and the change that would help: see [`SlotTrace::advice`]. `Display`
/// writes a sentence.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The slot's name.
    pub slot: Arc<str>,
    /// The recipe and group that it ran under.
    pub recipe: RecipeLabel,
    /// The problem, with numbers.
    pub finding: String,
    /// The change that would help.
    pub remedy: String,
}

/// Writes a sentence: the slot, what was seen, and the change that would help.
impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, recipe, finding, remedy } = self;
        write!(f, "{slot} (under {recipe}) {finding}: {remedy}")
    }
}

impl SlotTrace {
    /// Returns what slots lost in the recorded steps and the changes that would help, in the order of the slots. It is empty
    /// if nothing was lost that is worth a change.
    ///
    /// A slot is mentioned if it had NaN values, if it saturated more than 0.01 % of the values of some step and 0.001 % of all,
    /// if it underflowed more than 5 % of all values, or if its scale left more than four bits of the format unused in every
    /// step. If the SQNR was measured, a slot is also mentioned if it fell below 25 dB in E4M3 or 19 dB in E5M2 for another
    /// reason.
    ///
    /// In NVFP4, a slot is mentioned if it had NaN values, if it underflowed more than 30 % of all values, or, where the SQNR was
    /// measured, if a value was infinite, if more than 1 % of the blocks lost all of their values or saturated, or if the SQNR fell
    /// below 12 dB.
    ///
    /// ```
    /// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
    /// use fp8_recipe::{Advice, DelayedScaling, GemmSlots, Scaling, SlotTrace};
    ///
    /// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
    /// let mut scaling = Scaling::new(&fc, &device)?;
    /// scaling.set_counting(true);
    /// let mut trace = SlotTrace::new(100);
    /// for (step, amax) in [1.0f32, 3.0, 2.0].into_iter().enumerate() {
    ///     let mut cx = scaling.autocast(&DelayedScaling::default().into())?;
    ///     ops::quantize(&Tensor::from_vec(vec![amax, 0.5], [1, 2], &device)?, &cx.slot(&fc.input)?)?;
    ///     cx.commit()?;
    ///     trace.record(step as u64, &scaling)?;
    /// }
    /// let advice: &Advice = &trace.advice()[0];
    /// assert_eq!(
    ///     advice.to_string(),
    ///     "fc.input (under delayed) saturated 16.7 % of its values, in 1 of the last 3 steps, because its amax grew to 3.0 \
    ///      times what its scale allowed for: raise its margin by 2, or use current scaling for this slot"
    /// );
    /// # Ok::<(), fp8_recipe::Error>(())
    /// ```
    pub fn advice(&self) -> Vec<Advice> {
        self.series().iter().flat_map(of_slot).collect()
    }
}

fn of_slot(series: &SlotSeries) -> Vec<Advice> {
    let points = &series.points;
    let mut all = Vec::new();
    let mut add = |finding: String, remedy: String| {
        let (slot, recipe) = (series.name.clone(), series.recipe.clone());
        all.push(Advice { slot, recipe, finding, remedy });
    };
    let steps = points.len();
    let in_steps = |is: &dyn Fn(&TracePoint) -> bool| points.iter().filter(|point| is(point)).count();
    let total = |value: fn(&TracePoint) -> u64| points.iter().map(value).sum::<u64>();
    let share = |part: u64| part as f64 / total(|point| point.elements).max(1) as f64;

    let nan = in_steps(&|point| point.nan > 0);
    if nan > 0 {
        let remedy = "no recipe helps; find the operation before it that makes them".to_owned();
        add(format!("had NaN values in {nan} of the last {steps} steps"), remedy);
    }
    let underflowed = share(total(|point| point.underflowed));
    if series.is_nvfp4() {
        nvfp4_advice::findings(series, underflowed)
            .into_iter()
            .for_each(|(finding, remedy)| add(finding, remedy));
        return all;
    }
    let saturated = in_steps(&saturates);
    let clipped = share(total(|point| point.saturated));
    if saturated > 0 && clipped >= LEAST_SATURATED {
        let percent = percent(clipped);
        let finding = format!("saturated {percent} of its values, in {saturated} of the last {steps} steps");
        let (reason, remedy) = against_saturation(series);
        add(finding + &reason, remedy);
    }
    let unused = overshoots(series).map(|(_, bits)| -bits).reduce(f64::min).unwrap_or(0.0);
    if unused > UNUSED_BITS {
        add(
            format!("left at least {unused:.0} bits of its format unused in each of the last {steps} steps"),
            "lower its margin or amax_history_len, or use current scaling for this slot".to_owned(),
        );
    } else if underflowed > UNDERFLOWED {
        add(
            format!("underflowed {} of its values in the last {steps} steps", percent(underflowed)),
            against_underflow(series),
        );
    }
    let least = if series.fp8_max > 448.0 { LEAST_SQNR_E5M2 } else { LEAST_SQNR_E4M3 };
    let inexact = |point: &TracePoint| point.sqnr.is_some_and(|sqnr| sqnr < least);
    let (measured, low) = (in_steps(&|point| point.sqnr.is_some()), in_steps(&inexact));
    if low > 0 && saturated == 0 && unused <= UNUSED_BITS && underflowed <= UNDERFLOWED {
        let worst = points.iter().filter_map(|point| point.sqnr).fold(f64::INFINITY, f64::min);
        add(
            format!("had an SQNR of only {worst:.1} dB, below {least} dB in {low} of {measured} measured steps"),
            "most of its values are so small that FP8 holds them with fewer bits; lower amax_epsilon, use scales for smaller \
             blocks, or leave this slot in high precision if the loss suffers"
                .to_owned(),
        );
    }
    all
}

fn saturates(point: &TracePoint) -> bool {
    point.saturated as f64 > SATURATED * point.elements as f64
}

/// Returns each point that quantized with the scale of the point before, with the bits by which its amax exceeded what that
/// scale allowed for. Empty if scales come from the tensor itself.
fn overshoots(series: &SlotSeries) -> impl Iterator<Item = (&TracePoint, f64)> {
    let steps = series.points.iter().zip(series.points.iter().skip(1));
    let steps = steps.filter(|_| series.scales == ScaleSource::Past);
    let steps = steps.filter_map(|(last, next)| Some((next, bits(next.amax, last.scale?, series.fp8_max))));
    steps.filter(|(_, bits)| bits.is_finite())
}

/// Returns the reason of saturation, as the end of a sentence, and what helps.
fn against_saturation(series: &SlotSeries) -> (String, String) {
    if series.scales != ScaleSource::Past {
        // Scales from the values themselves leave room for the largest of them, unless MXFP8 rounds them down or an infinity
        // makes the scale 1.
        let floor = series.recipe.to_string().contains("rounding=Floor");
        return match floor {
            true => (
                ", because its scales are rounded down".to_owned(),
                "use MxRounding::Ceil, with which no value saturates".to_owned(),
            ),
            false => (
                String::new(),
                "scales from the values themselves leave room for the largest finite one, so it had infinite values; find the \
                 operation before it that makes them"
                    .to_owned(),
            ),
        };
    }
    let saturating = overshoots(series).filter(|(point, _)| saturates(point));
    let overshoot = saturating.map(|(_, bits)| bits).fold(0.0, f64::max);
    match overshoot > 0.0 {
        true => (
            format!(", because its amax grew to {:.1} times what its scale allowed for", overshoot.exp2()),
            format!(
                "raise its margin by {}, or use current scaling for this slot",
                overshoot.ceil().max(1.0)
            ),
        ),
        false => (String::new(), "raise its margin by 1, or use current scaling for this slot".to_owned()),
    }
}

fn against_underflow(series: &SlotSeries) -> String {
    let is_e5m2 = series.fp8_max > 448.0;
    let (format, hybrid) = if is_e5m2 { ("E5M2", "") } else { ("E4M3", ", use HYBRID if it is a gradient") };
    match series.scales {
        ScaleSource::RowsOrBlocks => format!(
            "the values that share a scale span more than {format} can hold; use smaller blocks{hybrid}, or leave this slot in \
             high precision if the loss suffers"
        ),
        _ => format!(
            "its values span more than {format} can hold; use scales for blocks (block or mxfp8){hybrid}, or leave this slot \
             in high precision if the loss suffers"
        ),
    }
}

/// Returns the number of bits by which a scaled amax exceeds the format's largest value; negative if it stays below.
fn bits(amax: f32, scale: f32, fp8_max: f32) -> f64 {
    (f64::from(amax) * f64::from(scale) / f64::from(fp8_max)).log2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(step: u64, amax: f32, scale: f32) -> TracePoint {
        TracePoint {
            step,
            amax,
            scale: Some(scale),
            elements: 1000,
            saturated: 0,
            underflowed: 0,
            nan: 0,
            sqnr: None,
            nvfp4: None,
        }
    }

    fn advice(fp8_max: f32, points: Vec<TracePoint>) -> Vec<String> {
        under(ScaleSource::Past, "delayed", fp8_max, points)
    }

    fn under(scales: ScaleSource, recipe: &str, fp8_max: f32, points: Vec<TracePoint>) -> Vec<String> {
        let trace = SlotTrace::of_points("blocks.3.fc2.grad_output", recipe, fp8_max, scales, points);
        trace.advice().iter().map(|advice| advice.to_string()).collect()
    }

    #[test]
    fn a_slot_that_loses_nothing_gets_none() {
        assert_eq!(advice(448.0, vec![]), Vec::<String>::new());
        assert_eq!(advice(448.0, (0..9).map(|step| point(step, 3.5, 128.0)).collect()), Vec::<String>::new());
        let few = |step| TracePoint {
            elements: 100_000,
            saturated: 10,
            underflowed: 5000,
            ..point(step, 3.5, 128.0)
        };
        assert_eq!(advice(448.0, (0..9).map(few).collect()), Vec::<String>::new());
        // A single step whose share of all values is tiny.
        let once = |step| TracePoint { saturated: u64::from(step == 5), ..point(step, 3.5, 128.0) };
        assert_eq!(advice(448.0, (0..1000).map(once).collect()), Vec::<String>::new());
        assert_eq!(advice(448.0, (0..100).map(once).collect()).len(), 1);
    }

    #[test]
    fn saturation_names_its_share_and_the_margin_that_would_help() {
        let mut points: Vec<_> = (0..100).map(|step| point(step, 3.5, 128.0)).collect();
        for step in [10, 50] {
            points[step] = TracePoint { saturated: 200, amax: 17.5, ..points[step] };
        }
        assert_eq!(
            advice(448.0, points.clone()),
            [
                "blocks.3.fc2.grad_output (under delayed) saturated 0.4 % of its values, in 2 of the last 100 steps, because \
                 its amax grew to 5.0 times what its scale allowed for: raise its margin by 3, or use current scaling for \
                 this slot"
            ]
        );
        // Without a step before it, its scale is unknown.
        let alone = vec![TracePoint { saturated: 1, ..points[0] }];
        assert_eq!(
            advice(448.0, alone),
            [
                "blocks.3.fc2.grad_output (under delayed) saturated 0.1 % of its values, in 1 of the last 1 steps: raise its \
                 margin by 1, or use current scaling for this slot"
            ]
        );
    }

    #[test]
    fn underflow_nan_and_unused_bits_have_sentences_of_their_own() {
        let lossy = |step| TracePoint { underflowed: 100, ..point(step, 448.0, 1.0) };
        let found = advice(448.0, (0..4).map(lossy).collect());
        assert!(found[0].contains("underflowed 10.0 % of its values in the last 4 steps: "), "{found:?}");
        assert!(
            found[0].ends_with(
                "its values span more than E4M3 can hold; use scales for blocks (block or mxfp8), use HYBRID if it is a \
                 gradient, or leave this slot in high precision if the loss suffers"
            ),
            "{found:?}"
        );
        let lossy = |step| TracePoint { underflowed: 100, ..point(step, 57344.0, 1.0) };
        assert!(advice(57344.0, (0..4).map(lossy).collect())[0].contains("more than E5M2 can hold"));
        let unused = |step| TracePoint { underflowed: 100, ..point(step, 1.0, 7.0) };
        assert_eq!(
            advice(448.0, (0..4).map(unused).collect()),
            [
                "blocks.3.fc2.grad_output (under delayed) left at least 6 bits of its format unused in each of the last 4 \
                 steps: lower its margin or amax_history_len, or use current scaling for this slot"
            ]
        );
        let nan = |step| TracePoint { nan: step % 2, ..point(step, 3.5, 128.0) };
        assert_eq!(
            advice(448.0, (0..5).map(nan).collect()),
            [
                "blocks.3.fc2.grad_output (under delayed) had NaN values in 2 of the last 5 steps: no recipe helps; find the \
                 operation before it that makes them"
            ]
        );
    }

    #[test]
    fn scales_from_the_values_themselves_get_advice_of_their_own() {
        // The scale of a step says nothing about the next one.
        let growing: Vec<_> = (0..9).map(|step| point(step, 1e-9 * 3f32.powi(step as i32), 1.0)).collect();
        assert_eq!(under(ScaleSource::Tensor, "current", 448.0, growing), Vec::<String>::new());

        let saturating = |step| TracePoint { saturated: 100, scale: None, ..point(step, 1.0, 1.0) };
        let saturating: Vec<_> = (0..3).map(saturating).collect();
        let label = "mxfp8(fp8_format=E4M3,rounding=Floor,override=(false, false, false))";
        let found = under(ScaleSource::RowsOrBlocks, label, 448.0, saturating.clone());
        assert!(
            found[0].ends_with(
                "saturated 10.0 % of its values, in 3 of the last 3 steps, because its scales are rounded down: use \
                 MxRounding::Ceil, with which no value saturates"
            ),
            "{found:?}"
        );
        let found = under(ScaleSource::Tensor, "current", 448.0, saturating);
        assert!(
            found[0].ends_with(
                "scales from the values themselves leave room for the largest finite one, so it had infinite values; find \
                 the operation before it that makes them"
            ),
            "{found:?}"
        );

        let lossy = |step| TracePoint { underflowed: 100, scale: None, ..point(step, 1.0, 1.0) };
        let found = under(ScaleSource::RowsOrBlocks, "rowwise", 448.0, (0..3).map(lossy).collect());
        assert!(
            found[0].ends_with(
                "the values that share a scale span more than E4M3 can hold; use smaller blocks, use HYBRID if it is a \
                 gradient, or leave this slot in high precision if the loss suffers"
            ),
            "{found:?}"
        );
    }

    #[test]
    fn a_low_sqnr_is_mentioned_unless_another_finding_explains_it() {
        let measured = |step, sqnr| TracePoint { sqnr: Some(sqnr), ..point(step, 3.5, 128.0) };
        assert_eq!(advice(448.0, vec![measured(0, 31.5), measured(1, 25.1)]), Vec::<String>::new());
        let low = vec![measured(0, 31.5), point(1, 3.5, 128.0), measured(2, 12.34)];
        let found = advice(448.0, low.clone());
        assert!(
            found[0].contains(" had an SQNR of only 12.3 dB, below 25 dB in 1 of 2 measured steps: "),
            "{found:?}"
        );
        assert_eq!(advice(57344.0, vec![measured(0, 20.0)]), Vec::<String>::new());
        assert!(advice(57344.0, vec![measured(0, 18.0)])[0].contains("below 19 dB"));
        let underflowed: Vec<_> =
            low.into_iter().map(|point| TracePoint { underflowed: 100, ..point }).collect();
        assert_eq!(advice(448.0, underflowed).len(), 1);
    }
}
