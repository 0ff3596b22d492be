//! Medians, ratios and means.

use serde::Serialize;

/// Returns the median; of an even number of values, the mean of the two in the middle. NaN if there are none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        len if len.is_multiple_of(2) => (sorted[len / 2 - 1] + sorted[len / 2]) / 2.0,
        len => sorted[len / 2],
    }
}

/// Returns the geometric mean, NaN if there are no values.
pub(crate) fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp()
}

/// Returns the order in which contenders take their turns in a round. It differs from round to round, so that no contender
/// always follows the same one.
pub(crate) fn order(round: usize, contenders: usize) -> impl Iterator<Item = usize> {
    (0..contenders).map(move |turn| {
        let turn = if round.is_multiple_of(2) { turn } else { contenders - 1 - turn };
        (round / 2 + turn) % contenders
    })
}

/// The ratio of two contenders' times over all rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
}

impl Ratio {
    /// Divides round by round.
    pub(crate) fn of(dividends: &[f64], divisors: &[f64]) -> Self {
        let ratios: Vec<f64> =
            dividends.iter().zip(divisors).map(|(dividend, divisor)| dividend / divisor).collect();
        Self {
            median: median(&ratios),
            lowest: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            highest: ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// Returns the largest relative difference of two series, and its index. A NaN counts as infinitely different.
pub(crate) fn largest_difference(values: &[f64], expected: &[f64]) -> (f64, usize) {
    let differences = values.iter().zip(expected).map(|(value, expected)| {
        let difference = (value - expected).abs() / expected.abs();
        if difference.is_nan() { f64::INFINITY } else { difference }
    });
    let mut largest = (0.0, 0);
    for (index, difference) in differences.enumerate() {
        if difference > largest.0 {
            largest = (difference, index);
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan() && geometric_mean(&[]).is_nan());
        assert!((geometric_mean(&[1.0, 8.0, 27.0]) - 6.0).abs() < 1e-12);
    }

    #[test]
    fn orders_differ_and_have_every_contender_once() {
        let orders: Vec<Vec<usize>> = (0..4).map(|round| order(round, 3).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]);
        assert_eq!(order(5, 0).count(), 0);
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians() {
        // A machine that was half as fast in the second and third round.
        let ratio = Ratio::of(&[1.0, 2.0, 2.2], &[2.0, 4.0, 4.0]);
        assert_eq!(ratio, Ratio { median: 0.5, lowest: 0.5, highest: 0.55 });
    }

    #[test]
    fn the_largest_difference_is_relative_and_finds_nan() {
        assert_eq!(largest_difference(&[1.0, 4.5, 8.5], &[1.0, 4.0, 8.0]), (0.125, 1));
        assert_eq!(largest_difference(&[1.0, f64::NAN], &[1.0, 4.0]), (f64::INFINITY, 1));
        assert_eq!(largest_difference(&[2.0], &[2.0]), (0.0, 0));
    }
}
