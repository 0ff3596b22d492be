//! Advice on slots in NVFP4, whose blocks lose values in ways that FP8 does not know.

use crate::reports::share::percent;
use crate::{Nvfp4Report, SlotSeries};

/// Shares of blocks below which a slot is left alone.
const LOST: f64 = 0.01;
const SATURATED: f64 = 0.01;

/// The share of values. Of normal data, 7 % become 0.
const UNDERFLOWED: f64 = 0.3;

/// The least SQNR in decibels that is left alone. Normal data has 20, and 17 if it is rounded stochastically.
const LEAST_SQNR: f64 = 12.0;

/// Returns what a slot lost, NaN values aside, and what would help. `underflowed` is its share of all values.
pub(crate) fn findings(series: &SlotSeries, underflowed: f64) -> Vec<(String, String)> {
    let measured: Vec<Nvfp4Report> = series.points.iter().filter_map(|point| point.nvfp4).collect();
    let total = |count: fn(&Nvfp4Report) -> u64| measured.iter().map(count).sum::<u64>();
    let share = |count: u64| count as f64 / total(|report| report.blocks).max(1) as f64;
    let (lost, saturated) = (share(total(|report| report.lost)), share(total(|report| report.saturated)));
    let infinite = measured.iter().filter(|report| report.infinite > 0).count();
    let steps = measured.len();

    let mut all = Vec::new();
    if infinite > 0 {
        all.push((
            format!(
                "had infinite values in {infinite} of {steps} measured steps, which make the factor of the tensor 1, and lost {} of its \
                 blocks",
                percent(lost)
            ),
            "no recipe helps; find the operation before it that makes them".to_owned(),
        ));
    } else if lost > LOST {
        all.push((
            format!(
                "lost {} of its blocks in {steps} measured steps, because all of their values are below 1/458,752 of the tensor's amax and \
                 became 0",
                percent(lost)
            ),
            instead(series),
        ));
    }
    if saturated > SATURATED && infinite == 0 {
        all.push((
            format!(
                "saturated values in {} of its blocks in {steps} measured steps, because their values are below 1/28,672 of the tensor's \
                 amax, for which the scales of blocks are inexact",
                percent(saturated)
            ),
            instead(series),
        ));
    }
    if !all.is_empty() {
        return all;
    }
    if underflowed > UNDERFLOWED {
        let finding = format!(
            "underflowed {} of its values in the last {} steps",
            percent(underflowed),
            series.points.len()
        );
        all.push((
            finding,
            format!("values that share a scale span more than E2M1 can hold; {}", instead(series)),
        ));
        return all;
    }
    let sqnrs = || series.points.iter().filter_map(|point| point.sqnr);
    let low = sqnrs().filter(|&sqnr| sqnr < LEAST_SQNR).count();
    if low > 0 {
        let worst = sqnrs().fold(f64::INFINITY, f64::min);
        let finding = format!(
            "had an SQNR of only {worst:.1} dB, below {LEAST_SQNR} dB in {low} of {} measured steps",
            sqnrs().count()
        );
        all.push((finding, instead(series)));
    }
    all
}

/// Returns the recipes that help, for the layer: a product needs both of its operands in NVFP4.
fn instead(series: &SlotSeries) -> String {
    let layer = series.name.rsplit_once('.').map_or(&*series.name, |(layer, _)| layer);
    format!("leave its layer in high precision, or use MXFP8 for it, by name (pattern `{layer}.*`)")
}
